// The npm package `openai` as a client: an answer, a stream, an error.
// Start a server first (minisgl serve), then: npm install openai && node openai_client.mjs
// Another address: OPENAI_BASE_URL=http://host:port/v1.

import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:1919/v1",
  apiKey: process.env.OPENAI_API_KEY ?? "none", // the package wants one, the server does not
});
const model = (await client.models.list()).data[0].id;
const question = { role: "user", content: "What is the capital of France? Answer in one sentence." };

const answer = await client.chat.completions.create({ model, messages: [question], temperature: 0 });
console.log(`answer: ${answer.choices[0].message.content}`);

const pieces = [];
const stream = await client.chat.completions.create({
  model,
  messages: [question],
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  pieces.push(chunk.choices[0]?.delta?.content ?? "");
  if (chunk.usage) console.log(`streamed: ${chunk.usage.completion_tokens} tokens`);
}
console.log(`the same: ${pieces.join("") === answer.choices[0].message.content}`);

try {
  await client.chat.completions.create({ model, messages: [question], temperature: -1 });
} catch (error) {
  console.log(`refused: ${error.status} ${error.param}`);
}

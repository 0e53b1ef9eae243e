// What the npm package `openai` must be able to do with a server, one line of output for each.

import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  maxRetries: 0,
});
const model = (await client.models.list()).data[0].id;
const chat = (fields) => client.chat.completions.create({ model, temperature: 0, ...fields });
const messages = [{ role: "user", content: "Hi, my name is Bob." }];

let answer = await chat({ messages, max_tokens: 24 });
messages.push(answer.choices[0].message, { role: "user", content: "What is my name?" });
answer = await chat({ messages, max_tokens: 24 });
assert(answer.choices[0].message.content.includes("Bob"));
assert(answer.usage.prompt_tokens_details.cached_tokens > 0);
console.log("conversation");

let text = "";
for await (const chunk of await chat({ messages, max_tokens: 24, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? "";
}
assert.strictEqual(text, answer.choices[0].message.content);
console.log("stream");

const drawn = await chat({ messages, max_tokens: 12, n: 3, temperature: 1, seed: 1 });
assert.strictEqual(new Set(drawn.choices.map((choice) => choice.message.content)).size, 3);
console.log("three choices");

const told = await chat({ messages, max_tokens: 3, logprobs: true, top_logprobs: 2 });
assert.strictEqual(told.choices[0].logprobs.content.length, 3);
assert(told.choices[0].logprobs.content.every((place) => place.top_logprobs.length === 2));
console.log("logprobs");

const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});
const name = { type: "string", maxLength: 20 };
const schema = object({ name, age: { type: "integer", minimum: 1, maximum: 120 } });
const json_schema = { name: "person", strict: true, schema };
const formed = await chat({
  messages,
  max_tokens: 60,
  response_format: { type: "json_schema", json_schema },
});
const person = JSON.parse(formed.choices[0].message.content);
assert.deepStrictEqual(Object.keys(person).sort(), ["age", "name"]);
assert(Number.isInteger(person.age) && person.age >= 1 && person.age <= 120);
console.log("schema");

const parameters = object({ city: name, unit: { enum: ["C", "F"] } });
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const talk = [{ role: "user", content: "What is the weather in Paris?" }];
const forced = { type: "function", function: { name: "weather" } };
const called = await chat({ messages: talk, tools, tool_choice: forced, max_tokens: 100 });
assert.strictEqual(called.choices[0].finish_reason, "tool_calls");
const call = called.choices[0].message.tool_calls[0];
assert(["C", "F"].includes(JSON.parse(call.function.arguments).unit));
talk.push(called.choices[0].message);
talk.push({ role: "tool", tool_call_id: call.id, content: "22 C, sunny" });
const followed = await chat({ messages: talk, tools, tool_choice: "none", max_tokens: 40 });
assert(followed.choices[0].message.content);
console.log("tool");

const prompt = "The capital of France is";
const echoed = await client.completions.create({
  model,
  prompt,
  max_tokens: 2,
  temperature: 0,
  echo: true,
  logprobs: 1,
});
assert(echoed.choices[0].text.startsWith(`${prompt} Paris`));
assert.strictEqual(echoed.choices[0].logprobs.tokens.length, echoed.usage.total_tokens);
console.log("echo");

const asked = { model, input: "Say hi", max_output_tokens: 10, temperature: 0 };
const response = await client.responses.create(asked);
text = "";
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert(text && text === response.output_text);
console.log("response");

await assert.rejects(chat({ messages, temperature: -1 }), { status: 400, param: "temperature" });
console.log("refusal");

"""The `openai` package as a client: a conversation, and a stream.

Start a server first: `minisgl serve`. Another address: OPENAI_BASE_URL=http://host:port/v1.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:1919/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),  # the package wants one, the server does not
)
model = client.models.list().data[0].id
print(f"model: {model}")

# A conversation: each turn sends all of it, and the server's prefix cache makes the old part free.
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
print(f"answer: {answer.choices[0].message.content}")
messages += [answer.choices[0].message, {"role": "user", "content": "And of Italy?"}]
answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
print(f"answer: {answer.choices[0].message.content}")
details = answer.usage.prompt_tokens_details
print(f"prompt: {answer.usage.prompt_tokens} tokens, {details.cached_tokens} of them cached")

# A stream: pieces of text as they are made, and the counts at the end.
print("stream: ", end="")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Count from one to five."}],
    max_tokens=40,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print((chunk.choices[0].delta.content or "").replace("\n", " "), end="", flush=True)
    if chunk.usage:
        print(f"\nstreamed: {chunk.usage.completion_tokens} tokens")

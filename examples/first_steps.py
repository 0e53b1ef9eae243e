"""First steps: load a model, complete two texts at once, then stream an answer.

    python examples/first_steps.py [MODEL]

Look at: both prompts run in one batch, and the streamed answer comes word by word.
"""

import sys

from minisgl import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "default"
llm = LLM(model, dtype="auto")

# Without a temperature the likeliest token is taken, so this prints the same each time.
prompts = ["The capital of France is", "One, two, three,"]
for prompt, answer in zip(prompts, llm.generate(prompts, SamplingParams(max_tokens=12))):
    print(f"{prompt}|{answer['text']}  ({answer['finish_reason']})")

# A chat: the model's own template turns messages into token ids.
question = llm.chat_prompt([{"role": "user", "content": "Name three colours."}])
sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=40)
for event in llm.stream([question], sampling):
    print(event.text, end="", flush=True)
print()

llm.shutdown()

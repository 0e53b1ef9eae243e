"""Chunked prefill: a long prompt is computed in pieces of at most `max_extend_tokens` a step.

    python examples/chunked_prefill.py [MODEL]

The budget bounds how long one step can take, whatever prompts arrive. Short prompts share a step
with the last piece of a long one.

Look at: every prefill step but the last computes exactly 64 tokens, the steps together compute
every prompt token once, and a request decodes only when its whole prompt is done.
"""

import sys

from minisgl import LLM, SamplingParams

BUDGET = 64

llm = LLM(
    sys.argv[1] if len(sys.argv) > 1 else "default",
    dtype="auto",
    cache_type="naive",
    max_extend_tokens=BUDGET,
)
records = []
llm.step_listeners.append(records.append)

texts = ["The river ran past the mill and down to the sea. " * 20, "Short one.", "And a third."]
prompts = [llm.tokenizer.encode(text) for text in texts]
llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))

print("prompt tokens:", *map(len, prompts))
for record in records:
    bar = "#" * max(record.num_tokens // 2, 1)
    uids = ",".join(map(str, record.uids))
    print(f"step {record.step:>2} {record.phase:<8} uids {uids:<6} {record.num_tokens:>3} {bar}")
computed = sum(record.num_tokens for record in records if record.phase == "prefill")
print(f"computed in prefill: {computed} of {sum(map(len, prompts))} prompt tokens")
llm.shutdown()

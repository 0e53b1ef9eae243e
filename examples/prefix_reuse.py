"""Prefix reuse: what two prompts share is computed once.

    python examples/prefix_reuse.py [MODEL]

Finished requests leave their keys and values in a tree. A later prompt walks down the tree as far
as it agrees, and computes only the rest: at least one token, to have something to predict from.

Look at: "computed" against "prompt". The first question pays for the instructions, the second only
for the words that differ, and the same question again for a single token.
"""

import sys

from minisgl import LLM, SamplingParams

INSTRUCTIONS = "You are a helpful guide who answers in one short sentence. " * 8
QUESTIONS = ["Where is Rome?", "Where is Oslo?", "Where is Oslo?"]

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "default", dtype="auto", cache_type="radix")
records = []
llm.step_listeners.append(records.append)

for question in QUESTIONS:
    prompt = llm.tokenizer.encode(INSTRUCTIONS + question)
    records.clear()
    llm.generate([prompt], SamplingParams(max_tokens=8))
    computed = sum(record.num_tokens for record in records if record.phase == "prefill")
    print(f"{question}  prompt {len(prompt):>3} tokens, computed {computed:>3}")
llm.shutdown()

"""A pool of 64 tokens, five requests: who runs, who waits, and why.

    python examples/trace_pool.py [MODEL]

A request is admitted only if its worst case, prompt and longest answer, fits beside what is
promised to the others. The first four need 13 + 13 + 12 + 23 = 61 of 64 tokens; the fifth needs 13
and waits.

Look at: "free" falls by one per running request and step, "reserved" with it, so that free is never
less than reserved; the fifth starts the step after the others have given everything back.
"""

import sys

from minisgl import LLM, SamplingParams
from minisgl.env import ENV
from minisgl.scheduler import StepRecord

TEXT = "Once upon a time there was a small engine that wanted to climb the highest mountain alone."
PROMPT_LENGTHS = (5, 5, 4, 15, 5)


def show(record: StepRecord) -> None:
    """One line per forward."""
    uids = ",".join(map(str, record.uids))
    print(
        f"{record.phase:<8} uids {uids:<8} waiting {record.waiting}  "
        f"free {record.free_pages:>2}  reserved {record.reserved_tokens:>2} "
        + (f"(the next one waits for {record.head_waits_for})" if record.waiting else "")
    )


ENV.DISABLE_OVERLAP_SCHEDULING.value = True
llm = LLM(
    sys.argv[1] if len(sys.argv) > 1 else "default",
    dtype="auto",
    num_page_override=64,
    page_size=1,
    cache_type="naive",
    max_running_req=8,
    max_seq_len_override=128,
)
llm.step_listeners.append(show)

ids = llm.tokenizer.encode(TEXT)
prompts = [ids[:length] for length in PROMPT_LENGTHS]
llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
llm.cache_manager.check_integrity()
print(f"at the end: {len(llm.cache_manager.free_slots)} of 64 pages are free, the check passes")
llm.shutdown()

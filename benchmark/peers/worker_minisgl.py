"""minisgl as a user has it: `LLM(model, dtype="auto")`, timed from outside.

Times are taken at the end of each forward, so one decode step includes everything that happens
between two forwards: replies, detokenization, scheduling, sampling.
"""

from __future__ import annotations

import time
from typing import Any

import protocol
import torch

AFTER_TORCH = protocol.memory_now()


class Worker:
    """One `LLM` at a time; a job that needs other limits gets a new one."""

    def __init__(self, options: dict[str, Any]) -> None:
        from minisgl import SamplingParams
        from minisgl.llm import LLM

        self._make, self._params = LLM, SamplingParams
        self._options = options
        self._fields: dict[str, Any] | None = None
        self._steps: list[tuple[str, float, int]] = []
        if not options.get("is_lazy"):
            self._open(max_running_req=32)
            self._generate([protocol.random_tokens(32, 0)], [4])

    def _open(self, **fields: Any) -> None:
        if fields == self._fields:
            return
        if self._fields is not None:
            self.llm.shutdown()
        self.llm = self._make(
            self._options["model"],
            dtype=self._options.get("dtype", "auto"),
            num_threads=self._options["threads"],
            **fields,
        )
        self.llm.step_listeners.append(
            lambda record: self._steps.append(
                (record.phase, time.perf_counter(), record.num_tokens)
            )
        )
        self._fields = fields

    def _generate(self, prompts: list[list[int]], num_outputs: list[int]) -> tuple[float, int]:
        """Seconds and generated tokens."""
        self._steps.clear()
        params = [self._params(max_tokens=n, ignore_eos=True) for n in num_outputs]
        start = time.perf_counter()
        answers = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        counts = [len(answer["token_ids"]) for answer in answers]
        assert counts == num_outputs, (counts, num_outputs)
        return seconds, sum(counts)

    def decode(self, job: dict[str, Any]) -> dict[str, Any]:
        self._open(max_running_req=32)
        num_steps = protocol.WARM_STEPS + job["steps"]
        self._generate(protocol.make_prompts(job), [num_steps + 1] * job["streams"])
        steps = [(at, count) for phase, at, count in self._steps if phase == "decode"]
        assert all(count == job["streams"] for _, count in steps) and len(steps) == num_steps
        seconds = steps[-1][0] - steps[protocol.WARM_STEPS - 1][0]
        return {"tokens": job["steps"] * job["streams"], "seconds": seconds}

    def prefill(self, job: dict[str, Any]) -> dict[str, Any]:
        self._open(max_running_req=32)
        seconds = 0.0
        for i in range(1 + job["repeats"]):
            prompt = protocol.random_tokens(job["context"], job["seed"] * 1009 + i)
            taken, _ = self._generate([prompt], [1])
            seconds += taken if i else 0.0
        return {"tokens": job["context"] * job["repeats"], "seconds": seconds}

    def chat(self, job: dict[str, Any]) -> dict[str, Any]:
        self._open(max_running_req=job["at_once"], share_prefixes=32)
        for each in (protocol.warm_up_chat(job), job):
            system, requests = protocol.make_chat(each)
            if job["is_warm"]:
                self._generate([system], [1])
            prompts = [system + request.user for request in requests]
            seconds, tokens = self._generate(prompts, [r.num_output for r in requests])
        computed = sum(count for phase, _, count in self._steps if phase == "prefill")
        return {"tokens": tokens, "seconds": seconds, "prefilled": computed}

    def memory(self, job: dict[str, Any]) -> dict[str, Any]:
        protocol.reset_peak()
        self._open(max_seq_len_override=job["context"])
        prompt = protocol.random_tokens(job["context"] - job["steps"], job["seed"])
        self._generate([prompt], [job["steps"]])
        return protocol.memory_beyond(AFTER_TORCH)

    def probe(self, job: dict[str, Any]) -> dict[str, Any]:
        """The two ceilings, as in benchmark/kernels.py, and versions."""
        import minisgl
        from minisgl.kernel import native

        module = native.load()
        return {
            "read": module.probe_read(128 << 20, 4),
            "multiply": module.probe_multiply(20_000, 20),
            "isa": native.isa(),
            "versions": {"minisgl": minisgl.__version__, "torch": torch.__version__},
        }

    def encode(self, job: dict[str, Any]) -> dict[str, Any]:
        self._open(max_running_req=32)
        return {"ids": list(self.llm.tokenizer.encode(job["text"]))}

    def logits(self, job: dict[str, Any]) -> dict[str, Any]:
        """Logits at every position of a prompt, saved as float32; the engine is driven by hand."""
        import numpy as np

        from minisgl.core import Batch, Req

        self._open(max_running_req=32)
        engine, ids = self.llm.engine, torch.tensor(job["ids"], dtype=torch.int32)
        count = len(ids)
        engine.page_table[0, :count] = torch.arange(count, dtype=torch.int32)
        req = Req(ids, 0, 0, 1, 0, self._params(max_tokens=1))
        batch = Batch([req], "prefill")
        batch.input_ids = ids
        batch.positions = torch.arange(count, dtype=torch.int32)
        batch.out_loc = engine.page_table[0, :count].clone()
        engine.prepare(batch)
        batch.attn_metadata.wanted_indices = torch.arange(count)
        with torch.inference_mode():
            logits = engine.graph_runner.forward(batch)
        np.save(job["path"], logits.float().numpy())
        return {"shape": list(logits.shape)}


if __name__ == "__main__":
    protocol.serve(Worker)

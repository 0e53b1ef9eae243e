"""vLLM on a CPU, from a float checkpoint that is written beside the GGUF file's requantised forms.

vLLM's CPU build does not run this GGUF file, so the weights are dequantised by transformers (which
its environment has) into a folder of safetensors, once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import protocol

BARE = protocol.memory_now()


def float_folder(path: str) -> str:
    """The checkpoint as floats; made at the first use."""
    from transformers import AutoModelForCausalLM

    source = Path(path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    target = cache / "minisgl" / "peers" / "models" / f"{source.stem}-float"
    if not (target / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name)
        model.save_pretrained(str(target))
    return str(target)


class Worker:
    """One engine; steps are driven from here."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._next_id = 0
        if not options.get("is_lazy"):
            self._open(4096)
            self._run([protocol.random_tokens(32, 0)], [4])

    def _open(self, max_model_len: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self._params = SamplingParams
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=float_folder(self._options["model"]),
                dtype=self._options["dtype"],
                skip_tokenizer_init=True,
                max_model_len=max_model_len,
                max_num_seqs=64,
                max_num_batched_tokens=16384,
                enable_prefix_caching=True,
            )
        )

    def _run(
        self, prompts: list[list[int]], num_outputs: list[int], at_once: int = 0
    ) -> tuple[list[float], int]:
        """The time after each step (the first entry is the start), and the generated tokens."""
        waiting = list(reversed(list(zip(prompts, num_outputs))))
        running = total = 0
        times = [time.perf_counter()]
        while waiting or running:
            while waiting and (not at_once or running < at_once):
                prompt, count = waiting.pop()
                params = self._params(
                    temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
                )
                self._next_id += 1
                self.engine.add_request(str(self._next_id), {"prompt_token_ids": prompt}, params)
                running += 1
            outputs = self.engine.step()
            times.append(time.perf_counter())
            for output in outputs:
                if output.finished:
                    running -= 1
                    total += len(output.outputs[0].token_ids)
        return times, total

    def decode(self, job: dict[str, Any]) -> dict[str, Any]:
        streams, steps = job["streams"], job["steps"]
        num_outputs = [1 + protocol.WARM_STEPS + steps] * streams
        times, _ = self._run(protocol.make_prompts(job), num_outputs)
        return {"tokens": steps * streams, "seconds": times[-1] - times[-1 - steps]}

    def prefill(self, job: dict[str, Any]) -> dict[str, Any]:
        seconds = 0.0
        for i in range(1 + job["repeats"]):
            prompt = protocol.random_tokens(job["context"], job["seed"] * 1009 + i)
            times, _ = self._run([prompt], [1])
            seconds += times[-1] - times[0] if i else 0.0
        return {"tokens": job["context"] * job["repeats"], "seconds": seconds}

    def chat(self, job: dict[str, Any]) -> dict[str, Any]:
        for each in (protocol.warm_up_chat(job), job):
            system, requests = protocol.make_chat(each)
            if job["is_warm"]:
                self._run([system], [1])
            prompts = [system + request.user for request in requests]
            times, tokens = self._run(prompts, [r.num_output for r in requests], job["at_once"])
        return {"tokens": tokens, "seconds": times[-1] - times[0]}

    def memory(self, job: dict[str, Any]) -> dict[str, Any]:
        protocol.reset_peak()
        self._open(job["context"])
        prompt = protocol.random_tokens(job["context"] - job["steps"], job["seed"])
        self._run([prompt], [job["steps"]])
        return protocol.memory_beyond(BARE)


if __name__ == "__main__":
    protocol.serve(Worker)

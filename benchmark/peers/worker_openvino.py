"""OpenVINO GenAI: its continuous batching pipeline with prefix caching, reading the GGUF file."""

from __future__ import annotations

import time
from typing import Any

import protocol

BARE = protocol.memory_now()  # before numpy and the engine

import numpy as np  # noqa: E402

MAX_STEP_TOKENS = 16384  # prompts never wait for a second step


class Worker:
    """One pipeline for all jobs. Precisions other than that of K and V are OpenVINO's choice."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._next_id = 0
        if not options.get("is_lazy"):
            self._open()
            self._run([protocol.random_tokens(32, 0)], [4])

    def _open(self, cache_tokens: int = 0) -> None:
        import openvino
        import openvino_genai

        self._tensor, self._genai = openvino.Tensor, openvino_genai
        config = openvino_genai.SchedulerConfig()
        if cache_tokens:
            config.num_kv_blocks = -(-cache_tokens // 32) + 1
        else:
            config.cache_size = 1  # GB
        config.enable_prefix_caching = True
        config.max_num_batched_tokens = MAX_STEP_TOKENS
        config.max_num_seqs = 64
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            self._options["model"],
            config,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": self._options["threads"],
                "KV_CACHE_PRECISION": "f16",
                "PERFORMANCE_HINT": "LATENCY",
            },
        )

    def _add(self, prompt: list[int], num_output: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens = num_output, num_output
        config.ignore_eos, config.do_sample = True, False
        config.apply_chat_template = False
        self._next_id += 1
        ids = np.array([prompt], dtype=np.int64)
        return self.pipeline.add_request(self._next_id, self._tensor(ids), config)

    def _run(
        self, prompts: list[list[int]], num_outputs: list[int], at_once: int = 0
    ) -> tuple[list[float], int]:
        """The time after each step (the first entry is the start), and the generated tokens."""
        waiting = list(reversed(list(zip(prompts, num_outputs))))
        running: list[Any] = []
        total, times = 0, [time.perf_counter()]
        is_running = self._genai.GenerationStatus.RUNNING
        while waiting or running:
            while waiting and (not at_once or len(running) < at_once):
                running.append(self._add(*waiting.pop()))
            self.pipeline.step()
            times.append(time.perf_counter())
            for handle in [h for h in running if h.get_status() != is_running]:
                running.remove(handle)
                total += sum(len(output.generated_ids) for output in handle.read_all())
        assert total == sum(num_outputs), (total, sum(num_outputs))
        return times, total

    def decode(self, job: dict[str, Any]) -> dict[str, Any]:
        streams, steps = job["streams"], job["steps"]
        num_outputs = [1 + protocol.WARM_STEPS + steps] * streams
        times, _ = self._run(protocol.make_prompts(job), num_outputs)
        if len(times) != 2 + protocol.WARM_STEPS + steps:
            raise RuntimeError(f"prompts took more than one step: {len(times)} steps")
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
            times, tokens = self._run(
                [system + request.user for request in requests],
                [request.num_output for request in requests],
                job["at_once"],
            )
        return {"tokens": tokens, "seconds": times[-1] - times[0]}

    def memory(self, job: dict[str, Any]) -> dict[str, Any]:
        protocol.reset_peak()
        self._open(job["context"])
        prompt = protocol.random_tokens(job["context"] - job["steps"], job["seed"])
        self._run([prompt], [job["steps"]])
        return protocol.memory_beyond(BARE)


if __name__ == "__main__":
    protocol.serve(Worker)

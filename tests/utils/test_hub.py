"""Hub ids: what is asked of the client, and what is said when it fails in one of its own ways."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from minisgl.params import ModelLoadError
from minisgl.utils.model_files import resolve_model

FILES = ["config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"]
SHA = "0123456789abcdef0123456789abcdef01234567"


def http_error(kind: type[Exception]) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=404)
    return kind("404", response=response)  # type: ignore[call-arg]


class FakeHub:
    """Stands for the client. files: of the repository. error: what the hub answers with."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files = FILES
        self.error: Exception | None = None
        self.is_cached = False
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def model_info(self, hub_id: str, *, revision: str | None) -> Any:
        self.calls.append(("model_info", {"revision": revision}))
        if self.error is not None:
            raise self.error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def snapshot_download(self, hub_id: str, **options: Any) -> str:
        self.calls.append(("snapshot_download", options))
        if options.get("local_files_only") and not self.is_cached:
            raise errors.LocalEntryNotFoundError("nothing there")
        folder = self.cache / hub_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "model.safetensors").write_bytes(b"")
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_hub_id_is_fetched_at_its_revision_without_pickles_or_folders(hub: FakeHub) -> None:
    found = resolve_model("org/model", SHA)
    assert (found.kind, found.name) == ("hf", "org/model")
    assert found.path == hub.cache / "org" / "model"
    (_, asked), (_, options) = hub.calls
    assert asked["revision"] == options["revision"] == SHA
    wanted = huggingface_hub.utils.filter_repo_objects(
        [*FILES, "original/a.safetensors", "onnx/a.json", "consolidated.safetensors", "m.gguf"],
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(wanted) == FILES[:3]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["config.json", "pytorch_model.bin"], r"only pickled weights \(pytorch_model\.bin\)"),
        (["config.json", "m.Q4.gguf"], r"hf download org/model m\.Q4\.gguf"),
        (["config.json", "x/model.safetensors"], r"has no \*\.safetensors weights"),
        (["consolidated.safetensors", "params.json"], r"has no \*\.safetensors weights"),
    ],
)
def test_a_repository_without_usable_weights_is_refused_before_the_fetch(
    hub: FakeHub, files: list[str], problem: str
) -> None:
    hub.files = files
    with pytest.raises(ModelLoadError, match=problem):
        resolve_model("org/model")
    assert [name for name, _ in hub.calls] == ["model_info"]


ERRORS = [
    (http_error(errors.GatedRepoError), r"is gated: accept .*huggingface\.co/org/model.*HF_TOKEN"),
    (http_error(errors.RepositoryNotFoundError), r"no path 'org/model', and no such model"),
    (http_error(errors.RevisionNotFoundError), r"has no revision \(--revision\) 'v9'"),
    (errors.OfflineModeIsEnabled("offline"), r"HF_HUB_OFFLINE is set.*no complete copy"),
    (OSError(28, "No space left on device"), r"\(No space left on device\)"),
    (http_error(errors.HfHubHTTPError), r"cannot be fetched from the hub \(HfHubHTTPError\)"),
    (RuntimeError("odd"), r"\(RuntimeError\): check the spelling and the network"),
]


@pytest.mark.parametrize(("error", "problem"), ERRORS, ids=lambda v: type(v).__name__)
def test_each_way_to_fail_is_one_clear_sentence(
    hub: FakeHub, error: Exception, problem: str
) -> None:
    hub.error = error
    with pytest.raises(ModelLoadError, match=problem) as caught:
        resolve_model("org/model", "v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("error", "_"), ERRORS, ids=lambda v: type(v).__name__)
def test_what_is_in_the_cache_is_enough_when_the_hub_does_not_answer(
    hub: FakeHub, error: Exception, _: str
) -> None:
    hub.error, hub.is_cached = error, True
    assert resolve_model("org/model").path == hub.cache / "org" / "model"
    assert hub.calls[-1][1]["local_files_only"]


def test_offline_takes_the_pinned_commit_from_a_real_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--model" / "snapshots" / SHA
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve_model("org/model", SHA).path == folder
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/model", "main")


def test_a_revision_of_something_on_disk_is_refused(tmp_path: Path, hub: FakeHub) -> None:
    for name in (str(tmp_path), "default"):
        with pytest.raises(ModelLoadError, match=r"--revision.* is of a hub model"):
            resolve_model(name, "main")
    assert hub.calls == []

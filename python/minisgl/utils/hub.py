"""Models of the Hugging Face hub: fetched once into the hub's own cache, found there ever after.

Imports the standard library and, when a hub id is asked for, `huggingface_hub`, which shows its own
progress. Invariant: what goes wrong on the way is one `ModelLoadError` that says what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ModelLoadError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
# What lies in folders (but templates) is the same weights once more, in another layout.
_UNWANTED = ["*/*.safetensors", "*/*.json", "*/*.txt", "consolidated*"]
_ELSEWHERE = "pass a local folder or .gguf file"


def fetch_from_hub(hub_id: str, revision: str | None = None) -> Path:
    """The folder of a hub model: what is not in the local cache is fetched.

    revision: a branch, a tag or a commit; a commit never changes. Where the hub does not answer, or
    HF_HUB_OFFLINE is set, a complete copy in the cache is enough.
    """
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"there is no path {hub_id!r}, and fetching it from the hub needs the package "
            "huggingface_hub"
        ) from error

    def snapshot(**options: Any) -> Path:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                **options,
            )
        )

    try:
        info = HfApi().model_info(hub_id, revision=revision)
        _check_weights(hub_id, [file.rfilename for file in info.siblings or ()])
        return snapshot()
    except ModelLoadError:
        raise
    except Exception as error:  # the client raises errors of many libraries
        try:
            return snapshot(local_files_only=True)
        except Exception:  # not in the cache either: what counts is why the hub did not give it
            raise ModelLoadError(_explain(hub_id, revision, error)) from error


def _check_weights(hub_id: str, names: list[str]) -> None:
    """Refuse a repository without weights that can be used, before anything is fetched."""
    names = sorted(name for name in names if "/" not in name)
    if any(name.endswith(".safetensors") and name[:12] != "consolidated" for name in names):
        return
    pickled = [name for name in names if name.endswith(PICKLES)]
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        problem = f"holds GGUF files: `hf download {hub_id} {ggufs[0]}` fetches one, pass its path"
    elif pickled:
        problem = (
            f"has only pickled weights ({', '.join(pickled[:3])}), which can run code when loaded: "
            "take a repository with safetensors, or a GGUF file"
        )
    else:
        problem = "has no *.safetensors weights: take another repository"
    raise ModelLoadError(f"the hub model {hub_id} {problem}")


def _explain(hub_id: str, revision: str | None, error: Exception) -> str:
    """What happened and the way out, in one sentence."""
    from huggingface_hub import errors

    model = f"the hub model {hub_id}"
    if isinstance(error, errors.GatedRepoError):  # is a RepositoryNotFoundError as well
        return (
            f"{model} is gated: accept its conditions at https://huggingface.co/{hub_id}, then log "
            "in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision (--revision) {revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no path {hub_id!r}, and no such model on the hub: check the spelling; if it "
            "is private, log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"there is no path {hub_id!r}, HF_HUB_OFFLINE is set, and the hub's cache holds no "
            f"complete copy: unset it to fetch the model, or {_ELSEWHERE}"
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
    return (
        f"there is no path {hub_id!r}, and it cannot be fetched from the hub "
        f"({reason or type(error).__name__}): check the spelling and the network, or {_ELSEWHERE}"
    )

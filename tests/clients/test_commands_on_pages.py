"""Every command of minisgl on a page, in the service and in the image is understood by it."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from minisgl.cli.parser import parse
from minisgl.utils.openai_api import Address

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]


def commands(text: str) -> list[list[str]]:
    """Arguments of the commands in fenced blocks: what stands before a pipe, a `>` or a comment."""
    found = []
    for block in re.findall(r"^ *```\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^ *minisgl (.*)$", block, re.MULTILINE):
            words = shlex.split(line, comments=True)
            ends = [i for i, word in enumerate(words) if word in (">", "|")]
            found.append(words[: min(ends, default=len(words))])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_understood(page: str) -> None:
    for argv in commands((ROOT / page).read_text(encoding="utf-8")):
        assert parse(argv).module.startswith("minisgl.cli."), argv


def test_commands_are_found_on_the_pages() -> None:
    found = [argv[0] for page in PAGES for argv in commands((ROOT / page).read_text())]
    assert {"serve", "chat", "generate", "bench"} <= set(found)


def test_the_command_of_the_service_is_understood_and_ends_after_its_drain() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "minisgl.service")
    service = unit["Service"]
    args = parse(shlex.split(service["ExecStart"])[1:])
    assert args.module == "minisgl.cli.serve"
    assert float(service["TimeoutStopSec"]) > args.drain_seconds
    assert service["KillMode"] == "mixed"  # else the children die before the drain has begun


def test_the_command_of_the_image_is_understood_and_wants_a_key() -> None:
    file = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(r"^ENTRYPOINT (.*)$", file, re.MULTILINE)
    assert found is not None
    args = parse([*json.loads(found[1])[1:], "--model", "default"])
    assert (args.module, args.server_host) == ("minisgl.cli.serve", "0.0.0.0")
    assert "insecure_bind" not in args


@pytest.mark.parametrize(
    ("url", "text", "prefix"),
    [
        ("http://127.0.0.1:1919", "http://127.0.0.1:1919", "/v1"),
        ("localhost:8000/v1/", "http://localhost:8000", "/v1"),
        ("https://example.org/some/v1", "https://example.org:443", "/some/v1"),
        ("http://[::1]:1919/", "http://[::1]:1919", "/v1"),
        ("http://example.org:0", "http://example.org:0", "/v1"),
    ],
)
def test_an_address_is_understood_with_and_without_its_prefix(
    url: str, text: str, prefix: str
) -> None:
    address = Address.parse(url, "key")
    assert (str(address), address.prefix) == (text, prefix)
    assert address.headers["host"] == address.netloc and "key" not in repr(address)

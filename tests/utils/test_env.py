"""Environment variables: read once, settable, and never a silent default."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.env import ENV, EnvError, EnvVars, parse_bool, parse_optional_bool


def test_nothing_set_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for var in ENV.all():
        monkeypatch.delenv(var.name, raising=False)
    env = EnvVars()
    assert env.DISABLE_OVERLAP_SCHEDULING.value is None
    assert (env.SHELL_MAX_TOKENS.value, env.SHELL_TEMPERATURE.value) == (2048, 0.6)
    assert (env.SHELL_TOP_K.value, env.SHELL_TOP_P.value) == (-1, 1.0)
    assert env.LOG_LEVEL.value == "INFO"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DISABLE_OVERLAP_SCHEDULING", "1", True),
        ("DISABLE_OVERLAP_SCHEDULING", " False ", False),
        ("DISABLE_OVERLAP_SCHEDULING", "", None),
        ("SHELL_MAX_TOKENS", "17", 17),
        ("SHELL_TEMPERATURE", "0", 0.0),
        ("LOG_LEVEL", "debug", "DEBUG"),
        ("NUM_THREADS", "3", 3),
        ("CACHE_DIR", "/somewhere", "/somewhere"),
    ],
)
def test_a_value_is_parsed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(f"MINISGL_{name}", text)
    assert getattr(EnvVars(), name).value == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DISABLE_OVERLAP_SCHEDULING", "maybe"),
        ("SHELL_MAX_TOKENS", "many"),
        ("SHELL_TOP_P", ""),
        ("LOG_LEVEL", "LOUD"),
        ("NUM_THREADS", "-1"),
        ("NUM_THREADS", "257"),
        ("ISA", "bogus"),
    ],
)
def test_a_value_that_does_not_parse_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"MINISGL_{name}", text)
    with pytest.raises(EnvError, match=f"MINISGL_{name}="):
        EnvVars()


def test_a_value_can_be_assigned_at_run_time() -> None:
    ENV.SHELL_MAX_TOKENS.value = 5
    assert ENV.SHELL_MAX_TOKENS.value == 5


def test_every_spelling_of_yes_and_no() -> None:
    assert all(parse_bool(word) for word in ("1", "true", "TRUE", "yes", "On"))
    assert not any(parse_bool(word) for word in ("0", "false", "No", "off "))
    assert parse_optional_bool("  ") is None
    with pytest.raises(ValueError, match="true, false"):
        parse_bool("2")


def test_every_variable_is_described() -> None:
    lines = ENV.describe().splitlines()
    assert len(lines) == len(ENV.all())
    assert all(var.help and var.name in ENV.describe() for var in ENV.all())

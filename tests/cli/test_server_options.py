"""Flags of the HTTP side become fields of `ServerArgs`; a key may come from the environment."""

from __future__ import annotations

import argparse

import pytest

from minisgl.cli.server_options import add_server_flags, server_options
from minisgl.config import MAX_CONCURRENT_REQUESTS, ServerArgs
from minisgl.env import ENV
from minisgl.params import ConfigError


def options(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return server_options(parser.parse_args(argv))


def test_what_is_not_given_stays_out() -> None:
    assert options() == {}
    assert ServerArgs("m", **options()) == ServerArgs("m")  # type: ignore[arg-type]


def test_every_flag_reaches_its_field() -> None:
    given = options(
        *("--host", "0.0.0.0", "--port", "0", "--served-model-name", "m", "--api-key", "k"),
        *("--allowed-host", "a", "--allowed-host", "b", "--cors-origin", "https://c"),
        *("--insecure-bind", "--max-concurrent-requests", "9"),
    )
    args = ServerArgs("model", **given)  # type: ignore[arg-type]
    assert (args.server_host, args.server_port, args.served_model_name) == ("0.0.0.0", 0, "m")
    assert (args.allowed_hosts, args.cors_origins) == (("a", "b"), ("https://c",))
    assert (args.api_key, args.insecure_bind, args.max_concurrent_requests) == ("k", True, 9)


def test_the_key_may_come_from_the_environment_and_is_not_shown_in_help() -> None:
    ENV.API_KEY.value = "from-env"
    assert options() == {"api_key": "from-env"}
    assert options("--api-key", "mine") == {"api_key": "mine"}
    assert "from-env" not in ENV.describe()
    assert "MINISGL_API_KEY" in ENV.describe()


@pytest.mark.parametrize("number", [0, -1, MAX_CONCURRENT_REQUESTS + 1])
def test_the_bound_on_requests_is_bounded(number: int) -> None:
    with pytest.raises(ConfigError, match="--max-concurrent-requests"):
        ServerArgs("m", max_concurrent_requests=number)
    assert ServerArgs("m", max_concurrent_requests=MAX_CONCURRENT_REQUESTS)


@pytest.mark.parametrize(
    "origin", ["example.org", "https://example.org/", "https://example.org/chat", "https://", ""]
)
def test_an_origin_that_no_page_could_have_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        ServerArgs("m", cors_origins=(origin,))


def test_origins_of_pages_and_of_apps_are_taken() -> None:
    origins = ("*", "https://example.org:8443", "http://[::1]:3000", "tauri://localhost")
    assert ServerArgs("m", cors_origins=origins).cors_origins == origins


@pytest.mark.parametrize("host", ["https://example.org", "example.org:8080", "a b", ""])
def test_an_allowed_host_that_could_never_match_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-host"):
        ServerArgs("m", allowed_hosts=(host,))

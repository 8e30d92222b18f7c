"""Parsing of the options `--port` and `--set` of `roostream up`."""

from __future__ import annotations

import pytest

from roostream.cli.options import parse_overrides, parse_ports
from roostream.errors import ConfigError


def test_ports_and_overrides_are_read() -> None:
    assert parse_ports(["serving=8080", "shard-0=9000"]) == {"serving": 8080, "shard-0": 9000}
    assert parse_overrides(
        [
            "joiner.window_ms=20000",
            "joiner.engine=local",
            "worker.exact=true",
            "worker.max_batch_wait_ms='2s'",
        ]
    ) == {
        "joiner": {"window_ms": 20000, "engine": "local"},
        "worker": {"exact": True, "max_batch_wait_ms": 2000},
    }


@pytest.mark.parametrize("text", ["serving", "serving=", "serving=x", "serving=0", "serving=65536"])
def test_a_port_of_another_form_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected NAME=PORT"):
        parse_ports([text])


@pytest.mark.parametrize("text", ["worker", "worker.exact", "exact=true", "worker.=1"])
def test_an_override_of_another_form_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected PROGRAM\.KEY=VALUE"):
        parse_overrides([text])


def test_an_override_is_checked_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'worker\.batch_request' = 3; did you mean 'batch_requests'"
    ):
        parse_overrides(["worker.batch_request=3"])
    with pytest.raises(ConfigError, match=r"key 'shard-0\.publish_interval'.*expected a duration"):
        parse_overrides(["shard-0.publish_interval='soon'"])
    assert parse_overrides(["joiner.window='30s'"]) == {"joiner": {"window_ms": 30_000}}

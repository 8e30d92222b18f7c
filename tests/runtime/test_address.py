"""Which addresses programs may listen on and advertise."""

from __future__ import annotations

import re

import pytest

from roostream.errors import ConfigError
from roostream.runtime.address import (
    check_addresses,
    check_listen,
    check_redis,
    expand_addresses,
    is_loopback,
    join_address,
    parse_address,
    reachable_address,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"])
def test_listening_on_loopback_needs_no_permission(host: str) -> None:
    check_listen("listen", join_address(host, 80), insecure=False)
    assert is_loopback(host)


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "example.org:80"])
def test_a_public_address_needs_permission(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_listen("listen", address, insecure=False)
    assert "key 'listen': expected a loopback address" in str(caught.value) and "set insecure = true" in str(
        caught.value
    )
    check_listen("listen", address, insecure=True)


def test_an_invalid_address_is_named_with_its_key() -> None:
    check_addresses("shards", "a:1", "b:2")
    with pytest.raises(
        ConfigError, match=r"^key 'shards': expected an address like '127.0.0.1:7000', got 'b'$"
    ):
        check_addresses("shards", "a:1", "b")


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("::1:9092", "[::1]:9092"),
        ("fd00::7:6379", "[fd00::7]:6379"),
        ("fe80::1%eth0:80", "[fe80::1%eth0]:80"),
    ],
)
def test_ipv6_without_brackets_is_refused_and_the_message_has_the_brackets(address: str, meant: str) -> None:
    """Kafka's client would only wait for it."""
    for check in (lambda: parse_address(address), lambda: check_addresses("bootstrap", address)):
        with pytest.raises(ConfigError, match=re.escape(f"'{meant}'")):
            check()
    with pytest.raises(ConfigError, match=re.escape(f"'redis://{meant}/0'")):
        check_redis("redis", f"redis://user:secret@{address}/0")
    check_addresses("bootstrap", meant)
    check_redis("redis", f"redis://{meant}/0")


@pytest.mark.parametrize("address", ["[::1:9092", "::1]:9092", "[]:1", "[a.b]:1", "a:b:1", "http://a:1"])
def test_colons_and_brackets_that_are_no_ipv6_address_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected an address like"):
        check_addresses("bootstrap", address)
    if "/" not in address:
        with pytest.raises(ConfigError, match="expected redis://"):
            check_redis("redis", f"redis://{address}")


@pytest.mark.parametrize(
    ("host", "other", "expected", "case"),
    [
        ("127.0.0.1", "127.0.0.1:7000", "127.0.0.1:9", "same host"),
        ("127.0.0.1", "10.0.0.7:7000", "", "the peer would connect to itself"),
        ("10.0.0.3", "10.0.0.7:7000", "10.0.0.3:9", "two hosts"),
        ("0.0.0.0", "10.0.0.7:7000", "", "it names no host"),
        ("::", "127.0.0.1:7000", "", "it names no host either"),
        ("worker-1.pod", "controller:7000", "worker-1.pod:9", "a host name"),
        ("localhost", "controller:7000", "", "a name that each host has for itself"),
        ("[::1]", "[::1]:7000", "[::1]:9", "IPv6"),
    ],
)
def test_an_advertised_address_is_reachable_or_empty(host: str, other: str, expected: str, case: str) -> None:
    assert reachable_address(host, 9, other) == expected, case


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (("a:1", "b:2"), ("a:1", "b:2")),
        (("shard-{3}.shards:7000",), ("shard-0.shards:7000", "shard-1.shards:7000", "shard-2.shards:7000")),
        (("shard-{1}.shards:7000", "late:7000"), ("shard-0.shards:7000", "late:7000")),
    ],
)
def test_braces_in_an_address_expand_to_a_range(given: tuple[str, ...], meant: tuple[str, ...]) -> None:
    assert expand_addresses(given) == meant
    check_addresses("shards", *given)


@pytest.mark.parametrize(
    "address", ["shard-{0}.shards:7000", "shard-{}.shards:7000", "shard-{2}-{2}:7000", "shard-{2}.shards"]
)
def test_invalid_braces_are_refused_and_the_message_names_the_key(address: str) -> None:
    with pytest.raises(ConfigError, match="key 'shards': expected an address"):
        check_addresses("shards", address)

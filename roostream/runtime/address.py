"""host:port, and which of them may be listened on: few of our ports can ask a caller who it is."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from roostream.errors import ConfigError
from roostream.schema.settings import setting_error


def parse_address(address: str) -> tuple[str, int]:
    """`"host:port"` → (host, port).

    Raises:
        ConfigError: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"expected an address like '127.0.0.1:7000', got {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def reachable_address(host: str, port: int, other: str) -> str:
    """The "host:port" of something that listens on `host`, for whoever is at `other` (host:port); "" where that would lead them
    elsewhere: a wildcard names no machine, and a loopback address only one's own."""
    bare = host.strip("[]")
    try:
        is_wildcard = ipaddress.ip_address(bare).is_unspecified
    except ValueError:
        is_wildcard = not bare
    if is_wildcard or (is_loopback(host) and not is_loopback(parse_address(other)[0])):
        return ""
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


_COUNTED = re.compile(r"\{(\d{1,4})\}")


def expand_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Each address, one with `{N}` as N of them: `shard-{3}.shards:7000` is shard-0, shard-1 and shard-2 there, as orchestrators
    name the members of a set. N is at least 1.

    Raises:
        ConfigError: N is 0, or a brace is otherwise than that.
    """
    found: list[str] = []
    for address in addresses:
        counted = _COUNTED.search(address)
        if counted is None:
            found.append(address)
        elif int(counted[1]) == 0:
            raise ConfigError(
                f"expected an address like 'shard-{{3}}.shards:7000' with 1 or more, got {address!r}"
            )
        else:
            found += [
                address[: counted.start()] + str(i) + address[counted.end() :] for i in range(int(counted[1]))
            ]
    if wrong := next((a for a in found if "{" in a or "}" in a), ""):
        raise ConfigError(f"expected an address like 'shard-{{3}}.shards:7000', got {wrong!r}")
    return tuple(found)


def check_addresses(key: str, *addresses: str) -> None:
    """Raises ConfigError: one isn't host:port, `{N}` in it or not; names the key."""
    for address in addresses:
        try:
            for one in expand_addresses((address,)):
                parse_address(one)
        except ConfigError:
            raise setting_error(key, "an address like '127.0.0.1:7000'", address) from None


def check_redis(key: str, url: str) -> None:
    """Raises ConfigError: it isn't the address of a Redis; what stands in front of its host is not told."""
    parts = urlsplit(url)
    try:
        fits = (
            parts.scheme in ("redis", "rediss")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        fits = False
    if not fits:
        raise setting_error(key, "redis://host:port/0 (rediss:// for TLS)", url.rpartition("@")[2])


SERVING_ASKS, LINK_ASKS = "tls_certificate and keys_file", "certificate, key and ca of [link]"
"""What makes a port ask who calls."""


def check_listen(
    key: str, address: str, *, insecure: bool, authenticated: bool | None = None, by: str = SERVING_ASKS
) -> None:
    """The rule for every port of every program. `authenticated`: whether it asks who calls, over a line that nobody reads; None:
    it has no way to. `by`: what settings would make it ask.

    Raises:
        ConfigError: it isn't host:port, or others would reach it and nobody has said that they may.
    """
    check_addresses(key, address)
    if not (insecure or authenticated or is_loopback(parse_address(address)[0])):
        way = "" if authenticated is None else f"give it {by}, or "
        raise setting_error(
            key,
            "a loopback address such as 127.0.0.1",
            address,
            f"to let others reach it, {way}set insecure = true",
        )

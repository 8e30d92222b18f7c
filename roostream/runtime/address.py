"""Parses and checks host:port addresses. Ports without authentication may listen on loopback addresses
only."""

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
        ConfigError: it is malformed.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or not _is_host(host):
        raise ConfigError(f"expected {_expected(host, port)}, got {address!r}")
    return host, int(port)


def _is_host(host: str) -> bool:
    if host[:1] == "[" and host[-1:] == "]":
        return _is_ipv6(host[1:-1])
    return bool(host) and not set(host) & set("[]:/")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
        return True
    except ValueError:
        return False


def _expected(host: str, port: str) -> str:
    """The address that was probably meant, else an example."""
    return (
        f"brackets around IPv6, '[{host}]:{port}'" if _is_ipv6(host) else "an address like '127.0.0.1:7000'"
    )


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine, and so names no machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host


def reachable_address(host: str, port: int, other: str) -> str:
    """The "host:port" at which a peer at `other` (host:port) can reach a listener on `host`; "" if it cannot
    be known.

    A wildcard address names no machine, and a loopback address only works on the same machine.
    """
    if is_wildcard(host) or (is_loopback(host) and not is_loopback(parse_address(other)[0])):
        return ""
    return join_address(host, port)


_NUMBERED = re.compile(r"\{(\d{1,4})\}")


def expand_addresses(addresses: Iterable[str]) -> tuple[str, ...]:
    """Expand each `{N}` into N addresses: `shard-{3}.shards:7000` gives shard-0, shard-1 and shard-2, as
    orchestrators name the members of a set.

    Raises:
        ConfigError: N is 0, or another use of braces.
    """
    found: list[str] = []
    for address in addresses:
        numbered = _NUMBERED.search(address)
        if numbered is None:
            found.append(address)
        elif int(numbered[1]) == 0:
            raise ConfigError(
                f"expected an address like 'shard-{{3}}.shards:7000' with 1 or more, got {address!r}"
            )
        else:
            found += [
                address[: numbered.start()] + str(i) + address[numbered.end() :]
                for i in range(int(numbered[1]))
            ]
    if wrong := next((a for a in found if "{" in a or "}" in a), ""):
        raise ConfigError(f"expected an address like 'shard-{{3}}.shards:7000', got {wrong!r}")
    return tuple(found)


def check_addresses(key: str, *addresses: str) -> None:
    """Raises ConfigError, with the key: an address is not host:port (`{N}` is allowed)."""
    for address in addresses:
        try:
            for one in expand_addresses((address,)):
                parse_address(one)
        except ConfigError:
            host, _, port = address.rpartition(":")
            raise setting_error(key, _expected(host, port), address) from None


def is_http_url(url: str) -> bool:
    """Whether the URL has a scheme of HTTP, a host that can be looked up, and no impossible port."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:  # a bracket too few, a port above 65535, an empty label of the host's name
        return False


def check_redis(key: str, url: str) -> None:
    """Raises ConfigError: it is no Redis URL. The message omits user and password."""
    shown, expected = url.rpartition("@")[2], "redis://host:port/0 (rediss:// for TLS)"
    try:
        parts = urlsplit(url)
        host, _, port = parts.netloc.rpartition("@")[2].rpartition(":")
        if _is_ipv6(host):
            expected = f"brackets around IPv6, '{parts.scheme}://[{host}]:{port}{parts.path}'"
            raise ValueError
        fits = parts.scheme in ("redis", "rediss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise setting_error(key, expected, shown)


SERVING_AUTHENTICATION = "tls_certificate and keys_file"  # makes a port authenticate its clients


def check_listen(
    key: str,
    address: str,
    *,
    insecure: bool,
    authenticated: bool | None = None,
    by: str = SERVING_AUTHENTICATION,
) -> None:
    """The rule for every port of every program: without authentication it listens on loopback addresses,
    unless `insecure`.

    `authenticated`: whether clients must authenticate over an encrypted connection; None: the port does not
    support it. `by`: the settings that would enable it.

    Raises:
        ConfigError: the address is malformed, or the rule is broken.
    """
    check_addresses(key, address)
    if not (insecure or authenticated or is_loopback(parse_address(address)[0])):
        way = "" if authenticated is None else f"give it {by}, or "
        raise setting_error(
            key,
            "a loopback address such as 127.0.0.1",
            address,
            f"to accept connections from other machines, {way}set insecure = true",
        )

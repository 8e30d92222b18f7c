"""The controller that a command asks: of the stack in a home, or one that is named and may want to know who calls."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from infra.home import Home
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.rpc.transport import Header
from roostream.schema.settings import Settings, load, setting
from roostream.schema.toml_file import TomlFile, read_toml


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Linked(Settings):
    """What is read of a program's TOML."""

    link: LinkSecurity = setting(
        factory=LinkSecurity, help="table: how shards and controller are called, and who may"
    )


@dataclasses.dataclass(frozen=True)
class AskedController:
    """`address` "" = that of the stack in `home`; `link` "" = it asks nobody."""

    home: Path
    address: str = ""
    link: str = ""

    def ask(self, method: str, header: Header, timeout_s: float) -> Header:
        """One call. Raises ConfigError: no such file; TransportError: no controller answers; or what it answers."""
        address = self.address or str(Home(self.home).running_stack()["controller"])
        transport = SocketTransport(address, keys=LinkCredentials(link_of(self.link)))
        try:
            return transport.call(method, header, timeout_s=timeout_s)[0]
        finally:
            transport.close()


def link_of(file: str) -> LinkSecurity:
    """The table `[link]` of a program's TOML, whatever else is in it. Raises ConfigError: it isn't one."""
    if not file:
        return LinkSecurity()
    read = read_toml(file)
    raw = {key: value for key, value in read.raw.items() if key == "link"}
    return load(_Linked, TomlFile(raw, read.location)).link

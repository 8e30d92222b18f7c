"""Settings of readers: of the program, of a worker that asks them, and of the controller that says how many there are."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.runtime.address import LINK_ASKS, check_addresses, check_listen
from roostream.runtime.deployment import ProgramSettings
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.schema.settings import Settings, setting, setting_error

MAX_READERS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadersConfig(Settings):
    """`[readers]` of a worker."""

    by: Literal["worker", "programs"] = setting(
        "worker",
        "who reads sessions of the warehouse: the worker itself, in the thread of its source, or `reader` programs",
    )
    max_bytes: int = setting(256 << 20, "programs: of units that are here and not yet trained", ge=1 << 20)
    max_units: int = setting(16, "the same in units; a unit is what a reader makes at once", ge=1, le=1024)
    max_in_flight: int = setting(
        8, "splits under way for this worker, at most; as many readers at once", ge=1, le=32
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderCountConfig(Settings):
    """`[readers]` of a controller: how many it wishes for, by the fullness of its workers' buffers."""

    least: int = setting(1, "readers while a session is read by programs", ge=1, le=MAX_READERS)
    most: int = setting(
        1, "readers, however hungry workers are; above least it follows them", ge=1, le=MAX_READERS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise setting_error("least", f"at most most = {self.most}", self.least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderConfig(ProgramSettings):
    """`roostream reader`: reads splits of the session that is trained and serves them to workers. It keeps nothing."""

    controller: str = setting(help="the controller's host:port, which says what is read")
    listen: str = setting("127.0.0.1:0", "host:port at which workers ask it; port 0 = draw")
    told: str = setting(
        "", "the same as workers reach it, where that isn't what it listens on; port 0 = that of listen"
    )
    link: LinkSecurity = setting(factory=LinkSecurity, help="table: how it calls and is called, and who may")
    max_splits: int = setting(2, "held at once, one of them being read", ge=1, le=64)
    max_bytes: int = setting(
        128 << 20, "of units that wait to be fetched; one unit is always held", ge=1 << 20
    )
    max_units: int = setting(16, "the same in units", ge=1, le=1024)
    max_requests_s: int = setting(
        0, "requests a second, at most, to spare a store; 0 = as fast as it can", ge=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("controller", self.controller)
        check_listen(
            "listen", self.listen, insecure=self.insecure, authenticated=self.link.asks, by=LINK_ASKS
        )
        if self.told:
            check_addresses("told", self.told)

    def link_credentials(self) -> LinkCredentials:
        """As `Deployment.link_credentials`."""
        return LinkCredentials(self.link, insecure=self.insecure)

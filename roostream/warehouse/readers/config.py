"""Settings of input readers: of the reader program, of a worker that uses readers, and of the controller that
scales them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.runtime.address import check_addresses
from roostream.runtime.deployment import LinkSettings
from roostream.schema.settings import Settings, setting, setting_error

MAX_READERS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadersConfig(Settings):
    """`[readers]` of a worker."""

    by: Literal["worker", "programs"] = setting(
        "worker", "who reads warehouse sessions: the worker in its own thread, or `reader` programs"
    )
    max_bytes: int = setting(256 << 20, "programs: bytes of fetched rows that wait for training", ge=1 << 20)
    max_pieces: int = setting(
        16,
        "programs: fetched pieces that wait for training; a piece is what a reader makes at once",
        ge=1,
        le=1024,
    )
    max_in_flight: int = setting(
        8,
        "programs: splits that are read for this worker at once, and so readers that work for it",
        ge=1,
        le=32,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderCountConfig(Settings):
    """`[readers]` of a controller: how many readers it requests, by the fullness of its workers' buffers."""

    min_readers: int = setting(1, "readers while programs read a session", ge=1, le=MAX_READERS)
    max_readers: int = setting(
        1, "readers at most; above min_readers the number follows the workers' buffers", ge=1, le=MAX_READERS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_readers > self.max_readers:
            raise setting_error("min_readers", f"at most max_readers = {self.max_readers}", self.min_readers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderConfig(LinkSettings):
    """`roostream reader`: reads splits of the session that is trained and serves them to workers.
    Stateless."""

    controller: str = setting(help="host:port of the controller, which says what is read")
    listen: str = setting("127.0.0.1:0", "host:port that workers call; port 0 picks a free port")
    advertised_address: str = setting(
        "", "host:port under which workers reach it, if not `listen`; port 0 = the port of `listen`"
    )
    max_splits: int = setting(2, "splits that are leased at once; one of them is being read", ge=1, le=64)
    max_bytes: int = setting(
        128 << 20, "bytes of pieces that wait to be fetched; one piece is always kept", ge=1 << 20
    )
    max_pieces: int = setting(16, "pieces that wait to be fetched", ge=1, le=1024)
    max_requests_s: int = setting(0, "rate limit in requests a second, to spare a store; 0 = no limit", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("controller", self.controller)
        self.check_link_port(self.listen)
        if self.advertised_address:
            check_addresses("advertised_address", self.advertised_address)

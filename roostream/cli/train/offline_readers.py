"""`reader` programs beside training in this process: what they are told to read, and as many of them as are wished for."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from infra.child import Program, StopRank
from infra.home import Home
from infra.options import ROOT
from infra.process_pool import ProcessPool, ProgramPool
from roostream.errors import RoostreamError
from roostream.runtime.address import is_loopback, parse_address
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.warehouse.readers.config import ReaderCountConfig, ReadersConfig
from roostream.warehouse.readers.remote_rows import ReadersLink, RemoteSessionOpener
from trainer.control.reader_master import LeaseRecorder, ReaderMaster

log = logging.getLogger("roostream.train")

_FOLLOW_S = 1.0
_STOP_S = 10.0
HERE = "127.0.0.1:0"


class OfflineReaders:
    """A pool of readers that follows the wish of a master, until `close`."""

    def __init__(
        self,
        master: ReaderMaster,
        count: ReaderCountConfig,
        pool: Callable[[str], ProgramPool],
        store: CheckpointStore | None = None,
        at: str = HERE,
        keys: LinkCredentials | None = None,
    ) -> None:
        """`pool`: the master's "host:port" → readers that ask it; `store`: where it is kept what became of leases; `at`: where
        it is asked; `keys`: of those calls, and of those to readers."""
        self.master, self.count, self.clock, self.keys = (
            master,
            count,
            master.clock,
            keys or LinkCredentials(),
        )
        self._kept = LeaseRecorder(master, store, self.clock) if store else None
        self.server = RpcServer(self.master.handle, *parse_address(at), keys=self.keys)
        self._pool = pool
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="readers", daemon=True)

    def open(self) -> OfflineReaders:
        self.server.start()
        self.pool = self._pool(self.server.address)
        self.pool.resize(self.count.min_readers)
        self._thread.start()
        return self

    def close(self) -> None:
        """Readers hear from nobody, so they end at once, by force those that don't. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._kept:
            self._kept.save_if_due(last=True)
        self.server.stop()
        self.pool.close()

    def reading(self, settings: ReadersConfig, incarnation: Callable[[], int]) -> RemoteSessionOpener:
        """Who reads for the worker of this process."""
        link = ReadersLink(
            controller=lambda: InMemoryTransport(self.master.handle),
            dial=lambda address: SocketTransport(address, keys=self.keys),
            worker=0,
            incarnation=incarnation,
        )
        return RemoteSessionOpener(link, settings, self.clock)

    def _follow(self) -> None:
        while not self._stop.wait(_FOLLOW_S):
            if self._kept:
                self._kept.save_if_due()
            try:
                self.pool.resize(max(self.master.status()["wanted"], self.count.min_readers))
            except RoostreamError as error:  # those that run go on
                log.warning("the number of readers stays as it is: %s", error)


def reader_programs(home: Home, settings: Mapping[str, Any] | None = None) -> Callable[[str], ProgramPool]:
    """Child processes with these settings; their files lie in `home`."""

    def made(controller: str) -> ProgramPool:
        return ProcessPool(
            lambda number: _program(home, number, {**(settings or {}), "controller": controller})
        )

    return made


def reader_actors(settings: Mapping[str, Any] | None = None) -> Callable[[str], ProgramPool]:
    """The same programs on the nodes of a Ray cluster, which have this project, the warehouse's place and the link's files as
    this machine has them. Where others reach the master they listen on all addresses of their nodes, and are told by their names.

    The call raises as `RayPool`.
    """

    def made(controller: str) -> ProgramPool:
        from infra.ray_pool import RayPool

        listen = {} if is_loopback(parse_address(controller)[0]) else {"listen": "0.0.0.0:0"}
        return RayPool(
            partial(_on_a_node, {**listen, **(settings or {}), "controller": controller}), "reader"
        )

    return made


def linked(keys: LinkCredentials) -> dict[str, Any]:
    """Settings of readers that call, and are called, as these keys say."""
    link = {key: value for key, value in dataclasses.asdict(keys.security).items() if value}
    return {**({"link": link} if link else {}), **({"insecure": True} if keys.insecure else {})}


def _on_a_node(table: Mapping[str, Any], number: int, folder: Path) -> Program:
    return _program(Home(folder), number, table)


def _program(home: Home, number: int, table: Mapping[str, Any]) -> Program:
    name = f"reader-{number}"
    conf = home.conf / f"{name}.toml"

    def prepare() -> None:
        conf.parent.mkdir(parents=True, exist_ok=True)
        conf.write_text(tomli_w.dumps(table), encoding="utf-8")

    return Program(
        name=name,
        command=(sys.executable, "-m", "roostream.cli.main", "reader", "--config", str(conf)),
        log=home.log(name),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        },
        prepare=prepare,
        stop_rank=StopRank.FEATURES,
        stop_timeout_s=_STOP_S,
    )

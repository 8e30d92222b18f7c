"""`reader` programs for `roostream train`: the RPC server of their master, and a pool that follows its target
size."""

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

_RESIZE_INTERVAL_S = 1.0
_STOP_S = 10.0
LOOPBACK = "127.0.0.1:0"


class OfflineReaders:
    """A pool of readers that follows the target size of a master, between `open` and `close`."""

    def __init__(
        self,
        master: ReaderMaster,
        count: ReaderCountConfig,
        build_pool: Callable[[str], ProgramPool],
        store: CheckpointStore | None = None,
        listen: str = LOOPBACK,
        credentials: LinkCredentials | None = None,
    ) -> None:
        """`build_pool` takes the address of the master. `store` keeps the log of leases. `credentials`
        protect calls to the master and to readers."""
        self.master, self.count, self.clock = master, count, master.clock
        self.credentials = credentials or LinkCredentials()
        self._lease_recorder = LeaseRecorder(master, store, self.clock) if store else None
        self.server = RpcServer(self.master.handle, *parse_address(listen), credentials=self.credentials)
        self._build_pool = build_pool
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow_target, name="readers", daemon=True)

    def open(self) -> OfflineReaders:
        self.server.start()
        self.pool = self._build_pool(self.server.address)
        self.pool.resize(self.count.min_readers)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the server and all readers; readers that miss their time limit are killed. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._lease_recorder:
            self._lease_recorder.save_if_due(last=True)
        self.server.stop()
        self.pool.close()

    def session_opener(self, settings: ReadersConfig, incarnation: Callable[[], int]) -> RemoteSessionOpener:
        """Opens sessions that are read by these readers, for the worker in this process."""
        link = ReadersLink(
            controller=lambda: InMemoryTransport(self.master.handle),
            dial=lambda address: SocketTransport(address, credentials=self.credentials),
            worker=0,
            incarnation=incarnation,
        )
        return RemoteSessionOpener(link, settings, self.clock)

    def _follow_target(self) -> None:
        while not self._stop.wait(_RESIZE_INTERVAL_S):
            if self._lease_recorder:
                self._lease_recorder.save_if_due()
            try:
                self.pool.resize(max(self.master.status()["wanted"], self.count.min_readers))
            except RoostreamError as error:  # the readers that run continue
                log.warning("cannot change the number of readers: %s", error)


def reader_programs(home: Home, settings: Mapping[str, Any] | None = None) -> Callable[[str], ProgramPool]:
    """Readers as child processes with these settings; their files are in `home`."""

    def build(master: str) -> ProgramPool:
        return ProcessPool(lambda number: _reader(home, number, {**(settings or {}), "controller": master}))

    return build


def reader_actors(settings: Mapping[str, Any] | None = None) -> Callable[[str], ProgramPool]:
    """Readers on the nodes of a Ray cluster, which have this package and can reach the warehouse and the
    files of [link].

    If the master is not on loopback, readers listen on all addresses and are known by the host names of their
    nodes. The pool raises as `RayPool`.
    """

    def build(master: str) -> ProgramPool:
        from infra.ray_pool import RayPool

        listen = {} if is_loopback(parse_address(master)[0]) else {"listen": "0.0.0.0:0"}
        return RayPool(
            partial(_reader_on_node, {**listen, **(settings or {}), "controller": master}), "reader"
        )

    return build


def link_table(credentials: LinkCredentials) -> dict[str, Any]:
    """The settings by which readers use the same credentials."""
    link = {key: value for key, value in dataclasses.asdict(credentials.security).items() if value}
    return {**({"link": link} if link else {}), **({"insecure": True} if credentials.insecure else {})}


def child_program(
    home: Home,
    name: str,
    module: tuple[str, ...],
    conf_name: str,
    conf_text: str,
    *,
    stop_rank: StopRank,
    refused_code: int | None = None,
) -> Program:
    """A Python module as a child process. Its last argument is a file with `conf_text`, written before each
    start."""
    conf = home.conf / conf_name

    def prepare() -> None:
        conf.parent.mkdir(parents=True, exist_ok=True)
        conf.write_text(conf_text, encoding="utf-8")

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return Program(
        name=name,
        command=(sys.executable, "-m", *module, str(conf)),
        log=home.log(name),
        env={**os.environ, "PYTHONPATH": path},
        prepare=prepare,
        stop_rank=stop_rank,
        stop_timeout_s=_STOP_S,
        refused_code=refused_code,
    )


def _reader(home: Home, number: int, table: Mapping[str, Any]) -> Program:
    name = f"reader-{number}"
    command = ("roostream.cli.main", "reader", "--config")
    return child_program(
        home, name, command, f"{name}.toml", tomli_w.dumps(table), stop_rank=StopRank.FEATURES
    )


def _reader_on_node(table: Mapping[str, Any], number: int, folder: Path) -> Program:
    return _reader(Home(folder), number, table)

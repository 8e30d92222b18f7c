"""Readers, the controller and workers over real sockets: with certificates and a token, or not at all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roostream.errors import RoostreamError
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.topics import SAMPLES
from roostream.runtime.program import Stop
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.work_unit import TableInput
from roostream.warehouse.readers.config import ReaderConfig, ReadersConfig
from roostream.warehouse.readers.reader_program import read
from roostream.warehouse.readers.remote_rows import ReadersLink, RemoteSessionOpener
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from tests.certificates import Authority
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS
from tests.trainer.sessions.reading_fleet import bits
from tests.warehouse.sessions.test_sample_table import archive
from trainer.control.reader_master import ReaderMaster
from trainer.sessions.session_source import SessionSource, local_rows, open_session

TOKEN = "t" * 32
WAIT_S = 30.0


class Link:
    """A controller's master on a port, and a reader as its program runs it, each with keys of its own."""

    def __init__(self, place: Path, authority: Authority, opened: contextlib.ExitStack) -> None:
        self.authority, self.opened, self.folder = authority, opened, place
        archive(place / "w", samples.records(list(range(1, 61))))
        told = SampleTable(str(place / "w")).newest(
            SessionSpec(table=str(place / "w"), version=0, batch_requests=4), {}
        )
        assert told is not None
        self.told: TableInput = told
        self.master = ReaderMaster(lambda: (1, self.told), samples.schema(), SystemClock(), long_poll_s=0.05)
        self.server = RpcServer(
            self.master.handle, credentials=LinkCredentials(self.security("controller"))
        ).start()
        opened.callback(self.server.stop)

    def security(self, name: str, token: str = TOKEN) -> LinkSecurity:
        certificate, key = self.authority.issue(name)
        (self.folder / f"{name}.token").write_text(token)
        token_file = str(self.folder / f"{name}.token")
        return LinkSecurity(
            certificate=certificate, key=key, ca=str(self.authority.pem), token_file=token_file
        )

    def start_reader(self, security: LinkSecurity) -> None:
        """One, as a process has."""
        stop = Stop()
        config = ReaderConfig(controller=self.server.address, link=security)
        thread = threading.Thread(target=read, args=(config, stop))
        thread.start()
        self.opened.callback(thread.join, WAIT_S)
        self.opened.callback(stop.set)

    def worker(self, number: int, security: LinkSecurity) -> SessionSource:
        """Of the partition of its number."""
        credentials = LinkCredentials(security)
        link = ReadersLink(
            controller=lambda: SocketTransport(self.server.address, credentials=credentials),
            dial=lambda address: SocketTransport(address, credentials=credentials),
            worker=number,
            incarnation=lambda: 1,
        )
        return self.batches(number, RemoteSessionOpener(link, ReadersConfig(by="programs"), SystemClock()))

    def batches(self, number: int, open_rows: Callable[..., object] = local_rows) -> SessionSource:
        made = open_session(self.told, samples.schema(), PARTITIONS, 0, SystemClock(), None, open_rows)  # type: ignore[arg-type]
        self.opened.callback(made.close)
        made.assign([number])
        made.seek({(SAMPLES, number): 0})
        return made


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    with contextlib.ExitStack() as opened:
        yield Link(tmp_path, Authority(tmp_path, "ours"), opened)


def all_of(source: SessionSource, rows: int) -> list[list[bytes]]:
    found, given, ends_s = list[list[bytes]](), 0, time.monotonic() + WAIT_S
    while given < rows:
        assert time.monotonic() < ends_s, f"{given} of {rows} rows"
        if (chunk := source.poll(5, 0.2)) is not None:
            found.append(bits(chunk.batch))
            given += chunk.batch.num_requests
    return found


def test_an_authenticated_reader_gives_workers_the_rows_that_they_would_read(link: Link) -> None:
    link.start_reader(link.security("reader"))
    workers = {number: link.worker(number, link.security(f"worker-{number}")) for number in range(2)}
    for number, source in workers.items():
        rows = link.told.rows[number]
        assert all_of(source, rows) == all_of(link.batches(number), rows), "as a worker that reads for itself"
    assert link.master.status()["there"] == 1 and link.master.status()["splits_leased"] > 0


@pytest.mark.parametrize("who", ["without a certificate", "with another token", "of another authority"])
def test_an_unauthenticated_reader_gets_no_lease(link: Link, tmp_path: Path, who: str) -> None:
    (tmp_path / "theirs").mkdir()
    others = Link.security
    match who:
        case "without a certificate":
            security = LinkSecurity(token_file=link.security("x").token_file)
        case "with another token":
            security = link.security("x", "o" * 32)
        case _:
            link.authority, ours = Authority(tmp_path / "theirs", "theirs"), link.authority
            security, link.authority = others(link, "x"), ours
    source = link.worker(0, link.security("worker"))
    link.start_reader(security)
    assert source.poll(5, 1.0) is None
    assert link.master.status()["there"] == 0 and link.master.status()["splits_leased"] == 0


def test_a_reader_rejects_unauthenticated_callers(link: Link) -> None:
    link.start_reader(link.security("reader"))
    link.worker(0, link.security("worker")).poll(5, 1.0)
    (name,) = link.master.status()["readers"]
    header = {"split": 0, "grant": 1, "position": 0, "wait_s": 0}
    for stranger in (LinkSecurity(), link.security("y", "o" * 32)):
        transport = SocketTransport(name.partition("/")[0], credentials=LinkCredentials(stranger))
        with pytest.raises(RoostreamError):
            transport.call("piece", header, timeout_s=2.0)
        transport.close()

"""Readers, the controller and workers over real sockets. Without a valid certificate and token, access is
denied."""

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
    """A controller's reader master on a port, and readers and workers that connect to it. Each has its own
    certificate."""

    def __init__(self, folder: Path, authority: Authority, exit_stack: contextlib.ExitStack) -> None:
        self.authority, self.exit_stack, self.folder = authority, exit_stack, folder
        archive(folder / "w", samples.records(list(range(1, 61))))
        table_input = SampleTable(str(folder / "w")).newest(
            SessionSpec(table=str(folder / "w"), version=0, batch_requests=4), {}
        )
        assert table_input is not None
        self.table_input: TableInput = table_input
        self.master = ReaderMaster(
            lambda: (1, self.table_input), samples.schema(), SystemClock(), long_poll_s=0.05
        )
        self.server = RpcServer(
            self.master.handle, credentials=LinkCredentials(self.security("controller"))
        ).start()
        exit_stack.callback(self.server.stop)

    def security(self, name: str, token: str = TOKEN) -> LinkSecurity:
        certificate, key = self.authority.issue(name)
        (self.folder / f"{name}.token").write_text(token)
        token_file = str(self.folder / f"{name}.token")
        return LinkSecurity(
            certificate=certificate, key=key, ca=str(self.authority.pem), token_file=token_file
        )

    def start_reader(self, security: LinkSecurity) -> None:
        """Run a reader program in a thread."""
        stop = Stop()
        config = ReaderConfig(controller=self.server.address, link=security)
        thread = threading.Thread(target=read, args=(config, stop))
        thread.start()
        self.exit_stack.callback(thread.join, WAIT_S)
        self.exit_stack.callback(stop.set)

    def worker(self, number: int, security: LinkSecurity) -> SessionSource:
        """Build a worker's source. It reads the partition with the worker's number through readers."""
        credentials = LinkCredentials(security)
        link = ReadersLink(
            controller=lambda: SocketTransport(self.server.address, credentials=credentials),
            dial=lambda address: SocketTransport(address, credentials=credentials),
            worker=number,
            incarnation=lambda: 1,
        )
        return self.batches(number, RemoteSessionOpener(link, ReadersConfig(by="programs"), SystemClock()))

    def batches(self, number: int, open_rows: Callable[..., object] = local_rows) -> SessionSource:
        source = open_session(  # type: ignore[arg-type]
            self.table_input, samples.schema(), PARTITIONS, 0, SystemClock(), None, open_rows
        )
        self.exit_stack.callback(source.close)
        source.assign([number])
        source.seek({(SAMPLES, number): 0})
        return source


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    with contextlib.ExitStack() as exit_stack:
        yield Link(tmp_path, Authority(tmp_path, "ours"), exit_stack)


def read_all(source: SessionSource, rows: int) -> list[list[bytes]]:
    batches, num_rows, ends_s = list[list[bytes]](), 0, time.monotonic() + WAIT_S
    while num_rows < rows:
        assert time.monotonic() < ends_s, f"{num_rows} of {rows} rows"
        if (chunk := source.poll(5, 0.2)) is not None:
            batches.append(bits(chunk.batch))
            num_rows += chunk.batch.num_requests
    return batches


def test_an_authenticated_reader_serves_the_rows_that_workers_would_read_themselves(link: Link) -> None:
    link.start_reader(link.security("reader"))
    workers = {number: link.worker(number, link.security(f"worker-{number}")) for number in range(2)}
    for number, source in workers.items():
        rows = link.table_input.rows[number]
        assert read_all(source, rows) == read_all(link.batches(number), rows), (
            "rows must equal those that the worker reads itself"
        )
    assert link.master.status()["there"] == 1 and link.master.status()["splits_leased"] > 0


@pytest.mark.parametrize(
    "credentials", ["without a certificate", "with another token", "of another authority"]
)
def test_an_unauthenticated_reader_gets_no_lease(link: Link, tmp_path: Path, credentials: str) -> None:
    (tmp_path / "theirs").mkdir()
    others = Link.security
    match credentials:
        case "without a certificate":
            security = LinkSecurity(token_file=link.security("x").token_file)
        case "with another token":
            security = link.security("x", "o" * 32)
        case _:
            link.authority, own_authority = Authority(tmp_path / "theirs", "theirs"), link.authority
            security, link.authority = others(link, "x"), own_authority
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

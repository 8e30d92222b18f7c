"""A reader that is told to end gives what it has, takes no more, and waits for nobody for long."""

from __future__ import annotations

import pytest

from roostream.errors import TransportError
from roostream.runtime.rpc.transport import Answer, Arrays, Header, Transport
from roostream.warehouse.readers.reader_program import DRAIN_S, METRICS, ReaderAgent, drain, metrics_of
from tests.trainer.sessions.reading_fleet import Fleet


class Beside:
    """The controller; whoever trains fetches what it waits for whenever the reader asks."""

    def __init__(self, fleet: Fleet, inner: Transport, trains: bool = True) -> None:
        self.fleet, self.inner, self.trains = fleet, inner, trains
        self.is_away = False
        self.free: list[int] = []

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        if self.is_away:
            raise TransportError("it is away")
        self.free.append(int(header["free"]))
        if self.trains:
            for _ in range(4):
                train(self.fleet)
        return self.inner.call(method, header, arrays, timeout_s=timeout_s)

    def close(self) -> None:
        """Nothing is held."""


def train(fleet: Fleet) -> None:
    """The reader reads, and whoever trains fetches what it waits for."""
    fleet.reader_reads("r1:1")
    fleet.worker_requests_splits()
    fleet.worker_starts_fetch()
    fleet.deliver_answer()
    fleet.poll()


@pytest.fixture
def fleet() -> Fleet:
    """One reader, which has what is waited for."""
    made = Fleet(num_readers=1)
    made.poll()
    made.worker_requests_splits()
    made.reader_renews_leases("r1:1")
    made.reader_renews_leases("r1:1")
    assert its(made).reader.has_leases
    return made


def its(fleet: Fleet) -> ReaderAgent:
    return fleet.readers["r1:1"]


def test_a_draining_reader_ends_when_its_pieces_were_fetched_and_takes_no_leases(fleet: Fleet) -> None:
    controller, had = Beside(fleet, fleet.controller()), fleet.master.leases.num_granted
    drain(its(fleet), controller, fleet.clock)
    assert metrics_of(its(fleet).reader).keys() == METRICS.keys()
    assert not its(fleet).reader.has_leases and set(controller.free) == {0}
    assert fleet.master.leases.num_granted == had, "others are another reader's"
    assert fleet.rows.buffer.counts["requests"] > 0 and fleet.rows.buffer.counts["refused"] == 0


def test_draining_ends_after_a_time_limit(fleet: Fleet) -> None:
    controller, began_s = Beside(fleet, fleet.controller(), trains=False), fleet.clock.monotonic_s()
    drain(its(fleet), controller, fleet.clock)
    assert DRAIN_S <= fleet.clock.monotonic_s() - began_s < DRAIN_S + 1


def test_draining_ends_at_once_without_a_controller(fleet: Fleet) -> None:
    controller, began_s = Beside(fleet, fleet.controller()), fleet.clock.monotonic_s()
    controller.is_away = True
    drain(its(fleet), controller, fleet.clock)
    assert fleet.clock.monotonic_s() == began_s

"""Draining a reader: it serves the pieces that it has read, takes no new leases, and ends within a time
limit."""

from __future__ import annotations

import pytest

from roostream.errors import TransportError
from roostream.runtime.rpc.transport import Answer, Arrays, Header, Transport
from roostream.warehouse.readers.reader_program import DRAIN_S, METRICS, ReaderAgent, drain, metrics_of
from tests.trainer.sessions.reading_fleet import Fleet


class TrainingController:
    """A connection to the controller. With `trains`, each call also lets a worker fetch pieces from the
    reader."""

    def __init__(self, fleet: Fleet, inner: Transport, trains: bool = True) -> None:
        self.fleet, self.inner, self.trains = fleet, inner, trains
        self.is_unavailable = False
        self.free: list[int] = []

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        if self.is_unavailable:
            raise TransportError("it is away")
        self.free.append(int(header["free"]))
        if self.trains:
            for _ in range(4):
                train_step(self.fleet)
        return self.inner.call(method, header, arrays, timeout_s=timeout_s)

    def close(self) -> None:
        """Do nothing: there is no connection to close."""


def train_step(fleet: Fleet) -> None:
    """Let the reader read a piece, and let the worker fetch it."""
    fleet.reader_reads("r1:1")
    fleet.worker_requests_splits()
    fleet.worker_starts_fetch()
    fleet.deliver_answer()
    fleet.poll()


@pytest.fixture
def fleet() -> Fleet:
    """A fleet with one reader, which has a lease of the split that the worker waits for."""
    new_fleet = Fleet(num_readers=1)
    new_fleet.poll()
    new_fleet.worker_requests_splits()
    new_fleet.reader_renews_leases("r1:1")
    new_fleet.reader_renews_leases("r1:1")
    assert agent_of(new_fleet).reader.has_leases
    return new_fleet


def agent_of(fleet: Fleet) -> ReaderAgent:
    return fleet.readers["r1:1"]


def test_a_draining_reader_ends_when_its_pieces_were_fetched_and_takes_no_leases(fleet: Fleet) -> None:
    controller, num_granted = TrainingController(fleet, fleet.controller()), fleet.master.leases.num_granted
    drain(agent_of(fleet), controller, fleet.clock)
    assert metrics_of(agent_of(fleet).reader).keys() == METRICS.keys()
    assert not agent_of(fleet).reader.has_leases and set(controller.free) == {0}
    assert fleet.master.leases.num_granted == num_granted, "a draining reader must take no new lease"
    assert fleet.rows.buffer.counts["requests"] > 0 and fleet.rows.buffer.counts["refused"] == 0


def test_draining_ends_after_a_time_limit(fleet: Fleet) -> None:
    controller = TrainingController(fleet, fleet.controller(), trains=False)
    began_s = fleet.clock.monotonic_s()
    drain(agent_of(fleet), controller, fleet.clock)
    assert DRAIN_S <= fleet.clock.monotonic_s() - began_s < DRAIN_S + 1


def test_draining_ends_at_once_without_a_controller(fleet: Fleet) -> None:
    controller, began_s = TrainingController(fleet, fleet.controller()), fleet.clock.monotonic_s()
    controller.is_unavailable = True
    drain(agent_of(fleet), controller, fleet.clock)
    assert fleet.clock.monotonic_s() == began_s

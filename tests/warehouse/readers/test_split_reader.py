"""A reader keeps what it read until it is fetched, and no more than it has room for."""

from __future__ import annotations

import threading

import pytest

from roostream.errors import CheckpointError, FencedError, UnavailableError
from roostream.runtime.clock import FakeClock, SystemClock
from roostream.warehouse.readers.leases import Lease
from roostream.warehouse.readers.split_reader import SplitReader
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import LocalSessionRows, Piece
from tests.trainer import samples
from tests.warehouse.memory_table import MemoryTable, table_of


def reader(max_pieces: int = 4, table: MemoryTable | None = None, **more: int) -> SplitReader:
    """Of files of 8 rows, row groups of 4, units of 3."""
    table = table or table_of(samples.records(list(range(1, 60))), rows_of_file=8)
    its = SplitReader(FakeClock(), **{"max_bytes": 1 << 30, "max_pieces": max_pieces, **more})
    its.start_session(LocalSessionRows(table.session(shuffle_seed=None, batch_requests=3), table), "digest")
    return its


def lease(split: int, position: int = -1, grant: int = 0) -> Lease:
    return Lease(split, 8 * (split // 2) if position < 0 else position, grant or 100 + split, "r")


def test_pieces_have_the_session_size_and_end_with_their_row_group() -> None:
    its = reader()
    its.set_leases([lease(0)])
    assert its.step(0) and its.step(0) and not its.step(0)
    found = [its.next_piece(0, 100, at, 0) for at in (0, 3, 4, 7)]
    assert [(u.start, u.end) for u in found if u] == [(0, 3), (3, 4), (4, 7), (7, 8)]
    assert its.next_piece(0, 100, 8, 0) is None


def test_a_piece_is_repeated_until_the_next_one_is_requested() -> None:
    its = reader()
    its.set_leases([lease(0)])
    its.step(0)
    first = its.next_piece(0, 100, 0, 0)
    assert first is not None and its.next_piece(0, 100, 0, 0) is first
    assert its.report()["held_pieces"] == 2
    its.next_piece(0, 100, 3, 0)
    assert its.report()["held_pieces"] == 1


def test_a_restarted_worker_gets_rows_from_its_position() -> None:
    its = reader()
    its.set_leases([lease(0)])
    its.step(0)
    assert its.next_piece(0, 100, 2, 0) is None, "it was read from 0"
    its.step(0)
    unit = its.next_piece(0, 100, 2, 0)
    assert unit is not None and (unit.start, unit.end) == (2, 4)
    its.set_leases([lease(0, position=6, grant=7)])
    its.step(0)
    assert (unit := its.next_piece(0, 7, 6, 0)) is not None and unit.start == 6


def test_the_buffer_is_bounded_but_requested_pieces_are_always_read() -> None:
    its = reader(max_pieces=1)
    its.set_leases([lease(0), lease(2)])
    assert its.step(0) and not its.step(0), "a row group more than there is room for"
    assert its.num_free_slots(2) == 0 and its.next_piece(2, 102, 8, 0) is None
    threading.Timer(0.05, lambda: its.step(1.0)).start()
    its.clock = SystemClock()
    assert its.next_piece(2, 102, 8, 5.0) is not None


def test_free_slots_follow_unread_splits() -> None:
    its = reader(max_pieces=100)
    assert its.num_free_slots(2) == 2
    its.set_leases([lease(0), lease(2)])
    assert its.num_free_slots(2) == 0
    while its.step(0):
        pass
    assert its.num_free_slots(2) == 2


def test_a_request_without_the_current_lease_is_rejected() -> None:
    its = reader()
    its.set_leases([lease(0)])
    its.step(0)
    with pytest.raises(FencedError):
        its.next_piece(0, 99, 0, 0)
    its.set_leases([lease(2)])
    with pytest.raises(FencedError):
        its.next_piece(0, 100, 0, 0)
    its.start_session(None)
    assert its.report()["held_splits"] == 0 and not its.step(0)


class Broken(LocalSessionRows):
    def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
        raise (UnavailableError if split.number else CheckpointError)(f"file {split.path}")


def test_damage_is_reported_to_the_worker_and_an_unavailable_file_is_retried() -> None:
    table = table_of(samples.records(list(range(1, 60))), rows_of_file=8)
    its = SplitReader(FakeClock(), max_bytes=1 << 30, max_pieces=4)
    its.start_session(Broken(table.session(shuffle_seed=None), table))
    its.set_leases([lease(0), lease(2)])
    assert not its.step(0)
    with pytest.raises(CheckpointError):
        its.next_piece(0, 100, 0, 0)
    with pytest.raises(UnavailableError):
        its.step(0)
    assert its.next_piece(2, 102, 8, 0) is None


def test_the_rate_limit_delays_reading() -> None:
    its = reader(max_requests_s=2)
    its.set_leases([lease(0)])
    its.step(0)
    its.step(0)
    assert its.clock.monotonic_s() == pytest.approx(8 / 2)

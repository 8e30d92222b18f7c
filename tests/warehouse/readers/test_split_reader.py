"""`SplitReader` reads leased splits, keeps pieces until they are fetched, and bounds their number."""

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


def make_reader(max_pieces: int = 4, table: MemoryTable | None = None, **limits: int) -> SplitReader:
    """Build a reader of a table with files of 8 rows, row groups of 4 and batches of 3."""
    table = table or table_of(samples.records(list(range(1, 60))), rows_of_file=8)
    split_reader = SplitReader(FakeClock(), **{"max_bytes": 1 << 30, "max_pieces": max_pieces, **limits})
    split_reader.start_session(
        LocalSessionRows(table.session(shuffle_seed=None, batch_requests=3), table), "digest"
    )
    return split_reader


def lease(split: int, position: int = -1, grant: int = 0) -> Lease:
    """Build a lease. By default it starts with the split's file of 8 rows, and its grant is 100 + `split`."""
    return Lease(split, 8 * (split // 2) if position < 0 else position, grant or 100 + split, "r")


def test_pieces_have_the_session_size_and_end_with_their_row_group() -> None:
    split_reader = make_reader()
    split_reader.set_leases([lease(0)])
    assert split_reader.step(0) and split_reader.step(0) and not split_reader.step(0)
    found = [split_reader.next_piece(0, 100, at, 0) for at in (0, 3, 4, 7)]
    assert [(u.start, u.end) for u in found if u] == [(0, 3), (3, 4), (4, 7), (7, 8)]
    assert split_reader.next_piece(0, 100, 8, 0) is None


def test_a_piece_is_repeated_until_the_next_one_is_requested() -> None:
    split_reader = make_reader()
    split_reader.set_leases([lease(0)])
    split_reader.step(0)
    first = split_reader.next_piece(0, 100, 0, 0)
    assert first is not None and split_reader.next_piece(0, 100, 0, 0) is first
    assert split_reader.report()["held_pieces"] == 2
    split_reader.next_piece(0, 100, 3, 0)
    assert split_reader.report()["held_pieces"] == 1


def test_a_restarted_worker_gets_rows_from_its_position() -> None:
    split_reader = make_reader()
    split_reader.set_leases([lease(0)])
    split_reader.step(0)
    assert split_reader.next_piece(0, 100, 2, 0) is None, (
        "the piece was read from position 0, so it must be read again"
    )
    split_reader.step(0)
    unit = split_reader.next_piece(0, 100, 2, 0)
    assert unit is not None and (unit.start, unit.end) == (2, 4)
    split_reader.set_leases([lease(0, position=6, grant=7)])
    split_reader.step(0)
    assert (unit := split_reader.next_piece(0, 7, 6, 0)) is not None and unit.start == 6


def test_rows_that_are_being_read_at_the_end_of_their_session_are_dropped() -> None:
    table = table_of(samples.records(list(range(1, 60))), rows_of_file=8)
    split_reader = make_reader(table=table)
    split_reader.set_leases([lease(0)])

    class EndsWhileReading(LocalSessionRows):
        def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
            split_reader.start_session(None)  # by the thread of the leases
            return super().piece(split, position, timeout_s)

    session = table.session(shuffle_seed=None, batch_requests=3)
    split_reader.start_session(EndsWhileReading(session, table), "digest")
    split_reader.set_leases([lease(0)])
    split_reader.step(0)
    assert not split_reader.has_leases and split_reader.report()["held_pieces"] == 0


def test_the_buffer_is_bounded_but_requested_pieces_are_always_read() -> None:
    split_reader = make_reader(max_pieces=1)
    split_reader.set_leases([lease(0), lease(2)])
    assert split_reader.step(0) and not split_reader.step(0), (
        "the buffer may exceed its limit by one row group only"
    )
    assert split_reader.num_free_slots(2) == 0 and split_reader.next_piece(2, 102, 8, 0) is None
    threading.Timer(0.05, lambda: split_reader.step(1.0)).start()
    split_reader.clock = SystemClock()
    assert split_reader.next_piece(2, 102, 8, 5.0) is not None


def test_free_slots_follow_unread_splits() -> None:
    split_reader = make_reader(max_pieces=100)
    assert split_reader.num_free_slots(2) == 2
    split_reader.set_leases([lease(0), lease(2)])
    assert split_reader.num_free_slots(2) == 0
    while split_reader.step(0):
        pass
    assert split_reader.num_free_slots(2) == 2


def test_a_request_without_the_current_lease_is_rejected() -> None:
    split_reader = make_reader()
    split_reader.set_leases([lease(0)])
    split_reader.step(0)
    with pytest.raises(FencedError):
        split_reader.next_piece(0, 99, 0, 0)
    split_reader.set_leases([lease(2)])
    with pytest.raises(FencedError):
        split_reader.next_piece(0, 100, 0, 0)
    split_reader.start_session(None)
    assert split_reader.report()["held_splits"] == 0 and not split_reader.step(0)


class UnreadableRows(LocalSessionRows):
    """Rows that cannot be read: split 0 is damaged, and all other splits are unavailable."""

    def piece(self, split: TableSplit, position: int, timeout_s: float = 0.0) -> Piece:
        raise (UnavailableError if split.number else CheckpointError)(f"file {split.path}")


def test_damage_is_reported_to_the_worker_and_an_unavailable_file_is_retried() -> None:
    table = table_of(samples.records(list(range(1, 60))), rows_of_file=8)
    split_reader = SplitReader(FakeClock(), max_bytes=1 << 30, max_pieces=4)
    split_reader.start_session(UnreadableRows(table.session(shuffle_seed=None), table))
    split_reader.set_leases([lease(0), lease(2)])
    assert not split_reader.step(0)
    with pytest.raises(CheckpointError):
        split_reader.next_piece(0, 100, 0, 0)
    with pytest.raises(UnavailableError):
        split_reader.step(0)
    assert split_reader.next_piece(2, 102, 8, 0) is None


def test_the_rate_limit_delays_reading() -> None:
    split_reader = make_reader(max_requests_s=2)
    split_reader.set_leases([lease(0)])
    split_reader.step(0)
    split_reader.step(0)
    assert split_reader.clock.monotonic_s() == pytest.approx(8 / 2)

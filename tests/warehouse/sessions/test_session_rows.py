"""Rows of a session, read in the process of the trainer: each sample once, and no sample of an earlier
session."""

from __future__ import annotations

import numpy as np

from roostream.warehouse.sessions.session_rows import LocalSessionRows, recent_sample_ids
from tests.trainer import samples
from tests.warehouse.memory_table import MemoryTable, table_of


def read(table: MemoryTable, **spec: object) -> list[int]:
    """Read a session; return the sample ids in the order of reading."""
    session = table.session(**spec)
    rows, found = LocalSessionRows(session, table), []
    for split in session.order.splits:
        position = split.at
        while position < split.end_position:
            piece = rows.piece(split, position)
            assert position <= piece.end - piece.num_rows and piece.end > position
            assert ((piece.at_R >= position) & (piece.at_R < piece.end)).all()
            found += piece.batch.sample_id_R.tolist()
            position = piece.end
    return found


def test_every_row_is_read_once_a_row_group_at_a_time() -> None:
    table = table_of(samples.records(list(range(1, 30))))
    assert sorted(read(table)) == list(range(1, 30))
    assert all(end - start <= 4 and start % 4 == 0 for _, start, end in table.reads)


def test_a_duplicate_sample_is_read_once_even_if_copies_are_in_several_files() -> None:
    records_with_copies = samples.records([1, 3, 5, 7, 9, 11, 2, 4, 3, 6, 9, 1, 13])
    assert sorted(read(table_of(records_with_copies, rows_of_file=3, seed=4))) == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        9,
        11,
        13,
    ]


def test_a_later_session_reads_only_new_rows_of_a_file_that_a_seal_merged() -> None:
    table = table_of(samples.records([1, 3, 5, 7, 3, 9, 2, 4]), rows_of_file=100, seed=1)
    assert sorted(read(table, from_offsets={0: 1, 1: 3})) == [4, 7, 9], (
        "offset 4 of partition 1 is a copy of sample 3"
    )


def test_copies_of_samples_of_an_earlier_session_are_skipped() -> None:
    table = table_of(samples.records([1, 3, 5, 1, 7]), rows_of_file=3)
    assert read(table, from_offsets={1: 3}) == [7]
    assert {path for path, _, _ in table.reads} == {table.files[1].path}


def test_reading_resumed_in_a_row_group_gives_the_same_remaining_rows() -> None:
    table = table_of(samples.records([1, 3, 5, 1, 7, 9]), rows_of_file=6)
    session = table.session()
    (split,) = session.order.splits
    for position in range(6):
        piece = LocalSessionRows(session, table).piece(split, position)
        assert piece.at_R.tolist() == [p for p in (0, 1, 2, 4, 5) if position <= p < piece.end], piece.end


def test_the_newest_ids_are_those_within_the_horizon_of_the_newest_closes() -> None:
    numbers = list(range(1, 80, 2))
    table = table_of(samples.records(numbers), rows_of_file=7, seed=2)
    ids, times = recent_sample_ids(table.session(), table, 1, 20_000)
    middle = sorted(samples.T0 + n * 1000 + 500 for n in numbers)[-15:][7]
    assert ids.tolist() == [n for n in numbers if samples.T0 + n * 1000 + 500 >= middle - 20_000]
    assert (np.diff(times) >= 0).all()
    assert recent_sample_ids(table.session(), table, 3, 20_000)[0].tolist() == []


def test_a_single_time_far_ahead_does_not_empty_the_newest_ids() -> None:
    table = table_of(samples.records(list(range(1, 80, 2))), rows_of_file=100)
    batch = next(iter(table.batches.values()))
    batch.close_ms_R[3] += 10**11
    ids, _ = recent_sample_ids(table.session(), table, 1, 20_000)
    assert len(ids) > 15

"""Rows keep their numbers, whatever order they come in."""

from __future__ import annotations

import numpy as np

from trainer.selection.row_index import RowIndex


def test_numbers_equal_those_of_a_dictionary() -> None:
    rows, known = RowIndex(), dict[tuple[int, int], int]()
    random = np.random.default_rng(3)
    for step in range(60):
        ids = np.unique(random.integers(-40, 40, 12))
        table = random.integers(0, 3, len(ids)).astype(np.uint32)
        pairs = list(zip(table.tolist(), ids.tolist(), strict=True))
        assert rows.find(table, ids).tolist() == [known.get(pair, -1) for pair in pairs]
        assert rows.number(table, ids).tolist() == [known.setdefault(pair, len(known)) for pair in pairs]
        if step % 20 == 19:
            gone = np.unique(random.integers(0, len(rows), 20))
            at = list(known)
            for number in gone.tolist():
                del known[at[number]]
            moved = dict(zip(*(x.tolist() for x in rows.drop(gone)), strict=True))
            known = {pair: moved.get(number, number) for pair, number in known.items()}
            known = dict(sorted(known.items(), key=lambda item: item[1]))
    assert len(rows) == len(known) > 100
    again = RowIndex(rows.table_N, rows.id_N)
    assert again.find(rows.table_N, rows.id_N).tolist() == list(range(len(rows))) == list(known.values())


def test_rows_beyond_the_limit_get_no_number() -> None:
    rows, table = RowIndex(), np.ones(5, np.uint32)
    assert rows.number(table, np.arange(5), max_rows=3).tolist() == [0, 1, 2, -1, -1]
    assert rows.number(table, np.arange(4, -1, -1), max_rows=3).tolist() == [-1, -1, 2, 1, 0]
    assert rows.number(table, np.arange(5), max_rows=2).tolist() == [0, 1, 2, -1, -1], (
        "nobody loses a number by it"
    )
    assert rows.number(table, np.array([7, 7, 8, 0, 7])).tolist() == [3, 3, 4, 0, 3]

"""Rows keep their numbers, whatever order they come in."""

from __future__ import annotations

import numpy as np

from trainer.selection.row_numbers import RowNumbers


def test_rows_are_found_as_a_dictionary_would() -> None:
    rows, known = RowNumbers(), dict[tuple[int, int], int]()
    random = np.random.default_rng(3)
    for _ in range(50):
        ids = np.unique(random.integers(-40, 40, 12))
        table = random.integers(0, 3, len(ids)).astype(np.uint32)
        pairs = list(zip(table.tolist(), ids.tolist(), strict=True))
        found = rows.find(table, ids)
        assert found.tolist() == [known.get(pair, -1) for pair in pairs]
        new = found < 0
        added = rows.add(table[new], ids[new])
        known |= dict(zip([pair for pair, is_new in zip(pairs, new, strict=True) if is_new], added.tolist(), strict=True))
    assert len(rows) == len(known) > 100
    again = RowNumbers(rows.table_N, rows.id_N)
    assert again.find(rows.table_N, rows.id_N).tolist() == list(range(len(rows)))

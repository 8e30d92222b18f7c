"""The row change detector finds exactly the items whose rows changed since the last check. The refresh queue
gives the longest waiting items first."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from roostream.wire.lookup import Lookup
from serving.retrieval import item_vectors as changed_rows
from serving.retrieval.catalogue import Catalogue, read_catalogue
from serving.retrieval.item_vectors import RefreshQueue, RowChangeDetector
from tests.serving.serving_cases import SCHEMA

ITEMS = [{"item_id": i, "topics": [100 + i % 3, 200]} if i != 4 else {"item_id": 4} for i in range(8)]


@dataclasses.dataclass
class Rows:
    """Fake rows: 1 everywhere, except for the ids in `values`."""

    values: dict[int, float] = dataclasses.field(default_factory=dict)

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {
            name: np.array([[self.values.get(i, 1.0)] * 4 for i in s.id_U.tolist()], np.float32).reshape(
                -1, 4
            )
            for name, s in lookup.stacks.items()
        }


def catalogue() -> Catalogue:
    return read_catalogue(SCHEMA, [json.dumps(item).encode() for item in ITEMS])


def find_changed(detector: RowChangeDetector, rows: Rows) -> list[int]:
    return sorted(
        {slot for chunk in detector.chunks() for slot in detector.changed_items(rows, chunk).tolist()}
    )


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_items_with_changed_rows_are_reported_once(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(changed_rows, "CHUNK", chunk)
    detector, rows = RowChangeDetector(catalogue().items), Rows()
    assert find_changed(detector, rows) == []  # the first check only records the rows
    rows.values[5] = 2.0  # the row of one item
    assert find_changed(detector, rows) == [5]
    assert find_changed(detector, rows) == []
    rows.values |= {101: 0.5, 3: 0.5}  # a row that several items share, and the row of another item
    assert find_changed(detector, rows) == [1, 3, 7]
    rows.values[200] = 9.0
    assert find_changed(detector, rows) == [0, 1, 2, 3, 5, 6, 7]
    rows.values[999] = 9.0  # a row of no item
    assert find_changed(detector, rows) == []


def test_the_longest_waiting_items_are_taken_first() -> None:
    due = RefreshQueue(10)
    due.mark(np.array([7, 8]), 2.0)
    due.mark(np.array([1, 3]), 1.0)
    assert (len(due), due.oldest_s) == (4, 1.0)
    assert due.take(3).tolist() == [1, 3, 7]
    assert (len(due), due.oldest_s) == (1, 2.0)
    assert due.take(5).tolist() == [8] and due.oldest_s is None and len(due.take(5)) == 0


def test_an_item_marked_again_keeps_its_first_time() -> None:
    due = RefreshQueue(4)
    due.mark(np.array([2]), 1.0)
    due.mark(np.array([2, 0]), 5.0)
    assert due.take(1).tolist() == [2]
    due.mark(np.array([2]), 6.0)
    assert due.take(9).tolist() == [0, 2]

"""Who waits longest has the next new vector."""

from __future__ import annotations

import numpy as np

from serving.retrieval.item_vectors import RefreshQueue


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

"""A sample id is trained once within the horizon of close time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.dedupe import Dedupe


def take(dedupe: Dedupe, *pairs: tuple[int, int]) -> list[bool]:
    ids, times = zip(*pairs, strict=True)
    return dedupe.take_new(np.array(ids, dtype=np.int64), np.array(times, dtype=np.int64)).tolist()


def test_an_id_is_new_once_within_and_across_batches() -> None:
    dedupe = Dedupe(1000)
    assert take(dedupe, (5, 10), (6, 10), (5, 10)) == [True, True, False]
    assert take(dedupe, (6, 20), (-7, 20)) == [False, True]
    assert dedupe.num_skipped == 2


def test_ids_behind_the_horizon_are_forgotten() -> None:
    dedupe = Dedupe(100)
    take(dedupe, (1, 0), (2, 50))
    take(dedupe, (3, 120))
    assert len(dedupe) == 2
    assert take(dedupe, (2, 50), (1, 0)) == [False, True]


def test_an_empty_batch_changes_nothing() -> None:
    dedupe = Dedupe(100)
    assert dedupe.take_new(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    assert len(dedupe) == 0


@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 300)), min_size=1, max_size=8), max_size=12),
    st.integers(0, 11),
)
def test_the_state_is_the_arrays(batches: list[list[tuple[int, int]]], cut: int) -> None:
    whole = Dedupe(100)
    first = Dedupe(100)
    for batch in batches[:cut]:
        take(whole, *batch)
        take(first, *batch)
    second = Dedupe(100)
    second.load(*first.arrays())
    for batch in batches[cut:]:
        assert take(second, *batch) == take(whole, *batch)
    assert [a.tolist() for a in second.arrays()] == [a.tolist() for a in whole.arrays()]

"""A sample id is trained once within the horizon of close time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.dedupe import Dedupe


def take(dedupe: Dedupe, *pairs: tuple[int, int]) -> list[bool]:
    ids, times = zip(*pairs, strict=True)
    id_R, close_ms_R = np.array(ids, dtype=np.int64), np.array(times, dtype=np.int64)
    new_R = dedupe.claim(id_R)
    dedupe.settle(id_R, close_ms_R, new_R)
    return new_R.tolist()


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
    none_R = np.zeros(0, np.int64)
    new_R = dedupe.claim(none_R)
    dedupe.settle(none_R, none_R, new_R)
    assert new_R.tolist() == [] and len(dedupe) == 0


def test_a_claimed_id_is_seen_and_in_no_cut_until_it_is_settled() -> None:
    dedupe, id_R, close_ms_R = Dedupe(1000), np.array([5, 6]), np.array([10, 20])
    new_R = dedupe.claim(id_R)
    assert new_R.all() and not dedupe.claim(id_R).any() and len(dedupe) == 0
    dedupe.settle(id_R, close_ms_R, new_R)
    assert [a.tolist() for a in dedupe.arrays()] == [[5, 6], [10, 20]]


def test_claims_end_with_a_load() -> None:
    dedupe, id_R = Dedupe(1000), np.array([5])
    dedupe.claim(id_R)
    dedupe.load(*Dedupe(1000).arrays())
    assert dedupe.claim(id_R).all()


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

"""A sample id is trained once within the horizon of close time."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.runtime.event_time import NUM_RECENT
from trainer.dedupe import Dedupe


def take(dedupe: Dedupe, *pairs: tuple[int, int]) -> list[bool]:
    ids, times = zip(*pairs, strict=True)
    id_R, close_ms_R = np.array(ids, dtype=np.int64), np.array(times, dtype=np.int64)
    new_R = dedupe.claim(id_R, close_ms_R)
    dedupe.settle(new_R)
    return new_R.tolist()


def test_an_id_is_new_once_within_and_across_batches() -> None:
    dedupe = Dedupe(1000)
    assert take(dedupe, (5, 10), (6, 10), (5, 10)) == [True, True, False]
    assert take(dedupe, (6, 20), (-7, 20)) == [False, True]
    assert dedupe.num_skipped == 2


def lists(dedupe: Dedupe) -> dict[str, list[int]]:
    return {name: array.tolist() for name, array in dedupe.state().items()}


def at(time_ms: int, first_id: int = 1000) -> list[tuple[int, int]]:
    """As many samples of one time as make it the time it is by now."""
    return [(first_id + n, time_ms) for n in range(NUM_RECENT // 2 + 1)]


def test_ids_older_than_the_horizon_are_forgotten() -> None:
    dedupe = Dedupe(100)
    take(dedupe, (1, 19), (2, 20), (3, 21))
    take(dedupe, *at(120))
    assert take(dedupe, (2, 20), (3, 21), (1, 19)) == [False, False, True]


@pytest.mark.parametrize("wrong", [1, NUM_RECENT // 2])
@pytest.mark.parametrize("time_ms", [1 << 50, 0])
def test_a_few_wrong_times_do_not_move_the_clock(wrong: int, time_ms: int) -> None:
    dedupe = Dedupe(100)
    take(dedupe, *at(500), *at(510, 2000))
    take(dedupe, *[(n, time_ms) for n in range(wrong)])
    assert take(dedupe, *at(500)) == [False] * (NUM_RECENT // 2 + 1)
    take(dedupe, *at(700, 3000))
    assert take(dedupe, *at(500)) == [True] * (NUM_RECENT // 2 + 1), "and the horizon goes on"


def test_an_old_state_without_recent_times_can_be_loaded() -> None:
    whole, read = Dedupe(100), Dedupe(100)
    take(whole, *at(500))
    read.load({name: a for name, a in whole.state().items() if name != "recent_ms"})
    for dedupe in (whole, read):
        assert take(dedupe, *at(500), *at(700, 2000)) == [False] * 8 + [True] * 8 and len(dedupe) == 8


def test_a_claimed_id_is_a_duplicate_but_not_in_the_state_until_settled() -> None:
    dedupe, id_R, close_ms_R = Dedupe(1000), np.array([5, 6]), np.array([10, 20])
    new_R = dedupe.claim(id_R, close_ms_R)
    assert new_R.all() and not dedupe.claim(id_R, close_ms_R).any() and len(dedupe) == 0
    dedupe.settle(new_R)
    assert lists(dedupe) == {"id": [5, 6], "close_ms": [10, 20], "recent_ms": [10, 20]}


@given(
    st.lists(
        st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 300)), min_size=1, max_size=8), max_size=12
    ),
    st.integers(0, 11),
)
def test_the_state_round_trips(batches: list[list[tuple[int, int]]], cut: int) -> None:
    whole = Dedupe(100)
    first = Dedupe(100)
    for batch in batches[:cut]:
        take(whole, *batch)
        take(first, *batch)
    second = Dedupe(100)
    second.load(first.state())
    for batch in batches[cut:]:
        assert take(second, *batch) == take(whole, *batch)
    assert lists(second) == lists(whole)


@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 300)), max_size=8), max_size=12),
    st.integers(0, 3),
)
def test_claiming_ahead_gives_the_same_results_as_claiming_one_by_one(
    batches: list[list[tuple[int, int]]], most: int
) -> None:
    """At each cut, up to `most` chunks are claimed beyond it."""
    serial, ahead, claimed = Dedupe(100), Dedupe(100), deque[np.ndarray]()
    chunks = [np.array(batch, dtype=np.int64).reshape(-1, 2) for batch in batches]
    for n, chunk in enumerate(chunks):
        while len(claimed) <= most and n + len(claimed) < len(chunks):
            claimed.append(ahead.claim(*chunks[n + len(claimed)].T))
        new_R = serial.claim(*chunk.T)
        serial.settle(new_R)
        assert claimed[0].tolist() == new_R.tolist()
        ahead.settle(claimed.popleft())
        assert lists(ahead) == lists(serial) and ahead.num_skipped == serial.num_skipped

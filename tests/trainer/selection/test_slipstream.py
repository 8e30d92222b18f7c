"""The rules of the Slipstream paper: which rows are hot, which inputs are stale, and the search for the
threshold. Results are checked against plain implementations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import ConfigError
from roostream.wire.batch import Batch
from roostream.wire.lookup import sources_of
from tests.trainer.selection.random_batches import TWO_STACKS, random_batch
from trainer.selection.config import MIN_SAMPLE, SlipstreamConfig
from trainer.selection.row_index import RowIndex
from trainer.selection.slipstream import (
    AccessCounts,
    ReadSlots,
    half_width,
    hot_requests,
    is_hot,
    is_stale,
    judge,
    read_slots,
    sampled_threshold,
    take_requests,
    threshold,
)
from trainer.selection.slipstream_policy import HotInputs, HotRows

INF = float("inf")


def single_row_slots(s_RS: list[list[float]]) -> tuple[ReadSlots, np.ndarray, np.ndarray]:
    """Build slots that read one row each, from the largest movement of each row. ∞ stands for a row that is
    not hot."""
    request_S = np.repeat(np.arange(len(s_RS)), [len(row) for row in s_RS])
    s_N = np.array([s for row in s_RS for s in row], np.float32)
    return ReadSlots(request_S, np.arange(len(s_N)), np.arange(len(s_N))), s_N, np.isfinite(s_N)


def test_the_largest_movement_between_snapshots_counts() -> None:
    """The row moves by .1, .9 and .1 between snapshots, although it moves by .7 from the first to the
    last."""
    row = HotRows(np.zeros(1, np.uint32), np.ones(1, np.int64))
    value_ND = np.zeros((1, 1), np.float32)
    for value in (0.0, 0.1, -0.8, -0.7):
        value_ND[0, 0] = value  # changed in place, so a snapshot has to be a copy
        row.take_snapshot(value_ND)
    assert row.s_N.tolist() == pytest.approx([0.9])
    slots, _, hot_N = single_row_slots([[0.9]])
    (q,) = judge(slots, row.s_N, hot_N, 1, alpha=1).q_R.tolist()
    assert not q <= 0.5 and q <= 0.91, "the row is not stale at a threshold of .5"


def test_a_row_is_hot_from_a_share_of_all_accesses_on() -> None:
    count_N = np.array([1, 2, 13])
    assert is_hot(count_N, 1_300_000, 1e-6).tolist() == [False, True, True]
    assert is_hot(count_N, 1_300_000, 1e-5).tolist() == [False, False, True]


def test_access_counts_equal_those_of_a_dictionary() -> None:
    counts, random = AccessCounts(), np.random.default_rng(1)
    expected: dict[tuple[int, int], int] = {}
    for _ in range(30):
        ids = np.unique(random.integers(-5, 5, 6))
        table = np.full(len(ids), random.integers(0, 2), np.uint32)
        n = random.integers(1, 4, len(ids))
        counts.add(table, ids, n)
        for t, i, c in zip(table.tolist(), ids.tolist(), n.tolist(), strict=True):
            expected[t, i] = expected.get((t, i), 0) + c
    found = zip(counts.rows.table_N.tolist(), counts.rows.id_N.tolist(), counts.count_N.tolist(), strict=True)
    assert {(t, i): c for t, i, c in found} == expected and counts.total == sum(expected.values())


def test_a_share_alpha_of_the_slots_must_be_stale() -> None:
    stale, varying = 0.1, 0.9
    slots, s_N, hot_N = single_row_slots([[varying] * (26 - k) + [stale] * k for k in (0, 3, 4, 26)])
    assert (judge(slots, s_N, hot_N, 4, alpha=4 / 26).q_R <= 0.5).tolist() == [False, False, True, True]
    assert (judge(slots, s_N, hot_N, 4, alpha=0).q_R <= 0.5).all(), "with alpha = 0 all hot inputs are stale"


def test_a_cold_input_is_never_skipped_and_the_worst_row_of_a_list_counts() -> None:
    slots = ReadSlots(np.array([0, 0]), np.array([0, 0, 1]), np.array([0, 1, 2]))
    s_N = np.array([0.1, 0.7, 0.2], np.float32)
    judged = judge(slots, s_N, np.ones(3, np.bool_), 1, alpha=1)
    assert judged.hot_R.all() and judged.q_R[0] == np.float32(0.7)
    judged = judge(slots, s_N, np.array([True, False, True]), 2, alpha=0)
    assert not judged.hot_R.any() and (judged.q_R == INF).all(), (
        "the first request reads a row that is not hot, the second has no slot"
    )
    judged = judge(slots, s_N, np.array([True, False, True]), 1, alpha=0.5, hot_share=0.5)
    assert judged.hot_R.all() and judged.q_R[0] == np.float32(0.2), (
        "with hot_share = .5, half of the slots have to be hot"
    )


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0, INF]), max_size=25), st.floats(0, 1))
def test_the_threshold_equals_a_search_through_all_values(values: list[float], drop: float) -> None:
    q_I = np.array(values, np.float32)
    fits = [
        t
        for t in sorted(set(values))
        if math.isfinite(t) and (q_I <= t).sum() <= math.floor(drop * len(q_I) + 1e-9)
    ]
    assert threshold(q_I, drop) == (fits[-1] if fits else -INF)


@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.sampled_from([0.0, 0.4, 1.0]),
    st.sampled_from([-INF, 0.0, 0.5, INF]),
)
def test_stale_requests_equal_those_of_the_sorting_judge(
    seed: int, alpha: float, hot_share: float, t: float
) -> None:
    random = np.random.default_rng(seed)
    num_S = random.integers(0, 30)
    slot_L = np.repeat(np.arange(num_S), random.integers(1, 4, num_S))
    slots = ReadSlots(random.integers(0, 8, num_S), slot_L, random.integers(0, 12, len(slot_L)))
    s_N, hot_N = random.choice([0.0, 0.3, 0.5, INF], 12).astype(np.float32), random.random(12) < 0.7
    judged = judge(slots, s_N, hot_N, 8, alpha=alpha, hot_share=hot_share)
    stale_R = is_stale(slots, s_N, hot_N, 8, t, alpha=alpha, hot_share=hot_share)
    assert stale_R.tolist() == (judged.hot_R & (judged.q_R <= t)).tolist()
    by_hand_R = [
        any(x == r for x in slots.request_S)
        and sum(bool(hot_N[slots.row_L[slot_L == s]].all()) for s in np.flatnonzero(slots.request_S == r))
        >= math.ceil(hot_share * (slots.request_S == r).sum() - 1e-9)
        for r in range(8)
    ]
    assert judged.hot_R.tolist() == hot_requests(slots, hot_N, 8, hot_share).tolist() == by_hand_R


def test_the_interval_has_its_nominal_coverage() -> None:
    """201 of 18,464 hot inputs are sampled without replacement; 30 % of the inputs are below T."""
    population, below = 18_464, 5_539
    drawn = np.random.default_rng(0).hypergeometric(below, population - below, MIN_SAMPLE, 200_000)
    share_M, count_M = np.unique(drawn / MIN_SAMPLE, return_counts=True)
    off_M = np.abs(share_M - below / population)
    half_M = np.array([half_width(share, MIN_SAMPLE, population) for share in share_M.tolist()])
    assert 0.998 <= np.average(off_M <= half_M, weights=count_M) < 1
    assert 0.88 < np.average(off_M <= half_M / 2, weights=count_M) < 0.91, (
        "an interval of half the width would cover 90 %"
    )


def test_the_sampled_search_finds_the_requested_share_of_its_sample() -> None:
    q_I = np.arange(1, 1001, dtype=np.float32)
    t, half = sampled_threshold(q_I, 0.3, 1000, np.random.default_rng(0))
    assert 300 <= t < 301 and t == pytest.approx(301, abs=1e-4) and half == 0, (
        "if all inputs are sampled, the share is the largest of .3 or less"
    )
    t, half = sampled_threshold(q_I, 0.3, MIN_SAMPLE, np.random.default_rng(3))
    taken_M = np.random.default_rng(3).choice(q_I, MIN_SAMPLE, replace=False)
    assert (taken_M <= t).sum() == 60 and 60 / 201 <= 0.3 < 61 / 201
    assert half == pytest.approx(3.340 * math.sqrt(799 / 1000 * (60 / 201) * (141 / 201) / 201))
    assert half == pytest.approx(0.0963631, abs=1e-7)
    ties = np.repeat(np.array([0, 1], np.float32), [61, 39])
    assert (
        threshold(ties, 0.3) == -INF and sampled_threshold(ties, 0.3, 100, np.random.default_rng(0))[0] < 1e-9
    )
    assert (ties <= 1e-9).mean() == 0.61, "with ties, the paper's search skips more than the requested .3"


def test_a_sample_too_small_for_its_interval_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected 0, or 201 or more, got 200"):
        SlipstreamConfig(sample=200)
    assert SlipstreamConfig(sample=201).sample == 201


def expected_reads(batch: Batch, number: Mapping[tuple[int, int], int]) -> list[tuple[int, tuple[int, ...]]]:
    """Compute the request and the rows of each slot. A row without a number is -1."""
    out = []
    for stack in TWO_STACKS.stacks:
        for key, table, side, is_column in sorted(
            sources_of(TWO_STACKS)[stack], key=lambda s: (s.side == "nro", s.is_column)
        ):
            lists = batch.ro_lists if side == "ro" else batch.nro_lists
            ids = lists.columns[key] if is_column else lists.values_of(key)
            offset_N = lists.offsets_of(key.partition(".")[0])
            for n in range(lists.num_rows):
                rows = tuple(
                    number.get((table.id, i), -1) for i in ids[offset_N[n] : offset_N[n + 1]].tolist()
                )
                request = n if side == "ro" else int(batch.request_index_B[n])
                out += [(request, rows)] if rows else []
    return out


@pytest.mark.parametrize("seed", range(4))
def test_slots_equal_what_each_feature_reads(seed: int) -> None:
    batch, random = random_batch(seed), np.random.default_rng(seed)
    hot, number = dict[str, RowIndex](), dict[tuple[int, int], int]()
    for stack, tables in TWO_STACKS.stacks.items():
        keys = [(t.id, i) for t in tables for i in range(1, 9) if random.random() < 0.6]
        random.shuffle(keys)
        number |= {key: len(number) + n for n, key in enumerate(keys)}
        hot[stack] = RowIndex(
            np.array([t for t, _ in keys], np.uint32), np.array([i for _, i in keys], np.int64)
        )
    slots = read_slots(batch, hot)
    expected = expected_reads(batch, number)
    assert slots.request_S.tolist() == [request for request, _ in expected]
    assert slots.slot_L.tolist() == [s for s, (_, rows) in enumerate(expected) for _ in rows]
    cold = len(number)
    assert slots.row_L.tolist() == [cold if n < 0 else n for _, rows in expected for n in rows]
    assert {len(rows) for _, rows in expected} >= {1, 2, 3} and cold in slots.row_L and 0 in slots.row_L
    kept_R = random.random(batch.num_requests) < 0.5
    num_I, num_S, row_L = (x.tolist() for x in take_requests(*slots, kept_R))
    of_kept = [[rows for request, rows in expected if request == r] for r in np.flatnonzero(kept_R)]
    assert num_I == [len(slots) for slots in of_kept] and num_S == [
        len(rows) for slots in of_kept for rows in slots
    ]
    assert row_L == [cold if n < 0 else n for slots in of_kept for rows in slots for n in rows]


def test_restored_hot_inputs_continue_as_before() -> None:
    batch = random_batch(5)
    slots = read_slots(batch, {stack: RowIndex() for stack in TWO_STACKS.stacks})
    inputs, halves = HotInputs(), np.arange(12) < 6
    inputs.add(slots, halves)
    restored = HotInputs({name: value.copy() for name, value in inputs.arrays().items()})
    for each in (inputs, restored):
        each.add(slots, ~halves)
        assert (
            each.num_inputs == 12 == len(each.slots.request_S[np.r_[True, np.diff(each.slots.request_S) > 0]])
        )
        assert each.num_entries == len(slots.row_L) == len(each.slots.row_L)
    assert [x.tolist() for x in inputs.slots] == [x.tolist() for x in restored.slots]
    assert np.bincount(inputs.slots.request_S).tolist() == np.bincount(slots.request_S).tolist()


# RowIndex numbers rows by their first occurrence; a row keeps its number


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
            dropped = np.unique(random.integers(0, len(rows), 20))
            at = list(known)
            for number in dropped.tolist():
                del known[at[number]]
            moved = dict(zip(*(x.tolist() for x in rows.drop(dropped)), strict=True))
            known = {pair: moved.get(number, number) for pair, number in known.items()}
            known = dict(sorted(known.items(), key=lambda item: item[1]))
    assert len(rows) == len(known) > 100
    restored = RowIndex(rows.table_N, rows.id_N)
    assert restored.find(rows.table_N, rows.id_N).tolist() == list(range(len(rows))) == list(known.values())


def test_rows_beyond_the_limit_get_no_number() -> None:
    rows, table = RowIndex(), np.ones(5, np.uint32)
    assert rows.number(table, np.arange(5), max_rows=3).tolist() == [0, 1, 2, -1, -1]
    assert rows.number(table, np.arange(4, -1, -1), max_rows=3).tolist() == [-1, -1, 2, 1, 0]
    assert rows.number(table, np.arange(5), max_rows=2).tolist() == [0, 1, 2, -1, -1], (
        "a lower limit removes no number"
    )
    assert rows.number(table, np.array([7, 7, 8, 0, 7])).tolist() == [3, 3, 4, 0, 3]

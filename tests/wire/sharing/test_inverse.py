"""Deduplication of lists: the examples of the RecD paper, and round trips of random rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.wire import dedup as dedup
from roostream.wire.dedup import (
    dedupe_factor,
    dedupe_len,
    find_inverse,
    find_partial_dedup,
    group_impressions,
    list_values,
    order_by_user,
    request_values,
)
from roostream.wire.jagged import Jagged
from tests.models.model_cases import make_batch, make_schema

Rows = list[list[int]]


def lists_of(**features: Rows) -> Jagged:
    """Build lists from features by name. Each feature has one list per row."""
    lengths = [[len(row) for row in rows] for rows in features.values()]
    flat = [value for rows in features.values() for row in rows for value in row]
    lengths_KN = np.array(lengths, dtype=np.int32).reshape(len(features), -1)
    return Jagged(
        keys=tuple(features),
        lengths_KN=lengths_KN,
        values=np.array(flat, dtype=np.int64),
        present_KN=np.ones_like(lengths_KN) > 0,
    )


def rows_of(lists: Jagged, key: str) -> Rows:
    offset_N1, values = lists.offsets_of(key), lists.values_of(key)
    return [values[offset_N1[n] : offset_N1[n + 1]].tolist() for n in range(lists.num_rows)]


def test_a_repeated_list_is_stored_once_as_in_figure_5_of_the_paper() -> None:
    lists = lists_of(b=[[3, 4, 5], [4, 5, 6], [3, 4, 5]])
    result = find_inverse(list_values(lists, "b"), 3)
    assert result.row_N.tolist() == [0, 1, 0] and rows_of(result.unique(lists), "b") == [[3, 4, 5], [4, 5, 6]]


def test_features_of_a_group_share_an_inverse() -> None:
    """The paper's example (§5): the sums of c and d by row are [24, 24, 21]; two of them are computed."""
    lists = lists_of(c=[[7, 8], [7, 8], [10]], d=[[9], [9], [11]])
    result = find_inverse([*list_values(lists, "c"), *list_values(lists, "d")], 3)
    kept = result.unique(lists)
    sum_U = [sum(c) + sum(d) for c, d in zip(rows_of(kept, "c"), rows_of(kept, "d"), strict=True)]
    assert sum_U == [24, 21] and np.array(sum_U)[result.row_N].tolist() == [24, 24, 21]
    assert rows_of(result.expand(kept), "c") == [[7, 8], [7, 8], [10]]


def test_a_shifted_list_shares_entries_as_in_the_papers_partial_form() -> None:
    lists = lists_of(b=[[3, 4, 5], [4, 5, 6], [3, 4, 5]])
    result = find_partial_dedup(lists, "b", newest_first=False)
    assert lists.values_of("b")[result.entry_V].tolist() == [3, 4, 5, 6]
    assert result.span_N2.tolist() == [[0, 3], [1, 3], [0, 3]]


def test_an_entry_is_shared_only_with_all_of_its_columns() -> None:
    lists = dataclasses.replace(lists_of(h=[[2, 1], [3, 2]]), columns={"h.time": np.array([20, 10, 30, 21])})
    assert len(find_partial_dedup(lists, "h").entry_V) == 4
    equal = dataclasses.replace(lists, columns={"h.time": np.array([20, 10, 30, 20])})
    assert len(find_partial_dedup(equal, "h").entry_V) == 3


def test_rows_that_are_far_apart_are_deduplicated() -> None:
    lists = lists_of(h=[[2, 1], [9, 8], [3, 2], [10, 9]])
    assert len(find_partial_dedup(lists, "h").entry_V) == 8
    result = find_partial_dedup(lists, "h", order_M=np.array([0, 2, 1, 3]))
    assert len(result.entry_V) == 6
    assert lists.values_of("h")[result.entry_V][result.at_L].tolist() == lists.values_of("h").tolist()


def test_a_missing_list_is_not_an_empty_one() -> None:
    lists = dataclasses.replace(lists_of(h=[[], []]), present_KN=np.array([[True, False]]))
    assert find_inverse(list_values(lists, "h"), 2).num_unique == 2


def test_two_rows_that_share_a_hash_stay_apart() -> None:
    """Rows are compared, not only their hashes. In this test all hashes are equal."""
    offset_N1, bits_L = np.array([0, 1, 2, 3]), np.array([5, 6, 5])
    is_equal_N = np.ones(3, dtype=np.bool_)
    dedup.compare_rows(offset_N1, bits_L, np.zeros(3, dtype=np.int64), is_equal_N)
    assert is_equal_N.tolist() == [True, False, True]


row_lists = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=12)


@given(row_lists, row_lists, st.randoms())
def test_any_rows_round_trip(one: Rows, other: Rows, random: object) -> None:
    num_rows = min(len(one), len(other))
    lists = lists_of(a=one[:num_rows], b=other[:num_rows])
    result = find_inverse([*list_values(lists, "a"), *list_values(lists, "b")], num_rows)
    expanded = result.expand(result.unique(lists))
    assert expanded.values.tolist() == lists.values.tolist()
    assert expanded.lengths_KN.tolist() == lists.lengths_KN.tolist()
    distinct = {(tuple(a), tuple(b)) for a, b in zip(one[:num_rows], other[:num_rows], strict=True)}
    assert result.num_unique == len(distinct)


@given(row_lists, st.booleans(), st.data())
def test_spans_of_any_rows_contain_their_values(rows: Rows, newest_first: bool, data: st.DataObject) -> None:
    lists = lists_of(a=rows)
    order = np.array(data.draw(st.permutations(range(len(rows)))), dtype=np.int64)
    result = find_partial_dedup(lists, "a", newest_first=newest_first, order_M=order)
    value_V = lists.values_of("a")[result.entry_V]
    assert [value_V[at : at + n].tolist() for at, n in result.span_N2.tolist()] == rows
    assert value_V[result.at_L].tolist() == lists.values_of("a").tolist()
    exact = find_inverse(list_values(lists, "a"), len(rows))
    assert len(value_V) <= exact.unique(lists).total_of("a")


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 8))
def test_each_entry_of_a_growing_history_is_stored_once(entries: list[int], length: int) -> None:
    """Windows over the history move by one entry. This holds also if the history has equal entries."""
    windows = [entries[max(0, end - length) : end][::-1] for end in range(1, len(entries) + 1)]
    assert len(find_partial_dedup(lists_of(h=windows), "h").entry_V) <= len(entries)


@pytest.mark.parametrize(
    ("length", "rows", "session_rows", "same", "remain", "factor"),
    [
        (3, 3, 3, 0.5, 6, 1.5),  # the example of the paper
        (3, 3, 1, 0.5, 9, 1.0),  # a session of one row shares nothing
        (10, 4096, 16.5, 1.0, 40960 / 16.5, 16.5),  # lists never change, so each session has one
        (0, 8, 4, 0.9, 0, 1.0),
    ],
)
def test_the_papers_formulas(
    length: float, rows: float, session_rows: float, same: float, remain: float, factor: float
) -> None:
    assert dedupe_len(length, rows, session_rows, same) == pytest.approx(remain)
    assert dedupe_factor(length, rows, session_rows, same) == pytest.approx(factor)


def test_a_batch_names_the_features_of_a_group_and_is_ordered_by_its_users() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [1, 2, 1], seed=3).take_requests(np.array([0, 1, 0, 2, 1]))
    assert find_inverse(request_values(batch), 5).row_N.tolist() == [0, 1, 0, 2, 1]
    assert find_inverse(request_values(batch, {"no such"}), 5).num_unique == 1
    user_of_row = find_inverse(list_values(batch.ro_lists, "user"), 5).row_N[order_by_user(batch)]
    assert (np.diff(user_of_row) >= 0).all()
    assert order_by_user(make_batch(make_schema("floats only"), [1, 1])).tolist() == [0, 1]


def test_impressions_in_any_order_are_grouped_into_their_requests() -> None:
    batch = make_batch(make_schema("everything"), [3, 1, 2], seed=1)
    mixed = batch.expand().take_requests(np.array([3, 0, 5, 1, 4, 2]))
    grouped = group_impressions(mixed)
    assert grouped.num_candidates_R.tolist() == [1, 3, 2] and (np.diff(grouped.request_index_B) >= 0).all()
    assert grouped.item_B.tolist() == batch.item_B[[3, 0, 1, 2, 5, 4]].tolist()
    assert grouped.time_ms_R.tolist() == batch.time_ms_R[[1, 0, 2]].tolist()

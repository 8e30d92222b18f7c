"""The plan of a session: which splits it has, and in which order its rows are read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import ConfigError
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.sessions.session import MAX_CANDIDATES, SessionSpec, days_of, plan
from tests.warehouse.memory_table import data_file

SPEC = SessionSpec(table="t", version=3)


def file(
    path: str, day: int = 1, partition: int = 0, rows: int = 10, candidates: int = 50, first: int = 0
) -> DataFile:
    return data_file(path, date(2024, 5, day), partition, rows, candidates, first)


def test_days_come_in_order_and_the_files_of_a_day_are_shuffled_by_the_seed() -> None:
    files = [file(f"f{i}", day=1 + i % 2, first=10 * i) for i in range(16)]
    for seed in (0, 1, None):
        order = plan(files, dataclasses.replace(SPEC, shuffle_seed=seed), 4)
        assert [s.day for s in order.splits] == ["2024-05-01"] * 8 + ["2024-05-02"] * 8
        assert order.splits == plan(files[::-1], dataclasses.replace(SPEC, shuffle_seed=seed), 4).splits
    by_offset = [s.path for s in plan(files, dataclasses.replace(SPEC, shuffle_seed=None), 4).splits]
    assert by_offset == [f"f{i}" for i in (*range(0, 16, 2), *range(1, 16, 2))]
    shuffled = [
        [s.path for s in plan(files, dataclasses.replace(SPEC, shuffle_seed=seed), 4).splits]
        for seed in (0, 1)
    ]
    assert shuffled[0] != shuffled[1] != by_offset


def test_a_split_has_whole_row_groups_and_bounded_candidates() -> None:
    order = plan([file("f", rows=10, candidates=3 * MAX_CANDIDATES)], SPEC, 2)
    assert [(s.start, s.end) for s in order.splits] == [(0, 2), (2, 6), (6, 10)]
    (whole,) = plan([file("f", rows=10, candidates=MAX_CANDIDATES)], SPEC, 2).splits
    assert (whole.start, whole.end) == (0, 10)
    assert len(plan([file("f", rows=3, candidates=9 * MAX_CANDIDATES)], SPEC, 2).splits) == 2, (
        "a row group must not be divided"
    )


def test_other_days_and_files_of_earlier_sessions_are_skipped() -> None:
    files = [file("a", 1), file("b", 2, first=10), file("c", 3, first=20), file("d", 3, 1, rows=0)]
    one_day = dataclasses.replace(SPEC, first_day="2024-05-02", last_day="2024-05-02")
    assert [s.path for s in plan(files, one_day, 4).splits] == ["b"]
    newer = dataclasses.replace(SPEC, from_offsets={0: 19})
    assert [s.path for s in plan(files, newer, 4).splits] == ["b", "c"], (
        "file b ends at offset 19, so it has an unread row"
    )


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 12)), max_size=8),
    st.integers(1, 5),
)
def test_every_row_has_one_position_of_its_partition(
    files: list[tuple[int, int, int]], row_group: int
) -> None:
    data_files = [
        file(f"f{i}", day, p, rows, candidates=rows * 20_000) for i, (day, p, rows) in enumerate(files)
    ]
    order = plan(data_files, SPEC, row_group)
    seen: Counter[tuple[str, int]] = Counter()
    for partition, rows in order.rows.items():
        for position in range(rows):
            split = order.split_at(partition, position)
            assert split and split.partition == partition and split.at <= position < split.end_position
            seen[split.path, split.row(position)] += 1
        assert order.split_at(partition, rows) is None
    assert seen == Counter((f.path, row) for f in data_files for row in range(f.rows))
    assert [s.number for s in order.splits] == list(range(len(order.splits)))


def test_the_next_splits_follow_the_session_order_and_started_ones_come_first() -> None:
    files = [file("a", 1, 0), file("b", 1, 1, first=1), file("c", 2, 0, first=10), file("d", 2, 1, first=20)]
    order = plan(files, dataclasses.replace(SPEC, shuffle_seed=None), 10)
    assert [s.path for s in order.next_splits({0: 3, 1: 10}, 2)] == ["a", "c"]
    assert [s.path for s in order.next_splits({0: 0, 1: 0}, 9)] == ["a", "b", "c", "d"]
    assert order.next_splits({0: 20, 7: 0}, 9) == []


def test_equal_specs_have_equal_digests_and_plain_forms() -> None:
    spec = dataclasses.replace(
        SPEC, features=("a", "b"), from_offsets={3: 7, 1: 2}, shuffle_seed=None, labels="as_streamed"
    )
    assert SessionSpec.of(spec.plain()) == spec
    assert spec.digest == dataclasses.replace(spec, from_offsets={1: 2, 3: 7}).digest
    assert spec.digest != dataclasses.replace(spec, version=4).digest


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("2024-05-01..2024-05-07", ("2024-05-01", "2024-05-07")),
        ("2024-05-01", ("2024-05-01", "2024-05-01")),
        ("..2024-05-07", ("", "2024-05-07")),
    ],
)
def test_days_are_parsed_from_a_range_a_single_day_or_an_open_range(text: str, days: tuple[str, str]) -> None:
    assert days_of(text) == days


@pytest.mark.parametrize("text", ["..", "monday", "2024-05-01..x", "2024-13-01", "2024-02-30.."])
def test_invalid_days_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError):
        days_of(text)


@pytest.mark.parametrize(
    "changes",
    [{"first_day": "2024-05-02", "last_day": "2024-05-01"}, {"first_day": "May"}, {"labels": "newest"}],
)
def test_a_malformed_spec_is_rejected(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]

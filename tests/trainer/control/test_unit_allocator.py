"""A historical range is handed out in bounded units, and what is done is what a commit contains."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.runtime.work_unit import STREAM, Epoch, WorkUnit, partition_of, source_of
from trainer.control.phases import UnitAllocator

A, B = WorkUnit("samples/0", 100, 120), WorkUnit("samples/1", 0, 10)


def test_all_sources_have_the_same_number_of_epochs() -> None:
    it = UnitAllocator([A, B], unit_records=7)
    assert it.num_epochs == 3
    assert it.epoch([A.source, B.source]) == Epoch(
        1, (WorkUnit("samples/0", 100, 106), WorkUnit("samples/1", 0, 3))
    )


def test_a_unit_is_done_only_once_it_is_committed() -> None:
    it = UnitAllocator([A, B], unit_records=7)
    it.committed({"samples/0": 105, "samples/1": 3})
    assert it.epoch([A.source, B.source]) == Epoch(
        1, (WorkUnit("samples/0", 105, 106), WorkUnit("samples/1", 3, 3))
    )
    it.committed({"samples/0": 106, "samples/1": 3})
    assert it.epoch([A.source, B.source]) == Epoch(
        2, (WorkUnit("samples/0", 106, 113), WorkUnit("samples/1", 3, 6))
    )


def test_a_rollback_hands_out_later_units_again() -> None:
    it = UnitAllocator([A, B], unit_records=7)
    it.committed({"samples/0": 120, "samples/1": 10})
    assert it.is_over and it.num_left == 0
    it.committed({"samples/0": 113, "samples/1": 6})
    assert not it.is_over and it.number == 3 and it.num_left == 11


@pytest.mark.parametrize("whole", [[], [WorkUnit("samples/0", 5, 5)]], ids=["no source", "nothing in it"])
def test_a_range_without_records_is_over_from_the_start(whole: list[WorkUnit]) -> None:
    it = UnitAllocator(whole, 10)
    assert it.is_over and it.num_records == it.num_left == 0
    assert not any(map(len, it.epoch(["samples/0"]).units))


ranges = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(ranges, st.integers(1, 60), st.data())
def test_all_records_are_handed_out_once_in_bounded_units(
    lengths: list[tuple[int, int]], unit_records: int, data: st.DataObject
) -> None:
    whole = [WorkUnit(f"samples/{p}", start, start + length) for p, (start, length) in enumerate(lengths)]
    it = UnitAllocator(whole, unit_records)
    done: dict[str, int] = {}
    commits = 0
    while not it.is_over:
        epoch = it.epoch(it.units)
        for unit in epoch.units:
            assert len(unit) <= unit_records
            at = data.draw(st.integers(unit.start, unit.end)) if commits % 2 else unit.end
            assert unit.start == max(done.get(unit.source, 0), it.units[unit.source].start) or not len(unit)
            done[unit.source] = max(at, done.get(unit.source, 0))
        it.committed(done)
        commits += 1
        assert commits <= 2 * it.num_epochs
    assert all(done.get(unit.source, 0) >= unit.end for unit in whole if len(unit))


def test_units_and_epochs_round_trip() -> None:
    epoch = UnitAllocator([A, B], unit_records=7).epoch([A.source, B.source])
    assert Epoch.of(epoch.plain()) == epoch and Epoch.of(None) == Epoch.of(STREAM.plain()) == STREAM
    assert partition_of(source_of(("samples", 3))) == ("samples", 3)
    with pytest.raises(ValueError, match="invalid literal"):
        partition_of("no partition")

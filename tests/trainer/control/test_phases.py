"""History first, then the stream: the phase follows from a fixed range and the committed offsets, whoever
dies when."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.manifest import discard_after
from roostream.runtime.work_unit import STREAM, Epoch, WorkUnit, partition_of, source_of
from tests.trainer.control.test_coordinator import ANSWERS, FACTS
from tests.trainer.control.test_scaling import Fleet
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import BackfillEta, Controller
from trainer.control.coordinator import Coordinator
from trainer.control.phases import UnitAllocator, historical_range
from trainer.control.types import InitialRange, Key, State

END = 20


class HistoryFleet(Fleet):
    """Every partition of `samples` has 20 records; each worker trains all that it may read as soon as it
    may."""

    def __init__(
        self,
        num_workers: int = 1,
        initial_workers: int = 2,
        store: MemoryStore | None = None,
        unit_records: int = 10,
        end: int = END,
    ) -> None:
        super().__init__(num_workers, store, started=max(num_workers, initial_workers))
        sizes = {"initial_workers": initial_workers, "unit_records": unit_records}
        facts = dataclasses.replace(FACTS, num_workers=num_workers, **sizes)
        self.end, self.asked_for = end, 0
        self.it = Controller(Coordinator(facts), self.store, self.clock, history=self.history, long_poll_s=0)
        self.epochs: dict[Key, dict[str, Any]] = {}
        self.lazy: set[Key] = set()  # who has not trained what it was given

    def history(self, committed: Any) -> tuple[WorkUnit, ...]:
        self.asked_for += 1
        return tuple(historical_range({p: (0, self.end) for p in range(4)}, committed, {}))

    def report(self, key: Key) -> dict[str, Any]:
        epoch = self.epochs.get(key)
        if not epoch or not epoch["number"]:
            return super().report(key)
        return super().report(key) | {"epoch_trained": 0 if key in self.lazy else epoch["number"]}

    def answer(self, key: Key, command: dict[str, Any]) -> dict[str, Any]:
        answer = super().answer(key, command)
        if key.role == "worker" and command["kind"] in ("start", "commit"):
            self.epochs[key] = command.get("epoch", {"number": 0, "units": []})
            self.step += len(self.epochs[key]["units"])
        if command["kind"] == "cut":
            ends = {int(source.split("/")[1]): end for source, _, end in self.epochs[key]["units"]}
            its = [c for k, c in self.asked if k == key and c["kind"] == "restore"][-1]["partitions"]
            answer |= {"offsets": {"samples": {p: ends.get(p, self.end) for p in its}}, "step": self.step}
            answer |= {k: v for k, v in ANSWERS["worker", "cut"].items() if k not in answer}
        return answer

    @property
    def state(self) -> tuple[int, bool]:
        """(workers, is initial)"""
        return self.it.coordinator.membership.num_workers, self.it.coordinator.phases.is_initial

    def to_the_stream(self) -> HistoryFleet:
        for _ in range(60):
            self.turn()
            if self.it.coordinator.state is State.RUNNING and not self.it.coordinator.phases.is_initial:
                return self
        raise AssertionError(self.it.status())


def kept(store: MemoryStore) -> dict[str, Any]:
    return dict(json.loads(store.get(store.list(manifests.INCARNATIONS)[-1]))["wish"])


def test_without_initial_workers_there_are_no_phases() -> None:
    fleet = Fleet(2).to(State.RUNNING)
    assert not any("epoch" in command for _, command in fleet.asked)
    assert kept(fleet.store) == {"workers": 2, "configured": 2}
    assert fleet.it.status()["initial"] is None


def test_more_workers_train_history_in_epochs_with_a_commit_each_then_fewer_the_stream() -> None:
    fleet = HistoryFleet()
    assert isinstance(fleet.to(State.RUNNING), HistoryFleet)
    assert fleet.state == (2, True)
    fleet.turn()
    progress = {"epoch": 1, "epochs": 2, "records": 80, "left": 80, "eta_s": [None, None, None]}
    assert fleet.it.status()["initial"] == progress
    fleet.to_the_stream()
    assert fleet.state == (1, False) and fleet.it.status()["initial"] is None
    assert fleet.it.coordinator.num_commits == 2 and fleet.it.coordinator.num_rollbacks == 0
    assert "history is trained up to its export point" in fleet.it.coordinator.reason
    resumed = {command["seq"] for _, command in fleet.asked if command["kind"] == "resume"}
    assert resumed == {1}, (
        "after the last commit of history, workers wait for the restore and not for each other"
    )
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.offsets == {("samples", p): END for p in range(4)}
    fleet.turn()
    assert fleet.epochs[Key("worker", 0)] == {"number": 0, "units": []}
    epochs = [c["epoch"] for _, c in fleet.asked if c["kind"] in ("start", "commit") and "epoch" in c]
    units = [tuple(unit) for epoch in epochs for unit in epoch["units"]]
    assert {unit for unit in units if unit[1] < unit[2]} == {
        (f"samples/{p}", n, n + 10) for p in range(4) for n in (0, 10)
    }


def test_the_next_epoch_comes_with_the_commit_of_all_workers() -> None:
    fleet = HistoryFleet()
    fleet.lazy.add(Key("worker", 1))
    fleet.to(State.RUNNING)
    for _ in range(6):
        fleet.turn()
    assert fleet.it.coordinator.num_commits == 0 and fleet.state == (2, True)
    fleet.lazy.clear()
    fleet.to_the_stream()
    assert [c["seq"] for k, c in fleet.asked if k == Key("shard", 0) and c["kind"] == "commit"] == [1, 2]


@pytest.mark.parametrize("state", [State.COMMITTING, State.CLAIMING])
def test_a_restarted_controller_continues_in_the_committed_phase(state: State) -> None:
    first = HistoryFleet()
    first.to(State.RUNNING)
    for _ in range(60):
        if first.it.coordinator.num_commits == 2 and first.it.coordinator.state is state:
            break
        first.turn()
    second = HistoryFleet(store=first.store, end=999)
    second.end = END  # what a worker would read; the range is not fixed again
    second.to_the_stream()
    assert second.asked_for == 0 and second.state == (1, False) and second.it.coordinator.num_commits == 0
    assert kept(second.store)["historical"]["whole"] == [[f"samples/{p}", 0, END] for p in range(4)]


def test_scaling_in_the_initial_phase_applies_to_that_phase_only() -> None:
    fleet = HistoryFleet(initial_workers=2, unit_records=5)
    fleet.start_workers(4)
    fleet.lazy = {Key("worker", n) for n in range(4)}
    fleet.to(State.RUNNING)
    assert fleet.scale(4) == {"workers": 4, "running": True, "why": ""}
    assert fleet.state == (4, True)
    again = HistoryFleet(initial_workers=2, store=fleet.store, unit_records=5)
    again.start_workers(4)
    again.lazy = set(fleet.lazy)
    again.to(State.RUNNING)
    assert again.state == (4, True), "it survives a restart of the controller"
    again.lazy.clear()
    again.to_the_stream()
    assert again.state == (1, False) and again.it.status()["wanted_workers"] == 1
    again.lazy = {Key("worker", n) for n in range(4)}
    assert again.scale(3)["running"] is True
    assert HistoryFleet(initial_workers=2, store=again.store, unit_records=5, num_workers=1).it is not None
    assert kept(again.store)["workers"] == 3 and kept(again.store)["historical"]["over"] is True


def test_changed_settings_override_the_stored_number_of_their_phase() -> None:
    first = HistoryFleet(initial_workers=2)
    first.to(State.RUNNING)
    more = HistoryFleet(initial_workers=4, store=first.store)
    more.lazy = {Key("worker", n) for n in range(4)}
    more.to(State.RUNNING)
    assert more.state == (4, True)
    other = HistoryFleet(num_workers=3, initial_workers=4, store=first.store)
    other.lazy = set(more.lazy)
    other.to(State.RUNNING)
    assert other.state == (4, True)
    other.lazy.clear()
    assert other.to_the_stream().state == (3, False)


def test_without_initial_workers_a_stored_range_is_ignored() -> None:
    first = HistoryFleet()
    first.to(State.RUNNING)
    second = Fleet(1, first.store).to(State.RUNNING)
    assert kept(second.store) == {"workers": 1, "configured": 1}
    assert not any("epoch" in command for _, command in second.asked)


def test_without_history_training_begins_with_the_stream() -> None:
    fleet = HistoryFleet(end=0)
    fleet.to(State.RUNNING)
    assert fleet.state == (1, False) and fleet.it.coordinator.incarnation == 1


def test_a_rollback_before_the_switch_returns_to_history() -> None:
    first = HistoryFleet()
    first.to(State.RUNNING)
    first.to_the_stream()
    assert first.state == (1, False)
    discard_after(first.store, 1)
    second = HistoryFleet(store=first.store)
    second.to(State.RUNNING)
    assert second.state == (2, True)
    second.turn()
    assert second.it.status()["initial"]["epoch"] == 2 and second.it.status()["initial"]["left"] == 40
    second.to_the_stream()
    assert second.state == (1, False)


def test_an_unavailable_kafka_delays_the_claim() -> None:
    fleet = HistoryFleet()
    fleet.it.history = _away
    for _ in range(3):
        fleet.turn()
    assert not fleet.store.list(manifests.INCARNATIONS)
    fleet.it.history = fleet.history
    fleet.to(State.RUNNING)
    assert fleet.state == (2, True)


def _away(committed: object) -> tuple[WorkUnit, ...]:
    raise UnavailableError("Kafka is away")


def test_a_refused_commit_at_an_epoch_s_end_is_retried_later() -> None:
    fleet = HistoryFleet()
    fleet.refusing = "freeze"
    fleet.to(State.RUNNING)
    for _ in range(12):
        fleet.turn()
    assert fleet.it.coordinator.num_aborts == 1
    fleet.refusing = ""
    for _ in range(40):
        fleet.turn(1.0)
    assert fleet.state == (1, False)


def test_history_is_the_range_from_the_commit_to_the_export_point() -> None:
    bounds, committed = {0: (5, 50), 1: (0, 30), 2: (7, 7), 3: (0, 9)}, {0: 20, 1: 0, 3: 8}
    assert [*historical_range(bounds, committed, {1: 12, 3: 4})] == [
        WorkUnit("samples/0", 20, 50),
        WorkUnit("samples/1", 0, 12),
        WorkUnit("samples/2", 7, 7),
        WorkUnit("samples/3", 8, 8),
    ]


@pytest.mark.parametrize(
    "left", [None, 3, {}, {"whole": 4, "over": False}, {"whole": [["a", 2, 1]], "over": 0}, {"whole": [[1]]}]
)
def test_an_invalid_saved_range_is_ignored(left: object) -> None:
    assert InitialRange.from_saved(left) is None


# A historical range is handed out in bounded units, and what is done is what a commit contains


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


@settings(max_examples=30, deadline=None)
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


# How long history takes yet follows from what is trained, and is unknown where nothing tells


OF = {"epoch": 1, "epochs": 2, "records": 1000, "left": 1000}


def test_eta_covers_all_epochs_at_the_rate_of_the_last_minute() -> None:
    pace = BackfillEta()
    assert pace.estimate(OF, 0.0, 0.0) == {**OF, "eta_s": [None, None, None]}, "one reading is no rate"
    told = pace.estimate(OF, 100.0, 10.0)
    assert told is not None and told["eta_s"][0] == pytest.approx(1900 / 10)
    for second in range(11, 60):
        told = pace.estimate({**OF, "left": 700}, 100.0 + 20 * (second - 10), float(second))
    assert told is not None and told["eta_s"][0] == pytest.approx((1700 - 960) / (1080 / 59), rel=1e-6)
    value, low, high = told["eta_s"]
    assert low < value < high


def test_a_commit_restarts_the_count_of_remaining_records() -> None:
    pace = BackfillEta()
    pace.estimate({**OF, "epochs": 1}, 0.0, 0.0)
    pace.estimate({**OF, "epochs": 1}, 500.0, 50.0)
    told = pace.estimate({**OF, "epochs": 1, "left": 500}, 500.0, 51.0)
    assert told is not None and told["eta_s"][0] == pytest.approx(500 / (500 / 51))


@pytest.mark.parametrize("trained", [None, 20.0])
def test_eta_is_unknown_after_a_worker_is_silent_or_restarts(trained: float | None) -> None:
    pace = BackfillEta()
    pace.estimate(OF, 0.0, 0.0)
    pace.estimate(OF, 100.0, 10.0)
    told = pace.estimate(OF, trained, 11.0)
    assert told is not None and told["eta_s"] == [None, None, None]
    assert pace.estimate(None, 30.0, 12.0) is None
    assert pace.estimate(OF, 40.0, 13.0) == {**OF, "eta_s": [None, None, None]}


def test_eta_is_unknown_without_progress_and_zero_when_done() -> None:
    pace = BackfillEta()
    for second in range(5):
        told = pace.estimate(OF, 100.0, float(second))
    assert told is not None and told["eta_s"] == [None, None, None]
    done = pace.estimate({**OF, "epoch": 2, "left": 0}, 100.0, 6.0)
    assert done is not None and done["eta_s"] == [0.0, 0.0, 0.0]

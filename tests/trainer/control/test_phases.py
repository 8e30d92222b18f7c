"""The phases of training: first the history, then the stream. The phase depends only on a fixed range and the
committed offsets, so kills cannot change it."""

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
from tests.trainer.control.test_coordinator import ANSWERS, CONFIG
from tests.trainer.control.test_scaling import FakeFleet
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import BackfillEta, Controller
from trainer.control.coordinator import Coordinator
from trainer.control.phases import UnitAllocator, historical_range
from trainer.control.types import InitialRange, Key, State

END = 20


class HistoryFleet(FakeFleet):
    """A fleet over a topic with 20 records in each partition. Each worker trains its units at once, except
    those in `unfinished`."""

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
        config = dataclasses.replace(CONFIG, num_workers=num_workers, **sizes)
        self.end, self.num_history_calls = end, 0
        self.controller = Controller(
            Coordinator(config), self.store, self.clock, history=self.history, long_poll_s=0
        )
        self.epochs: dict[Key, dict[str, Any]] = {}
        self.unfinished: set[Key] = set()  # workers that have not trained their units

    def history(self, committed: Any) -> tuple[WorkUnit, ...]:
        self.num_history_calls += 1
        return tuple(historical_range({p: (0, self.end) for p in range(4)}, committed, {}))

    def report(self, key: Key) -> dict[str, Any]:
        epoch = self.epochs.get(key)
        if not epoch or not epoch["number"]:
            return super().report(key)
        return super().report(key) | {"epoch_trained": 0 if key in self.unfinished else epoch["number"]}

    def answer(self, key: Key, command: dict[str, Any]) -> dict[str, Any]:
        answer = super().answer(key, command)
        if key.role == "worker" and command["kind"] in ("start", "commit"):
            self.epochs[key] = command.get("epoch", {"number": 0, "units": []})
            self.step += len(self.epochs[key]["units"])
        if command["kind"] == "cut":
            ends = {int(source.split("/")[1]): end for source, _, end in self.epochs[key]["units"]}
            restores = [c for k, c in self.received if k == key and c["kind"] == "restore"]
            offsets = {p: ends.get(p, self.end) for p in restores[-1]["partitions"]}
            answer |= {"offsets": {"samples": offsets}, "step": self.step}
            answer |= {k: v for k, v in ANSWERS["worker", "cut"].items() if k not in answer}
        return answer

    @property
    def state(self) -> tuple[int, bool]:
        """(number of workers, whether the phase is the initial one)"""
        return (
            self.controller.coordinator.membership.num_workers,
            self.controller.coordinator.phases.is_initial,
        )

    def to_the_stream(self) -> HistoryFleet:
        for _ in range(60):
            self.turn()
            if (
                self.controller.coordinator.state is State.RUNNING
                and not self.controller.coordinator.phases.is_initial
            ):
                return self
        raise AssertionError(self.controller.status())


def saved_plan(store: MemoryStore) -> dict[str, Any]:
    """The number of workers and the historical range, as the newest incarnation in the store states them."""
    return dict(json.loads(store.get(store.list(manifests.INCARNATIONS)[-1]))["wish"])


def test_without_initial_workers_there_are_no_phases() -> None:
    fleet = FakeFleet(2).to(State.RUNNING)
    assert not any("epoch" in command for _, command in fleet.received)
    assert saved_plan(fleet.store) == {"workers": 2, "configured": 2}
    assert fleet.controller.status()["initial"] is None


def test_more_workers_train_history_in_epochs_with_one_commit_each_and_fewer_train_the_stream() -> None:
    fleet = HistoryFleet()
    assert isinstance(fleet.to(State.RUNNING), HistoryFleet)
    assert fleet.state == (2, True)
    fleet.turn()
    progress = {"epoch": 1, "epochs": 2, "records": 80, "left": 80, "eta_s": [None, None, None]}
    assert fleet.controller.status()["initial"] == progress
    fleet.to_the_stream()
    assert fleet.state == (1, False) and fleet.controller.status()["initial"] is None
    assert fleet.controller.coordinator.num_commits == 2 and fleet.controller.coordinator.num_rollbacks == 0
    assert "history is trained up to its export point" in fleet.controller.coordinator.reason
    resumed = {command["seq"] for _, command in fleet.received if command["kind"] == "resume"}
    assert resumed == {1}, (
        "after the last commit of the history, workers must wait for a restore instead of resuming"
    )
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.offsets == {("samples", p): END for p in range(4)}
    fleet.turn()
    assert fleet.epochs[Key("worker", 0)] == {"number": 0, "units": []}
    epochs = [c["epoch"] for _, c in fleet.received if c["kind"] in ("start", "commit") and "epoch" in c]
    units = [tuple(unit) for epoch in epochs for unit in epoch["units"]]
    assert {unit for unit in units if unit[1] < unit[2]} == {
        (f"samples/{p}", n, n + 10) for p in range(4) for n in (0, 10)
    }


def test_the_next_epoch_comes_with_the_commit_of_all_workers() -> None:
    fleet = HistoryFleet()
    fleet.unfinished.add(Key("worker", 1))
    fleet.to(State.RUNNING)
    for _ in range(6):
        fleet.turn()
    assert fleet.controller.coordinator.num_commits == 0 and fleet.state == (2, True)
    fleet.unfinished.clear()
    fleet.to_the_stream()
    assert [c["seq"] for k, c in fleet.received if k == Key("shard", 0) and c["kind"] == "commit"] == [1, 2]


@pytest.mark.parametrize("state", [State.COMMITTING, State.CLAIMING])
def test_a_restarted_controller_continues_in_the_committed_phase(state: State) -> None:
    first = HistoryFleet()
    first.to(State.RUNNING)
    for _ in range(60):
        if first.controller.coordinator.num_commits == 2 and first.controller.coordinator.state is state:
            break
        first.turn()
    second = HistoryFleet(store=first.store, end=999)
    second.end = END  # what workers read; the saved range must not be determined again
    second.to_the_stream()
    assert (
        second.num_history_calls == 0
        and second.state == (1, False)
        and second.controller.coordinator.num_commits == 0
    )
    assert saved_plan(second.store)["historical"]["whole"] == [[f"samples/{p}", 0, END] for p in range(4)]


def test_scaling_in_the_initial_phase_applies_to_that_phase_only() -> None:
    fleet = HistoryFleet(initial_workers=2, unit_records=5)
    fleet.start_workers(4)
    fleet.unfinished = {Key("worker", n) for n in range(4)}
    fleet.to(State.RUNNING)
    assert fleet.scale(4) == {"workers": 4, "running": True, "why": ""}
    assert fleet.state == (4, True)
    second = HistoryFleet(initial_workers=2, store=fleet.store, unit_records=5)
    second.start_workers(4)
    second.unfinished = set(fleet.unfinished)
    second.to(State.RUNNING)
    assert second.state == (4, True), "the number must survive a restart of the controller"
    second.unfinished.clear()
    second.to_the_stream()
    assert second.state == (1, False) and second.controller.status()["wanted_workers"] == 1
    second.unfinished = {Key("worker", n) for n in range(4)}
    assert second.scale(3)["running"] is True
    third = HistoryFleet(initial_workers=2, store=second.store, unit_records=5, num_workers=1)
    assert third.controller is not None
    assert saved_plan(second.store)["workers"] == 3 and saved_plan(second.store)["historical"]["over"] is True


def test_changed_settings_override_the_stored_number_of_their_phase() -> None:
    first = HistoryFleet(initial_workers=2)
    first.to(State.RUNNING)
    more = HistoryFleet(initial_workers=4, store=first.store)
    more.unfinished = {Key("worker", n) for n in range(4)}
    more.to(State.RUNNING)
    assert more.state == (4, True)
    other = HistoryFleet(num_workers=3, initial_workers=4, store=first.store)
    other.unfinished = set(more.unfinished)
    other.to(State.RUNNING)
    assert other.state == (4, True)
    other.unfinished.clear()
    assert other.to_the_stream().state == (3, False)


def test_without_initial_workers_a_stored_range_is_ignored() -> None:
    first = HistoryFleet()
    first.to(State.RUNNING)
    second = FakeFleet(1, first.store).to(State.RUNNING)
    assert saved_plan(second.store) == {"workers": 1, "configured": 1}
    assert not any("epoch" in command for _, command in second.received)


def test_without_history_training_starts_with_the_stream() -> None:
    fleet = HistoryFleet(end=0)
    fleet.to(State.RUNNING)
    assert fleet.state == (1, False) and fleet.controller.coordinator.incarnation == 1


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
    assert (
        second.controller.status()["initial"]["epoch"] == 2
        and second.controller.status()["initial"]["left"] == 40
    )
    second.to_the_stream()
    assert second.state == (1, False)


def test_an_unavailable_kafka_delays_the_claim() -> None:
    fleet = HistoryFleet()
    fleet.controller.history = raise_unavailable
    for _ in range(3):
        fleet.turn()
    assert not fleet.store.list(manifests.INCARNATIONS)
    fleet.controller.history = fleet.history
    fleet.to(State.RUNNING)
    assert fleet.state == (2, True)


def raise_unavailable(committed: object) -> tuple[WorkUnit, ...]:
    raise UnavailableError("Kafka is away")


def test_a_refused_commit_at_an_epoch_s_end_is_retried_later() -> None:
    fleet = HistoryFleet()
    fleet.refused_kind = "freeze"
    fleet.to(State.RUNNING)
    for _ in range(12):
        fleet.turn()
    assert fleet.controller.coordinator.num_aborts == 1
    fleet.refused_kind = ""
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
    "saved", [None, 3, {}, {"whole": 4, "over": False}, {"whole": [["a", 2, 1]], "over": 0}, {"whole": [[1]]}]
)
def test_an_invalid_saved_range_is_ignored(saved: object) -> None:
    assert InitialRange.from_saved(saved) is None


# `UnitAllocator` hands out a historical range in units of limited size. A unit is done when it is committed.


A, B = WorkUnit("samples/0", 100, 120), WorkUnit("samples/1", 0, 10)


def test_all_sources_have_the_same_number_of_epochs() -> None:
    allocator = UnitAllocator([A, B], unit_records=7)
    assert allocator.num_epochs == 3
    assert allocator.epoch([A.source, B.source]) == Epoch(
        1, (WorkUnit("samples/0", 100, 106), WorkUnit("samples/1", 0, 3))
    )


def test_a_unit_is_done_only_once_it_is_committed() -> None:
    allocator = UnitAllocator([A, B], unit_records=7)
    allocator.committed({"samples/0": 105, "samples/1": 3})
    assert allocator.epoch([A.source, B.source]) == Epoch(
        1, (WorkUnit("samples/0", 105, 106), WorkUnit("samples/1", 3, 3))
    )
    allocator.committed({"samples/0": 106, "samples/1": 3})
    assert allocator.epoch([A.source, B.source]) == Epoch(
        2, (WorkUnit("samples/0", 106, 113), WorkUnit("samples/1", 3, 6))
    )


def test_a_rollback_hands_out_later_units_again() -> None:
    allocator = UnitAllocator([A, B], unit_records=7)
    allocator.committed({"samples/0": 120, "samples/1": 10})
    assert allocator.is_over and allocator.num_left == 0
    allocator.committed({"samples/0": 113, "samples/1": 6})
    assert not allocator.is_over and allocator.number == 3 and allocator.num_left == 11


@pytest.mark.parametrize("whole", [[], [WorkUnit("samples/0", 5, 5)]], ids=["no source", "nothing in it"])
def test_a_range_without_records_is_over_from_the_start(whole: list[WorkUnit]) -> None:
    allocator = UnitAllocator(whole, 10)
    assert allocator.is_over and allocator.num_records == allocator.num_left == 0
    assert not any(map(len, allocator.epoch(["samples/0"]).units))


ranges = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=4)


@settings(max_examples=30)
@given(ranges, st.integers(1, 60), st.data())
def test_all_records_are_handed_out_once_in_bounded_units(
    lengths: list[tuple[int, int]], unit_records: int, data: st.DataObject
) -> None:
    whole = [WorkUnit(f"samples/{p}", start, start + length) for p, (start, length) in enumerate(lengths)]
    allocator = UnitAllocator(whole, unit_records)
    done: dict[str, int] = {}
    commits = 0
    while not allocator.is_over:
        epoch = allocator.epoch(allocator.units)
        for unit in epoch.units:
            assert len(unit) <= unit_records
            at = data.draw(st.integers(unit.start, unit.end)) if commits % 2 else unit.end
            assert unit.start == max(done.get(unit.source, 0), allocator.units[unit.source].start) or not len(
                unit
            )
            done[unit.source] = max(at, done.get(unit.source, 0))
        allocator.committed(done)
        commits += 1
        assert commits <= 2 * allocator.num_epochs
    assert all(done.get(unit.source, 0) >= unit.end for unit in whole if len(unit))


def test_units_and_epochs_round_trip() -> None:
    epoch = UnitAllocator([A, B], unit_records=7).epoch([A.source, B.source])
    assert Epoch.of(epoch.plain()) == epoch and Epoch.of(None) == Epoch.of(STREAM.plain()) == STREAM
    assert partition_of(source_of(("samples", 3))) == ("samples", 3)
    with pytest.raises(ValueError, match="invalid literal"):
        partition_of("no partition")


# `BackfillEta` estimates how long the rest of the history takes


PROGRESS = {"epoch": 1, "epochs": 2, "records": 1000, "left": 1000}


def test_eta_counts_each_record_once() -> None:
    """Epochs are parts of one pass over history, so what is left of it is left of all epochs."""
    allocator, eta = UnitAllocator([A, B], unit_records=1), BackfillEta()
    progress = {"epoch": allocator.number, "epochs": allocator.num_epochs}
    progress |= {"records": allocator.num_records, "left": allocator.num_left}
    assert progress["epochs"] > 1 and progress["left"] == len(A) + len(B)
    for second in range(3):
        estimate = eta.estimate(progress, float(second), float(second))
    assert estimate is not None and estimate["eta_s"][0] == pytest.approx(len(A) + len(B) - 2)


def test_eta_is_that_of_the_rate_of_the_last_minute() -> None:
    eta = BackfillEta()
    assert eta.estimate(PROGRESS, 0.0, 0.0) == {**PROGRESS, "eta_s": [None, None, None]}, (
        "one reading does not give a rate"
    )
    estimate = eta.estimate(PROGRESS, 100.0, 10.0)
    assert estimate is not None and estimate["eta_s"][0] == pytest.approx(900 / 10)
    for second in range(11, 60):
        estimate = eta.estimate({**PROGRESS, "left": 990}, 100.0 + 20 * (second - 10), float(second))
    assert estimate is not None and estimate["eta_s"][0] == pytest.approx((990 - 960) / (1080 / 59), rel=1e-6)
    value, low, high = estimate["eta_s"]
    assert low < value < high


def test_a_commit_restarts_the_count_of_remaining_records() -> None:
    eta = BackfillEta()
    eta.estimate({**PROGRESS, "epochs": 1}, 0.0, 0.0)
    eta.estimate({**PROGRESS, "epochs": 1}, 500.0, 50.0)
    estimate = eta.estimate({**PROGRESS, "epochs": 1, "left": 500}, 500.0, 51.0)
    assert estimate is not None and estimate["eta_s"][0] == pytest.approx(500 / (500 / 51))


@pytest.mark.parametrize("trained", [None, 20.0])
def test_eta_is_unknown_after_a_worker_is_silent_or_restarts(trained: float | None) -> None:
    eta = BackfillEta()
    eta.estimate(PROGRESS, 0.0, 0.0)
    eta.estimate(PROGRESS, 100.0, 10.0)
    estimate = eta.estimate(PROGRESS, trained, 11.0)
    assert estimate is not None and estimate["eta_s"] == [None, None, None]
    assert eta.estimate(None, 30.0, 12.0) is None
    assert eta.estimate(PROGRESS, 40.0, 13.0) == {**PROGRESS, "eta_s": [None, None, None]}


def test_eta_is_unknown_without_progress_and_zero_when_done() -> None:
    eta = BackfillEta()
    for second in range(5):
        estimate = eta.estimate(PROGRESS, 100.0, float(second))
    assert estimate is not None and estimate["eta_s"] == [None, None, None]
    done = eta.estimate({**PROGRESS, "epoch": 2, "left": 0}, 100.0, 6.0)
    assert done is not None and done["eta_s"] == [0.0, 0.0, 0.0]

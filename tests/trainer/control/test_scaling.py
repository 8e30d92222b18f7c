"""The number of workers can change while training runs. The wanted number is saved, applied at a commit, and
never interrupts running workers."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from roostream.errors import ConfigError, FencedError
from roostream.runtime import manifest as manifests
from roostream.runtime.clock import FakeClock
from tests.trainer.control.test_coordinator import ANSWERS, CONFIG
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.types import Key, State

RENDEZVOUS = "10.0.0.1:4000"


class FakeFleet:
    """A controller with an in-memory store and fake members: two shards, and the workers that were started.
    `received`: the commands of each member. `refused_kind`: the kind of command that members refuse."""

    def __init__(
        self,
        num_workers: int = 1,
        store: MemoryStore | None = None,
        started: int | None = None,
        long_poll_s: float = 0.0,
        follow_workers: bool = False,
    ) -> None:
        self.store, self.clock = store or MemoryStore(), FakeClock()
        config = dataclasses.replace(CONFIG, num_workers=num_workers, follow_workers=follow_workers)
        self.checked: list[str] = []  # names of manifests
        check = lambda manifest: self.checked.append(manifest.name)
        self.controller = Controller(
            Coordinator(config), self.store, self.clock, check=check, long_poll_s=long_poll_s
        )
        self.members = [Key("shard", 0), Key("shard", 1)]
        self.sessions: dict[Key, int] = {}
        self.incarnations: dict[Key, int] = {}
        self.received: list[tuple[Key, dict[str, Any]]] = []
        self.refused_kind: str = ""
        self.leaving: set[Key] = set()
        self.step = 0
        self.start_workers(num_workers if started is None else started)

    def start_workers(self, count: int) -> None:
        self.members += [
            Key("worker", i) for i in range(sum(k.role == "worker" for k in self.members), count)
        ]

    def stop(self, key: Key) -> None:
        self.members.remove(key)

    def report(self, key: Key) -> dict[str, Any]:
        report: dict[str, Any] = {"leaving": key in self.leaving, "seen_at": f"h:{key.index}"}
        report |= {"step": self.step} if key.role == "worker" else {}
        return report | ({"meet": RENDEZVOUS} if key == Key("worker", 0) else {})

    def send(
        self, key: Key, results: list[dict[str, Any]] | None = None, report: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a heartbeat, and return its answer."""
        header = {"role": key.role, "index": key.index, "session": self.sessions.get(key, 1)}
        header |= {"incarnation": self.incarnations.get(key, 0), "results": results or []}
        header["report"] = self.report(key) if report is None else report
        return dict(self.controller.handle("beat", header, ())[0])

    def beat(self, key: Key, results: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        return self.send(key, results)["commands"]

    def answer(self, key: Key, command: dict[str, Any]) -> dict[str, Any]:
        self.received.append((key, command))
        if command["kind"] == self.refused_kind:
            return {"id": command["id"], "ok": False, "error": "not now"}
        if command["kind"] == "restore":
            self.incarnations[key] = command["incarnation"]
        answer = dict(ANSWERS.get((key.role, command["kind"]), {}))
        if command["kind"] == "cut":
            restores = [c for k, c in self.received if k == key and c["kind"] == "restore"]
            offsets = {p: 10 + p for p in restores[-1]["partitions"]}
            answer |= {"offsets": {"samples": offsets}, "step": self.step}
        return {"id": command["id"], "ok": True, **answer}

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.controller.turn()
        for key in list(self.members):
            self.beat(key, [self.answer(key, command) for command in self.beat(key)])
        self.controller.turn()

    def to(self, state: State, seconds: float = 0.0) -> FakeFleet:
        for _ in range(30):
            if self.controller.coordinator.state is state:
                return self
            self.turn(seconds)
        raise AssertionError(self.controller.status())

    def call(self, method: str, /, **header: Any) -> dict[str, Any]:
        """Call the controller from another thread, run turns meanwhile, and return the answer."""
        answers: list[dict[str, Any]] = []
        caller = threading.Thread(
            target=lambda: answers.append(dict(self.controller.handle(method, header, ())[0]))
        )
        caller.start()
        for _ in range(200):
            self.turn()
            caller.join(0.005)
            if not caller.is_alive():
                return answers[0]
        raise AssertionError(self.controller.status())

    def scale(self, count: int, timeout_s: float = 20.0) -> dict[str, Any]:
        return self.call("scale", workers=count, timeout_s=timeout_s)

    def restored(self) -> dict[Key, dict[str, Any]]:
        """The RESTORE commands of the current incarnation."""
        now = self.controller.coordinator.incarnation
        return {k: c for k, c in self.received if c["kind"] == "restore" and c["incarnation"] == now}


@pytest.mark.parametrize("count", [1, 3])
def test_restore_assigns_each_partition_once_with_the_rendezvous_address(count: int) -> None:
    fleet = FakeFleet(count).to(State.RUNNING)
    commands = {k.index: c for k, c in fleet.restored().items() if k.role == "worker"}
    assert sorted(p for c in commands.values() for p in c["partitions"]) == [0, 1, 2, 3]
    assert all(p % count == index for index, c in commands.items() for p in c["partitions"])
    assert {(c["workers"], c["meet"]) for c in commands.values()} == {
        (count, RENDEZVOUS if count > 1 else "")
    }
    assert all(
        set(c) == {"id", "kind", "incarnation", "manifest", "schema", "store", "keep_commits"}
        for k, c in fleet.restored().items()
        if k.role == "shard"
    )


def test_several_workers_wait_for_the_rendezvous_address() -> None:
    fleet = FakeFleet(2)
    first, fleet.members = fleet.members[2], [*fleet.members[:2], fleet.members[3]]
    for _ in range(5):
        fleet.turn()
    header = {"role": "worker", "index": 0, "session": 1, "incarnation": 0, "results": [], "report": {}}
    fleet.controller.handle("beat", header, ())
    assert fleet.controller.coordinator.state is State.GATHERING
    fleet.members.append(first)
    fleet.to(State.RUNNING)


def test_scaling_commits_first_and_replays_nothing() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.start_workers(3)
    for step, count in enumerate((2, 3, 1), 1):
        fleet.step, fleet.received = step, [a for a in fleet.received if a[1]["kind"] == "restore"]
        before = fleet.controller.coordinator.incarnation
        assert fleet.scale(count) == {"workers": count, "running": True, "why": ""}
        assert (
            fleet.controller.coordinator.incarnation == before + 1
            and fleet.controller.coordinator.num_rollbacks == 0
        )
        last = manifests.newest(fleet.store)
        assert last is not None and last.manifest.step == step
        kinds = [c["kind"] for _, c in fleet.received]
        assert "cut" in kinds and "resume" not in kinds, (
            "workers must not train between the commit and the restore"
        )
        restored = fleet.restored()
        assert {k for k in restored if k.role == "worker"} == {Key("worker", i) for i in range(count)}
        assert {c["manifest"] for c in restored.values()} == {last.name}
        assert sorted(last.manifest.offsets) == [("samples", p) for p in range(4)]


def test_workers_on_standby_may_join_and_leave_without_effect() -> None:
    fleet = FakeFleet(1, started=3).to(State.RUNNING)
    assert fleet.controller.status()["workers"] == 1 and set(fleet.controller.status()["members"]) >= {
        "worker 1",
        "worker 2",
    }
    fleet.stop(Key("worker", 2))
    for _ in range(5):
        fleet.turn(1.0)
    assert (
        fleet.controller.coordinator.state is State.RUNNING
        and fleet.controller.coordinator.num_rollbacks == 0
    )
    assert "worker 2" not in fleet.controller.status()["members"]
    assert not any(key.role == "worker" and key.index > 0 for key, _ in fleet.received)


def test_scaling_waits_for_missing_workers_without_stopping_training() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    answer = fleet.scale(2, timeout_s=0.05)
    assert answer == {"workers": 1, "running": False, "why": "it waits for worker 1"}
    assert fleet.controller.coordinator.state is State.RUNNING
    fleet.stop(Key("shard", 0))
    for _ in range(4):
        fleet.turn(1.0)
    fleet.sessions[Key("shard", 0)] = 2  # a rollback must not wait for the missing worker either
    fleet.members.append(Key("shard", 0))
    fleet.to(State.RUNNING)
    assert fleet.controller.coordinator.membership.num_workers == 1
    fleet.start_workers(2)
    for _ in range(25):
        fleet.turn(1.0)
    assert (
        fleet.controller.coordinator.membership.num_workers == 2
        and fleet.controller.coordinator.state is State.RUNNING
    )


def test_metrics_addresses_follow_the_connected_workers() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    assert fleet.controller.worker_metrics_addresses() == {0: "h:0"}
    fleet.start_workers(2)
    fleet.turn()
    assert fleet.controller.worker_metrics_addresses() == {0: "h:0", 1: "h:1"}, (
        "a worker on standby is included"
    )
    fleet.stop(Key("worker", 0))
    fleet.stop(Key("worker", 1))
    fleet.turn(4.0)
    assert fleet.controller.worker_metrics_addresses() == {0: ""}, (
        "a training worker is included even if its address is unknown"
    )


def test_scaling_is_retried_after_a_refused_commit() -> None:
    fleet = FakeFleet(1, started=2).to(State.RUNNING)
    fleet.refused_kind, fleet.step = "freeze", 1
    assert fleet.scale(2, timeout_s=0.05)["running"] is False
    fleet.to(State.RUNNING)
    assert (
        fleet.controller.coordinator.num_aborts == 1
        and fleet.controller.coordinator.membership.num_workers == 1
    )
    for _ in range(5):
        fleet.turn()
    assert fleet.controller.coordinator.num_aborts == 1, "the change must not be retried at once"
    fleet.refused_kind = ""
    for _ in range(25):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.membership.num_workers == 2


@pytest.mark.parametrize("count", [0, 5, -1])
def test_an_invalid_number_of_workers_is_refused(count: int) -> None:
    fleet = FakeFleet().to(State.RUNNING)
    with pytest.raises(ConfigError, match=f"workers, got {count}"):
        fleet.controller.handle("scale", {"workers": count}, ())
    assert fleet.controller.coordinator.membership.wanted_workers == 1


def test_a_restarted_controller_keeps_the_wanted_number() -> None:
    first = FakeFleet(1, started=3).to(State.RUNNING)
    first.scale(3)
    second = FakeFleet(1, first.store, started=3).to(State.RUNNING)
    membership = second.controller.coordinator.membership
    assert (membership.num_workers, membership.wanted_workers) == (3, 3)


def test_changed_settings_override_the_stored_number() -> None:
    first = FakeFleet(1, started=3).to(State.RUNNING)
    first.scale(3)
    assert FakeFleet(2, first.store).to(State.RUNNING).controller.coordinator.membership.num_workers == 2
    assert FakeFleet(2, first.store).to(State.RUNNING).controller.coordinator.membership.num_workers == 2


@pytest.mark.parametrize(
    "plan", [b"", b"{}", b"[]", b'{"wish": 3}', b'{"wish": {"workers": "2", "configured": 1}}']
)
def test_an_incarnation_without_a_valid_plan_uses_the_settings(plan: bytes) -> None:
    store = MemoryStore()
    store.create("incarnations/00000001", plan)
    assert FakeFleet(1, store).to(State.RUNNING).controller.coordinator.membership.num_workers == 1


def test_a_scale_call_fails_when_another_controller_takes_over() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            fleet.controller.handle("scale", {"workers": 2}, ())
        except FencedError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    fleet.store.create("incarnations/00000009", b"{}")
    with pytest.raises(FencedError):
        for _ in range(200):
            fleet.turn(1.0)
    caller.join(10)
    assert len(errors) == 1


def test_leaving_without_new_steps_makes_no_commit() -> None:
    fleet = FakeFleet(2).to(State.RUNNING)
    fleet.leaving.add(Key("worker", 1))
    for _ in range(4):
        fleet.turn()
    assert (
        fleet.controller.coordinator.state is State.RUNNING and fleet.controller.coordinator.num_commits == 0
    )


def test_a_lost_worker_rolls_everyone_back_to_the_last_commit() -> None:
    fleet = FakeFleet(2).to(State.RUNNING)
    fleet.step = 4
    fleet.controller.handle("commit", {"timeout_s": 0}, ())
    fleet.to(State.COMMITTING).to(State.RUNNING)
    fleet.stop(Key("worker", 1))
    for _ in range(4):
        fleet.turn(1.0)
    fleet.sessions[Key("worker", 1)] = 2
    fleet.members.append(Key("worker", 1))
    fleet.to(State.RUNNING)
    assert (
        fleet.controller.coordinator.num_rollbacks == 1
        and fleet.controller.coordinator.membership.num_workers == 2
    )
    assert {c["manifest"] for c in fleet.restored().values()} == {"manifests/00000001"}


def test_the_wanted_number_can_change_while_a_lost_worker_is_awaited() -> None:
    fleet = FakeFleet(2).to(State.RUNNING)
    fleet.stop(Key("worker", 1))
    for _ in range(5):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.GATHERING
    assert fleet.scale(1)["running"] is True


@pytest.mark.parametrize("who", [Key("worker", 1), Key("worker", 0), Key("shard", 0)])
def test_a_leaving_member_gets_a_closing_commit_and_is_awaited(who: Key) -> None:
    fleet = FakeFleet(2).to(State.RUNNING)
    fleet.step, fleet.received = 5, [a for a in fleet.received if a[1]["kind"] == "restore"]
    fleet.leaving.add(who)
    for _ in range(8):
        fleet.turn()
    assert (
        fleet.controller.coordinator.state is State.GATHERING
        and fleet.controller.coordinator.reason == f"{who} leaves"
    )
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.step == 5
    assert (
        "resume" not in [c["kind"] for _, c in fleet.received]
        and fleet.controller.coordinator.num_rollbacks == 0
    )
    fleet.stop(who)
    for _ in range(5):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.GATHERING
    fleet.leaving.clear()
    fleet.sessions[who] = 2
    fleet.members.append(who)
    fleet.to(State.RUNNING)
    assert {c["manifest"] for c in fleet.restored().values()} == {
        last.name
    } and fleet.controller.coordinator.num_rollbacks == 0


def fleet_that_follows_workers(num_workers: int, started: int) -> FakeFleet:
    """A running fleet whose number of workers follows the connected ones."""
    fleet = FakeFleet(num_workers, started=started, follow_workers=True)
    for _ in range(40):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.RUNNING
    return fleet


def test_a_controller_that_follows_its_workers_trains_with_those_that_stay_connected() -> None:
    fleet = fleet_that_follows_workers(1, started=1)
    fleet.start_workers(3)
    for _ in range(25):
        fleet.turn(1.0)
    membership = fleet.controller.coordinator.membership
    assert membership.num_workers == 1, "a worker that is connected for less than 30 s may be lost again"
    for _ in range(20):
        fleet.turn(1.0)
    assert membership.num_workers == 3 and fleet.controller.coordinator.num_rollbacks == 0
    fleet.leaving.add(Key("worker", 2))
    for _ in range(10):
        fleet.turn(1.0)
    assert membership.num_workers == 2 and fleet.controller.coordinator.state is State.RUNNING
    assert fleet.controller.coordinator.num_rollbacks == 0, (
        "the trained steps must be committed before the worker leaves"
    )


def test_a_controller_that_follows_its_workers_gives_a_lost_one_up_after_30_s() -> None:
    fleet = fleet_that_follows_workers(3, started=3)
    membership = fleet.controller.coordinator.membership
    fleet.stop(Key("worker", 1))
    for _ in range(20):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.GATHERING and membership.wanted_workers == 3
    for _ in range(30):
        fleet.turn(1.0)
    assert membership.num_workers == 1, "workers are counted from worker 0 to the first absent one"
    assert fleet.controller.coordinator.state is State.RUNNING
    fleet.members.append(Key("worker", 1))
    for _ in range(45):
        fleet.turn(1.0)
    assert membership.num_workers == 3 and fleet.controller.coordinator.state is State.RUNNING


def test_a_controller_that_follows_its_workers_waits_for_worker_0_and_refuses_a_number() -> None:
    fleet = fleet_that_follows_workers(2, started=2)
    fleet.stop(Key("worker", 0))
    for _ in range(60):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.GATHERING
    assert fleet.controller.coordinator.membership.wanted_workers == 2
    with pytest.raises(ConfigError, match="follow_workers"):
        fleet.controller.handle("scale", {"workers": 1}, ())

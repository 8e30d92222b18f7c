"""How many workers train: a wish that is kept, carried out at a commit, and never at the price of what
runs."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from roostream.errors import ConfigError, FencedError
from roostream.runtime import manifest as manifests
from roostream.runtime.clock import FakeClock
from tests.trainer.control.test_coordinator import ANSWERS, FACTS
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.types import Key, State

MEET = "10.0.0.1:4000"


class Fleet:
    """A controller over a store, two shards and as many workers as are started."""

    def __init__(
        self,
        num_workers: int = 1,
        store: MemoryStore | None = None,
        started: int | None = None,
        long_poll_s: float = 0.0,
        follow_workers: bool = False,
    ) -> None:
        self.store, self.clock = store or MemoryStore(), FakeClock()
        facts = dataclasses.replace(FACTS, num_workers=num_workers, follow_workers=follow_workers)
        self.checked: list[str] = []  # manifests
        check = lambda manifest: self.checked.append(manifest.name)
        self.it = Controller(Coordinator(facts), self.store, self.clock, check=check, long_poll_s=long_poll_s)
        self.members = [Key("shard", 0), Key("shard", 1)]
        self.sessions: dict[Key, int] = {}
        self.incarnations: dict[Key, int] = {}
        self.asked: list[tuple[Key, dict[str, Any]]] = []
        self.refusing: str = ""
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
        return report | ({"meet": MEET} if key == Key("worker", 0) else {})

    def send(
        self, key: Key, results: list[dict[str, Any]] | None = None, report: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer to a beat."""
        header = {"role": key.role, "index": key.index, "session": self.sessions.get(key, 1)}
        header |= {"incarnation": self.incarnations.get(key, 0), "results": results or []}
        header["report"] = self.report(key) if report is None else report
        return dict(self.it.handle("beat", header, ())[0])

    def beat(self, key: Key, results: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        return self.send(key, results)["commands"]

    def answer(self, key: Key, command: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((key, command))
        if command["kind"] == self.refusing:
            return {"id": command["id"], "ok": False, "error": "not now"}
        if command["kind"] == "restore":
            self.incarnations[key] = command["incarnation"]
        answer = dict(ANSWERS.get((key.role, command["kind"]), {}))
        if command["kind"] == "cut":
            its = [c for k, c in self.asked if k == key and c["kind"] == "restore"][-1]["partitions"]
            answer |= {"offsets": {"samples": {p: 10 + p for p in its}}, "step": self.step}
        return {"id": command["id"], "ok": True, **answer}

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.it.turn()
        for key in list(self.members):
            self.beat(key, [self.answer(key, command) for command in self.beat(key)])
        self.it.turn()

    def to(self, state: State, seconds: float = 0.0) -> Fleet:
        for _ in range(30):
            if self.it.coordinator.state is state:
                return self
            self.turn(seconds)
        raise AssertionError(self.it.status())

    def call(self, method: str, /, **header: Any) -> dict[str, Any]:
        """What a call answers, beside turns."""
        answers: list[dict[str, Any]] = []
        caller = threading.Thread(target=lambda: answers.append(dict(self.it.handle(method, header, ())[0])))
        caller.start()
        for _ in range(200):
            self.turn()
            caller.join(0.005)
            if not caller.is_alive():
                return answers[0]
        raise AssertionError(self.it.status())

    def scale(self, count: int, timeout_s: float = 20.0) -> dict[str, Any]:
        return self.call("scale", workers=count, timeout_s=timeout_s)

    def restored(self) -> dict[Key, dict[str, Any]]:
        """The last RESTORE of those that are of the incarnation."""
        now = self.it.coordinator.incarnation
        return {k: c for k, c in self.asked if c["kind"] == "restore" and c["incarnation"] == now}


@pytest.mark.parametrize("count", [1, 3])
def test_restore_assigns_each_partition_once_with_the_rendezvous_address(count: int) -> None:
    fleet = Fleet(count).to(State.RUNNING)
    its = {k.index: c for k, c in fleet.restored().items() if k.role == "worker"}
    assert sorted(p for c in its.values() for p in c["partitions"]) == [0, 1, 2, 3]
    assert all(p % count == index for index, c in its.items() for p in c["partitions"])
    assert {(c["workers"], c["meet"]) for c in its.values()} == {(count, MEET if count > 1 else "")}
    assert all(
        set(c) == {"id", "kind", "incarnation", "manifest", "schema", "store"}
        for k, c in fleet.restored().items()
        if k.role == "shard"
    )


def test_several_workers_wait_for_the_rendezvous_address() -> None:
    fleet = Fleet(2)
    first, fleet.members = fleet.members[2], [*fleet.members[:2], fleet.members[3]]
    for _ in range(5):
        fleet.turn()
    header = {"role": "worker", "index": 0, "session": 1, "incarnation": 0, "results": [], "report": {}}
    fleet.it.handle("beat", header, ())
    assert fleet.it.coordinator.state is State.GATHERING
    fleet.members.append(first)
    fleet.to(State.RUNNING)


def test_scaling_commits_first_and_replays_nothing() -> None:
    fleet = Fleet().to(State.RUNNING)
    fleet.start_workers(3)
    for step, count in enumerate((2, 3, 1), 1):
        fleet.step, fleet.asked = step, [a for a in fleet.asked if a[1]["kind"] == "restore"]
        before = fleet.it.coordinator.incarnation
        assert fleet.scale(count) == {"workers": count, "running": True, "why": ""}
        assert fleet.it.coordinator.incarnation == before + 1 and fleet.it.coordinator.num_rollbacks == 0
        last = manifests.newest(fleet.store)
        assert last is not None and last.manifest.step == step
        kinds = [c["kind"] for _, c in fleet.asked]
        assert "cut" in kinds and "resume" not in kinds, "nobody trains between the commit and the restore"
        its = fleet.restored()
        assert {k for k in its if k.role == "worker"} == {Key("worker", i) for i in range(count)}
        assert {c["manifest"] for c in its.values()} == {last.name}
        assert sorted(last.manifest.offsets) == [("samples", p) for p in range(4)]


def test_workers_on_standby_may_come_and_go() -> None:
    fleet = Fleet(1, started=3).to(State.RUNNING)
    assert fleet.it.status()["workers"] == 1 and set(fleet.it.status()["members"]) >= {"worker 1", "worker 2"}
    standing = Key("worker", 2)
    fleet.stop(standing)
    for _ in range(5):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.RUNNING and fleet.it.coordinator.num_rollbacks == 0
    assert "worker 2" not in fleet.it.status()["members"]
    assert not any(key.role == "worker" and key.index > 0 for key, _ in fleet.asked)


def test_scaling_waits_for_missing_workers_without_stopping_training() -> None:
    fleet = Fleet().to(State.RUNNING)
    answer = fleet.scale(2, timeout_s=0.05)
    assert answer == {"workers": 1, "running": False, "why": "it waits for worker 1"}
    assert fleet.it.coordinator.state is State.RUNNING
    fleet.stop(Key("shard", 0))
    for _ in range(4):
        fleet.turn(1.0)
    fleet.sessions[Key("shard", 0)] = 2  # a rollback meanwhile doesn't wait for it either
    fleet.members.append(Key("shard", 0))
    fleet.to(State.RUNNING)
    assert fleet.it.coordinator.membership.num_workers == 1
    fleet.start_workers(2)
    for _ in range(25):
        fleet.turn(1.0)
    assert fleet.it.coordinator.membership.num_workers == 2 and fleet.it.coordinator.state is State.RUNNING


def test_metrics_addresses_follow_the_connected_workers() -> None:
    fleet = Fleet().to(State.RUNNING)
    assert fleet.it.worker_metrics_addresses() == {0: "h:0"}
    fleet.start_workers(2)
    fleet.turn()
    assert fleet.it.worker_metrics_addresses() == {0: "h:0", 1: "h:1"}, "it stands by"
    fleet.stop(Key("worker", 0))
    fleet.stop(Key("worker", 1))
    fleet.turn(4.0)
    assert fleet.it.worker_metrics_addresses() == {0: ""}, "one that trains is wanted, wherever it is"


def test_scaling_is_retried_after_a_refused_commit() -> None:
    fleet = Fleet(1, started=2).to(State.RUNNING)
    fleet.refusing, fleet.step = "freeze", 1
    assert fleet.scale(2, timeout_s=0.05)["running"] is False
    fleet.to(State.RUNNING)
    assert fleet.it.coordinator.num_aborts == 1 and fleet.it.coordinator.membership.num_workers == 1
    for _ in range(5):
        fleet.turn()
    assert fleet.it.coordinator.num_aborts == 1, "not again at once"
    fleet.refusing = ""
    for _ in range(25):
        fleet.turn(1.0)
    assert fleet.it.coordinator.membership.num_workers == 2


@pytest.mark.parametrize("count", [0, 5, -1])
def test_an_invalid_number_of_workers_is_refused(count: int) -> None:
    fleet = Fleet().to(State.RUNNING)
    with pytest.raises(ConfigError, match=f"workers, got {count}"):
        fleet.it.handle("scale", {"workers": count}, ())
    assert fleet.it.coordinator.membership.wanted_workers == 1


def test_a_restarted_controller_keeps_the_wanted_number() -> None:
    first = Fleet(1, started=3).to(State.RUNNING)
    first.scale(3)
    second = Fleet(1, first.store, started=3).to(State.RUNNING)
    membership = second.it.coordinator.membership
    assert (membership.num_workers, membership.wanted_workers) == (3, 3)


def test_changed_settings_override_the_stored_number() -> None:
    first = Fleet(1, started=3).to(State.RUNNING)
    first.scale(3)
    assert Fleet(2, first.store).to(State.RUNNING).it.coordinator.membership.num_workers == 2
    assert Fleet(2, first.store).to(State.RUNNING).it.coordinator.membership.num_workers == 2


@pytest.mark.parametrize(
    "left", [b"", b"{}", b"[]", b'{"wish": 3}', b'{"wish": {"workers": "2", "configured": 1}}']
)
def test_an_incarnation_without_a_plan_uses_the_settings(left: bytes) -> None:
    store = MemoryStore()
    store.create("incarnations/00000001", left)
    assert Fleet(1, store).to(State.RUNNING).it.coordinator.membership.num_workers == 1


def test_a_scale_call_fails_when_another_controller_takes_over() -> None:
    fleet = Fleet().to(State.RUNNING)
    told: list[BaseException] = []

    def call() -> None:
        try:
            fleet.it.handle("scale", {"workers": 2}, ())
        except FencedError as error:
            told.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    fleet.store.create("incarnations/00000009", b"{}")
    with pytest.raises(FencedError):
        for _ in range(200):
            fleet.turn(1.0)
    caller.join(10)
    assert len(told) == 1


def test_leaving_without_new_steps_makes_no_commit() -> None:
    fleet = Fleet(2).to(State.RUNNING)
    fleet.leaving.add(Key("worker", 1))
    for _ in range(4):
        fleet.turn()
    assert fleet.it.coordinator.state is State.RUNNING and fleet.it.coordinator.num_commits == 0


def test_a_lost_worker_rolls_everyone_back_to_the_last_commit() -> None:
    fleet = Fleet(2).to(State.RUNNING)
    fleet.step = 4
    fleet.it.handle("commit", {"timeout_s": 0}, ())
    fleet.to(State.COMMITTING).to(State.RUNNING)
    fleet.stop(Key("worker", 1))
    for _ in range(4):
        fleet.turn(1.0)
    fleet.sessions[Key("worker", 1)] = 2
    fleet.members.append(Key("worker", 1))
    fleet.to(State.RUNNING)
    assert fleet.it.coordinator.num_rollbacks == 1 and fleet.it.coordinator.membership.num_workers == 2
    assert {c["manifest"] for c in fleet.restored().values()} == {"manifests/00000001"}


def test_the_wanted_number_can_change_while_a_lost_worker_is_awaited() -> None:
    fleet = Fleet(2).to(State.RUNNING)
    fleet.stop(Key("worker", 1))
    for _ in range(5):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.GATHERING
    assert fleet.scale(1)["running"] is True


@pytest.mark.parametrize("who", [Key("worker", 1), Key("worker", 0), Key("shard", 0)])
def test_a_leaving_member_gets_a_closing_commit_and_is_awaited(who: Key) -> None:
    fleet = Fleet(2).to(State.RUNNING)
    fleet.step, fleet.asked = 5, [a for a in fleet.asked if a[1]["kind"] == "restore"]
    fleet.leaving.add(who)
    for _ in range(8):
        fleet.turn()
    assert fleet.it.coordinator.state is State.GATHERING and fleet.it.coordinator.reason == f"{who} leaves"
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.step == 5
    assert "resume" not in [c["kind"] for _, c in fleet.asked] and fleet.it.coordinator.num_rollbacks == 0
    fleet.stop(who)
    for _ in range(5):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.GATHERING
    fleet.leaving.clear()
    fleet.sessions[who] = 2
    fleet.members.append(who)
    fleet.to(State.RUNNING)
    assert {c["manifest"] for c in fleet.restored().values()} == {
        last.name
    } and fleet.it.coordinator.num_rollbacks == 0


def following(num_workers: int, started: int) -> Fleet:
    fleet = Fleet(num_workers, started=started, follow_workers=True)
    for _ in range(40):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.RUNNING
    return fleet


def test_a_controller_that_follows_its_workers_trains_with_those_that_stay_connected() -> None:
    fleet = following(1, started=1)
    fleet.start_workers(3)
    for _ in range(25):
        fleet.turn(1.0)
    membership = fleet.it.coordinator.membership
    assert membership.num_workers == 1, "a worker that is connected for less than 30 s may be lost again"
    for _ in range(20):
        fleet.turn(1.0)
    assert membership.num_workers == 3 and fleet.it.coordinator.num_rollbacks == 0
    fleet.leaving.add(Key("worker", 2))
    for _ in range(10):
        fleet.turn(1.0)
    assert membership.num_workers == 2 and fleet.it.coordinator.state is State.RUNNING
    assert fleet.it.coordinator.num_rollbacks == 0, "what it trained was committed before it left"


def test_a_controller_that_follows_its_workers_gives_a_lost_one_up_after_30_s() -> None:
    fleet = following(3, started=3)
    membership = fleet.it.coordinator.membership
    fleet.stop(Key("worker", 1))
    for _ in range(20):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.GATHERING and membership.wanted_workers == 3
    for _ in range(30):
        fleet.turn(1.0)
    assert membership.num_workers == 1, "workers are counted from worker 0 to the first absent one"
    assert fleet.it.coordinator.state is State.RUNNING
    fleet.members.append(Key("worker", 1))
    for _ in range(45):
        fleet.turn(1.0)
    assert membership.num_workers == 3 and fleet.it.coordinator.state is State.RUNNING


def test_a_controller_that_follows_its_workers_waits_for_worker_0_and_refuses_a_number() -> None:
    fleet = following(2, started=2)
    fleet.stop(Key("worker", 0))
    for _ in range(60):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.GATHERING
    assert fleet.it.coordinator.membership.wanted_workers == 2
    with pytest.raises(ConfigError, match="follow_workers"):
        fleet.it.handle("scale", {"workers": 1}, ())

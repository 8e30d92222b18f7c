"""A member of the controller: each command once, its result until it is known, beats whatever else
happens."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from roostream.errors import CheckpointError, ConfigError, FencedError, TransportError, UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.controller_agent import (
    REFUSED_S,
    STUCK_S,
    ControllerAgent,
    check_command_schema,
    error_result,
)
from roostream.runtime.rpc.transport import Answer, Arrays, Header
from roostream.runtime.thread_group import StopBudget


class FakeController:
    """Answers beats from a script; the last entry again and again."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception) -> None:
        self.answers, self.beats, self.closed = list(answers), [], 0
        self.changed = threading.Condition()
        self.said: dict[str, Any] = {}

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        assert method == "beat"
        with self.changed:
            self.beats.append(header)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self.changed.notify_all()
        if isinstance(answer, Exception):
            raise answer
        return {"commands": answer, "incarnation": 1, **self.said}, []

    def close(self) -> None:
        self.closed += 1

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 10)

    def results(self) -> list[dict[str, Any]]:
        return [result for beat in self.beats for result in beat["results"]]


def command(id_: int, kind: str = "freeze", incarnation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"id": id_, "kind": kind, "incarnation": incarnation, **fields}


ERRORS = {
    "damaged": CheckpointError("a segment is damaged"),
    "defect": ZeroDivisionError("oops"),
    "settings": ConfigError("expected width 8, got 9"),
    "away": UnavailableError("the disk is full"),
}


class Doer:
    """Notes what it does; the kinds in ERRORS fail."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.begun = threading.Event()

    def __call__(self, command: dict[str, Any]) -> dict[str, Any]:
        self.begun.set()
        assert self.hold.wait(10)
        self.done.append(command["id"])
        if error := ERRORS.get(command["kind"]):
            raise error
        return {"rows": 7}


def make_member(controller: FakeController, doer: Doer, **kwargs: Any) -> ControllerAgent:
    stop, given = threading.Event(), {"clock": FakeClock(), **kwargs}
    return ControllerAgent(lambda: controller, "shard", 2, doer, lambda: {"rows": 5}, stop, **given)


def do_all(member: ControllerAgent) -> None:
    while not member.commands.empty():
        got = member.commands.get()
        assert got is not None
        member.run(got)


def test_a_heartbeat_has_identity_and_report() -> None:
    controller = FakeController([])
    member = make_member(controller, Doer(), session=9)
    assert member.beat(controller) is False
    identity = {"role": "shard", "index": 2, "session": 9, "process": member.process, "incarnation": 0}
    assert controller.beats == [{**identity, "results": [], "report": {"rows": 5}}]


def test_a_command_is_executed_once_and_its_result_repeated() -> None:
    controller, doer = FakeController([command(1)]), Doer()
    member = make_member(controller, doer)
    assert member.beat(controller) is True and member.beat(controller) is False
    do_all(member)
    controller.answers = [TransportError("lost"), [command(1)], []]
    with pytest.raises(TransportError):
        member.beat(controller)
    member.beat(controller)
    member.beat(controller)  # it was given again: told again
    member.beat(controller)
    assert doer.done == [1]
    told = [beat["results"] for beat in controller.beats[2:]]
    result = {"id": 1, "ok": True, "rows": 7}
    assert told == [[result], [result], [result], []]


def test_the_same_number_of_another_incarnation_is_another_command() -> None:
    controller, doer = FakeController([command(1, "restore", 1)], [command(1, "restore", 2)]), Doer()
    member = make_member(controller, doer)
    for _ in range(2):
        member.beat(controller)
        do_all(member)
    assert doer.done == [1, 1] and member.incarnation == 2


def test_commands_are_done_in_the_order_of_their_ids() -> None:
    controller, doer = FakeController([command(3), command(1), command(2)]), Doer()
    member = make_member(controller, doer)
    member.beat(controller)
    do_all(member)
    assert doer.done == [1, 2, 3]


def test_a_withdrawn_command_is_never_started() -> None:
    controller, doer = FakeController([command(6, "abort")], [command(5, "freeze")], []), Doer()
    member = make_member(controller, doer)
    assert member.beat(controller) is True and member.beat(controller) is False
    do_all(member)
    member.beat(controller)
    assert doer.done == [6] and [result["id"] for result in controller.results()] == [6]


def test_two_threads_that_take_answers_at_once_queue_them_in_order() -> None:
    member = make_member(FakeController([]), Doer())
    barrier = threading.Barrier(2)

    def take(answers: list[list[dict[str, Any]]]) -> None:
        barrier.wait(10)
        for answer in answers:
            member.beat(FakeController(answer))

    threads = [
        threading.Thread(target=take, args=([[command(n)] for n in range(first, 200, 2)],))
        for first in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    member.commands.put(None)
    taken = [got["id"] for got in iter(member.commands.get, None)]
    assert taken == sorted(taken) and taken[-1] == 199


def test_an_abandoned_hanging_command_ends_the_process() -> None:
    clock, doer, stuck = FakeClock(), Doer(), []
    doer.hold.clear()
    controller = FakeController([command(1, "write")])
    member = make_member(controller, doer, clock=clock, on_stuck=stuck.append)
    member.beat(controller)
    running = threading.Thread(target=do_all, args=(member,))
    running.start()
    assert doer.begun.wait(10)
    clock.advance(1000)
    member.beat(controller)
    assert stuck == [], "nobody has given it up"
    controller.answers = [[command(2, "restore", 2)]]
    member.beat(controller)
    clock.advance(59)
    member.beat(controller)
    assert stuck == []
    clock.advance(2)
    member.beat(controller)
    assert stuck == ["command write was given up by the controller and still hangs after 61 s"]
    doer.hold.set()
    running.join(10)
    do_all(member)
    clock.advance(100)
    member.beat(controller)
    assert len(stuck) == 1


def test_a_restore_that_works_sets_the_incarnation_and_older_commands_are_refused() -> None:
    controller, doer = FakeController([command(1, "restore", 5)], [command(2, "freeze", 4)], []), Doer()
    member = make_member(controller, doer)
    member.beat(controller)
    do_all(member)
    assert member.beat(controller) is False
    do_all(member)
    assert controller.beats[1]["incarnation"] == 5 and doer.done == [1]
    member.run(command(3, "freeze", 4))
    member.beat(controller)
    refused = controller.beats[-1]["results"][0]
    assert refused["ok"] is False and "expected incarnation 5 or later, got 4" in refused["error"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("damaged", ("a segment is damaged", True, False, False)),
        ("away", ("the disk is full", False, True, False)),
        ("settings", ("expected width 8, got 9", False, False, True)),
        ("defect", ("a defect of Roostream: ZeroDivisionError('oops')", False, False, False)),
    ],
)
def test_an_error_is_reported_and_the_agent_continues(
    kind: str, expected: tuple[str, bool, bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    controller, doer = FakeController([command(1, kind), command(2)], []), Doer()
    member = make_member(controller, doer)
    member.beat(controller)
    do_all(member)
    member.beat(controller)
    told = {
        "id": 1,
        "ok": False,
        **dict(zip(("error", "damaged", "away", "permanent"), expected, strict=True)),
    }
    assert controller.beats[1]["results"] == [told, {"id": 2, "ok": True, "rows": 7}]
    assert member.incarnation == 0
    assert bool([r for r in caplog.records if r.exc_info]) == (kind == "defect")


def test_a_command_that_an_outage_fails_again_and_again_is_logged_once_a_minute_and_when_it_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock, is_away = FakeClock(), True

    def write(_: dict[str, Any]) -> dict[str, Any]:
        if is_away:
            raise UnavailableError("the store is away")
        return {}

    member = make_member(FakeController([]), write, clock=clock)  # type: ignore[arg-type]
    for id_ in range(20):
        member.run(command(id_, "write"))
        clock.advance(10)
    warnings = list(caplog.messages)
    assert warnings[0] == "write: the store is away" and len(warnings) == 4, warnings
    assert all("and 5 more like it" in line for line in warnings[1:])
    is_away = False
    caplog.clear()
    member.run(command(20, "write"))
    member.run(command(21, "write"))
    assert caplog.messages == ["write: succeeds again"]


def test_a_lost_controller_is_dialled_again_and_silence_is_counted() -> None:
    controller, doer = FakeController(TransportError("away"), FencedError("over")), Doer()
    clock, stop = FakeClock(), threading.Event()
    member = ControllerAgent(lambda: controller, "worker", 0, doer, dict, stop, clock=clock)
    member.start()
    controller.wait_for(lambda: member.silent_s > 60)
    controller.answers = [[]]
    controller.wait_for(lambda: member.silent_s < 60)
    stop.set()
    assert member.join()
    assert controller.closed == 2


def test_heartbeats_continue_during_a_command() -> None:
    controller, doer = FakeController([command(1)], []), Doer()
    doer.hold.clear()
    member = make_member(controller, doer).start()
    controller.wait_for(lambda: len(controller.beats) > 5)
    assert doer.done == [] and controller.results() == []
    doer.hold.set()
    controller.wait_for(lambda: len(controller.results()) > 0)
    assert controller.results()[0] == {"id": 1, "ok": True, "rows": 7}
    member.stop.set()
    assert member.join()


def test_a_result_does_not_wait_for_a_held_heartbeat() -> None:
    held, told = threading.Event(), threading.Event()

    class Holding(FakeController):
        def call(
            self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0
        ) -> Answer:
            if header["results"]:
                told.set()
            elif self.beats:
                held.wait(10)
            return super().call(method, header, arrays, timeout_s=timeout_s)

    controller = Holding([command(1)], [])
    member = make_member(controller, Doer()).start()
    assert told.wait(10) and not held.is_set()
    held.set()
    member.stop.set()
    assert member.join()


def test_join_reports_a_command_that_does_not_end() -> None:
    controller, doer = FakeController([command(1)], []), Doer()
    doer.hold.clear()
    member = make_member(controller, doer).start()
    controller.wait_for(lambda: len(controller.beats) > 2)
    member.stop.set()
    assert member.join(timeout_s=0.05) is False
    doer.hold.set()
    assert member.join()


def beaten(controller: FakeController, member: ControllerAgent) -> None:
    """One beat, as its thread makes it."""
    with contextlib.suppress(TransportError):
        member.beat(controller)


class Beating(FakeClock):
    """A clock on which a beat passes with each wait."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self.beat = beat

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        self.beat()
        return super().sleep(seconds, stop)


def leaver(controller: FakeController, seconds: float = 8.0) -> tuple[ControllerAgent, StopBudget]:
    stop = threading.Event()
    stop.set()
    member = make_member(controller, Doer())
    member.clock = Beating(lambda: beaten(controller, member))
    return member, StopBudget(stop, seconds, member.clock)


def test_a_leaving_member_waits_for_permission() -> None:
    controller = FakeController([])
    member, ending = leaver(controller)
    beaten(controller, member)
    free_at = len(controller.beats) + 3
    told = controller.call

    def call(*args: Any, **more: Any) -> Answer:
        answer, arrays = told(*args, **more)
        return {**answer, "free": len(controller.beats) >= free_at}, arrays

    controller.call = call  # type: ignore[method-assign]
    assert member.leave(ending, 1.0) is True
    assert [beat["report"].get("leaving", False) for beat in controller.beats] == [False, True, True, True]


def test_a_leaving_member_does_not_wait_for_an_unavailable_controller() -> None:
    controller = FakeController(TransportError("refused"))
    member, ending = leaver(controller)
    assert member.leave(ending, 1.0) is False and len(controller.beats) == 1


def test_a_leaving_member_leaves_at_its_deadline() -> None:
    member, ending = leaver(FakeController([]), seconds=3.0)
    assert member.leave(ending, 1.0) is False
    assert 0.9 <= ending.left_s() <= 1.0


def test_a_preempted_member_ends_within_the_notice() -> None:
    controller, stop = FakeController([]), threading.Event()
    ending = StopBudget(stop, 8.0, FakeClock())
    member = make_member(controller, Doer(), stop_budget=ending)
    member.beat(controller)
    assert not stop.is_set()
    controller.said = {"leave_s": 17.0}
    member.beat(controller)
    assert stop.is_set() and ending.left_s() == 17.0
    controller.said = {"leave_s": 300.0}
    member.beat(controller)
    assert ending.seconds == 17.0, "it is asked once"


def test_a_member_sends_its_last_result_before_it_ends() -> None:
    controller, doer = FakeController([command(1)]), Doer()
    member = make_member(controller, doer)
    member.beat(controller)
    do_all(member)
    controller.answers = [[]]
    member.stop.set()
    assert member.start().join()
    assert controller.beats[-1]["results"] == [{"id": 1, "ok": True, "rows": 7}]


def test_a_member_with_another_schema_waits() -> None:
    check_command_schema({"kind": "restore", "schema": "00000000000000ff"}, 255)
    check_command_schema({"kind": "restore"}, 255)  # of a controller that does not say
    with pytest.raises(
        UnavailableError, match="controller's schema 00000000000000fe, got 00000000000000ff"
    ) as caught:
        check_command_schema({"kind": "restore", "schema": "00000000000000fe"}, 255)
    assert error_result(caught.value)["away"], "it is asked again, and no manifest is passed over for it"


def test_a_command_that_makes_progress_does_not_end_the_process() -> None:
    """As a large RESTORE does that the controller has given up, because another shard refused."""
    controller, doer, stuck = FakeController([command(1, "restore")], [command(2, "restore", 2)]), Doer(), []
    doer.hold.clear()
    member = make_member(controller, doer, on_stuck=stuck.append)
    progress = iter(range(1000))
    member.report = lambda: {"progress": next(progress)}
    member.beat(controller)
    thread = threading.Thread(target=lambda: do_all(member), daemon=True)
    thread.start()
    assert doer.begun.wait(10)
    for _ in range(10):
        member.clock.sleep(STUCK_S / 2)
        member.beat(controller)
    assert not stuck
    member.report = lambda: {"progress": 0}
    for _ in range(4):
        member.clock.sleep(STUCK_S / 2)
        member.beat(controller)
    assert stuck
    doer.hold.set()
    thread.join(10)


def test_commands_of_an_incarnation_that_was_given_up_are_not_executed() -> None:
    controller, doer = FakeController([command(1, "restore")], [command(2, "restore", 2)]), Doer()
    member = make_member(controller, doer)
    member.beat(controller)
    member.beat(controller)
    do_all(member)
    assert doer.done == [2] and member.incarnation == 2


def test_a_process_that_is_refused_for_long_ends_with_the_sentence() -> None:
    controller = FakeController([])
    controller.said = {"refused": "two processes run as shard 2"}
    member = make_member(controller, Doer())
    for _ in range(2):
        member.beat(controller)
        member.check()
        member.clock.sleep(REFUSED_S / 2)
    member.beat(controller)
    assert member.leave(StopBudget(threading.Event(), 1.0, member.clock), 0.0) is False
    with pytest.raises(ConfigError, match="two processes run as shard 2"):
        member.check()


def test_a_failed_thread_is_an_error_of_the_program() -> None:
    def report() -> dict[str, Any]:
        raise ZeroDivisionError("a defect")

    member = make_member(FakeController([]), Doer())
    member.report = report
    member.start()
    assert member.stop.wait(10)
    assert member.leave(StopBudget(threading.Event(), 1.0, member.clock), 0.0) is False
    with pytest.raises(RuntimeError, match="agent-heartbeat"):
        member.check()
    member.join()

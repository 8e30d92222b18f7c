"""The agent with which a program follows the controller. Each command runs once, its result is sent until it
is acknowledged, and heartbeats never stop."""

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
    """Answers heartbeats from a script and repeats the last entry. An exception in the script is raised;
    `extra` is added to every answer."""

    def __init__(self, *answers: list[dict[str, Any]] | Exception) -> None:
        self.answers, self.beats, self.closed = list(answers), [], 0
        self.changed = threading.Condition()
        self.extra: dict[str, Any] = {}

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        assert method == "beat"
        with self.changed:
            self.beats.append(header)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self.changed.notify_all()
        if isinstance(answer, Exception):
            raise answer
        return {"commands": answer, "incarnation": 1, **self.extra}, []

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


class CommandHandler:
    """Records the ids of the commands it runs. The kinds in ERRORS fail; with `hold` cleared, every command
    blocks."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.started = threading.Event()

    def __call__(self, command: dict[str, Any]) -> dict[str, Any]:
        self.started.set()
        assert self.hold.wait(10)
        self.done.append(command["id"])
        if error := ERRORS.get(command["kind"]):
            raise error
        return {"rows": 7}


def make_agent(controller: FakeController, handler: CommandHandler, **kwargs: Any) -> ControllerAgent:
    stop, settings = threading.Event(), {"clock": FakeClock(), **kwargs}
    return ControllerAgent(lambda: controller, "shard", 2, handler, lambda: {"rows": 5}, stop, **settings)


def run_queued_commands(agent: ControllerAgent) -> None:
    while not agent.commands.empty():
        next_command = agent.commands.get()
        assert next_command is not None
        agent.run(next_command)


def test_a_heartbeat_has_identity_and_report() -> None:
    controller = FakeController([])
    agent = make_agent(controller, CommandHandler(), session=9)
    assert agent.beat(controller) is False
    identity = {"role": "shard", "index": 2, "session": 9, "process": agent.process, "incarnation": 0}
    assert controller.beats == [{**identity, "results": [], "report": {"rows": 5}}]


def test_a_command_is_executed_once_and_its_result_repeated() -> None:
    controller, handler = FakeController([command(1)]), CommandHandler()
    agent = make_agent(controller, handler)
    assert agent.beat(controller) is True and agent.beat(controller) is False
    run_queued_commands(agent)
    controller.answers = [TransportError("lost"), [command(1)], []]
    with pytest.raises(TransportError):
        agent.beat(controller)
    agent.beat(controller)
    agent.beat(controller)  # the controller sent it again, so the agent sends its result again
    agent.beat(controller)
    assert handler.done == [1]
    sent_results = [beat["results"] for beat in controller.beats[2:]]
    result = {"id": 1, "ok": True, "rows": 7}
    assert sent_results == [[result], [result], [result], []]


def test_the_same_number_of_another_incarnation_is_another_command() -> None:
    controller, handler = (
        FakeController([command(1, "restore", 1)], [command(1, "restore", 2)]),
        CommandHandler(),
    )
    agent = make_agent(controller, handler)
    for _ in range(2):
        agent.beat(controller)
        run_queued_commands(agent)
    assert handler.done == [1, 1] and agent.incarnation == 2


def test_commands_are_done_in_the_order_of_their_ids() -> None:
    controller, handler = FakeController([command(3), command(1), command(2)]), CommandHandler()
    agent = make_agent(controller, handler)
    agent.beat(controller)
    run_queued_commands(agent)
    assert handler.done == [1, 2, 3]


def test_a_withdrawn_command_is_never_started() -> None:
    controller, handler = FakeController([command(6, "abort")], [command(5, "freeze")], []), CommandHandler()
    agent = make_agent(controller, handler)
    assert agent.beat(controller) is True and agent.beat(controller) is False
    run_queued_commands(agent)
    agent.beat(controller)
    assert handler.done == [6] and [result["id"] for result in controller.results()] == [6]


def test_two_threads_that_take_answers_at_once_queue_them_in_order() -> None:
    agent = make_agent(FakeController([]), CommandHandler())
    barrier = threading.Barrier(2)

    def take(answers: list[list[dict[str, Any]]]) -> None:
        barrier.wait(10)
        for answer in answers:
            agent.beat(FakeController(answer))

    threads = [
        threading.Thread(target=take, args=([[command(n)] for n in range(first, 200, 2)],))
        for first in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    agent.commands.put(None)
    taken = [next_command["id"] for next_command in iter(agent.commands.get, None)]
    assert taken == sorted(taken) and taken[-1] == 199


def test_an_abandoned_hanging_command_ends_the_process() -> None:
    clock, handler, stuck = FakeClock(), CommandHandler(), []
    handler.hold.clear()
    controller = FakeController([command(1, "write")])
    agent = make_agent(controller, handler, clock=clock, on_stuck=stuck.append)
    agent.beat(controller)
    running = threading.Thread(target=run_queued_commands, args=(agent,))
    running.start()
    assert handler.started.wait(10)
    clock.advance(1000)
    agent.beat(controller)
    assert stuck == [], "the controller has not abandoned the command"
    controller.answers = [[command(2, "restore", 2)]]
    agent.beat(controller)
    clock.advance(59)
    agent.beat(controller)
    assert stuck == []
    clock.advance(2)
    agent.beat(controller)
    assert stuck == ["command write was given up by the controller and still hangs after 61 s"]
    handler.hold.set()
    running.join(10)
    run_queued_commands(agent)
    clock.advance(100)
    agent.beat(controller)
    assert len(stuck) == 1


def test_a_restore_that_works_sets_the_incarnation_and_older_commands_are_refused() -> None:
    controller, handler = (
        FakeController([command(1, "restore", 5)], [command(2, "freeze", 4)], []),
        CommandHandler(),
    )
    agent = make_agent(controller, handler)
    agent.beat(controller)
    run_queued_commands(agent)
    assert agent.beat(controller) is False
    run_queued_commands(agent)
    assert controller.beats[1]["incarnation"] == 5 and handler.done == [1]
    agent.run(command(3, "freeze", 4))
    agent.beat(controller)
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
    controller, handler = FakeController([command(1, kind), command(2)], []), CommandHandler()
    agent = make_agent(controller, handler)
    agent.beat(controller)
    run_queued_commands(agent)
    agent.beat(controller)
    failed_result = {
        "id": 1,
        "ok": False,
        **dict(zip(("error", "damaged", "away", "permanent"), expected, strict=True)),
    }
    assert controller.beats[1]["results"] == [failed_result, {"id": 2, "ok": True, "rows": 7}]
    assert agent.incarnation == 0
    assert bool([r for r in caplog.records if r.exc_info]) == (kind == "defect")


def test_a_command_that_an_outage_fails_again_and_again_is_logged_once_a_minute_and_when_it_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    clock, is_unavailable = FakeClock(), True

    def write(_: dict[str, Any]) -> dict[str, Any]:
        if is_unavailable:
            raise UnavailableError("the store is away")
        return {}

    agent = make_agent(FakeController([]), write, clock=clock)  # type: ignore[arg-type]
    for id_ in range(20):
        agent.run(command(id_, "write"))
        clock.advance(10)
    warnings = list(caplog.messages)
    assert warnings[0] == "write: the store is away" and len(warnings) == 4, warnings
    assert all("and 5 more like it" in line for line in warnings[1:])
    is_unavailable = False
    caplog.clear()
    agent.run(command(20, "write"))
    agent.run(command(21, "write"))
    assert caplog.messages == ["write: succeeds again"]


def test_a_lost_controller_is_dialled_again_and_silence_is_counted() -> None:
    controller, handler = FakeController(TransportError("away"), FencedError("over")), CommandHandler()
    clock, stop = FakeClock(), threading.Event()
    agent = ControllerAgent(lambda: controller, "worker", 0, handler, dict, stop, clock=clock)
    agent.start()
    controller.wait_for(lambda: agent.silent_s > 60)
    controller.answers = [[]]
    controller.wait_for(lambda: agent.silent_s < 60)
    stop.set()
    assert agent.join()
    assert controller.closed == 2


def test_heartbeats_continue_during_a_command() -> None:
    controller, handler = FakeController([command(1)], []), CommandHandler()
    handler.hold.clear()
    agent = make_agent(controller, handler).start()
    controller.wait_for(lambda: len(controller.beats) > 5)
    assert handler.done == [] and controller.results() == []
    handler.hold.set()
    controller.wait_for(lambda: len(controller.results()) > 0)
    assert controller.results()[0] == {"id": 1, "ok": True, "rows": 7}
    agent.stop.set()
    assert agent.join()


def test_a_result_does_not_wait_for_a_held_heartbeat() -> None:
    heartbeat_may_return, result_arrived = threading.Event(), threading.Event()

    class HoldsHeartbeats(FakeController):
        def call(
            self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0
        ) -> Answer:
            if header["results"]:
                result_arrived.set()
            elif self.beats:
                heartbeat_may_return.wait(10)
            return super().call(method, header, arrays, timeout_s=timeout_s)

    controller = HoldsHeartbeats([command(1)], [])
    agent = make_agent(controller, CommandHandler()).start()
    assert result_arrived.wait(10) and not heartbeat_may_return.is_set()
    heartbeat_may_return.set()
    agent.stop.set()
    assert agent.join()


def test_join_reports_a_command_that_does_not_end() -> None:
    controller, handler = FakeController([command(1)], []), CommandHandler()
    handler.hold.clear()
    agent = make_agent(controller, handler).start()
    controller.wait_for(lambda: len(controller.beats) > 2)
    agent.stop.set()
    assert agent.join(timeout_s=0.05) is False
    handler.hold.set()
    assert agent.join()


def send_heartbeat(controller: FakeController, agent: ControllerAgent) -> None:
    """Send one heartbeat, as the agent's thread does."""
    with contextlib.suppress(TransportError):
        agent.beat(controller)


class HeartbeatClock(FakeClock):
    """A clock on which one heartbeat is sent during each wait."""

    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self.beat = beat

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        self.beat()
        return super().sleep(seconds, stop)


def leaving_agent(controller: FakeController, seconds: float = 8.0) -> tuple[ControllerAgent, StopBudget]:
    stop = threading.Event()
    stop.set()
    agent = make_agent(controller, CommandHandler())
    agent.clock = HeartbeatClock(lambda: send_heartbeat(controller, agent))
    return agent, StopBudget(stop, seconds, agent.clock)


def test_a_leaving_agent_waits_for_permission() -> None:
    controller = FakeController([])
    agent, budget = leaving_agent(controller)
    send_heartbeat(controller, agent)
    free_at = len(controller.beats) + 3
    original_call = controller.call

    def call(*args: Any, **kwargs: Any) -> Answer:
        answer, arrays = original_call(*args, **kwargs)
        return {**answer, "free": len(controller.beats) >= free_at}, arrays

    controller.call = call  # type: ignore[method-assign]
    assert agent.leave(budget, 1.0) is True
    assert [beat["report"].get("leaving", False) for beat in controller.beats] == [False, True, True, True]


def test_a_leaving_agent_does_not_wait_for_an_unavailable_controller() -> None:
    controller = FakeController(TransportError("refused"))
    agent, budget = leaving_agent(controller)
    assert agent.leave(budget, 1.0) is False and len(controller.beats) == 1


def test_a_leaving_agent_leaves_at_its_deadline() -> None:
    agent, budget = leaving_agent(FakeController([]), seconds=3.0)
    assert agent.leave(budget, 1.0) is False
    assert 0.9 <= budget.left_s() <= 1.0


def test_a_preempted_agent_ends_within_the_notice() -> None:
    controller, stop = FakeController([]), threading.Event()
    budget = StopBudget(stop, 8.0, FakeClock())
    agent = make_agent(controller, CommandHandler(), stop_budget=budget)
    agent.beat(controller)
    assert not stop.is_set()
    controller.extra = {"leave_s": 17.0}
    agent.beat(controller)
    assert stop.is_set() and budget.left_s() == 17.0
    controller.extra = {"leave_s": 300.0}
    agent.beat(controller)
    assert budget.seconds == 17.0, "only the first notice counts"


def test_an_agent_sends_its_last_result_before_it_ends() -> None:
    controller, handler = FakeController([command(1)]), CommandHandler()
    agent = make_agent(controller, handler)
    agent.beat(controller)
    run_queued_commands(agent)
    controller.answers = [[]]
    agent.stop.set()
    assert agent.start().join()
    assert controller.beats[-1]["results"] == [{"id": 1, "ok": True, "rows": 7}]


def test_an_agent_with_another_schema_waits() -> None:
    check_command_schema({"kind": "restore", "schema": "00000000000000ff"}, 255)
    check_command_schema({"kind": "restore"}, 255)  # from a controller that does not send its schema
    with pytest.raises(
        UnavailableError, match="controller's schema 00000000000000fe, got 00000000000000ff"
    ) as caught:
        check_command_schema({"kind": "restore", "schema": "00000000000000fe"}, 255)
    assert error_result(caught.value)["away"], (
        "the command must be retried, and no manifest may be skipped because of it"
    )


def test_a_command_that_makes_progress_does_not_end_the_process() -> None:
    """A large RESTORE may go on after the controller gave it up because another shard refused."""
    controller, handler, stuck = (
        FakeController([command(1, "restore")], [command(2, "restore", 2)]),
        CommandHandler(),
        [],
    )
    handler.hold.clear()
    agent = make_agent(controller, handler, on_stuck=stuck.append)
    progress = iter(range(1000))
    agent.report = lambda: {"progress": next(progress)}
    agent.beat(controller)
    thread = threading.Thread(target=lambda: run_queued_commands(agent), daemon=True)
    thread.start()
    assert handler.started.wait(10)
    for _ in range(10):
        agent.clock.sleep(STUCK_S / 2)
        agent.beat(controller)
    assert not stuck
    agent.report = lambda: {"progress": 0}
    for _ in range(4):
        agent.clock.sleep(STUCK_S / 2)
        agent.beat(controller)
    assert stuck
    handler.hold.set()
    thread.join(10)


def test_commands_of_an_incarnation_that_was_given_up_are_not_executed() -> None:
    controller, handler = (
        FakeController([command(1, "restore")], [command(2, "restore", 2)]),
        CommandHandler(),
    )
    agent = make_agent(controller, handler)
    agent.beat(controller)
    agent.beat(controller)
    run_queued_commands(agent)
    assert handler.done == [2] and agent.incarnation == 2


def test_a_process_that_stays_refused_ends_with_the_controllers_reason() -> None:
    controller = FakeController([])
    controller.extra = {"refused": "two processes run as shard 2"}
    agent = make_agent(controller, CommandHandler())
    for _ in range(2):
        agent.beat(controller)
        agent.check()
        agent.clock.sleep(REFUSED_S / 2)
    agent.beat(controller)
    assert agent.leave(StopBudget(threading.Event(), 1.0, agent.clock), 0.0) is False
    with pytest.raises(ConfigError, match="two processes run as shard 2"):
        agent.check()


def test_a_failed_thread_is_an_error_of_the_program() -> None:
    def report() -> dict[str, Any]:
        raise ZeroDivisionError("a defect")

    agent = make_agent(FakeController([]), CommandHandler())
    agent.report = report
    agent.start()
    assert agent.stop.wait(10)
    assert agent.leave(StopBudget(threading.Event(), 1.0, agent.clock), 0.0) is False
    with pytest.raises(RuntimeError, match="agent-heartbeat"):
        agent.check()
    agent.join()

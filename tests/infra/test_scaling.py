"""A stack runs as many workers and readers as the controller asks for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from infra import scaling as scaling_module
from infra.scaling import Scaling, reader_steps, worker_steps
from roostream.runtime.rpc.server import RpcServer

READY = {0: "ready", 1: "ready", 2: "ready"}


@pytest.mark.parametrize(
    ("wanted", "training", "state", "workers", "stopped_by_scaling", "start", "stop", "case"),
    [
        (
            2,
            1,
            "running",
            {0: "ready"},
            set(),
            [1],
            [],
            "a missing worker is started before training uses it",
        ),
        (3, 1, "running", {0: "ready", 1: "starting"}, set(), [2], [], "a starting worker counts as running"),
        (
            1,
            2,
            "running",
            {0: "ready", 1: "ready"},
            set(),
            [],
            [],
            "the work of worker 1 is not committed yet",
        ),
        (1, 1, "restoring", READY, set(), [], [], "the next incarnation does not train yet"),
        (1, 1, "running", READY, set(), [], [1, 2], "surplus workers are stopped"),
        (
            1,
            1,
            "running",
            {0: "ready", 1: "stopped", 2: "failed"},
            set(),
            [],
            [],
            "a worker that does not run is not stopped",
        ),
        (
            2,
            1,
            "running",
            {0: "ready", 1: "stopped"},
            {1},
            [1],
            [],
            "a worker that scaling stopped is started again",
        ),
        (
            2,
            2,
            "gathering",
            {0: "ready", 1: "stopped"},
            set(),
            [],
            [],
            "a worker that a user stopped stays stopped",
        ),
        (
            2,
            2,
            "gathering",
            {0: "ready", 1: "failed"},
            set(),
            [],
            [],
            "a worker that died too often stays down",
        ),
        (2, 2, "held", {0: "held", 1: "held"}, set(), [], [], "held workers stay held during the hold"),
        (
            2,
            2,
            "gathering",
            {0: "held", 1: "held"},
            set(),
            [0, 1],
            [],
            "held workers are started after the hold",
        ),
        (1, 2, "gathering", {0: "held", 1: "held"}, set(), [0], [], "only the wanted workers are started"),
        (2, 1, "held", {0: "held"}, set(), [], [], "no worker is started during a hold"),
        (2, 1, "running", {}, set(), [], [], "a stack without workers"),
        (2, 1, "running", {0: "stopped"}, set(), [], [], "a user stopped training"),
        (1, 1, "running", {0: "ready"}, set(), [], [], "nothing to do"),
    ],
)
def test_which_workers_are_started_and_stopped(
    wanted: int,
    training: int,
    state: str,
    workers: Mapping[int, str],
    stopped_by_scaling: set[int],
    start: list[int],
    stop: list[int],
    case: str,
) -> None:
    assert worker_steps(wanted, training, state, workers, stopped_by_scaling) == (start, stop), case


class FakePrograms:
    """Programs that are ready as soon as they are started."""

    def __init__(self) -> None:
        self.states: dict[str, dict[int, str]] = {"worker": {0: "ready"}, "reader": {}}

    def copies(self, program: str) -> dict[int, str]:
        return dict(self.states[program])

    def start_copy(self, program: str, number: int) -> None:
        self.states[program][number] = "ready"

    def stop_copy(self, program: str, number: int) -> None:
        self.states[program][number] = "stopped"

    def remove_copy(self, program: str, number: int) -> None:
        del self.states[program][number]


def test_workers_follow_the_controller() -> None:
    programs = FakePrograms()
    scaling = Scaling(programs, "127.0.0.1:1")

    def apply_status(**status: Any) -> dict[int, str]:
        scaling.apply({"state": "running", **status})
        return programs.states["worker"]

    assert apply_status(wanted_workers=2, workers=1) == {0: "ready", 1: "ready"}
    assert apply_status(wanted_workers=1, workers=2) == {0: "ready", 1: "ready"}
    assert apply_status(wanted_workers=1, workers=1) == {0: "ready", 1: "stopped"}
    assert apply_status(wanted_workers=2, workers=1) == {0: "ready", 1: "ready"}
    programs.stop_copy("worker", 1)
    assert apply_status(wanted_workers=2, workers=2) == {0: "ready", 1: "stopped"}
    scaling.close()


def test_scaling_goes_on_after_an_unexpected_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scaling_module, "_POLL_S", 0.01)
    answers = iter([{"wanted_workers": None}, {"state": "running", "wanted_workers": 2, "workers": 1}])
    server = RpcServer(lambda method, header, arrays: (next(answers), ()), "127.0.0.1").start()
    programs = FakePrograms()
    scaling = Scaling(programs, server.address).open()
    end_s = time.monotonic() + 10
    while len(programs.states["worker"]) < 2 and time.monotonic() < end_s:
        time.sleep(0.01)
    scaling.close()
    server.stop()
    assert programs.states["worker"] == {0: "ready", 1: "ready"}
    assert "cannot be scaled now" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "state", "readers", "start", "stop", "case"),
    [
        (3, "running", {0: "ready"}, [1, 2], [], "training waits for readers, so more are started"),
        (
            1,
            "running",
            {0: "ready", 1: "ready", 2: "starting"},
            [],
            [1, 2],
            "readers wait for training, so some are stopped",
        ),
        (0, "running", {0: "ready"}, [], [0], "the session is over"),
        (0, "gathering", {0: "ready"}, [], [], "the need for readers is not known yet"),
        (0, "committing", {0: "ready"}, [], [0], "the need for readers is also known during a commit"),
        (
            2,
            "running",
            {0: "ready", 1: "stopping"},
            [],
            [],
            "a stopping reader is started after it has ended",
        ),
        (2, "running", {0: "ready", 1: "stopped"}, [], [], "a reader that a user stopped stays stopped"),
        (1, "running", {0: "failed"}, [], [], "a reader that died too often stays down"),
    ],
)
def test_which_readers_are_started_and_ended(
    wanted: int, state: str, readers: Mapping[int, str], start: list[int], stop: list[int], case: str
) -> None:
    assert reader_steps(wanted, state, readers) == (start, stop), case


def test_readers_follow_the_controller_in_a_stack_that_has_readers() -> None:
    programs = FakePrograms()
    scaling = Scaling(programs, "127.0.0.1:1")

    def apply_wanted_readers(wanted: int) -> list[int]:
        scaling.apply({"state": "running", "wanted_workers": 1, "workers": 1, "readers": {"wanted": wanted}})
        return sorted(programs.states["reader"])

    assert apply_wanted_readers(2) == [], "a stack without readers must not start any"
    programs.start_copy("reader", 0)
    assert apply_wanted_readers(3) == [0, 1, 2]
    assert apply_wanted_readers(1) == [0]
    assert apply_wanted_readers(0) == [] and apply_wanted_readers(2) == [0, 1], (
        "readers must be started again for the next session"
    )
    scaling.apply({"state": "running", "wanted_workers": 1, "workers": 1, "readers": None})
    assert sorted(programs.states["reader"]) == [0, 1]
    scaling.close()

"""A stack runs as many workers and readers as the controller asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from infra.scaling import Scaling, reader_steps, worker_steps

READY = {0: "ready", 1: "ready", 2: "ready"}


@pytest.mark.parametrize(
    ("wanted", "training", "state", "workers", "stopped_by_scaling", "start", "stop", "why"),
    [
        (
            2,
            1,
            "running",
            {0: "ready"},
            set(),
            [1],
            [],
            "the missing one is started before it can be trained with",
        ),
        (3, 1, "running", {0: "ready", 1: "starting"}, set(), [2], [], "one that starts is there"),
        (1, 2, "running", {0: "ready", 1: "ready"}, set(), [], [], "its work is not committed yet"),
        (1, 1, "restoring", READY, set(), [], [], "the next incarnation is not up yet"),
        (1, 1, "running", READY, set(), [], [1, 2], "they stand by for nothing"),
        (
            1,
            1,
            "running",
            {0: "ready", 1: "stopped", 2: "failed"},
            set(),
            [],
            [],
            "what doesn't run is not stopped",
        ),
        (2, 1, "running", {0: "ready", 1: "stopped"}, {1}, [1], [], "what was stopped here is started again"),
        (2, 2, "gathering", {0: "ready", 1: "stopped"}, set(), [], [], "what a person stopped stays stopped"),
        (2, 2, "gathering", {0: "ready", 1: "failed"}, set(), [], [], "so does what died too often"),
        (2, 2, "held", {0: "held", 1: "held"}, set(), [], [], "they rest"),
        (2, 2, "gathering", {0: "held", 1: "held"}, set(), [0, 1], [], "the hold is over"),
        (1, 2, "gathering", {0: "held", 1: "held"}, set(), [0], [], "only those that are wanted"),
        (2, 1, "held", {0: "held"}, set(), [], [], "none is added to a hold"),
        (2, 1, "running", {}, set(), [], [], "a stack without training"),
        (2, 1, "running", {0: "stopped"}, set(), [], [], "training was stopped"),
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
    why: str,
) -> None:
    assert worker_steps(wanted, training, state, workers, stopped_by_scaling) == (start, stop), why


class Started:
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
    programs = Started()
    scaling = Scaling(programs, "127.0.0.1:1")

    def look(**status: Any) -> dict[int, str]:
        scaling.apply({"state": "running", **status})
        return programs.states["worker"]

    assert look(wanted_workers=2, workers=1) == {0: "ready", 1: "ready"}
    assert look(wanted_workers=1, workers=2) == {0: "ready", 1: "ready"}
    assert look(wanted_workers=1, workers=1) == {0: "ready", 1: "stopped"}
    assert look(wanted_workers=2, workers=1) == {0: "ready", 1: "ready"}
    programs.stop_copy("worker", 1)
    assert look(wanted_workers=2, workers=2) == {0: "ready", 1: "stopped"}
    scaling.close()


@pytest.mark.parametrize(
    ("wanted", "state", "readers", "start", "stop", "why"),
    [
        (3, "running", {0: "ready"}, [1, 2], [], "training waits"),
        (1, "running", {0: "ready", 1: "ready", 2: "starting"}, [], [1, 2], "they wait for training"),
        (0, "running", {0: "ready"}, [], [0], "the session is over"),
        (0, "gathering", {0: "ready"}, [], [], "it isn't known yet"),
        (0, "committing", {0: "ready"}, [], [0], "it is known during a commit, too"),
        (2, "running", {0: "ready", 1: "stopping"}, [], [], "it is started when it has ended"),
        (2, "running", {0: "ready", 1: "stopped"}, [], [], "what a person stopped stays stopped"),
        (1, "running", {0: "failed"}, [], [], "so does what died too often"),
    ],
)
def test_which_readers_are_started_and_ended(
    wanted: int, state: str, readers: Mapping[int, str], start: list[int], stop: list[int], why: str
) -> None:
    assert reader_steps(wanted, state, readers) == (start, stop), why


def test_readers_follow_the_controller_in_a_stack_that_has_readers() -> None:
    programs = Started()
    scaling = Scaling(programs, "127.0.0.1:1")

    def look(wanted: int) -> list[int]:
        scaling.apply({"state": "running", "wanted_workers": 1, "workers": 1, "readers": {"wanted": wanted}})
        return sorted(programs.states["reader"])

    assert look(2) == [], "workers of this stack read for themselves"
    programs.start_copy("reader", 0)
    assert look(3) == [0, 1, 2]
    assert look(1) == [0]
    assert look(0) == [] and look(2) == [0, 1], "another session"
    scaling.apply({"state": "running", "wanted_workers": 1, "workers": 1, "readers": None})
    assert sorted(programs.states["reader"]) == [0, 1]
    scaling.close()

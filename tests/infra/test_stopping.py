"""The order in which a stack ends, and what is told of it when a step fails."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from infra.child import Program, StopRank
from infra.home import Home
from infra.places import Endpoints
from infra.stopping import Stopped, stop
from roostream.runtime.rpc.server import RpcServer

NOBODY = "127.0.0.1:1"


@dataclasses.dataclass
class Slot:
    program: Program
    state: str = "ready"


class FakeSupervisor:
    """Programs by name; notes who was stopped together, and says that `stuck` ones had to be killed."""

    def __init__(self, ranks: dict[str, StopRank], stuck: tuple[str, ...] = ()) -> None:
        self.slots = {name: Slot(program(name, rank)) for name, rank in ranks.items()}
        self.stuck, self.halting, self.stopped = stuck, False, list[list[str]]()

    def stop(self, names: list[str]) -> list[str]:
        self.stopped.append(names)
        return [name for name in names if name in self.stuck]


def program(name: str, rank: StopRank) -> Program:
    return Program(name=name, command=(), log=Path("log"), env={}, stop_rank=rank)


def endpoints(controller: str = NOBODY) -> Endpoints:
    return Endpoints(
        kafka="", redis="", flink=f"http://{NOBODY}", serving="", controller=controller, shards=(), metrics={}
    )


def stopped(supervisor: Any, tmp_path: Path, controller: str = NOBODY) -> Stopped:
    return stop(supervisor, endpoints(controller), Home(tmp_path))


def test_programs_stop_by_rank_those_of_one_rank_together(tmp_path: Path) -> None:
    ranks = {
        "kafka": StopRank.KAFKA,
        "shard-0": StopRank.SHARD,
        "shard-1": StopRank.SHARD,
        "serving": StopRank.SERVING,
        "simulate": StopRank.TRAFFIC,
    }
    supervisor = FakeSupervisor(ranks)
    done = stopped(supervisor, tmp_path)
    assert supervisor.halting
    assert supervisor.stopped == [["simulate"], ["serving"], ["shard-0", "shard-1"], ["kafka"]]
    assert str(done) == "everything stopped in order, nothing was cut off"


def test_what_had_to_be_killed_is_told(tmp_path: Path) -> None:
    done = stopped(FakeSupervisor({"serving": StopRank.SERVING}, stuck=("serving",)), tmp_path)
    assert done.num_cut_off == 1 and str(done) == "stopped; cut off: serving"


def test_the_last_commit_comes_before_the_worker_ends(tmp_path: Path) -> None:
    supervisor = FakeSupervisor({"worker": StopRank.WORKER, "controller": StopRank.CONTROLLER})
    commits: list[int] = []

    def handle(method: str, header: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        assert method == "commit"
        commits.append(len(supervisor.stopped))
        return {}, []

    server = RpcServer(handle).start()
    try:
        done = stopped(supervisor, tmp_path, server.address)
    finally:
        server.stop()
    assert commits == [0] and supervisor.stopped == [["worker"], ["controller"]] and not done.missed


def test_a_commit_that_fails_is_told_and_the_rest_still_stops(tmp_path: Path) -> None:
    supervisor = FakeSupervisor({"worker": StopRank.WORKER, "controller": StopRank.CONTROLLER})
    done = stopped(supervisor, tmp_path)
    assert done.missed == ["commit"] and supervisor.stopped == [["worker"], ["controller"]]


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_nobody_is_asked_to_commit_without_a_controller_that_is_ready(tmp_path: Path, state: str) -> None:
    supervisor = FakeSupervisor({"worker": StopRank.WORKER, "controller": StopRank.CONTROLLER})
    supervisor.slots["controller"].state = state
    assert stopped(supervisor, tmp_path).missed == []


def test_a_cluster_that_does_not_answer_costs_its_savepoint_only(tmp_path: Path) -> None:
    supervisor = FakeSupervisor({"flink-jm": StopRank.FLINK, "kafka": StopRank.KAFKA})
    done = stopped(supervisor, tmp_path)
    assert done.missed == ["savepoint"] and supervisor.stopped == [["flink-jm"], ["kafka"]]

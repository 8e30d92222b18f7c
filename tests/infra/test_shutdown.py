"""The stop order of a stack, and the report of failed steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from infra.child import Program, StopRank
from infra.home import Home
from infra.ports import Endpoints
from infra.shutdown import ShutdownReport, shut_down
from roostream.runtime.rpc.server import RpcServer

UNREACHABLE = "127.0.0.1:1"


@dataclasses.dataclass
class Slot:
    """A program with its state, as the supervisor has it."""

    program: Program
    state: str = "ready"


class FakeSupervisor:
    """Records which programs are stopped together. Programs in `stuck` count as killed."""

    def __init__(self, ranks: dict[str, StopRank], stuck: tuple[str, ...] = ()) -> None:
        self.slots = {name: Slot(program(name, rank)) for name, rank in ranks.items()}
        self.stuck, self.halting, self.stopped = stuck, False, list[list[str]]()

    def stop(self, names: list[str]) -> list[str]:
        self.stopped.append(names)
        return [name for name in names if name in self.stuck]


def program(name: str, rank: StopRank) -> Program:
    return Program(name=name, command=(), log=Path("log"), env={}, stop_rank=rank)


def endpoints(controller: str = UNREACHABLE) -> Endpoints:
    return Endpoints(
        kafka="",
        redis="",
        flink=f"http://{UNREACHABLE}",
        serving="",
        controller=controller,
        shards=(),
        metrics={},
    )


def shut_down_with(supervisor: Any, tmp_path: Path, controller: str = UNREACHABLE) -> ShutdownReport:
    return shut_down(supervisor, endpoints(controller), Home(tmp_path))


def test_programs_stop_by_rank(tmp_path: Path) -> None:
    ranks = {
        "kafka": StopRank.KAFKA,
        "shard-0": StopRank.SHARD,
        "shard-1": StopRank.SHARD,
        "serving": StopRank.SERVING,
        "simulate": StopRank.TRAFFIC,
    }
    supervisor = FakeSupervisor(ranks)
    result = shut_down_with(supervisor, tmp_path)
    assert supervisor.halting
    assert supervisor.stopped == [["simulate"], ["serving"], ["shard-0", "shard-1"], ["kafka"]]
    assert str(result) == "everything stopped in order, nothing was cut off"


def test_killed_programs_are_reported(tmp_path: Path) -> None:
    result = shut_down_with(FakeSupervisor({"serving": StopRank.SERVING}, stuck=("serving",)), tmp_path)
    assert result.num_cut_off == 1 and str(result) == "stopped; cut off: serving"


def test_the_last_commit_comes_before_the_worker_ends(tmp_path: Path) -> None:
    supervisor = FakeSupervisor({"worker": StopRank.WORKER, "controller": StopRank.CONTROLLER})
    commits: list[int] = []

    def handle(method: str, header: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        assert method == "commit"
        commits.append(len(supervisor.stopped))
        return {}, []

    server = RpcServer(handle).start()
    try:
        result = shut_down_with(supervisor, tmp_path, server.address)
    finally:
        server.stop()
    assert commits == [0] and supervisor.stopped == [["worker"], ["controller"]] and not result.failed_steps


def test_a_failed_commit_is_reported_and_the_rest_still_stops(tmp_path: Path) -> None:
    supervisor = FakeSupervisor({"worker": StopRank.WORKER, "controller": StopRank.CONTROLLER})
    result = shut_down_with(supervisor, tmp_path)
    assert result.failed_steps == ["commit"] and supervisor.stopped == [["worker"], ["controller"]]


@pytest.mark.parametrize("state", ["starting", "restarting"])
def test_no_commit_without_a_ready_controller(tmp_path: Path, state: str) -> None:
    supervisor = FakeSupervisor({"worker": StopRank.WORKER, "controller": StopRank.CONTROLLER})
    supervisor.slots["controller"].state = state
    assert shut_down_with(supervisor, tmp_path).failed_steps == []


def test_an_unreachable_flink_loses_only_the_savepoint(tmp_path: Path) -> None:
    supervisor = FakeSupervisor({"flink-jm": StopRank.FLINK, "kafka": StopRank.KAFKA})
    result = shut_down_with(supervisor, tmp_path)
    assert result.failed_steps == ["savepoint"] and supervisor.stopped == [["flink-jm"], ["kafka"]]

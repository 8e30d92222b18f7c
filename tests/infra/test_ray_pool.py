"""So many copies on a cluster as are wanted: what is asked of Ray, against a stand-in (a real one:
test_ray_readers.py)."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.child import Program, StopRank
from infra.ray_pool import CopyActor, RayPool
from roostream.errors import ConfigError, UnavailableError


class Ref:
    def __init__(self, value: Any = None, *, ready: bool = False) -> None:
        self.value, self.ready = value, ready


class Actor:
    """Answers when it is asked; ends when the test says so."""

    def __init__(self, number: int) -> None:
        self.number, self.is_asked_to_end, self.is_killed = number, False, False
        self.over = Ref()

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda: self._called(name))

    def _called(self, name: str) -> Ref:
        if name == "wait_for_end":
            return self.over
        self.is_asked_to_end |= name == "end"
        return Ref([100 + self.number], ready=True)


class Cluster(types.ModuleType):
    """Stands where the package does."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[Actor] = []
        self.is_there, self.answers, self.is_shut = True, True, False
        self.exceptions = types.SimpleNamespace(RayError=KeyError)

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        if not self.is_there:
            raise ConnectionError("no cluster")

    def remote(self, **options: Any) -> Any:
        assert options["max_restarts"] == 0, "another node's is another actor"
        return lambda cls: types.SimpleNamespace(remote=self._made)

    def _made(self, copy: Any, number: int) -> Actor:
        if not self.answers:
            raise KeyError("gone")
        self.actors.append(Actor(number))
        return self.actors[-1]

    def wait(
        self, refs: Sequence[Ref], num_returns: int = 1, timeout: float = 0
    ) -> tuple[list[Ref], list[Ref]]:
        return [ref for ref in refs if ref.ready], [ref for ref in refs if not ref.ready]

    def get(self, refs: Sequence[Ref], timeout: float = 0) -> list[Any]:
        return [ref.value for ref in refs]

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    it = Cluster()
    monkeypatch.setitem(sys.modules, "ray", it)
    return it


def copy(number: int, folder: Path) -> Program:
    command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
    return Program(
        name=f"copy-{number}", command=command, log=folder / "log", env={}, stop_rank=StopRank.FEATURES
    )


def test_the_pool_grows_and_shrinks_without_waiting(cluster: Cluster) -> None:
    pool = RayPool(copy, "copy")
    pool.resize(3)
    pool.resize(3)
    assert [actor.number for actor in cluster.actors] == [0, 1, 2] and pool.pids() == [100, 101, 102]
    pool.resize(1)
    assert [actor.is_asked_to_end for actor in cluster.actors] == [False, True, True]
    assert pool.members() == ["copy-0", "copy-1", "copy-2"], "two are ending"
    cluster.actors[1].over.ready = cluster.actors[2].over.ready = True
    assert pool.members() == ["copy-0"] and [actor.is_killed for actor in cluster.actors] == [
        False,
        True,
        True,
    ]


def test_a_lost_actor_is_replaced(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    pool = RayPool(copy, "copy")
    pool.resize(2)
    cluster.actors[1].over.ready = True
    pool.resize(2)
    assert [actor.number for actor in cluster.actors] == [0, 1, 1] and "copy-1 was lost" in caplog.text
    assert not cluster.actors[0].is_asked_to_end


def test_close_ends_all_copies_and_leaves_the_cluster(cluster: Cluster) -> None:
    pool = RayPool(copy, "copy")
    pool.resize(2)
    pool.close()
    pool.close()
    assert all(actor.is_asked_to_end and actor.is_killed for actor in cluster.actors) and cluster.is_shut


def test_an_unreachable_cluster_is_reported(cluster: Cluster) -> None:
    pool = RayPool(copy, "copy")
    cluster.answers = False
    with pytest.raises(UnavailableError, match="Ray cluster"):
        pool.resize(1)
    cluster.answers = True
    pool.resize(1)
    assert pool.members() == ["copy-0"]


def test_a_missing_cluster_or_package_is_reported(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.is_there = False
    with pytest.raises(UnavailableError, match="Ray cluster"):
        RayPool(copy, "copy")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'roostream\[ray\]'"):
        RayPool(copy, "copy")


def test_an_actor_runs_one_copy_until_it_is_ended() -> None:
    actor = CopyActor(copy, 3)
    try:
        while not actor.pids():
            pass
    finally:
        actor.end()
    actor.wait_for_end()
    assert actor.pids() == []

"""The pool of copies on a Ray cluster, against a fake of the package. tests/e2e/test_ray_readers.py uses a
real cluster."""

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


class FakeRef:
    """A future of the fake."""

    def __init__(self, value: Any = None, *, ready: bool = False) -> None:
        self.value, self.ready = value, ready


class FakeActor:
    """An actor that answers calls at once and ends when the test sets `end_ref.ready`."""

    def __init__(self, number: int) -> None:
        self.number, self.is_asked_to_end, self.is_killed = number, False, False
        self.end_ref = FakeRef()

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda: self._answer(name))

    def _answer(self, name: str) -> FakeRef:
        if name == "wait_for_end":
            return self.end_ref
        self.is_asked_to_end |= name == "end"
        return FakeRef([100 + self.number], ready=True)


class FakeRay(types.ModuleType):
    """Replaces the package `ray`. With `is_reachable` false there is no cluster; with `answers` false actors
    can't be created."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[FakeActor] = []
        self.is_reachable, self.answers, self.is_shut_down = True, True, False
        self.exceptions = types.SimpleNamespace(RayError=KeyError)

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        if not self.is_reachable:
            raise ConnectionError("no cluster")

    def remote(self, **options: Any) -> Any:
        assert options["max_restarts"] == 0, (
            "Ray may not restart an actor by itself: the pool creates a new one"
        )
        return lambda cls: types.SimpleNamespace(remote=self._create_actor)

    def _create_actor(self, copy: Any, number: int) -> FakeActor:
        if not self.answers:
            raise KeyError("gone")
        self.actors.append(FakeActor(number))
        return self.actors[-1]

    def wait(
        self, refs: Sequence[FakeRef], num_returns: int = 1, timeout: float = 0
    ) -> tuple[list[FakeRef], list[FakeRef]]:
        return [ref for ref in refs if ref.ready], [ref for ref in refs if not ref.ready]

    def get(self, refs: Sequence[FakeRef], timeout: float = 0) -> list[Any]:
        return [ref.value for ref in refs]

    def kill(self, actor: FakeActor) -> None:
        actor.is_killed = True

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake_ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake_ray)
    return fake_ray


def sleeping_program(number: int, folder: Path) -> Program:
    command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
    return Program(
        name=f"copy-{number}", command=command, log=folder / "log", env={}, stop_rank=StopRank.FEATURES
    )


def test_the_pool_grows_and_shrinks_without_waiting(cluster: FakeRay) -> None:
    pool = RayPool(sleeping_program, "copy")
    pool.resize(3)
    pool.resize(3)
    assert [actor.number for actor in cluster.actors] == [0, 1, 2] and pool.pids() == [100, 101, 102]
    pool.resize(1)
    assert [actor.is_asked_to_end for actor in cluster.actors] == [False, True, True]
    assert pool.members() == ["copy-0", "copy-1", "copy-2"], "two copies are still ending"
    cluster.actors[1].end_ref.ready = cluster.actors[2].end_ref.ready = True
    assert pool.members() == ["copy-0"] and [actor.is_killed for actor in cluster.actors] == [
        False,
        True,
        True,
    ]


def test_a_lost_actor_is_replaced(cluster: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    pool = RayPool(sleeping_program, "copy")
    pool.resize(2)
    cluster.actors[1].end_ref.ready = True
    pool.resize(2)
    assert [actor.number for actor in cluster.actors] == [0, 1, 1] and "copy-1 was lost" in caplog.text
    assert not cluster.actors[0].is_asked_to_end


def test_close_ends_all_copies_and_leaves_the_cluster(cluster: FakeRay) -> None:
    pool = RayPool(sleeping_program, "copy")
    pool.resize(2)
    pool.close()
    pool.close()
    assert all(actor.is_asked_to_end and actor.is_killed for actor in cluster.actors) and cluster.is_shut_down


def test_an_unreachable_cluster_is_reported(cluster: FakeRay) -> None:
    pool = RayPool(sleeping_program, "copy")
    cluster.answers = False
    with pytest.raises(UnavailableError, match="Ray cluster"):
        pool.resize(1)
    cluster.answers = True
    pool.resize(1)
    assert pool.members() == ["copy-0"]


def test_a_missing_cluster_or_package_is_reported(cluster: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.is_reachable = False
    with pytest.raises(UnavailableError, match="Ray cluster"):
        RayPool(sleeping_program, "copy")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'roostream\[ray\]'"):
        RayPool(sleeping_program, "copy")


def test_an_actor_runs_one_copy_until_it_is_ended() -> None:
    actor = CopyActor(sleeping_program, 3)
    try:
        while not actor.pids():
            pass
    finally:
        actor.end()
    actor.wait_for_end()
    assert actor.pids() == []

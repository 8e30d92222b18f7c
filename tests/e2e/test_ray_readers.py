"""Readers on the nodes of a Ray cluster, here of one machine. Batches equal those of a worker without
readers, and readers that die are started again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from infra.child import Program, StopRank
from infra.ray_pool import RayPool
from tests.cli.train.test_offline import folder, last_manifest, run_training, same_bits

ray = pytest.importorskip("ray", reason="the package extra `ray` is not installed")
__all__ = ["folder"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]
WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def idle_program(env: dict[str, str], number: int, folder: Path) -> Program:
    command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)")
    return Program(
        name=f"copy-{number}", command=command, log=folder / "log", env=env, stop_rank=StopRank.FEATURES
    )


def wait_until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_copies_that_die_and_actors_that_die_are_started_again() -> None:
    pool = RayPool(partial(idle_program, dict(os.environ)), "copy")
    try:
        pool.resize(2)
        wait_until(lambda: len(pool.pids()) == 2)
        first, second = pool.pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(pids := pool.pids()) == 2 and first not in pids and second in pids)
        os.kill(parent_of(second), signal.SIGKILL)
        wait_until(lambda: not is_alive(second))

        def is_back() -> bool:
            pool.resize(2)
            return len(pids := pool.pids()) == 2 and second not in pids

        wait_until(is_back)
        pool.resize(1)
        wait_until(lambda: pool.members() == ["copy-0"])
        remaining = pool.pids()
    finally:
        pool.close()
    wait_until(lambda: not any(map(is_alive, remaining)))


def test_g11_readers_on_a_cluster_change_no_bit(folder: Path) -> None:
    run_training(folder, "here")
    report = run_training(folder, "on-a-cluster", readers=2, pool="ray")
    assert report["reading"]["fetched_requests"] >= 60
    assert last_manifest(folder, "on-a-cluster").workers[0].metrics["requests"] == 60
    assert same_bits(folder, "on-a-cluster", "here")

"""A long run under random faults: kills, a full disk under a shard, garbage in every topic. `make soak` takes
half an hour of it.

What must hold at the end: every event accounted for, nothing lost or trained twice, and resident memory and
open files of every program flat. SOAK_SERVING=2: so many serving processes, which share the rows of a program
that is killed too. The figures (memory and files over time, kills, dead letters) go to SOAK_REPORT, if that
is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra import program_specs
from infra.program_specs import SIMULATE
from infra.stack import Stack
from roostream.errors import RoostreamError
from tests.chaos.test_kill_everything import VICTIMS
from tests.e2e.loop_stack import (
    applied,
    check_nothing_lost_or_twice,
    produce_garbage,
    quick_options,
    wait_until,
)

SECONDS = float(os.environ.get("SOAK_SECONDS", "120"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
SERVING = int(os.environ.get("SOAK_SERVING", "1"))
MORE_FILES = 32
"""Beyond those of the second third: connections come and go, and a killed Kafka or Redis is dialled again."""
KILL_EVERY_S, LOOK_EVERY_S, GARBAGE_EVERY_S, FULL_EVERY_S, FULL_S = 10.0, 10.0, 30.0, 180.0, 20.0
DISK_MB = 64
GROWN_UP_S = 45.0  # a program's memory counts from this age on
STILL_FILLING_MB = {
    "redis": 64,  # 500 users of 512 items (40 bytes) and 50 clicks (24): 11 MB, thrice at most
    "auditor": 128,  # the ids of the newest 30 minutes
}
"""Programs whose memory has a bound that half an hour doesn't reach: what it may come to."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS + 900)]


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[bool]:
    """A file system of its own at `at`, gone afterwards; False where this user may not mount one."""
    at.mkdir(parents=True)
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", at], capture_output=True
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", at], check=True)


class Faults:
    """What is done to the stack, and what was seen meanwhile. `step` often; each fault has its own time."""

    def __init__(self, stack: Stack, disk: Path | None) -> None:
        self.stack, self.ballast = stack, disk / "ballast" if disk else None
        self.rng, self.began_s = random.Random(SEED), time.monotonic()
        self.memory: dict[str, list[tuple[float, int]]] = {}
        self.files: dict[str, list[tuple[float, int]]] = {}
        self.victims = [v for v in (*VICTIMS, "serving-1") if v in stack.expand(["all"])]
        self.kills: list[tuple[float, str]] = []
        self.num_garbage = self.num_full = 0
        self._next_s = {"kill": 20.0, "look": 0.0, "garbage": 15.0, "fill": 40.0, "free": float("inf")}

    def step(self) -> None:
        now_s = time.monotonic() - self.began_s
        for name, at_s in self._next_s.items():
            if now_s >= at_s:
                self._next_s[name] = now_s + getattr(self, name)(now_s)

    def kill(self, now_s: float) -> float:
        victim = self.rng.choice(self.victims)
        with contextlib.suppress(RoostreamError):  # it is down already
            self.stack.kill(victim)
            self.kills.append((now_s, victim))
        return KILL_EVERY_S * self.rng.uniform(0.5, 1.5)

    def look(self, now_s: float) -> float:
        """Resident memory and open files of every program that has run for a while, by its name."""
        for name in self.stack.expand(["all", "simulate"]):
            pid = self.stack.pid(name)
            with contextlib.suppress(psutil.Error):
                if (
                    pid is not None
                    and time.time() - (process := psutil.Process(pid)).create_time() >= GROWN_UP_S
                ):
                    self.memory.setdefault(name, []).append((now_s, process.memory_info().rss))
                    self.files.setdefault(name, []).append((now_s, process.num_fds()))
        return LOOK_EVERY_S

    def garbage(self, now_s: float) -> float:
        with contextlib.suppress(Exception):  # Kafka may be away; what was not taken is not counted
            self.num_garbage += produce_garbage(self.stack)
        return GARBAGE_EVERY_S

    def fill(self, now_s: float) -> float:
        if self.ballast is None:
            return float("inf")
        with contextlib.suppress(OSError), self.ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        self.num_full += 1
        self._next_s["free"] = now_s + FULL_S
        return FULL_EVERY_S

    def free(self, now_s: float) -> float:
        if self.ballast is not None:
            self.ballast.unlink(missing_ok=True)
        return float("inf")

    def report(self) -> dict[str, Any]:
        return {
            "seconds": SECONDS,
            "seed": SEED,
            "kills": len(self.kills),
            "killed": sorted({name for _, name in self.kills}),
            "garbage_records": self.num_garbage,
            "disk_filled": self.num_full,
            "memory_mb": {
                name: [(round(at), rss >> 20) for at, rss in seen] for name, seen in self.memory.items()
            },
            "files": {
                name: [(round(at), number) for at, number in seen] for name, seen in self.files.items()
            },
            "growth": growth(self.memory, SECONDS),
            "more_files": more(self.files, SECONDS),
        }


def growth(memory: dict[str, list[tuple[float, int]]], seconds: float) -> dict[str, float]:
    """Program → memory of the last third of the run over that of the second one: the lower quartiles, since a
    program that reads anew what a killed Redis held takes more for a minute, and kills don't fall evenly."""
    return {name: round(last / before, 3) for name, (before, last) in _thirds(memory, seconds).items()}


def more(files: dict[str, list[tuple[float, int]]], seconds: float) -> dict[str, float]:
    """Program → open files of the last third of the run beyond those of the second one, as `growth`
    compares."""
    return {name: last - before for name, (before, last) in _thirds(files, seconds).items()}


def _thirds(figures: dict[str, list[tuple[float, int]]], seconds: float) -> dict[str, tuple[float, float]]:
    found = {}
    for name, seen in figures.items():
        thirds: list[list[int]] = [[], [], []]
        for at_s, value in seen:
            thirds[min(int(3 * at_s / seconds), 2)].append(value)
        if thirds[1] and thirds[2]:
            found[name] = (_usual(thirds[1]), _usual(thirds[2]))
    return found


def _usual(values: list[int]) -> float:
    return statistics.quantiles(values, n=4)[0] if len(values) > 1 else values[0]


def test_nothing_is_lost_and_memory_is_flat_under_faults_at_random(tmp_path: Path) -> None:
    options = dataclasses.replace(quick_options(), serving_processes=SERVING)
    options.overrides["simulate"]["rate"] = 40.0  # type: ignore[index]
    with small_disk(tmp_path / "home" / "shard-0") as mounted, Stack(tmp_path / "home", options) as stack:
        stack.start(["all", "simulate"])
        stack.wait_ready("serving", timeout_s=180)
        wait_until("a commit with trained samples", lambda: applied(stack) > 50, 240)
        faults = Faults(stack, tmp_path / "home" / "shard-0" if mounted else None)
        while time.monotonic() - faults.began_s < SECONDS:
            faults.step()
            time.sleep(0.5)
        faults.free(SECONDS)
        report = faults.report()
        if path := os.environ.get("SOAK_REPORT"):
            Path(path).write_text(json.dumps(report, indent=1))
        wait_until("every program is ready again", lambda: ready(stack), 240)
        check_nothing_lost_or_twice(stack, within_s=300)
        assert len(faults.kills) >= SECONDS / 30 and faults.num_garbage, report
        if SECONDS >= 900:  # shorter runs are still warming up
            # the heaps of the servers that aren't ours are bounded by their options
            ours = {*program_specs.program_names(stack.options), SIMULATE} - STILL_FILLING_MB.keys()
            assert {
                name: ratio for name, ratio in report["growth"].items() if name in ours and ratio >= 1.1
            } == {}
            assert {
                name: number
                for name, number in report["more_files"].items()
                if name in ours and number > MORE_FILES
            } == {}
            for name, max_mb in STILL_FILLING_MB.items():
                assert max(rss >> 20 for _, rss in faults.memory[name]) < max_mb, (
                    name,
                    report["memory_mb"][name],
                )


def ready(stack: Stack) -> bool:
    return all(stack.state(name) == "ready" for name in stack.expand(["all"]))

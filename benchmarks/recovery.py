"""How soon does training continue after a kill -9?

Kills a program of a running stack: the time until the next step, and the throughput of a period with kills.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.common.shared_setup import SharedSetup
from benchmarks.common.training_stack import AuditorLoop, Trainer, books, training_stack
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.harness.subject_process import ROOT
from roostream.runtime.manifest import Manifest

RATE, ROWS = (
    500.0,
    100_000,
)  # requests a second, about a fifth of what can be trained; rows held beside those of the samples
WARM, SATURATED_WARM = 1_000, 10_000  # requests; batches are as large as they become
INTERVAL_MS = 10_000  # between commits, as by default
_BACK_S = 120.0
_LOOK_S = 0.05
_MS = 1000.0

caught_up = SharedSetup(training_stack)
_saturated = SharedSetup(training_stack)


class Recovered(NamedTuple):
    """Seconds from a kill until …"""

    started_s: float  # the supervisor had a new process
    answers_s: float  # that one answered: its imports are done
    restored_s: float  # the worker was restored
    trained_s: float  # it had trained the next step
    again: float  # steps that were trained before and went back


class Kills:
    """`kill` ends a program and waits for the next step."""

    def __init__(self, trainer: Trainer, victim: str) -> None:
        self.trainer, self.victim = trainer, victim

    def kill(self, last: Manifest) -> Recovered:
        """`last`: what everyone goes back to.

        Raises:
            RuntimeError: nothing was trained for two minutes.
        """
        trainer, seen = self.trainer, self.trainer.seen("worker")
        incarnation, step = (seen.value(f"roostream_worker_{name}") or 0 for name in ("incarnation", "step"))
        child, killed_s = trainer.child(self.victim), time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        at_s: dict[str, float] = {}
        while "trained" not in at_s:
            time.sleep(_LOOK_S)
            now_s = time.monotonic() - killed_s
            if now_s > _BACK_S:
                raise RuntimeError(
                    f"nothing was trained for {_BACK_S:.0f} s behind a kill of {self.victim}; seen: {at_s}"
                )
            its = trainer.stack.supervisor.slots[self.victim].child
            if its is not None and its is not child:
                at_s.setdefault("started", its.started_s - killed_s)
                if "answers" not in at_s and trainer.seen(self.victim):
                    at_s["answers"] = now_s
            worker = trainer.seen("worker")
            if (worker.value("roostream_worker_incarnation") or 0) > incarnation:
                at_s.setdefault("restored", now_s)
                if (worker.value("roostream_worker_step") or 0) > last.step:
                    at_s["trained"] = now_s
        started_s = at_s.get("started", at_s["trained"])
        return Recovered(
            started_s,
            at_s.get("answers", started_s),
            at_s["restored"],
            at_s["trained"],
            max(step - last.step, 0),
        )


class Recovery:
    """A turn: so many kills, one after the other. The first step is none: everything runs already."""

    def __init__(self, trainer: Trainer, victim: str, kills: int) -> None:
        self.trainer, self.kills, self.victim = trainer, kills, Kills(trainer, victim)
        self._recovered: list[Recovered] = []
        self._books = AuditorLoop(0, 0)
        self._is_first = True

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        self._recovered = [self.victim.kill(self._half_way()) for _ in range(self.kills)]
        self._books = self.trainer.audited(self.trainer.commit())

    def _half_way(self) -> Manifest:
        """Between two commits: a kill then costs what it costs on average."""
        return self.trainer.uncommitted(self.trainer.interval_s / 2)

    def units(self) -> float:
        return float(len(self._recovered)) or 1.0

    def took_s(self) -> float:
        return sum(one.trained_s for one in self._recovered)

    def figures(self) -> dict[str, float]:
        if not self._recovered:
            return {}
        each = Recovered(*(statistics.median(values) for values in zip(*self._recovered, strict=True)))
        return {
            "a new process, ms": each.started_s * _MS,
            "it answers, ms": each.answers_s * _MS,
            "restored, ms": each.restored_s * _MS,
            "next step, ms": each.trained_s * _MS,
            "longest, ms": max(one.trained_s for one in self._recovered) * _MS,
            "steps trained again": each.again,
            "lost": self._books.lost,
            "trained twice": self._books.twice,
            "samples in the books": self._books.below,
        }


@contextlib.contextmanager
def recovery(victim: str, kills: int, interval_ms: int = INTERVAL_MS) -> Iterator[Work]:
    """Units: kills. Time: from the kill until the next step is trained."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms) as trainer:
        it = Recovery(trainer, victim, kills)
        yield Work(it.step, it.units, it.figures, it.took_s)


@contextlib.contextmanager
def imports(interval_ms: int = INTERVAL_MS) -> Iterator[Work]:
    """A new Python and a worker's imports, beside the same stack."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms):
        command = [sys.executable, "-c", "import trainer.worker_program"]
        yield Work(lambda: subprocess.run(command, check=True, cwd=ROOT), lambda: 1.0)


class Goodput:
    """A turn: what is trained and kept in a time with a kill in its middle, or without one."""

    def __init__(self, trainer: Trainer, seconds: float, victim: str) -> None:
        self.trainer, self.seconds = trainer, seconds
        self.victim = Kills(trainer, victim) if victim else None
        self._before = self._after = AuditorLoop(0, 0)
        self._took_s = 0.0
        self._recovered: Recovered | None = None
        self._is_first = True

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        self._before = books(self.trainer.commit())
        began_s = time.monotonic()
        if self.victim:
            time.sleep(0.4 * self.seconds)
            self._recovered = self.victim.kill(self.trainer.uncommitted(self.trainer.interval_s / 2))
        time.sleep(max(self.seconds - (time.monotonic() - began_s), 0.0))
        self._after = books(self.trainer.commit())
        self._took_s = time.monotonic() - began_s

    def units(self) -> float:
        return float(self._after.trained - self._before.trained) or 1.0

    def took_s(self) -> float:
        return self._took_s

    def figures(self) -> dict[str, float]:
        at = self._recovered
        return {
            "seconds": self._took_s,
            "next step behind a kill, ms": at.trained_s * _MS if at else 0.0,
            "steps trained again": at.again if at else 0.0,
            "lost": self._after.lost,
            "trained twice": self._after.twice,
        }


@contextlib.contextmanager
def goodput(seconds: float, victim: str, interval_ms: int) -> Iterator[Work]:
    """Units: requests that a commit at the end has and one at the beginning had not; more samples wait than
    can be trained. `victim`: who is killed once, "" = nobody."""
    with _saturated.open(float("inf"), ROWS, SATURATED_WARM, interval_ms) as trainer:
        it = Goodput(trainer, seconds, victim)
        yield Work(it.step, it.units, it.figures, it.took_s)


_HERE = "benchmarks.recovery"
_KILLS = 2


def _killed(name: str, victim: str, role: str = "stage") -> Subject:
    return Subject(name, f"{_HERE}:recovery", (victim, _KILLS), role)  # type: ignore[arg-type]


BENCHMARK = Benchmark(
    name="recovery",
    summary="How soon is the next step trained behind a kill -9?",
    rows=(
        Row(
            name="from the kill until the next step is trained",
            unit="kills",
            shows="cost",
            subjects=(
                _killed("the worker", "worker", "ours"),
                _killed("a shard", "shard-0"),
                _killed("the controller", "controller"),
                Subject("a new Python and a worker's imports", f"{_HERE}:imports", (), "limit"),
            ),
        ),
    ),
    rounds=1,
    interpretation="""\
The target is 8 s behind a kill of the worker, its imports among them. The second table says where the time goes: until the stack
has a new process, until that one answers (it has imported what it needs), until the worker is restored, until it has trained the
next step. Whoever is killed, everyone goes back to the last commit; steps trained again were behind it. A controller that is
gone stops nobody: its kill costs what goes back, and training stands still only while everyone is restored.

Lost and trained twice are of the books at the end of each turn: samples below the commit's offsets against samples that its
parameters contain, and samples without a prediction. All of them are counted from the start of the stack.

Kills come half-way between two commits (10 s apart, the default). Broker, two shards that hold 100 000 rows and those of the
samples, controller, one worker, as a stack starts and restarts them, on the same cores; 500 requests/s of 20 candidates are
written all the time. The supervisor starts a program at once that lived for 2 s (by default 30 s: here kills come
more often than that). What was seen is looked at every 50 ms.""",
)

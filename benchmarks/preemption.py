"""Does a worker that has to go commit what it trained, and how soon is it gone?

Preempts a worker: whether its training is committed, and how soon the process ends.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.common.training_stack import AuditorLoop, Trainer, ended, until
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.recovery import INTERVAL_MS, RATE, ROWS, WARM, caught_up

_NEW_S = 1.0  # trained since the last commit
_LATE_S = 10.0  # behind its notice: it will not go at all


class Left(NamedTuple):
    """How one went."""

    took_s: float  # from the notice to the end of the process
    in_time: bool
    committed: bool  # a manifest of its incarnation has what it trained
    code: int


class Leaves:
    """A turn: so many preemptions, one after the other. The first step is none: everything runs already."""

    def __init__(self, trainer: Trainer, notice_s: float, count: int) -> None:
        self.trainer, self.notice_s, self.count = trainer, notice_s, count
        self._left: list[Left] = []
        self._books = AuditorLoop(0, 0)
        self._is_first = True

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        self._left = [self.preempt() for _ in range(self.count)]
        self._books = self.trainer.audited(self.trainer.commit())

    def preempt(self) -> Left:
        """A second behind a commit; then wait until training goes on."""
        trainer = self.trainer
        before = trainer.uncommitted(_NEW_S)
        child, began_s = trainer.child("worker"), time.monotonic()
        answer = trainer.ask("preempt", role="worker", index=0, notice_s=self.notice_s)
        ended_s, code = ended(child, self.notice_s + _LATE_S)
        newest = trainer.newest()
        committed = (
            bool(answer["committed"])
            and newest.step > before.step
            and newest.incarnation == before.incarnation
        )

        def trains_again() -> bool:
            seen = trainer.seen("worker")
            return (seen.value("roostream_worker_step") or 0) > newest.step and bool(
                seen.value("roostream_worker_training")
            )

        until("training goes on behind a preemption", trains_again, 60.0)
        return Left(ended_s - began_s, ended_s - began_s <= self.notice_s, committed, code)

    def units(self) -> float:
        return float(len(self._left)) or 1.0

    def took_s(self) -> float:
        return sum(one.took_s for one in self._left)

    def figures(self) -> dict[str, float]:
        if not self._left:
            return {}
        each = len(self._left) / 100
        return {
            "preemptions": len(self._left),
            "committed %": sum(one.committed for one in self._left) / each,
            "gone within the notice %": sum(one.in_time for one in self._left) / each,
            "exit code 0 %": sum(one.code == 0 for one in self._left) / each,
            "notice to exit, s": statistics.median(one.took_s for one in self._left),
            "longest, s": max(one.took_s for one in self._left),
            "lost": self._books.lost,
            "trained twice": self._books.twice,
        }


@contextlib.contextmanager
def preempted(notice_s: float, count: int, interval_ms: int = INTERVAL_MS) -> Iterator[Work]:
    """Units: preemptions. Time: from the notice to the end of the process."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms) as trainer:
        it = Leaves(trainer, notice_s, count)
        yield Work(it.step, it.units, it.figures, it.took_s)


@contextlib.contextmanager
def committed(count: int, interval_ms: int = INTERVAL_MS) -> Iterator[Work]:
    """A commit that is asked for: what whoever goes has to wait for."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms) as trainer:
        took_s: list[float] = []

        def step() -> None:
            took_s.clear()
            for _ in range(count):
                trainer.uncommitted(_NEW_S)
                began_s = time.monotonic()
                trainer.commit()
                took_s.append(time.monotonic() - began_s)

        yield Work(step, lambda: float(count), took_s=lambda: sum(took_s))


_HERE = "benchmarks.preemption"
_COUNT = 4

BENCHMARK = Benchmark(
    name="preemption",
    summary="Does a worker that has to go commit what it trained, and how soon is it gone?",
    rows=(
        Row(
            name="from the notice until the worker's process has ended",
            unit="preemptions",
            shows="cost",
            subjects=(
                Subject("30 s notice", f"{_HERE}:preempted", (30.0, _COUNT)),
                Subject("5 s notice", f"{_HERE}:preempted", (5.0, _COUNT), "stage"),
                Subject("a commit that is asked for", f"{_HERE}:committed", (_COUNT,), "limit"),
            ),
        ),
    ),
    rounds=1,
    interpretation="""\
The target is that every epoch commits at 30 s notice; at 5 s, the least that is accepted, the share is reported. Committed means
that a manifest of the same incarnation came behind the notice and has what was trained since the last one; an epoch is what one
process of the worker trained. The shares are of the preemptions of one run (the least of all runs stands beside them).

Each preemption is asked for as `roostream preempt worker` does, a second behind a commit; the stack starts the worker again, and
the next one comes a second behind the first commit that has what is new. Lost and trained twice are of the books, as on the page
of `recovery`.

Broker, two shards that hold 100 000 rows and those of the samples, controller, one worker as a stack starts them, on the same
cores; 500 requests/s of 20 candidates are written all the time.""",
)

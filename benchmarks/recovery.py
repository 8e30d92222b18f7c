"""Kills and preemptions of programs of a running stack: recovery, preemption, goodput and goodput-5min.

How soon the next step is trained after a kill -9, whether a preempted worker commits in time, and what share
of the throughput remains with regular kills.
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
from benchmarks.common.training_stack import Trainer, account, ended, training_stack, until
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn
from benchmarks.harness.subject_process import ROOT
from roostream.runtime.manifest import Manifest

RATE, ROWS = 500.0, 100_000  # requests/s, a fifth of what can be trained; rows beside those of the samples
WARM, SATURATED_WARM = 1_000, 10_000  # requests
INTERVAL_MS = 10_000  # between commits, the default
_RECOVERY_LIMIT_S = 120.0
_POLL_S = 0.05
_UNCOMMITTED_S = 1.0  # trained between the last commit and a preemption
_OVERTIME_S = 10.0  # after its notice: the worker will not end at all

caught_up = SharedSetup(training_stack)
_saturated = SharedSetup(training_stack)


class Recovered(NamedTuple):
    """Seconds from a kill until …"""

    started_s: float  # the supervisor had a new process
    answers_s: float  # that one answered: its imports are done
    restored_s: float  # the worker was restored
    trained_s: float  # it had trained the next step
    steps_again: float  # steps that were trained before the kill and rolled back


def kill(trainer: Trainer, victim: str, last: Manifest) -> Recovered:
    """Kill a program and wait for the next step. `last`: the commit to which everyone is restored.

    Raises:
        RuntimeError: nothing was trained for two minutes.
    """
    metrics = trainer.metrics("worker")
    incarnation = metrics.value("roostream_worker_incarnation") or 0
    step = metrics.value("roostream_worker_step") or 0
    child, killed_s = trainer.child(victim), time.monotonic()
    os.kill(child.pid, signal.SIGKILL)
    times_s: dict[str, float] = {}
    while "trained" not in times_s:
        time.sleep(_POLL_S)
        now_s = time.monotonic() - killed_s
        if now_s > _RECOVERY_LIMIT_S:
            raise RuntimeError(
                f"no step within {_RECOVERY_LIMIT_S:.0f} s after a kill of {victim}; reached: {times_s}"
            )
        new = trainer.stack.supervisor.slots[victim].child
        if new is not None and new is not child:
            times_s.setdefault("started", new.started_s - killed_s)
            if "answers" not in times_s and trainer.metrics(victim):
                times_s["answers"] = now_s
        worker = trainer.metrics("worker")
        if (worker.value("roostream_worker_incarnation") or 0) > incarnation:
            times_s.setdefault("restored", now_s)
            if (worker.value("roostream_worker_step") or 0) > last.step:
                times_s["trained"] = now_s
    started_s = times_s.get("started", times_s["trained"])
    return Recovered(
        started_s,
        times_s.get("answers", started_s),
        times_s["restored"],
        times_s["trained"],
        max(step - last.step, 0),
    )


@contextlib.contextmanager
def recovery(victim: str, kills: int, interval_ms: int = INTERVAL_MS) -> Iterator[WholeTurn]:
    """Units: kills, each half-way between two commits. Time: from a kill until the next step is trained."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms) as trainer:

        def turn() -> TurnResult:
            all_kills = [
                kill(trainer, victim, trainer.uncommitted(trainer.interval_s / 2)) for _ in range(kills)
            ]
            typical = Recovered(*(statistics.median(values) for values in zip(*all_kills, strict=True)))
            account = trainer.audited(trainer.commit())
            figures = {
                "a new process, ms": typical.started_s * 1000,
                "it answers, ms": typical.answers_s * 1000,
                "restored, ms": typical.restored_s * 1000,
                "next step, ms": typical.trained_s * 1000,
                "longest, ms": max(one.trained_s for one in all_kills) * 1000,
                "steps trained again": typical.steps_again,
                "lost": account.lost,
                "trained twice": account.twice,
                "samples in the books": account.below,
            }
            return TurnResult(len(all_kills), sum(one.trained_s for one in all_kills), figures)

        yield WholeTurn(turn)


@contextlib.contextmanager
def imports(interval_ms: int = INTERVAL_MS) -> Iterator[WholeTurn]:
    """A new Python and a worker's imports, beside the same stack."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms):

        def turn() -> TurnResult:
            subprocess.run([sys.executable, "-c", "import trainer.worker_program"], check=True, cwd=ROOT)
            return TurnResult()

        yield WholeTurn(turn, warm_up=turn)


@contextlib.contextmanager
def goodput(seconds: float, victim: str, interval_ms: int) -> Iterator[WholeTurn]:
    """Units: requests that a commit at the end contains and one at the begin did not. More samples wait than
    can be trained. `victim`: the program that is killed once; "" = none."""
    with _saturated.open(float("inf"), ROWS, SATURATED_WARM, interval_ms) as trainer:

        def turn() -> TurnResult:
            before, began_s = account(trainer.commit()), time.monotonic()
            recovered: Recovered | None = None
            if victim:
                time.sleep(0.4 * seconds)
                recovered = kill(trainer, victim, trainer.uncommitted(trainer.interval_s / 2))
            time.sleep(max(seconds - (time.monotonic() - began_s), 0.0))
            after = account(trainer.commit())
            took_s = time.monotonic() - began_s
            figures = {
                "seconds": took_s,
                "next step behind a kill, ms": recovered.trained_s * 1000 if recovered else 0.0,
                "steps trained again": recovered.steps_again if recovered else 0.0,
                "lost": after.lost,
                "trained twice": after.twice,
            }
            return TurnResult(float(after.trained - before.trained), took_s, figures)

        yield WholeTurn(turn)


class Preempted(NamedTuple):
    """One preemption."""

    took_s: float  # from the notice to the end of the process
    committed: bool  # a manifest of the same incarnation contains what the worker had trained
    exit_code: int


def preempt(trainer: Trainer, notice_s: float) -> Preempted:
    """Preempt the worker a second after a commit, then wait until training goes on."""
    before = trainer.uncommitted(_UNCOMMITTED_S)
    child, began_s = trainer.child("worker"), time.monotonic()
    answer = trainer.call("preempt", role="worker", index=0, notice_s=notice_s)
    ended_s, code = ended(child, notice_s + _OVERTIME_S)
    newest = trainer.newest()
    is_committed = newest.step > before.step and newest.incarnation == before.incarnation

    def trains_again() -> bool:
        metrics = trainer.metrics("worker")
        is_ahead = (metrics.value("roostream_worker_step") or 0) > newest.step
        return is_ahead and bool(metrics.value("roostream_worker_training"))

    until("training goes on after a preemption", trains_again, 60.0)
    return Preempted(ended_s - began_s, bool(answer["committed"]) and is_committed, code)


@contextlib.contextmanager
def preempted(notice_s: float, count: int, interval_ms: int = INTERVAL_MS) -> Iterator[WholeTurn]:
    """Units: preemptions. Time: from the notice to the end of the process."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms) as trainer:

        def turn() -> TurnResult:
            all_ = [preempt(trainer, notice_s) for _ in range(count)]
            account = trainer.audited(trainer.commit())
            figures = {
                "preemptions": len(all_),
                "committed %": 100 * sum(one.committed for one in all_) / count,
                "gone within the notice %": 100 * sum(one.took_s <= notice_s for one in all_) / count,
                "exit code 0 %": 100 * sum(one.exit_code == 0 for one in all_) / count,
                "notice to exit, s": statistics.median(one.took_s for one in all_),
                "longest, s": max(one.took_s for one in all_),
                "lost": account.lost,
                "trained twice": account.twice,
            }
            return TurnResult(count, sum(one.took_s for one in all_), figures)

        yield WholeTurn(turn)


@contextlib.contextmanager
def committed(count: int, interval_ms: int = INTERVAL_MS) -> Iterator[WholeTurn]:
    """Requested commits: a preempted worker has to wait for one."""
    with caught_up.open(RATE, ROWS, WARM, interval_ms) as trainer:

        def turn() -> TurnResult:
            took_s = 0.0
            for _ in range(count):
                trainer.uncommitted(_UNCOMMITTED_S)
                began_s = time.monotonic()
                trainer.commit()
                took_s += time.monotonic() - began_s
            return TurnResult(count, took_s)

        yield WholeTurn(turn)


_HERE = "benchmarks.recovery"
_KILLS, _PREEMPTIONS = 2, 4
_STACK = """\
The stack has a broker, two shards with 100 000 rows beside those of the samples, a controller and one
worker, on the same cores. 500 requests/s of 20 candidates are written all the time."""


def _killed(name: str, victim: str, role: Role = "stage") -> Subject:
    return Subject(name, f"{_HERE}:recovery", (victim, _KILLS), role)


RECOVERY = Benchmark(
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
    interpretation=f"""\
The target is 8 s after a kill of the worker, including its imports. The second table splits the time: a new
process runs, the process answers, the worker is restored, the next step is trained. After each kill all
programs return to the last commit, and the steps after it are trained again. Kills come half-way between
two commits, which are 10 s apart. "Lost" and "trained twice" compare the samples below the commit's offsets
with what the parameters and the predictions contain. {_STACK}""",
)


PREEMPTION = Benchmark(
    name="preemption",
    summary="Does a worker that has to go commit what it trained, and how soon is it gone?",
    rows=(
        Row(
            name="from the notice until the worker's process has ended",
            unit="preemptions",
            shows="cost",
            subjects=(
                Subject("30 s notice", f"{_HERE}:preempted", (30.0, _PREEMPTIONS)),
                Subject("5 s notice", f"{_HERE}:preempted", (5.0, _PREEMPTIONS), "stage"),
                Subject("a requested commit", f"{_HERE}:committed", (_PREEMPTIONS,), "limit"),
            ),
        ),
    ),
    rounds=1,
    interpretation=f"""\
The target is that every preempted worker commits at 30 s notice; 5 s is the shortest notice that is
accepted. "Committed" means that a manifest of the same incarnation came after the notice and contains what
was trained since the last commit. Each preemption comes a second after a commit, as `roostream drain
worker` requests it, and the stack then starts the worker again. "Lost" and "trained twice" are counted as
on the page of `recovery`. {_STACK}""",
)


def _goodput_row(seconds: float, interval_ms: int = INTERVAL_MS) -> Row:
    return Row(
        name=f"requests trained and committed in {seconds:g} s, commits {interval_ms / 1000:g} s apart",
        unit="requests",
        subjects=(
            Subject("one kill of the worker", f"{_HERE}:goodput", (seconds, "worker", interval_ms)),
            Subject("no program is killed", f"{_HERE}:goodput", (seconds, "", interval_ms), "limit"),
        ),
    )


_GOODPUT = """\
The ratio is the goodput: requests that are trained and committed with a kill, per request without one. More
samples wait than can be trained, so time lost in a recovery is lost. A kill costs the time until the next
step (page of `recovery`) and the steps since the last commit, half an interval on average; a shorter
`commit_interval_ms` gives more goodput. The two figures come from two stacks, which may differ by a quarter
on a machine with other work. Then 1 - (next step after a kill + steps trained again · 64 / (requests/s)) /
time says more than the ratio."""

GOODPUT = Benchmark(
    name="goodput",
    summary="What is trained with a kill every 60 s?",
    rows=(_goodput_row(60.0), _goodput_row(60.0, 3_000)),
    rounds=1,
    interpretation=f"The target is 0.85 with a kill every 60 s.\n{_GOODPUT}",
)

GOODPUT_5MIN = Benchmark(
    name="goodput-5min",
    summary="What is trained with a kill every 5 minutes? (Takes half an hour.)",
    rows=(_goodput_row(300.0),),
    rounds=1,
    interpretation=f"The target is 0.95 with a kill every 5 minutes.\n{_GOODPUT}",
)

BENCHMARKS = (RECOVERY, PREEMPTION, GOODPUT, GOODPUT_5MIN)

"""How soon is the next step trained after a kill -9 of a program of a running stack?"""

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
from benchmarks.common.training_stack import Trainer, training_stack
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn
from benchmarks.harness.subject_process import ROOT
from roostream.runtime.manifest import Manifest

RATE, ROWS = 500.0, 100_000  # requests/s, a fifth of what can be trained; rows beside those of the samples
WARM = 1_000  # requests
INTERVAL_MS = 10_000  # between commits, the default
_RECOVERY_LIMIT_S = 120.0
_POLL_S = 0.05

caught_up = SharedSetup(training_stack)


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


_HERE = "benchmarks.recovery"
_KILLS = 2


def _killed(name: str, victim: str, role: Role = "stage") -> Subject:
    return Subject(name, f"{_HERE}:recovery", (victim, _KILLS), role)


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
The target is 8 s after a kill of the worker, including its imports. The second table splits the time: a new
process runs, the process answers, the worker is restored, the next step is trained. After each kill all
programs return to the last commit, and the steps after it are trained again. Kills come half-way between
two commits, which are 10 s apart. "Lost" and "trained twice" compare the samples below the commit's offsets
with what the parameters and the predictions contain. The stack has a broker, two shards with 100 000 rows
beside those of the samples, a controller and one worker, on the same cores. 500 requests/s of 20 candidates
are written all the time.""",
)

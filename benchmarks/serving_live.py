"""How many ranks does a second of CPU time answer inside a running stack?

A whole stack under closed-loop and open-loop load, and our ranker behind plain FastAPI beside it.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

from benchmarks.common.open_load import Answer
from benchmarks.common.serving_program import ServingProgram
from benchmarks.common.shared_setup import SharedSetup, opened_with
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn
from benchmarks.serving_e2e import Programs
from benchmarks.serving_overload import Load, Served, in_time
from infra.options import demo
from infra.stack import Stack

_CANDIDATES = 50
_SECONDS = 4.0

# Fixed work of about 20 ms of CPU time, of the kind that a request causes: it decodes and encodes JSON. It
# prints its own CPU time for each line that it reads.
_REFERENCE = """
import json, sys, time
candidates = [{"item_id": i, "price": i * 1.5, "category": f"c{i % 7}"} for i in range(50)]
body = json.dumps({"candidates": candidates})
for _ in sys.stdin:
    began_s = time.process_time()
    for _ in range(200):
        json.dumps(json.loads(body))
    print(time.process_time() - began_s, flush=True)
"""
_REFERENCE_EVERY_S = 0.3


class Reference:
    """Runs the same work over and over in its own process, to tell how long a CPU second is.

    Where two virtual cores share a physical one, the work needs more CPU time while the other one is busy.
    """

    def __init__(self, opened: contextlib.ExitStack) -> None:
        """Measures the work alone first: nothing else of the benchmark may run yet."""
        command = [sys.executable, "-c", _REFERENCE]
        pipe = subprocess.PIPE
        self._child = opened.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        opened.callback(self._child.kill)
        self.alone_s = min(self._run() for _ in range(20))

    def _run(self) -> float:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    @contextlib.contextmanager
    def slowdown(self) -> Iterator[list[float]]:
        """Append to the list, until the end, how many times as much CPU time the work takes as alone."""
        out: list[float] = []
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(_REFERENCE_EVERY_S):
                out.append(self._run() / self.alone_s)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield out
        finally:
            ended.set()
            thread.join()


class ContextSwitches(NamedTuple):
    """Of all threads of a process so far."""

    voluntary: int
    involuntary: int

    @classmethod
    def of(cls, pid: int) -> ContextSwitches:
        totals = {"voluntary_ctxt_switches": 0, "nonvoluntary_ctxt_switches": 0}
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                for line in (thread / "status").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in totals:
                        totals[name] += int(value)
        return cls(*totals.values())


class LiveLoad(Load):
    """A closed loop of `connections`; or, if that is 0, Poisson arrivals at `rate` requests a second."""

    def __init__(self, served: Served, connections: int, rate: float) -> None:
        super().__init__(served, rate / served.capacity if rate else 1.0, _SECONDS)
        self.connections = connections

    def send(self, seconds: float) -> list[Answer]:
        if self.connections:
            return self.served.clients.closed_loop(self.connections, seconds)
        return super().send(seconds)


class LivePrograms(Programs):
    """The serving program of a stack, and a peer beside it that is suspended while the stack is asked."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        super().__init__(opened)
        self.reference = Reference(opened)
        home = opened.enter_context(tempfile.TemporaryDirectory())
        self._stack = opened.enter_context(Stack(Path(home), demo()))
        self._stack.start(["all"])
        self._stack.wait_ready("all", timeout_s=240)

    def check(self, program: ServingProgram, form: str, candidates: int) -> None:
        """Nothing to do: the stack's model is another one with every commit."""

    @contextlib.contextmanager
    def running(self, kind: str) -> Iterator[ServingProgram]:
        if kind == "live":
            url, pid = urlsplit(self._stack.endpoints.serving), self._stack.pid("serving")
            assert url.hostname is not None
            assert url.port is not None
            assert pid is not None
            yield ServingProgram((url.hostname, url.port), Path(), pid)
        else:
            with super().running(kind) as program:
                yield program


PROGRAMS = SharedSetup(opened_with(LivePrograms))


@contextlib.contextmanager
def under_load(kind: str, form: str, connections: int, rate: float) -> Iterator[WholeTurn]:
    """`kind`: live, fastapi. Units: requests answered 200 within the deadline. Time: CPU time of the serving
    program."""
    with PROGRAMS.open() as running:
        served = running.served(kind, form, _CANDIDATES)
        load = LiveLoad(served, connections, rate)

        def turn() -> TurnResult:
            with running.running(kind) as program:
                served.clients.close_idle()
                before, machine = ContextSwitches.of(program.pid), psutil.cpu_times()
                with running.reference.slowdown() as slowdowns:
                    result = load.turn()
                after, busy = ContextSwitches.of(program.pid), psutil.cpu_times()
            answered = max(result.units, 1.0)
            return TurnResult(
                result.units,
                load.cpu_s,
                {
                    **{name: result.figures[name] for name in _FIGURES},
                    "answered a second": len(in_time(load.answers)) / _SECONDS,
                    "cores busy, all programs": (_used(busy) - _used(machine)) / _SECONDS,
                    "CPU time of fixed work, times alone": statistics.median(slowdowns),
                    "voluntary context switches a request": (after.voluntary - before.voluntary) / answered,
                    "involuntary context switches a request": (after.involuntary - before.involuntary)
                    / answered,
                },
            )

        yield WholeTurn(turn, warm_up=turn)


_FIGURES = ("p50 of 200, ms", "p99 of 200, ms", "refused %", "late or failed %")


def _used(times: psutil._common.pcputimes) -> float:
    """CPU seconds of all programs so far."""
    return float(sum(times) - times.idle - times.iowait)


_HERE = "benchmarks.serving_live"
_LOADED = f"{_HERE}:under_load"


def _row(name: str, connections: int, rate: float) -> Row:
    def subject(of: str, kind: str, form: str, role: Role) -> Subject:
        return Subject(of, _LOADED, (kind, form, connections, rate), role)

    return Row(
        name=f"requests a CPU second of serving, {_CANDIDATES} candidates, {name}",
        unit="requests",
        time="CPU time of the serving program",
        subjects=(
            subject("the stack, JSON", "live", "json", "ours"),
            subject("FastAPI + Pydantic, JSON, no log", "fastapi", "json", "peer"),
            subject("the stack, protobuf", "live", "protobuf", "stage"),
        ),
    )


BENCHMARK = Benchmark(
    name="serving-live",
    summary="How many ranks does a second of CPU time answer inside a running stack?",
    rows=(
        *(_row(f"{n} connection{'s' * (n > 1)}", n, 0.0) for n in (1, 4, 16, 64)),
        *(_row(f"{rate} requests/s", 0, rate) for rate in (50, 100, 200)),
    ),
    run_setup=f"{_HERE}:PROGRAMS.open",
    interpretation="""\
The figure is requests answered 200 within a second, divided by the CPU time of the serving program, while
all other programs of the demo's stack run on the same machine: Kafka, Flink, Redis, shards, a worker, and
the load generator. Every request is logged, joined and trained. This is the figure to plan a machine with;
`serving-e2e` measures a serving program alone on a core of its own. A closed loop keeps one request in
flight per connection; the rows with requests/s are open-loop (Poisson), with latencies from the due time.

"CPU time of fixed work, times alone" says how long a CPU second is: a process next to the load does the
same JSON work over and over and compares its CPU time with that before the stack was started. Where two
virtual cores share a physical core, this is up to 2 when both are busy, and all CPU times of the row are
longer by as much. The peer runs the same ranker behind FastAPI with Pydantic, without feature log,
admission control, deadlines, Redis and versions, beside the same stack.""",
    slice_s=_SECONDS,
    rounds=1,
)

"""What does serving still answer in time under overload?

A serving program under open-loop load at multiples of its capacity.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.common.open_load import Answered, Clients
from benchmarks.common.serving_program import ServingProgram, requests_of, serving_program
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, Work

DEADLINE_MS = 1000
_MAX_CONNECTIONS = 900
_CAPACITY_S, _WARM_S, _FIRST_S = 3.0, 2.0, 0.5
_LINES = 4  # in the closed loop that says the capacity: one is scored while others are parsed
_BUSY = (429, 503)


class Served:
    """A running program and what it can answer a second, all of it within the deadline."""

    def __init__(
        self, program: ServingProgram, requests: Sequence[bytes], keeps_bodies: bool = False
    ) -> None:
        self.program = program
        self.clients = Clients(program.address, requests, _MAX_CONNECTIONS, keeps_bodies)
        self.clients.closed_loop(_LINES, _WARM_S)
        self.capacity = len(in_time(self.clients.closed_loop(_LINES, _CAPACITY_S))) / _CAPACITY_S


class Load:
    """Requests at random times (Poisson), `times` the capacity, for `seconds` a step. The first step, which
    nobody counts, is short: `Served` has warmed the program."""

    def __init__(self, served: Served, times: float, seconds: float) -> None:
        self.served, self.seconds, self.rate = served, seconds, times * served.capacity
        self.answered: list[Answered] = []
        self.cpu_s = 1.0  # that the program took for the last step
        self._steps_s = itertools.chain([min(_FIRST_S, seconds)], itertools.repeat(seconds))
        self._random = random.Random(int(times * 100))

    def step(self) -> None:
        seconds, before_s = next(self._steps_s), self.served.program.cpu_s()
        self.answered = self.ask(seconds)
        self.cpu_s = max(self.served.program.cpu_s() - before_s, 1e-3)

    def ask(self, seconds: float) -> list[Answered]:
        due_s, at_s = [], self._random.expovariate(self.rate)
        while at_s < seconds:
            due_s.append(at_s)
            at_s += self._random.expovariate(self.rate)
        return self.served.clients.open_loop(due_s)

    def units(self) -> float:
        """Of the last step."""
        return float(len(in_time(self.answered)))

    def figures(self) -> dict[str, float]:
        """Of the last step; shares are of all that was asked."""
        asked = max(len(self.answered), 1)
        took_ms = sorted(1e3 * a.took_s for a in self.answered if a.status == 200) or [0.0]
        refused = [a for a in self.answered if a.status in _BUSY]
        return {
            "asked a second": asked / self.seconds,
            "in time for a CPU second of serving": self.units() / self.cpu_s,
            "refused %": 100 * len(refused) / asked,
            "refused without Retry-After %": 100 * sum(not a.says_when for a in refused) / asked,
            "late or failed %": 100 * (asked - len(in_time(self.answered)) - len(refused)) / asked,
            "p50 of 200, ms": statistics.median(took_ms),
            "p99 of 200, ms": took_ms[int(0.99 * (len(took_ms) - 1))],
            "most that a request was sent late, ms": 1e3
            * max((a.late_s for a in self.answered), default=0.0),
        }


def in_time(answered: list[Answered]) -> list[Answered]:
    return [a for a in answered if a.status == 200 and a.took_s <= DEADLINE_MS / 1000]


@contextlib.contextmanager
def offered(times: float, seconds: float, candidates: int) -> Iterator[Work]:
    """Units: requests answered 200 within the deadline. Subjects of one process load the same program, in
    turns."""
    with _served.open(candidates) as served:
        load = Load(served, times, seconds)
        yield Work(load.step, load.units, load.figures)


@contextlib.contextmanager
def _loaded(candidates: int) -> Iterator[Served]:
    with serving_program(deadline_ms=DEADLINE_MS) as program:
        served = Served(program, requests_of(candidates))
        try:
            yield served
        finally:
            served.clients.close()


_served = SharedSetup(_loaded)

_OFFERED = "benchmarks.serving_overload:offered"
_SECONDS, _CANDIDATES = 5.0, 20
_ROLES: dict[float, Role] = {3.0: "ours", 1.0: "limit"}


def _at(times: float) -> Subject:
    return Subject(
        f"{times:g} × capacity", _OFFERED, (times, _SECONDS, _CANDIDATES), _ROLES.get(times, "stage")
    )


BENCHMARK = Benchmark(
    name="serving-overload",
    summary="What does serving still answer in time when more is asked than it can answer?",
    rows=(
        Row(
            name="rank requests answered 200 within 1 s",
            unit="requests",
            subjects=tuple(map(_at, (3.0, 0.5, 1.0, 2.0))),
        ),
    ),
    interpretation="""\
What was answered 200 within the deadline (1 s, the default), by how much was asked. The target is at least 90 % of the peak at
three times the capacity: the column that compares 3 × with 1 × and 2 × should say 0.9 or more. What is too much is answered 429
with Retry-After, unread.

`roostream serving` in a process of its own on loopback, the demo schema, 20 candidates a request (few: beside such an answer a
refusal is dear), initial rows; Kafka, Redis and the shards are away. The capacity is what four connections get that each ask
again as soon as they are answered. The load doesn't wait: requests at random times (Poisson) over kept connections, encoded
beforehand, from one thread over epoll that costs about 30 µs a request; times count from when a request was due. With two cores
serving has one and the load the other; a figure in which requests were sent late says that the load could not keep up. On a
machine that is busy with other work the requests answered for a second of serving's own CPU time are the better figure.""",
    slice_s=_SECONDS,
    rounds=3,
)

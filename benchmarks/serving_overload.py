"""What does serving still answer in time under overload?

A serving program under open-loop load at multiples of its capacity.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence

from benchmarks.common.open_load import Answer, Clients
from benchmarks.common.serving_program import ServingProgram, requests_of, serving_program
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn

DEADLINE_MS = 1000
_MAX_CONNECTIONS = 900
_CAPACITY_S, _WARM_S, _FIRST_S = 3.0, 2.0, 0.5
_CONNECTIONS = 4  # of the closed loop that measures the capacity
_BUSY = (429, 503)


class Served:
    """A running program, and its capacity: answers a second within the deadline."""

    def __init__(
        self, program: ServingProgram, requests: Sequence[bytes], keeps_bodies: bool = False
    ) -> None:
        self.program = program
        self.clients = Clients(program.address, requests, _MAX_CONNECTIONS, keeps_bodies)
        self.clients.closed_loop(_CONNECTIONS, _WARM_S)
        self.capacity = len(in_time(self.clients.closed_loop(_CONNECTIONS, _CAPACITY_S))) / _CAPACITY_S


class Load:
    """Requests at random times (Poisson) at `times` the capacity, for `seconds` a turn."""

    def __init__(self, served: Served, times: float, seconds: float) -> None:
        self.served, self.seconds, self.rate = served, seconds, times * served.capacity
        self.answers: list[Answer] = []  # of the last turn
        self.cpu_s = 1.0  # of the program in the last turn
        self._random = random.Random(int(times * 100))

    def send(self, seconds: float) -> list[Answer]:
        due_s, time_s = [], self._random.expovariate(self.rate)
        while time_s < seconds:
            due_s.append(time_s)
            time_s += self._random.expovariate(self.rate)
        return self.served.clients.open_loop(due_s)

    def run(self, seconds: float) -> None:
        before_s = self.served.program.cpu_s()
        self.answers = self.send(seconds)
        self.cpu_s = max(self.served.program.cpu_s() - before_s, 1e-3)

    def turn(self) -> TurnResult:
        began_s = time.perf_counter()
        self.run(self.seconds)
        took_s = time.perf_counter() - began_s
        return TurnResult(len(in_time(self.answers)), took_s, self.figures())

    def warm_up(self) -> None:
        """Short, because `Served` has warmed the program."""
        self.run(min(_FIRST_S, self.seconds))

    def latencies(self) -> dict[str, float]:
        took_ms = sorted(1e3 * a.took_s for a in self.answers if a.status == 200) or [0.0]
        return {"p50": statistics.median(took_ms), "p99": took_ms[int(0.99 * (len(took_ms) - 1))]}

    def latest_ms(self) -> float:
        """The longest delay with which the load sent a request."""
        return 1e3 * max((a.late_s for a in self.answers), default=0.0)

    def figures(self) -> dict[str, float]:
        """Shares are of all requests."""
        asked, num_in_time = max(len(self.answers), 1), len(in_time(self.answers))
        refused = [a for a in self.answers if a.status in _BUSY]
        latencies = self.latencies()
        return {
            "asked a second": asked / self.seconds,
            "in time for a CPU second of serving": num_in_time / self.cpu_s,
            "refused %": 100 * len(refused) / asked,
            "refused without Retry-After %": 100 * sum(not a.has_retry_after for a in refused) / asked,
            "late or failed %": 100 * (asked - num_in_time - len(refused)) / asked,
            "p50 of 200, ms": latencies["p50"],
            "p99 of 200, ms": latencies["p99"],
            "most that a request was sent late, ms": self.latest_ms(),
        }


def in_time(answers: list[Answer]) -> list[Answer]:
    return [a for a in answers if a.status == 200 and a.took_s <= DEADLINE_MS / 1000]


@contextlib.contextmanager
def offered(times: float, seconds: float, candidates: int) -> Iterator[WholeTurn]:
    """Units: requests answered 200 within the deadline. Subjects of one process load the same program, in
    turns."""
    with _served.open(candidates) as served:
        load = Load(served, times, seconds)
        yield WholeTurn(load.turn, load.warm_up)


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
Rows are offered loads; units are requests answered 200 within the deadline (1 s, the default). The target
is at least 90 % of the peak at three times the capacity, so the ratio of 3 × to 1 × and to 2 × should be
0.9 or more. Excess requests get 429 with Retry-After before their body is read. `roostream serving` runs on
loopback with the demo schema, initial rows and 20 candidates a request, without Kafka, Redis and shards.
The capacity is what four closed-loop connections get; the load is open-loop (Poisson), and latencies count
from the due time. On a busy machine use the requests in time per CPU second of serving.""",
    slice_s=_SECONDS,
    rounds=3,
)

"""How many requests fail while serving is restarted?

Serving programs replace each other on one port while clients with keep-alive connections send requests.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Iterator

from benchmarks.common.serving_program import ServingProgram, bodies_of, serving_program
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, Work

_PAUSE_S = 0.05  # of a client, between an answer and its next request
_DEADLINE_MS = 10_000  # starting programs share the core with the one that answers
_PATIENCE_S = 60.0
_SETTLE_S = 1.0  # of clients with a new program


class KeptClient(threading.Thread):
    """Asks again and again on a connection that it keeps until an answer says that it is the last; tries
    nothing twice."""

    def __init__(self, port: int, body: bytes, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.body, self.stop = port, body, stop
        self.took_s: list[float] = []  # of answers 200
        self.num_failed = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)
        while not self.stop.wait(_PAUSE_S):
            begin_s = time.perf_counter()
            try:
                connection.request("POST", "/v1/rank", self.body, {"content-type": "application/json"})
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                self.num_failed += 1
                continue
            if answer.status == 200:
                self.took_s.append(time.perf_counter() - begin_s)
            else:
                self.num_failed += 1
        connection.close()


class Rolling:
    """So many restarts a step, with so many clients; in the first step, which nobody counts, none."""

    def __init__(self, restarts: int, num_clients: int, drain_ms: int, candidates: int) -> None:
        self.restarts, self.num_clients, self.drain_ms = restarts, num_clients, drain_ms
        self._steps = itertools.chain([0], itertools.repeat(restarts))
        self._bodies = bodies_of(candidates)[:num_clients]
        self._clients: list[KeptClient] = []
        self._unclean = 0

    def step(self) -> None:
        port, stop = _free_port(), threading.Event()
        with contextlib.ExitStack() as all_:
            old, ended = self._started(port, all_)
            self._unclean = 0
            self._clients = [KeptClient(port, body, stop) for body in self._bodies]
            for client in self._clients:
                client.start()
            try:
                for _ in range(next(self._steps)):
                    new, new_ended = self._started(port, all_)
                    self._unclean += old.stop() != 0
                    ended.close()
                    old, ended = new, new_ended
                    time.sleep(_SETTLE_S)
            finally:
                stop.set()
                for client in self._clients:
                    client.join()

    def units(self) -> float:
        """Of the last step."""
        return float(sum(len(client.took_s) for client in self._clients))

    def figures(self) -> dict[str, float]:
        took_ms = sorted(1e3 * s for client in self._clients for s in client.took_s) or [0.0]
        failed = sum(client.num_failed for client in self._clients)
        return {
            "restarts": self.restarts,
            "asked": self.units() + failed,
            "failed": failed,
            "programs that did not end with 0": self._unclean,
            "p99, ms": took_ms[int(0.99 * (len(took_ms) - 1))],
        }

    def _started(self, port: int, all_: contextlib.ExitStack) -> tuple[ServingProgram, contextlib.ExitStack]:
        """Listening, and what ends it; `all_` does at last."""
        own = all_.enter_context(contextlib.ExitStack())
        program = serving_program(
            listen=f"127.0.0.1:{port}",
            reuse_port=True,
            drain_ms=self.drain_ms,
            deadline_ms=_DEADLINE_MS,
            stop_ms=5000,
        )
        return own.enter_context(program), own


@contextlib.contextmanager
def rolled(restarts: int, num_clients: int, drain_ms: int, candidates: int) -> Iterator[Work]:
    """Units: requests answered 200."""
    rolling = Rolling(restarts, num_clients, drain_ms, candidates)
    yield Work(rolling.step, rolling.units, rolling.figures)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


_ROLLED = "benchmarks.serving_restart:rolled"
_RESTARTS, _FEW_RESTARTS, _CLIENTS, _CANDIDATES = 10, 3, 16, 20


def _with(name: str, restarts: int, drain_ms: int, role: Role) -> Subject:
    return Subject(name, _ROLLED, (restarts, _CLIENTS, drain_ms, _CANDIDATES), role)


BENCHMARK = Benchmark(
    name="serving-restart",
    summary="How many requests fail while serving is restarted?",
    rows=(
        Row(
            name=f"rank requests of {_CLIENTS} clients over rolling restarts, answered 200",
            unit="requests",
            subjects=(
                _with("connections take leave", _RESTARTS, 1000, "ours"),
                _with("connections are closed at once, as uvicorn does", _FEW_RESTARTS, 0, "limit"),
            ),
        ),
    ),
    interpretation="""\
A serving program is started on the port of one that answers (`reuse_port`); once it listens, the old one gets SIGTERM; ten
times (three, where connections are closed at once, which is soon seen).
Sixteen clients of Python's standard library keep their connections and ask on each again 50 ms after an answer. Nothing is tried
twice: whatever isn't a 200 counts as failed, also a connection that was closed under a request, which HTTP lets a client of an
idempotent request try again. The target: none. A client that is told with an answer that it was the connection's last opens
another one, which the kernel gives to the new program, since the old one no longer listens.

`roostream serving` in processes of its own on loopback, the demo schema, 20 candidates a request, initial rows; Kafka, Redis and
the shards are away. With two cores the programs have one, also while they start, which the p99 shows; the clients have the
other.""",
    slice_s=1.0,
    rounds=1,
)

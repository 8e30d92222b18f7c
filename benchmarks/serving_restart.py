"""How many requests fail while serving is restarted?

Serving programs replace each other on one port while clients with keep-alive connections send requests.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

from benchmarks.common.serving_program import ServingProgram, bodies_of, serving_program
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn

_PAUSE_S = 0.05  # of a client, between an answer and its next request
_DEADLINE_MS = 10_000  # starting programs share the core with the one that answers
_TIMEOUT_S = 60.0
_SETTLE_S = 1.0  # for the clients, with a new program


class KeptClient(threading.Thread):
    """A closed loop on one keep-alive connection, without retries."""

    def __init__(self, port: int, body: bytes, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.body, self.stop = port, body, stop
        self.took_s: list[float] = []  # of answers with status 200
        self.num_failed = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
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


@contextlib.contextmanager
def _started(port: int, drain_ms: int) -> Iterator[ServingProgram]:
    listen, stop_ms = f"127.0.0.1:{port}", 5000
    with serving_program(
        listen=listen, reuse_port=True, drain_ms=drain_ms, deadline_ms=_DEADLINE_MS, stop_ms=stop_ms
    ) as program:
        yield program


@contextlib.contextmanager
def rolled(restarts: int, num_clients: int, drain_ms: int, candidates: int) -> Iterator[WholeTurn]:
    """Units: requests answered 200."""
    bodies = bodies_of(candidates)[:num_clients]

    def run(restarts: int) -> TurnResult:
        port, stop = _free_port(), threading.Event()
        clients = [KeptClient(port, body, stop) for body in bodies]
        num_unclean = 0
        with contextlib.ExitStack() as opened:
            programs = [opened.enter_context(_started(port, drain_ms))]
            for client in clients:
                client.start()
            try:
                for _ in range(restarts):
                    programs.append(opened.enter_context(_started(port, drain_ms)))
                    num_unclean += programs[-2].stop() != 0
                    time.sleep(_SETTLE_S)
            finally:
                stop.set()
                for client in clients:
                    client.join()
        took_ms = sorted(1e3 * s for client in clients for s in client.took_s) or [0.0]
        num_ok, num_failed = sum(len(c.took_s) for c in clients), sum(c.num_failed for c in clients)
        figures = {
            "restarts": restarts,
            "asked": num_ok + num_failed,
            "failed": num_failed,
            "programs that did not end with 0": num_unclean,
            "p99, ms": took_ms[int(0.99 * (len(took_ms) - 1))],
        }
        return TurnResult(num_ok, None, figures)

    yield WholeTurn(lambda: run(restarts), warm_up=lambda: run(0))


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
A new serving program starts on the port of the running one (`reuse_port`). When it listens, the old one
gets SIGTERM; this happens ten times, or three times where connections are closed at once. Sixteen clients
of Python's standard library keep their connections and ask again 50 ms after an answer, without retries:
everything but a 200 counts as failed. The target is no failed request. A client whose answer says that the
connection closes opens a new one, which reaches the new program. The programs share one of two cores while
they start, which the p99 shows; Kafka, Redis and the shards are away.""",
    slice_s=1.0,
    rounds=1,
)

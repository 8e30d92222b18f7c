"""How far a request, an event, a sample and a row delta walk through our files, in one process: a count, not
a time.

    rank      a request in JSON: HTTP body → answer and log record
    join      its impression → stored; the request closes → its sample
    train     that sample → batch → update → rows of a shard
    publish   the rows it touched → deltas → a replica

Sockets, Kafka, Redis and Flink are left out; kernels are compiled calls and not
counted. `python -m benchmarks.walks` prints the table.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from benchmarks import serving_request as one_request
from benchmarks import train_step as training_step
from benchmarks.common import samples as data
from benchmarks.common.joiner_events import START_MS, Maker
from benchmarks.common.shard import empty_shard
from benchmarks.harness.subject_process import ROOT
from benchmarks.joiner_core import Overlay
from joiner.config import JoinerConfig
from joiner.event_decoder import EventDecoder
from joiner.join import Join
from joiner.state import Impression, SerializedState
from param_server.client import Client
from param_server.publish import Publisher
from param_server.replica.replica import Replica
from param_server.server import ShardRpcHandler
from roostream.runtime.clock import SystemClock
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.wire import records as wire
from roostream.wire.decode import Decoder
from roostream.wire.lookup import build_lookup
from roostream.wire.records import Record
from tests.param_server.memory_rows import InMemoryRows

CANDIDATES = 20
PACKAGES = ("roostream", "joiner", "param_server", "trainer", "serving", "infra")


@dataclasses.dataclass(frozen=True)
class Walk:
    files: tuple[str, ...]  # of ours, in the order in which they were first entered
    num_functions: int
    num_calls: int
    num_moves: int  # calls from one of our files into another
    deepest: int  # of our frames on each other

    def row(self) -> str:
        counts = f"{self.num_functions:9} {self.num_calls:6} {self.num_moves:6} {self.deepest:8}"
        return f"{len(self.files):5} {counts}"


class Counter:
    """Counts calls of this thread while it is entered, with a profile hook."""

    def __init__(self) -> None:
        self._ours: dict[CodeType, str] = {}  # code → its file under ROOT, "" = not ours
        self._files: dict[str, None] = {}
        self._functions: set[CodeType] = set()
        self._stack: list[str] = []
        self._calls = self._moves = self._deepest = 0

    def __enter__(self) -> Counter:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def walk(self) -> Walk:
        return Walk(tuple(self._files), len(self._functions), self._calls, self._moves, self._deepest)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        file = self._ours.get(frame.f_code)
        if file is None:
            file = self._ours[frame.f_code] = _file_of(frame.f_code)
        if not file:
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        self._files[file] = None
        self._functions.add(frame.f_code)
        self._calls += 1
        self._moves += bool(self._stack) and self._stack[-1] != file
        self._stack.append(file)
        self._deepest = max(self._deepest, len(self._stack))


def _file_of(code: CodeType) -> str:
    if code.co_name.startswith("<"):
        return ""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return ""
    file = path.relative_to(ROOT)
    return str(file) if file.parts[0] in PACKAGES else ""


def count(call: Callable[[], object], *, warm: bool = True) -> Walk:
    """The walk of one call; `warm`: after one that isn't counted."""
    if warm:
        call()
    with Counter() as counter:
        call()
    return counter.walk()


def rank(folder: str) -> Walk:
    """HTTP body → answer and log record; 20 candidates of the demo schema."""
    with one_request.endpoint(CANDIDATES, in_executor=True) as work:
        return count(work.step)


def join(folder: str) -> Walk:
    """An impression → stored; its request closes → a sample. State is stored as bytes, as an engine keeps
    it."""
    schema = data.demo_schema()
    reader = EventDecoder({schema.fingerprint: schema}.get, schema.limits)
    machine = Join(JoinerConfig().rules, {schema.fingerprint: schema}.get, schema.limits)
    event = Maker(schema).impression("r-1", 17, START_MS, list(range(1, CANDIDATES + 1)))
    record = Record(event.topic, 0, 0, event.time_ms, event.key, event.value)

    def step() -> None:
        entries = SerializedState(Overlay({}))
        impression = reader.decode(record)
        assert isinstance(impression, Impression)
        result = machine.apply(entries, event.key, impression, 0)
        entries.flush()
        entries.reset()
        (timer_ms,) = result.timers_ms
        closed = machine.advance(entries, event.key, timer_ms, timer_ms)
        assert [output.topic for output in closed.outputs] == ["samples"]
        entries.flush()

    return count(step)


def train(folder: str) -> Walk:
    """One sample → batch → rows of a shard, pulled and pushed back."""
    return count(training_step.demo_case(folder, 1, CANDIDATES).whole)


def publish(folder: str) -> Walk:
    """The rows that one request's update touched → deltas → a replica."""
    schema, stop = data.demo_schema(), threading.Event()
    shard, topic, replica = empty_shard(schema, folder), InMemoryRows(), Replica(schema, 0)
    client = Client(schema, [InMemoryTransport(ShardRpcHandler(shard).handle)], worker=0)
    client.set_incarnation(1)
    publisher = Publisher(shard, topic, SystemClock())
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    lookup = build_lookup(decoder.decode(data.sample_records(schema, 1, candidates=CANDIDATES))[0])
    gradients = {stack: np.full_like(rows_UD, 1e-3) for stack, rows_UD in client.pull(lookup).items()}

    def touch() -> list[int]:
        client.push(lookup, gradients, step=1, time_ms=data.T0_MS)
        return [len(values) for values in topic.values]

    def send(ends: list[int]) -> None:
        publisher.turn(stop)
        for values, end in zip(topic.values, ends, strict=True):
            for value in values[end:]:
                replica.apply(wire.decode(value)[1])  # type: ignore[arg-type]

    replica.bootstrap(client.transports)
    send(touch())
    ends = touch()
    return count(lambda: send(ends), warm=False)


WALKS: dict[str, Callable[[str], Walk]] = {"rank": rank, "join": join, "train": train, "publish": publish}


def main() -> None:
    """Print one row a walk."""
    print(f"{'walk':8} files functions  calls  moves  deepest")
    for name, walk in WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name:8} {walk(folder).row()}")


if __name__ == "__main__":
    main()

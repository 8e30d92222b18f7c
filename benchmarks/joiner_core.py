"""What does an event cost in the join, and does the cost depend on the size of the state?

Runs the join without Kafka and Flink: a whole stream of events, and single events with a state of a chosen
size.
"""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cache
from typing import Any

import numpy as np

from benchmarks.common import joiner_events
from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from joiner import state
from joiner.config import JoinerConfig
from joiner.event_decoder import Event, EventDecoder
from joiner.join import Join, StepResult
from joiner.state import Engagement, Impression, SerializedState
from roostream.runtime.event_time import START
from roostream.runtime.program import tune_garbage_collector
from roostream.schema.ids import key_bytes
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record

WINDOW_MS, LATENESS_MS = 20_000, 1_000
CANDIDATES, ENGAGEMENTS = 10, 9  # 10 events a request


@cache
def _schema() -> Schema:
    return data.demo_schema()


def _impression(request: int, user: int, time_ms: int, candidates: int = CANDIDATES) -> Record:
    schema, rng = _schema(), np.random.default_rng(request)
    items_n = np.arange(1, candidates + 1, dtype=np.int64)
    message = pb.Impression(
        header=_header(request, user, time_ms),
        item_ids=items_n.tolist(),
        ro=encode_ro(schema, {"user": [user], "hour_of_day": 3.5}),
        nro=encode_nro(schema, {"item": items_n, "ctr_1h": rng.random(candidates)}, candidates),
    )
    return Record(
        "impressions", 0, request, time_ms, key_bytes(user, 1, ""), wire.encode(wire.IMPRESSION, message)
    )


def _engagement(request: int, user: int, time_ms: int, event: int, item: int) -> Record:
    message = pb.Engagement(
        header=_header(request, user, time_ms), event_id=event, item_id=item, action="click", value=1.0
    )
    return Record(
        "engagements", 0, event, time_ms, key_bytes(user, 1, ""), wire.encode(wire.ENGAGEMENT, message)
    )


def _header(request: int, user: int, time_ms: int) -> pb.Header:
    return pb.Header(
        request_id=f"r{request:08d}",
        user_id=user,
        session_id=1,
        time_ms=time_ms,
        schema=_schema().fingerprint,
    )


def stream(num_requests: int, num_users: int) -> list[Record]:
    """Requests 10 ms apart, each with its engagements within its window, in order of time."""
    rng, out = random.Random(1), []
    for n in range(num_requests):
        user, time_ms = rng.randrange(1, num_users + 1), data.T0_MS + 10 * n
        out.append(_impression(n, user, time_ms))
        for e in range(ENGAGEMENTS):
            at_ms = time_ms + rng.randrange(1, WINDOW_MS - 1)
            out.append(_engagement(n, user, at_ms, 1 + n * ENGAGEMENTS + e, rng.randrange(1, CANDIDATES + 1)))
    return sorted(out, key=lambda record: record.timestamp_ms)


def _decoder() -> EventDecoder:
    return EventDecoder({_schema().fingerprint: _schema()}.get, _schema().limits)


def _join(late_horizon_ms: int = 0) -> Join:
    rules = JoinerConfig(window_ms=WINDOW_MS, lateness_ms=LATENESS_MS, late_horizon_ms=late_horizon_ms).rules
    return Join(rules, {_schema().fingerprint: _schema()}.get, _schema().limits)


def _event(record: Record, decoder: EventDecoder | None = None) -> Event:
    event = (decoder or _decoder()).decode(record)
    assert isinstance(event, (Impression, Engagement)), event
    return event


class Engine:
    """States by key in memory and a heap of timers, with the garbage collection of our programs."""

    def __init__(self) -> None:
        tune_garbage_collector()
        self.join = _join()
        self.states: dict[bytes, state.MemoryState] = {}
        self.timers: list[tuple[int, bytes]] = []
        self.num_outputs = 0

    def apply(self, key: bytes, event: Event, watermark_ms: int) -> None:
        state_ = self.states.get(key)
        if state_ is None:
            state_ = self.states[key] = state.MemoryState()
        result = self.join.apply(state_, key, event, watermark_ms)
        if result.outputs or result.timers_ms:
            self._record(key, result)

    def advance(self, watermark_ms: int) -> None:
        while self.timers and self.timers[0][0] <= watermark_ms:
            due_ms, key = heapq.heappop(self.timers)
            state_ = self.states.get(key)
            if state_ is not None:
                self._record(key, self.join.advance(state_, key, due_ms, watermark_ms))
                if not state_.requests:
                    del self.states[key]

    def _record(self, key: bytes, result: StepResult) -> None:
        self.num_outputs += len(result.outputs)
        for due_ms in result.timers_ms:
            heapq.heappush(self.timers, (due_ms, key))


Timed = tuple[Record, int]
"""A record, and the watermark after it."""


@cache
def _stream(requests: int, users: int) -> list[Timed]:
    """`users`: of `stream`; 0 = the demo's mix of events, which come somewhat out of order."""
    if users:
        return [(record, record.timestamp_ms - LATENESS_MS) for record in stream(requests, users)]
    newest_ms, timed = 0, []
    for n, event in enumerate(joiner_events.events(_schema(), requests)):
        newest_ms = max(newest_ms, event.time_ms)
        record = Record(event.topic, 0, n, event.time_ms, event.key, event.value)
        timed.append((record, newest_ms - LATENESS_MS - 1))
    return timed


@contextlib.contextmanager
def parsed(requests: int, users: int) -> Iterator[Work]:
    """The limit: decoding the events without a join."""
    records, decoder = [record for record, _ in _stream(requests, users)], _decoder()
    yield Work(lambda: [decoder.decode(record) for record in records], len(records))


@contextlib.contextmanager
def joined(requests: int, users: int) -> Iterator[Work]:
    """The state machine alone, with decoded events."""
    decoder = _decoder()
    events = [(r.key or b"", time_ms, _event(r, decoder)) for r, time_ms in _stream(requests, users)]
    yield Work(lambda: _run(events, requests), len(events))


@contextlib.contextmanager
def read_and_joined(requests: int, users: int) -> Iterator[Work]:
    records, decoder = _stream(requests, users), _decoder()

    def step() -> None:
        _run(((r.key or b"", time_ms, decoder.decode(r)) for r, time_ms in records), requests)

    yield Work(step, len(records))


def _run(events: Iterable[tuple[bytes, int, Any]], num_requests: int) -> None:
    engine, now_ms = Engine(), START
    apply, timers = engine.apply, engine.timers
    for key, watermark_ms, event in events:
        apply(key, event, now_ms)
        if watermark_ms > now_ms:
            now_ms = watermark_ms
            if timers and timers[0][0] <= now_ms:
                engine.advance(now_ms)
    engine.advance(state.END)
    assert engine.num_outputs == num_requests and not engine.states


class Overlay:
    """A store whose writes `clear` drops and `keep` commits."""

    def __init__(self, below: dict[str, bytes]) -> None:
        self.below = below
        self.written: dict[str, bytes | None] = {}

    def get(self, key: str) -> bytes | None:
        return self.written[key] if key in self.written else self.below.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.written[key] = value

    def remove(self, key: str) -> None:
        self.written[key] = None

    def clear(self) -> None:
        self.written.clear()

    def keep(self) -> None:
        for key, value in self.written.items():
            if value is None:
                self.below.pop(key, None)
            else:
                self.below[key] = value
        self.written.clear()


def _store_with_requests(join: Join, num_requests: int, engagements: int) -> Overlay:
    """The state of a user whose requests are closed except for the last one, with `engagements` each."""
    store, key, event_id, timers = Overlay({}), key_bytes(1, 1, ""), 1, list[int]()
    entries = SerializedState(store)

    def keep(result: StepResult) -> None:
        entries.flush()
        entries.reset()
        store.keep()
        for timer_ms in result.timers_ms:
            heapq.heappush(timers, timer_ms)

    def advance(watermark_ms: int) -> None:
        while timers and timers[0] <= watermark_ms:
            keep(join.advance(entries, key, heapq.heappop(timers), watermark_ms))

    for n in range(num_requests):
        time_ms = data.T0_MS + n * WINDOW_MS
        advance(time_ms - 1)
        keep(join.apply(entries, key, _event(_impression(n, 1, time_ms)), time_ms - 1))
        for e in range(engagements):
            late = _event(_engagement(n, 1, time_ms + 1, event_id, 1 + e % CANDIDATES))
            keep(join.apply(entries, key, late, time_ms - 1))
            event_id += 1
    advance(data.T0_MS + num_requests * WINDOW_MS - 1)
    assert entries.counts.num_requests == num_requests
    entries.reset()
    return store


@contextlib.contextmanager
def one_event(remembered: int, engagements: int) -> Iterator[Work]:
    """One more engagement of the newest request as the Flink operator joins it: from stored bytes to stored
    bytes. Every step starts with the same bytes."""
    join, key = _join(late_horizon_ms=(remembered + 1) * WINDOW_MS), key_bytes(1, 1, "")
    store = _store_with_requests(join, remembered, engagements)
    entries = SerializedState(store)
    newest_ms = data.T0_MS + (remembered - 1) * WINDOW_MS
    event = _event(_engagement(remembered - 1, 1, newest_ms + 2, 1 << 40, 3))

    def step() -> None:
        store.clear()
        entries.reset()
        result = join.apply(entries, key, copy(event), newest_ms - 1)
        assert not result.timers_ms
        entries.flush()

    yield Work(step)


@contextlib.contextmanager
def read_one() -> Iterator[Work]:
    """The limit of one event: decoding it."""
    record, decoder = _engagement(0, 1, data.T0_MS, 1, 3), _decoder()
    yield Work(lambda: decoder.decode(record))


_HERE = "benchmarks.joiner_core"
_SIZE, _SMALL, _DEMO = (2_000, 500), (300, 75), (6_000, 0)


def _one_event(what: str, remembered: int, engagements: int) -> Row:
    return Row(
        name=f"one engagement, {what}",
        unit="events",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("join with its state's bytes", f"{_HERE}:one_event", (remembered, engagements)),
            Subject("reading the event", f"{_HERE}:read_one", (), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="joiner-core",
    summary="What does an event cost in the join, and does it depend on how much is remembered?",
    rows=(
        Row(
            name="a stream of 20,000 events, 10 a request, 500 users",
            unit="events",
            clock="cpu",
            subjects=(
                Subject("state machine", f"{_HERE}:joined", _SIZE),
                Subject("with reading the events", f"{_HERE}:read_and_joined", _SIZE, "stage"),
                Subject("reading alone", f"{_HERE}:parsed", _SIZE, "limit"),
            ),
        ),
        Row(
            name="a stream of 3,000 events, 10 a request, 75 users",
            unit="events",
            clock="cpu",
            subjects=(
                Subject("state machine", f"{_HERE}:joined", _SMALL),
                Subject("reading alone", f"{_HERE}:parsed", _SMALL, "limit"),
            ),
        ),
        Row(
            name="the demo's events, 3.4 a request, 20 candidates, 500 users",
            unit="events",
            clock="cpu",
            subjects=(
                Subject("state machine", f"{_HERE}:joined", _DEMO),
                Subject("reading alone", f"{_HERE}:parsed", _DEMO, "limit"),
            ),
        ),
        *(_one_event(f"{n} remembered requests of the user", n, 5) for n in (10, 50, 200, 500)),
        *(_one_event(f"{n} engagements of its request", 1, n) for n in (10, 400, 4000)),
    ),
    interpretation="""\
One process without Kafka and Flink. An event costs the same with 10 or 500 remembered requests of its user,
and with 10 or 4,000 engagements of its request: about twice the decoding. The target for the state machine
is 150 thousand events a second. The stream of 3,000 events reaches it; the stream of 20,000 events does
not, because its state exceeds the processor's caches (31 against 105 cache misses an event, counted with
cachegrind). Programs run Python's cycle collector rarely, which removes 49 of the 105 misses
(`roostream.runtime.program.tune_garbage_collector`); this benchmark does the same. The rows of one
engagement start from and end with the state's bytes, like the Flink operator.""",
)

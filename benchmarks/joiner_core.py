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


def _reader() -> EventDecoder:
    return EventDecoder({_schema().fingerprint: _schema()}.get, _schema().limits)


def _join(late_horizon_ms: int = 0) -> Join:
    rules = JoinerConfig(window_ms=WINDOW_MS, lateness_ms=LATENESS_MS, late_horizon_ms=late_horizon_ms).rules
    return Join(rules, {_schema().fingerprint: _schema()}.get, _schema().limits)


def _event(record: Record, reader: EventDecoder | None = None) -> Event:
    event = (reader or _reader()).decode(record)
    assert isinstance(event, (Impression, Engagement)), event
    return event


class Engine:
    """States by key in memory and one heap of timers, in a process that collects as programs do."""

    def __init__(self) -> None:
        tune_garbage_collector()
        self.join = _join()
        self.states: dict[bytes, state.MemoryState] = {}
        self.timers: list[tuple[int, bytes]] = []
        self.num_outputs = 0

    def apply(self, key: bytes, event: Event, watermark_ms: int) -> None:
        known = self.states.get(key)
        if known is None:
            known = self.states[key] = state.MemoryState()
        turn = self.join.apply(known, key, event, watermark_ms)
        if turn.outputs or turn.timers_ms:
            self._note(key, turn)

    def advance(self, watermark_ms: int) -> None:
        while self.timers and self.timers[0][0] <= watermark_ms:
            due_ms, key = heapq.heappop(self.timers)
            known = self.states.get(key)
            if known is not None:
                self._note(key, self.join.advance(known, key, due_ms, watermark_ms))
                if not known.requests:
                    del self.states[key]

    def _note(self, key: bytes, turn: StepResult) -> None:
        self.num_outputs += len(turn.outputs)
        for due_ms in turn.timers_ms:
            heapq.heappush(self.timers, (due_ms, key))


@contextlib.contextmanager
def parsed(num_requests: int, num_users: int) -> Iterator[Work]:
    """The limit: what reading an event costs before anything is joined."""
    records, reader = stream(num_requests, num_users), _reader()

    def step() -> None:
        for record in records:
            reader.decode(record)

    yield Work(step, len(records))


@contextlib.contextmanager
def joined(num_requests: int, num_users: int) -> Iterator[Work]:
    """The state machine alone: events are read beforehand."""
    events = [
        (r.key or b"", r.timestamp_ms - LATENESS_MS, _event(r)) for r in stream(num_requests, num_users)
    ]
    yield Work(lambda: _run(events, num_requests), len(events))


def demo_stream(num_requests: int) -> list[Record]:
    """The demo's mix of events, in order of arrival."""
    events = joiner_events.events(_schema(), num_requests)
    return [Record(e.topic, 0, n, e.time_ms, e.key, e.value) for n, e in enumerate(events)]


@contextlib.contextmanager
def parsed_as_in_the_demo(num_requests: int) -> Iterator[Work]:
    records, reader = demo_stream(num_requests), _reader()
    yield Work(lambda: [reader.decode(record) for record in records], len(records))


@contextlib.contextmanager
def joined_as_in_the_demo(num_requests: int) -> Iterator[Work]:
    """As `joined`, with the demo's mix of events, which come somewhat out of order."""
    reader, newest_ms = _reader(), 0
    events = []
    for record in demo_stream(num_requests):
        newest_ms = max(newest_ms, record.timestamp_ms)
        events.append((record.key or b"", newest_ms - LATENESS_MS - 1, _event(record, reader)))
    yield Work(lambda: _run(events, num_requests), len(events))


@contextlib.contextmanager
def read_and_joined(num_requests: int, num_users: int) -> Iterator[Work]:
    records, reader = stream(num_requests, num_users), _reader()

    def step() -> None:
        events = ((r.key or b"", r.timestamp_ms - LATENESS_MS, reader.decode(r)) for r in records)
        _run(events, num_requests)

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
    """A store whose writes are thrown away by `clear`."""

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


def _remembering(join: Join, num_requests: int, engagements: int) -> Overlay:
    """A user whose requests are closed but for the last; each has `engagements` engagements."""
    store, key, event_id, timers = Overlay({}), key_bytes(1, 1, ""), 1, list[int]()
    entries = SerializedState(store)

    def keep(turn: StepResult) -> None:
        entries.flush()
        entries.reset()
        store.keep()
        for timer_ms in turn.timers_ms:
            heapq.heappush(timers, timer_ms)

    def advance(watermark_ms: int) -> None:
        while timers and timers[0] <= watermark_ms:
            keep(join.advance(entries, key, heapq.heappop(timers), watermark_ms))

    for n in range(num_requests):
        time_ms = data.T0_MS + n * WINDOW_MS
        advance(time_ms - 1)
        keep(join.apply(entries, key, _event(_impression(n, 1, time_ms)), time_ms - 1))
        for e in range(engagements):
            keep(
                join.apply(
                    entries,
                    key,
                    _event(_engagement(n, 1, time_ms + 1, event_id, 1 + e % CANDIDATES)),
                    time_ms - 1,
                )
            )
            event_id += 1
    advance(data.T0_MS + num_requests * WINDOW_MS - 1)
    assert entries.counts.num_requests == num_requests
    entries.reset()
    return store


@contextlib.contextmanager
def one_event(remembered: int, engagements: int) -> Iterator[Work]:
    """One more engagement of the newest request, as the operator does it: stored bytes, join, stored bytes.
    Every step begins with the same bytes."""
    join, key = _join(late_horizon_ms=(remembered + 1) * WINDOW_MS), key_bytes(1, 1, "")
    store = _remembering(join, remembered, engagements)
    entries = SerializedState(store)
    newest_ms = data.T0_MS + (remembered - 1) * WINDOW_MS
    event = _event(_engagement(remembered - 1, 1, newest_ms + 2, 1 << 40, 3))

    def step() -> None:
        store.clear()
        entries.reset()
        turn = join.apply(entries, key, copy(event), newest_ms - 1)
        assert not turn.timers_ms
        entries.flush()

    yield Work(step)


@contextlib.contextmanager
def read_one() -> Iterator[Work]:
    """The limit of one event: reading it."""
    record, reader = _engagement(0, 1, data.T0_MS, 1, 3), _reader()
    yield Work(lambda: reader.decode(record))


_HERE = "benchmarks.joiner_core"
_SIZE, _SMALL = (2_000, 500), (300, 75)


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
                Subject("state machine", f"{_HERE}:joined_as_in_the_demo", (6_000,)),
                Subject("reading alone", f"{_HERE}:parsed_as_in_the_demo", (6_000,), "limit"),
            ),
        ),
        *(_one_event(f"{n} remembered requests of the user", n, 5) for n in (10, 50, 200, 500)),
        *(_one_event(f"{n} engagements of its request", 1, n) for n in (10, 400, 4000)),
    ),
    interpretation="""\
An event costs the same whether 10 or 500 requests of its user are remembered, and whether its request has 10 or 4 000
engagements: about twice what reading it costs. With one value a user, as it was before, it cost what was remembered.

The state machine alone was to take 150 thousand events a second. Over 3,000 events it does; over 20,000, of which nearly all
are in memory at once, it does not. What separates the two was counted (cachegrind with a 1 MiB last level, which other work on
the machine doesn't change), not timed: 38 and 41 thousand instructions an event, but 31 and 105 cache misses. 49 of the 105 go
away without Python's collector of cycles, which walks over what is remembered; programs run it rarely now
(`roostream.runtime.program.tune_garbage_collector`), this benchmark too. The rest is
the state itself: a longer stream touches more memory than the cache holds. The counts are of the code before
requests had a budget, which adds 8 % more bytecode to an event.

Tried without effect that could be told from the noise of a shared machine: leaving out what marks a folded engagement, another
allocator, large pages.

One process, no Kafka, no Flink. The rows of one engagement are what the Flink operator does for it: take the state's bytes, join,
give bytes back. They say whether an event costs what it touches or what is remembered.""",
)

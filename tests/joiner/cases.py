"""Support for tests of the joiner: a small schema, builders of events, a driver of one key, and readable
views of outputs."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from joiner.config import JoinerConfig
from joiner.event_decoder import Event, EventDecoder
from joiner.join import Join, StepResult
from joiner.outputs import Output
from joiner.rules import Rules
from joiner.state import (
    END,
    GONE,
    Engagement,
    Impression,
    KeyCounts,
    LabelAggregate,
    MemoryState,
    Request,
    RequestScope,
    SeenEngagement,
    SerializedState,
    decode,
    decoder,
    encode,
)
from roostream.runtime.event_time import START
from roostream.schema.ids import key_bytes
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record

SCHEMA = schema_from_dict(
    {
        "name": "test",
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "hour"}, {"name": "history", "kind": "ids", "table": "item"}],
        "nro": [{"name": "age"}, {"name": "item", "kind": "ids", "table": "item"}],
        "label": [
            {"name": "click", "action": "click"},
            {"name": "clicks", "action": "click", "fold": "count"},
            {"name": "dwell", "action": "dwell", "fold": "last"},
            {"name": "soon", "action": "click", "window_ms": 10},
        ],
    }
)
OTHER_SCHEMA = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}},
        "nro": [{"name": "item", "kind": "ids", "table": "item"}],
        "label": [{"name": "click", "action": "click"}],
    }
)
SCHEMAS = {s.fingerprint: s for s in (SCHEMA, OTHER_SCHEMA)}
USER = 17
KEY = key_bytes(USER, 4, "r")
NOW = 1_000


def rules(**settings: Any) -> Rules:
    """Rules with a window of 100 ms and a late horizon of 1 s, changed by `settings`."""
    return JoinerConfig(**{"window_ms": 100, **settings}).rules


def nro_block(items: Sequence[int], tag: float = 0.0, schema: Schema = SCHEMA) -> bytes:
    columns: dict[str, object] = {"item": list(items)}
    if schema is SCHEMA:
        columns["age"] = [tag + n for n in range(len(items))]
    return encode_nro(schema, columns, len(items))


def impression(
    time_ms: int,
    items: Sequence[int] = (1, 2),
    *,
    request: str = "r",
    ro: float | None = 1.0,
    user: int = USER,
    session: int = 4,
    surface: str = "",
    tag: float = 0.0,
    schema: Schema = SCHEMA,
    **fields: Any,
) -> pb.Impression:
    header = pb.Header(
        request_id=request,
        user_id=user,
        session_id=session,
        surface=surface,
        time_ms=time_ms,
        schema=schema.fingerprint,
    )
    message = pb.Impression(header=header, item_ids=items, nro=nro_block(items, tag, schema), **fields)
    if ro is not None:
        message.ro = encode_ro(schema, {"hour": ro, "history": [5]} if schema is SCHEMA else {})
    return message


def engagement(
    time_ms: int,
    item: int = 1,
    *,
    event: int,
    request: str = "r",
    action: str = "click",
    value: float = 0.0,
    user: int = USER,
    session: int = 4,
) -> pb.Engagement:
    header = pb.Header(
        request_id=request, user_id=user, session_id=session, time_ms=time_ms, schema=SCHEMA.fingerprint
    )
    return pb.Engagement(header=header, event_id=event, item_id=item, action=action, value=value)


def record(
    message: pb.Impression | pb.Engagement | pb.Heartbeat | pb.EndMarker,
    *,
    offset: int = 0,
    partition: int = 0,
) -> Record:
    """A record as a producer would write it."""
    if isinstance(message, (pb.Heartbeat, pb.EndMarker)):
        kind = wire.HEARTBEAT if isinstance(message, pb.Heartbeat) else wire.END_MARKER
        return Record("impressions", partition, offset, message.time_ms, None, wire.encode(kind, message))
    h = message.header
    kind, topic = (
        (wire.IMPRESSION, "impressions")
        if isinstance(message, pb.Impression)
        else (wire.ENGAGEMENT, "engagements")
    )
    return Record(
        topic,
        partition,
        offset,
        h.time_ms,
        key_bytes(h.user_id, h.session_id, h.request_id),
        wire.encode(kind, message),
    )


def make_decoder() -> EventDecoder:
    return EventDecoder(SCHEMAS.get, SCHEMA.limits)


def event(message: pb.Impression | pb.Engagement, offset: int = 0) -> Event:
    found = make_decoder().decode(record(message, offset=offset))
    assert found is not None and not isinstance(found, Output), found
    return found


class DictStore(dict[str, bytes]):
    """A dict with the methods of Flink's map state, for one key."""

    def put(self, key: str, value: bytes) -> None:
        self[key] = value

    def remove(self, key: str) -> None:
        self.pop(key, None)

    def as_memory_state(self) -> MemoryState:
        """All entries as a `MemoryState`."""
        state = MemoryState()
        for name, data in self.items():
            kind, rest = name[0], name[1:]
            if kind == "h":
                state.counts = decoder(KeyCounts)(data)
            elif kind == "r":
                state.requests[rest] = decoder(Request)(data)
            elif kind == "s":
                state.scopes[int(rest)] = decoder(RequestScope)(data)
            elif kind == "d":
                state.due[int(rest)] = decoder(list[tuple[str, int]])(data)
            else:
                number, request_id = rest.split(".", 1)
                if kind == "e":
                    stored: Any = decoder(Engagement | SeenEngagement)(data)  # type: ignore[arg-type]
                    state.engagements_of(request_id)[int(number, 16)] = stored
                    continue
                if kind == "t":
                    state.set_aggregates(request_id, {int(number, 16): decoder(LabelAggregate)(data)})
                    continue
                state.impressions[request_id, int(number, 16)] = decoder(Impression)(data)
        return state


KINDS = ("memory", "reloaded", "entries")
"""How a `Driver` keeps its state. "memory": dicts. "reloaded": dicts that are encoded and decoded around
every call, as after a restore. "entries": one byte string per entry, read and written by each call, as in
Flink."""


class Driver:
    """One key with its watermark and timers. As in the engines, timers decide when the join is called."""

    def __init__(self, with_rules: Rules, kind: str = "entries") -> None:
        self.join = Join(with_rules, SCHEMAS.get, SCHEMA.limits)
        self.kind, self.watermark_ms = kind, START
        self.outputs: list[Output] = []
        self._memory, self.store = MemoryState(), DictStore()
        self._timers: list[int] = []
        self.num_requests = [0] * 4  # by phase, counted from the steps
        self._offset = 0

    @property
    def state(self) -> MemoryState:
        return self.store.as_memory_state() if self.kind == "entries" else self._memory

    def send(self, *messages: pb.Impression | pb.Engagement) -> list[Output]:
        """Apply these events and return their outputs in order."""
        out = []
        for message in messages:
            self._offset += 1
            out += self.apply(event(message, self._offset))
        return out

    def apply(self, found: Event) -> list[Output]:
        """Apply a decoded event and return its outputs."""
        return self._call(lambda state: self.join.apply(state, KEY, found, self.watermark_ms))

    def advance_to(self, watermark_ms: int) -> list[Output]:
        """Advance the watermark, fire the timers that are due, and return their outputs."""
        assert watermark_ms >= self.watermark_ms
        self.watermark_ms = watermark_ms
        out = []
        while self._timers and self._timers[0] <= watermark_ms:
            due_ms = heapq.heappop(self._timers)
            out += self._call(
                lambda state, due_ms=due_ms: self.join.advance(state, KEY, due_ms, watermark_ms)
            )
        return out

    def end(self) -> list[Output]:
        return self.advance_to(END)

    def _call(self, call: Callable[[Any], StepResult]) -> list[Output]:
        if self.kind == "entries":
            entries = SerializedState(self.store)
            result = call(entries)
            entries.flush()
        else:
            if self.kind == "reloaded":
                self._memory = decode(encode(self._memory))
            result = call(self._memory)
        for due_ms in result.timers_ms:
            heapq.heappush(self._timers, due_ms)
        for before, after in result.phase_changes:
            if before != GONE:
                self.num_requests[before] -= 1
            if after != GONE:
                self.num_requests[after] += 1
        self.outputs += result.outputs
        return result.outputs


@dataclasses.dataclass(frozen=True)
class OutputView:
    """The decoded fields of one output that tests compare."""

    topic: str
    reason: str
    message: Any

    @property
    def items(self) -> list[int]:
        return list(self.message.item_ids)

    @property
    def labels(self) -> dict[int, list[float]]:
        return _by_item(self.message, self.message.labels)

    @property
    def labels_before(self) -> dict[int, list[float]]:
        return _by_item(self.message, self.message.labels_before)

    @property
    def events(self) -> list[int]:
        return list(self.message.event_ids)


def view_of(output: Output) -> OutputView:
    return OutputView(output.topic, output.reason, wire.decode(output.value)[1])


def only(outputs: Sequence[Output], topic: str) -> OutputView:
    found = [o for o in outputs if o.topic == topic]
    assert len(found) == 1, [(o.topic, o.reason) for o in outputs]
    return view_of(found[0])


def samples(outputs: Sequence[Output]) -> list[OutputView]:
    return [view_of(o) for o in outputs if o.topic == "samples"]


def reasons(outputs: Sequence[Output]) -> list[str]:
    """The reasons of the dead letters among these outputs."""
    return [o.reason for o in outputs if o.topic == "dead_letters"]


def features_of(message: Any) -> dict[int, tuple[bytes, int]]:
    """Item → (feature block, row in it), from the parts of a sample."""
    rows = []
    for part in message.parts:
        rows += [(part.nro, row) for row in (part.rows or range(part.num_rows))]
    return dict(zip(message.item_ids, rows, strict=True)) if message.parts else {}


def _by_item(message: Any, labels: Sequence[float]) -> dict[int, list[float]]:
    width = len(SCHEMAS[message.header.schema].labels)
    return {item: list(labels[n * width : (n + 1) * width]) for n, item in enumerate(message.item_ids)}


def sample_of(*messages: Any, until_ms: int = NOW + 5_000, **settings: Any) -> Any:
    """The one sample of these events. All events are sent before the watermark advances."""
    driver = Driver(rules(**settings))
    driver.send(*messages)
    return only(driver.advance_to(until_ms), "samples")

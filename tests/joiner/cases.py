"""What the joiner's tests share: a small schema, event makers, a driver of one key, and readable views of outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.ingest import Event, Reader
from joiner.join import Join
from joiner.rules import Rules
from joiner.state import END, START, State, decode, encode
from roo import roo_pb2 as pb
from roo import wire
from roo.block import encode_nro, encode_ro
from roo.ids import key_bytes
from roo.schema import Schema, schema_from_dict
from roo.wire import Record

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
KEY = key_bytes(USER, 4)
NOW = 1_000


def rules(**settings: Any) -> Rules:
    """Window 100 ms, late horizon 1 s, unless said otherwise."""
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
        request_id=request, user_id=user, session_id=session, surface=surface, time_ms=time_ms, schema=schema.fingerprint
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
    header = pb.Header(request_id=request, user_id=user, session_id=session, time_ms=time_ms, schema=SCHEMA.fingerprint)
    return pb.Engagement(header=header, event_id=event, item_id=item, action=action, value=value)


def record(
    message: pb.Impression | pb.Engagement | pb.Heartbeat | pb.EndMarker, *, offset: int = 0, partition: int = 0
) -> Record:
    """As a producer would write it."""
    if isinstance(message, (pb.Heartbeat, pb.EndMarker)):
        kind = wire.HEARTBEAT if isinstance(message, pb.Heartbeat) else wire.END_MARKER
        return Record("impressions", partition, offset, message.time_ms, None, wire.encode(kind, message))
    h = message.header
    kind, topic = (wire.IMPRESSION, "impressions") if isinstance(message, pb.Impression) else (wire.ENGAGEMENT, "engagements")
    return Record(topic, partition, offset, h.time_ms, key_bytes(h.user_id, h.session_id), wire.encode(kind, message))


def reader() -> Reader:
    return Reader(SCHEMAS.get, SCHEMA.limits)


def event(message: pb.Impression | pb.Engagement, offset: int = 0) -> Event:
    found = reader().read(record(message, offset=offset))
    assert found is not None and not isinstance(found, Output), found
    return found


class Driver:
    """One key and its watermark. `through_bytes` encodes and decodes the state around every call, as engines do."""

    def __init__(self, with_rules: Rules, *, through_bytes: bool = True) -> None:
        self.join = Join(with_rules, SCHEMAS.get, SCHEMA.limits.max_candidates)
        self.state, self.watermark_ms, self.through_bytes = State(), START, through_bytes
        self.outputs: list[Output] = []
        self._offset = 0

    def send(self, *messages: pb.Impression | pb.Engagement) -> list[Output]:
        """What these events wrote, in order."""
        out = []
        for message in messages:
            self._offset += 1
            out += self.join.apply(self._state(), KEY, event(message, self._offset), self.watermark_ms)
        self.outputs += out
        return out

    def at(self, watermark_ms: int) -> list[Output]:
        """Move the watermark; the timer decides whether the machine is called, as in engines."""
        assert watermark_ms >= self.watermark_ms
        self.watermark_ms = watermark_ms
        out = self.join.advance(self._state(), KEY, watermark_ms) if self.state.due_ms <= watermark_ms else []
        self.outputs += out
        return out

    def end(self) -> list[Output]:
        return self.at(END)

    def _state(self) -> State:
        if self.through_bytes:
            self.state = decode(encode(self.state))
        return self.state


@dataclasses.dataclass(frozen=True)
class Seen:
    """A view of one output: only what tests compare."""

    topic: str
    why: str
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


def seen(output: Output) -> Seen:
    return Seen(output.topic, output.why, wire.decode(output.value)[1])


def only(outputs: Sequence[Output], topic: str) -> Seen:
    found = [o for o in outputs if o.topic == topic]
    assert len(found) == 1, [(o.topic, o.why) for o in outputs]
    return seen(found[0])


def samples(outputs: Sequence[Output]) -> list[Seen]:
    return [seen(o) for o in outputs if o.topic == "samples"]


def reasons(outputs: Sequence[Output]) -> list[str]:
    """Reasons of the dead letters."""
    return [o.why for o in outputs if o.topic == "dead_letters"]


def features_of(message: Any) -> dict[int, tuple[bytes, int]]:
    """Item → (block, row) of its features, as the parts of a sample say."""
    places = []
    for part in message.parts:
        places += [(part.nro, row) for row in (part.rows or range(part.num_rows))]
    return dict(zip(message.item_ids, places, strict=True)) if message.parts else {}


def _by_item(message: Any, labels: Sequence[float]) -> dict[int, list[float]]:
    width = len(SCHEMAS[message.header.schema].labels)
    return {item: list(labels[n * width : (n + 1) * width]) for n, item in enumerate(message.item_ids)}


def closed(*messages: Any, at: int = NOW + 5_000, **settings: Any) -> Any:
    """The one sample of these events, sent before anything is due."""
    driver = Driver(rules(**settings))
    driver.send(*messages)
    return only(driver.at(at), "samples")

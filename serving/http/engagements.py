"""Parses the JSON body of `POST /v1/engagements`, one engagement or a list, into records for the feature log.

An engagement repeats its request's header. Its event time is taken here; the client's `time_ms` is stored but
not used. Without an `event_id`, one is derived from the body, so that a repeated post is the same event. A
client that lets a user do the same thing twice to the same item must send an `event_id` or its own `time_ms`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from roostream.errors import nearest
from roostream.runtime.kafka.topics import ENGAGEMENTS
from roostream.schema.counter_plan import plan_of
from roostream.schema.ids import MASK64, hash64, key_bytes
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.errors import RequestError, shown
from serving.feature_log.format import LogRecord
from serving.rank_json import FLOAT, MAX_FLOAT, TIME, decode_body
from serving.request import check_text, parse_id
from serving.types import MAX_ENGAGEMENTS, MAX_TEXT_BYTES, NAME, TEXT, Id, limits

SHARE = 0.25  # of the event loop's time, while rank requests come
_PIECE = 100  # engagements that are parsed without a pause, about 1 ms

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")


class EngagementBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a user did to a candidate of a request."""

    request_id: Annotated[str, NAME]
    item_id: Id
    action: Annotated[str, NAME]
    user_id: Id = 0
    session_id: Id = 0
    surface: Annotated[str, TEXT] = ""
    value: Annotated[float, FLOAT] = 0.0
    event_id: Annotated[
        Annotated[int, limits(minimum=0, maximum=MASK64)] | Annotated[str, limits(minLength=1)] | None,
        Meta(
            description="made of the other fields when missing, null or 0: a repeated post is one event; "
            "digits are a number"
        ),
    ] = None
    time_ms: Annotated[
        Annotated[int, TIME] | None, Meta(description="the client's clock: kept, never used")
    ] = None


_DECODER = msgspec.json.Decoder(EngagementBody | list[EngagementBody])
_FIELDS = EngagementBody.__struct_fields__
_KNOWN = {"$": _FIELDS, "$[]": _FIELDS}


class EngagementParser:
    """For one schema. Thread-safe. With `strict`, an action that the schema does not name is refused; else
    `unused` lists it."""

    def __init__(self, schema: Schema, strict: bool = False) -> None:
        self.schema, self.strict = schema, strict
        counted = sorted(schema.derived(plan_of).actions)
        self.known = (
            *dict.fromkeys((*(label.action for label in schema.labels), schema.online.click, *counted)),
        )

    def unused(self, actions: Iterable[str]) -> list[str]:
        """Return the actions that no label and no online feature counts, each once."""
        return [action for action in dict.fromkeys(actions) if action not in self.known]

    def parse(self, body: bytes, now_ms: int) -> ParsedEngagements:
        """Validate the whole body before any of it is accepted. Raises as `parse_in_pieces`."""
        parsed = ParsedEngagements([], [], [])
        for _ in self.parse_in_pieces(body, now_ms, parsed):
            pass
        return parsed

    def parse_in_pieces(self, body: bytes, now_ms: int, parsed: ParsedEngagements) -> Iterator[None]:
        """Validate the body and add its engagements to `parsed`; yields after every _PIECE of them.

        Raises:
            RequestError: 400 with the path of the field; 413 for more than MAX_ENGAGEMENTS.
        """
        given = decode_body(_DECODER, body, _KNOWN)
        if isinstance(given, EngagementBody):
            parsed.add(given, *self._message(given, now_ms, "$"))
            return
        if len(given) > MAX_ENGAGEMENTS:
            raise RequestError(
                413, f"expected at most {MAX_ENGAGEMENTS} engagements a body, got {len(given)}", "$"
            )
        for i, engagement in enumerate(given):
            parsed.add(engagement, *self._message(engagement, now_ms, f"$[{i}]"))
            if (i + 1) % _PIECE == 0:
                yield

    def _message(self, given: EngagementBody, now_ms: int, path: str) -> tuple[LogRecord, int]:
        """Return (record, event id) of one engagement. RequestError 400 with the path of the field."""
        for name in ("request_id", "action"):
            text = getattr(given, name)
            if not text:
                raise RequestError(400, f"expected 1 to {MAX_TEXT_BYTES} bytes, got none", f"{path}.{name}")
            check_text(text, f"{path}.{name}")
        if self.strict and given.action not in self.known:
            refusal = (
                f"nothing in the schema names action {given.action!r}{nearest(given.action, self.known)}"
            )
            raise RequestError(400, refusal, f"{path}.action")
        if abs(given.value) > MAX_FLOAT:
            raise RequestError(400, f"expected a finite 32-bit float, got {given.value}", f"{path}.value")
        client_ms = given.time_ms or 0
        if not -(1 << 63) <= client_ms < 1 << 63:
            raise RequestError(
                400, f"expected a time in ms as a 64-bit integer, got {shown(client_ms)}", f"{path}.time_ms"
            )
        message = pb.Engagement(
            header=pb.Header(
                request_id=given.request_id,
                user_id=parse_id(given.user_id, f"{path}.user_id"),
                session_id=parse_id(given.session_id, f"{path}.session_id"),
                surface=check_text(given.surface, f"{path}.surface"),
                time_ms=now_ms,
                schema=self.schema.fingerprint,
            ),
            item_id=parse_id(given.item_id, f"{path}.item_id"),
            action=given.action,
            value=given.value,
            client_time_ms=client_ms,
        )
        key = key_bytes(message.header.user_id, message.header.session_id, given.request_id)
        message.event_id = _event_id(given.event_id, f"{path}.event_id") or _derived_id(key, message)
        return LogRecord(
            ENGAGEMENTS, -1, now_ms, key, wire.encode(wire.ENGAGEMENT, message)
        ), message.event_id


class ParsedEngagements(NamedTuple):
    """The engagements of a body, in its order."""

    records: list[LogRecord]
    event_ids: list[int]  # uint64
    actions: list[str]

    def add(self, given: EngagementBody, record: LogRecord, event_id: int) -> None:
        self.records.append(record)
        self.event_ids.append(event_id)
        self.actions.append(given.action)


def _event_id(given: int | str | None, path: str) -> int:
    """Return a uint64, or 0 if an id must be derived. Digits are read as a number, as our answers write
    it."""
    if isinstance(given, str) and _DECIMAL.fullmatch(given) and int(given) <= MASK64:
        return int(given)
    if isinstance(given, int) and given < 0:
        raise RequestError(400, f"expected a 64-bit id from 0 on, or a text, got {shown(given)}", path)
    return 0 if given is None else parse_id(given, path)


def _derived_id(key: bytes, message: pb.Engagement) -> int:
    """A hash of all that the client sent and of nothing else."""
    assert math.isfinite(message.value)
    numbers = struct.pack("<Qfq", message.item_id, message.value, message.client_time_ms)
    texts = (message.header.request_id, message.action)
    return hash64(key + numbers + b"".join(len(t.encode()).to_bytes(1, "little") + t.encode() for t in texts))

"""JSON body of `POST /v1/engagements`, one or a list → records for the log.

An engagement repeats its request's header. Its event time is stamped here; the client's `time_ms` is only kept. Without an
`event_id` one is made of what the client sent, so that a repeated post is the same event: a client that lets a user do the
same thing twice to the same item gives an `event_id` or its own `time_ms`.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from roo import roo_pb2 as pb
from roo import wire
from roo.ids import hash64, key_bytes
from roo.schema import Schema
from runtime.kafka.topics import ENGAGEMENTS
from serving.errors import RequestError
from serving.feature_log.format import LogRecord
from serving.json_types import Id
from serving.parse import decode_error
from serving.request import MAX_TEXT_BYTES, id_of, text_of

MAX_ENGAGEMENTS = 1000  # a body


class EngagementBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a user did to a candidate of a request, as a client tells it."""

    request_id: str
    item_id: Id
    action: str
    user_id: Id = 0
    session_id: Id = 0
    surface: str = ""
    value: float = 0.0
    event_id: Annotated[Id | None, Meta(description="made of the other fields when missing: a repeated post is one event")] = None
    time_ms: Annotated[int | None, Meta(description="the client's clock: kept, never used")] = None


_DECODER = msgspec.json.Decoder(EngagementBody | list[EngagementBody])
_FIELDS = EngagementBody.__struct_fields__
_KNOWN = {"$": _FIELDS, "$[]": _FIELDS}


def parse_engagements(schema: Schema, body: bytes, now_ms: int) -> tuple[list[LogRecord], list[int]]:
    """(records, event ids as uint64). All of a body is checked before any of it is taken.

    Raises:
        RequestError: 400 with the path of the field, 413 for more than MAX_ENGAGEMENTS.
    """
    try:
        given = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise decode_error(error, _KNOWN) from None
    if isinstance(given, EngagementBody):
        pairs = [_message(schema, given, now_ms, "$")]
    elif len(given) > MAX_ENGAGEMENTS:
        raise RequestError(413, f"expected at most {MAX_ENGAGEMENTS} engagements a body, got {len(given)}", "$")
    else:
        pairs = [_message(schema, e, now_ms, f"$[{i}]") for i, e in enumerate(given)]
    return [record for record, _ in pairs], [event_id for _, event_id in pairs]


def _message(schema: Schema, given: EngagementBody, now_ms: int, path: str) -> tuple[LogRecord, int]:
    """(record, event id) of one engagement. RequestError 400 with the path of the field."""
    for name in ("request_id", "action"):
        text = getattr(given, name)
        if not text:
            raise RequestError(400, f"expected 1 to {MAX_TEXT_BYTES} bytes, got none", f"{path}.{name}")
        text_of(text, f"{path}.{name}")
    if abs(given.value) > float(np.finfo(np.float32).max):
        raise RequestError(400, f"expected a finite 32-bit float, got {given.value}", f"{path}.value")
    client_ms = given.time_ms or 0
    if not -(1 << 63) <= client_ms < 1 << 63:
        raise RequestError(400, f"expected a time in ms as a 64-bit integer, got {client_ms}", f"{path}.time_ms")
    message = pb.Engagement(
        header=pb.Header(
            request_id=given.request_id,
            user_id=id_of(given.user_id, f"{path}.user_id"),
            session_id=id_of(given.session_id, f"{path}.session_id"),
            surface=text_of(given.surface, f"{path}.surface"),
            time_ms=now_ms,
            schema=schema.fingerprint,
        ),
        item_id=id_of(given.item_id, f"{path}.item_id"),
        action=given.action,
        value=given.value,
        client_time_ms=client_ms,
    )
    header = message.header
    key = key_bytes(header.user_id, header.session_id, header.request_id)
    given_id = given.event_id
    message.event_id = _derived_id(key, message) if given_id is None else id_of(given_id, f"{path}.event_id")
    return LogRecord(ENGAGEMENTS, -1, now_ms, key, wire.encode(wire.ENGAGEMENT, message)), message.event_id


def _derived_id(key: bytes, message: pb.Engagement) -> int:
    """A function of everything that the client sent, and of nothing else."""
    assert math.isfinite(message.value)
    numbers = struct.pack("<Qfq", message.item_id, message.value, message.client_time_ms)
    texts = (message.header.request_id, message.action)
    return hash64(key + numbers + b"".join(len(t.encode()).to_bytes(1, "little") + t.encode() for t in texts))

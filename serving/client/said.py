"""What a client says and what it is told: a rank's body as JSON or as a `roo.Impression`, and the answers as values."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import msgspec
import numpy as np

from roo import roo_pb2 as pb
from roo.block import encode_nro, encode_ro
from roo.ids import item_id
from roo.schema import Schema
from serving.client.failure import ServingError
from serving.client.retrying import Call, Reply

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
Id = int | str
T = TypeVar("T")


class RankFields(TypedDict, total=False):
    """Body of a rank, as docs/http.md says it. Numpy arrays may stand for lists, NaN for a missing number."""

    candidates: Sequence[Mapping[str, Any]] | Mapping[str, Any]  # rows, or columns
    request_id: str  # made here if missing, so that a retry is the same request
    user_id: Id
    session_id: Id
    surface: str
    ro: Mapping[str, Any]
    append: bool
    first_position: int
    model_version: str


class EngagementFields(TypedDict, total=False):
    """What a user did to a candidate; `request_id`, `item_id` and `action` are needed."""

    request_id: str
    item_id: Id
    action: str
    user_id: Id
    session_id: Id
    surface: str
    value: float
    event_id: Id | None
    time_ms: int | None


class Ranking(msgspec.Struct, frozen=True):
    """Answer of a rank. `items` are the candidates' ids as they were given, first slot first: what to show."""

    request_id: str
    model_version: str
    scores: list[dict[str, float]]  # by task, in the request's order
    order: list[int]  # candidates' indices, first slot first
    degraded: bool
    items: list[Id] = []


class Receipt(msgspec.Struct, frozen=True):
    """Answer to engagements: ids of their events in the order given, and actions that nothing counts."""

    accepted: int
    event_ids: list[str]
    unused_actions: list[str]


def rank_call(fields: RankFields, schema: Schema | None) -> Call:
    """With a schema in protobuf; a place of the first slot has no field there, so such a request goes as JSON.

    Raises:
        WireError: protobuf: a feature isn't the schema's.
    """
    given: RankFields = {**fields}
    given["request_id"] = given.get("request_id") or uuid.uuid4().hex
    if schema is None or given.get("first_position"):
        body = msgspec.json.encode(given, enc_hook=_plain)
        return Call("POST", "/v1/rank", body, (("content-type", JSON), ("accept", JSON)))
    path = "/v1/rank?append=true" if given.get("append") else "/v1/rank"
    return Call("POST", path, impression_of(given, schema), (("content-type", PROTOBUF), ("accept", PROTOBUF)))


def engage_call(fields: EngagementFields | Sequence[EngagementFields]) -> Call:
    """One or many."""
    body = msgspec.json.encode(fields if isinstance(fields, Mapping) else list(fields), enc_hook=_plain)
    return Call("POST", "/v1/engagements", body, (("content-type", JSON), ("accept", JSON)))


def ranking_of(reply: Reply, fields: RankFields) -> Ranking:
    """Raises ServingError: it isn't a rank's answer."""
    given = item_ids_of(fields)
    try:
        if reply.headers.get("content-type", "").startswith(PROTOBUF):
            ranking = _ranking(pb.RankAnswer.FromString(reply.body))
        else:
            ranking = msgspec.json.decode(reply.body, type=Ranking)
        return msgspec.structs.replace(ranking, items=[given[i] for i in ranking.order])
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise _not_ours(reply, error) from None


def receipt_of(reply: Reply) -> Receipt:
    """Raises ServingError: it isn't the answer to engagements."""
    return decoded_as(Receipt, reply)


def decoded_as(kind: type[T], reply: Reply) -> T:
    """Raises ServingError: the body is another thing."""
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.DecodeError as error:
        raise _not_ours(reply, error) from None


def impression_of(fields: RankFields, schema: Schema) -> bytes:
    """`fields` as a `roo.Impression` without scores. Raises WireError, as `roo.block.encode_nro`."""
    ids = [item_id(i) for i in item_ids_of(fields)]
    header = pb.Header(
        request_id=fields.get("request_id", ""),
        user_id=item_id(fields.get("user_id", 0)),
        session_id=item_id(fields.get("session_id", 0)),
        surface=fields.get("surface", ""),
        schema=schema.fingerprint,
        model_version=fields.get("model_version", ""),
    )
    nro = encode_nro(schema, _columns(fields["candidates"], schema), len(ids))
    return pb.Impression(header=header, item_ids=ids, ro=encode_ro(schema, fields.get("ro", {})), nro=nro).SerializeToString()


def item_ids_of(fields: RankFields) -> list[Id]:
    """As given, in the order given."""
    candidates = fields.get("candidates", ())
    ids = candidates.get("item_id", ()) if isinstance(candidates, Mapping) else [c["item_id"] for c in candidates]
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)


def _columns(candidates: Any, schema: Schema) -> dict[str, Any]:
    """By feature, each with a value a candidate; what nobody has is left out."""
    if isinstance(candidates, Mapping):
        return {name: column for name, column in candidates.items() if name != "item_id"}
    rows = [{**{k: v for k, v in c.items() if k not in ("item_id", "nro")}, **(c.get("nro") or {})} for c in candidates]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _ranking(answer: pb.RankAnswer) -> Ranking:
    width = len(answer.tasks)
    rows = [answer.scores[at : at + width] for at in range(0, len(answer.scores), width or 1)]
    scores = [dict(zip(answer.tasks, row, strict=True)) for row in rows]
    return Ranking(answer.request_id, answer.model_version, scores, list(answer.order), answer.degraded)


def _plain(value: object) -> object:
    """Arrays and numbers of numpy, for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"expected what JSON has, got {type(value).__name__}")


def _not_ours(reply: Reply, error: Exception) -> ServingError:
    return ServingError(reply.status, "not_serving", f"expected an answer of serving, got one that can't be read: {error}")

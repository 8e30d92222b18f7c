"""Requests and answers of the client: bodies as JSON, a rank also as `roo.Impression`, and answers as typed
values."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, cast

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from roostream.schema.ids import item_id
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from serving.client.retry import Call, Reply, ServingError
from serving.types import (
    EngagementsAnswer,
    RankAnswer,
    RecommendAnswer,
    RetrieveAnswer,
    ScoredItem,
    TopAnswer,
)

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
Id = int | str
T = TypeVar("T")


class ApiCall(NamedTuple, Generic[T]):
    """A call and the function that reads its answer, which raises ServingError if the answer is not one of
    serving's."""

    call: Call
    read: Callable[[Reply], T]
    deadline_ms: int | None = None  # None = the policy's


class WhoFields(TypedDict, total=False):
    """Fields about the user. Numpy arrays may be given for lists, NaN for a missing number."""

    request_id: str  # generated if missing, so that a retry is the same request
    user_id: Id
    session_id: Id
    surface: str
    ro: Mapping[str, Any]


class RankFields(WhoFields, total=False):
    """The body of a rank request, see docs/http.md."""

    candidates: Sequence[Mapping[str, Any]] | Mapping[str, Any]  # rows, or columns
    append: bool
    first_position: int
    model_version: str


class RetrieveFields(WhoFields, total=False):
    """The body of a retrieve request, see docs/retrieval.md."""

    k: int
    task: str
    exclude: Sequence[Id]
    among: Sequence[Id] | None
    exclude_seen: bool
    filter: Mapping[str, Any]


class RecommendFields(RetrieveFields, total=False):
    """The body of a recommend request."""

    retrieved: int
    model_version: str


class EngagementFields(TypedDict, total=False):
    """What a user did to a candidate; `request_id`, `item_id` and `action` are required."""

    request_id: str
    item_id: Id
    action: str
    user_id: Id
    session_id: Id
    surface: str
    value: float
    event_id: Id | None
    time_ms: int | None


class Ranking(RankAnswer[dict[str, float]], kw_only=True):
    """The answer of a rank request. Show `items`, the candidates' ids as given, first slot first."""

    items: list[Id] = msgspec.field(default_factory=list)


TopRanking = TopAnswer[dict[str, float]]
FoundItems = RetrieveAnswer
Recommendation = RecommendAnswer[dict[str, float]]
Receipt = EngagementsAnswer


def rank_exchange(fields: RankFields, schema: Schema | None) -> ApiCall[Ranking]:
    """With a schema, the call is protobuf. `first_position` has no protobuf field, so such a request is JSON.

    Raises:
        WireError: a feature does not fit the schema.
    """
    return ApiCall(_rank_call(fields, schema), lambda reply: _ranking(reply, item_ids_of(fields)))


def top_exchange(fields: RankFields, slots: int, schema: Schema | None) -> ApiCall[TopRanking]:
    """As rank_exchange; the answer has at most `slots` items."""
    call = _rank_call(fields, schema, f"top={slots}")
    return ApiCall(call, lambda reply: _top_ranking(reply, item_ids_of(fields)))


def retrieve_exchange(fields: RetrieveFields) -> ApiCall[FoundItems]:
    """Always JSON: a request without candidates is small."""
    return ApiCall(_post("/v1/retrieve", _named(fields)), lambda reply: decode_json(FoundItems, reply))


def recommend_exchange(fields: RecommendFields) -> ApiCall[Recommendation]:
    """As retrieve_exchange."""
    return ApiCall(_post("/v1/recommend", _named(fields)), lambda reply: decode_json(Recommendation, reply))


def engage_exchange(fields: EngagementFields | Sequence[EngagementFields]) -> ApiCall[Receipt]:
    """One or many."""
    given = fields if isinstance(fields, Mapping) else list(fields)
    return ApiCall(_post("/v1/engagements", given), lambda reply: decode_json(Receipt, reply))


def decode_json(kind: type[T], reply: Reply) -> T:
    """The body of an answer as `kind`. Raises ServingError: the body is not of this type."""
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except msgspec.DecodeError as error:
        raise _not_ours(reply, error) from None


def encode_impression(fields: RankFields, schema: Schema) -> bytes:
    """Encode `fields` as a `roo.Impression` without scores. Raises WireError, as
    `roostream.wire.block.encode_nro`."""
    ids = [_uint64(i) for i in item_ids_of(fields)]
    header = pb.Header(
        request_id=fields.get("request_id", ""),
        user_id=_uint64(fields.get("user_id", 0)),
        session_id=_uint64(fields.get("session_id", 0)),
        surface=fields.get("surface", ""),
        schema=schema.fingerprint,
        model_version=fields.get("model_version", ""),
    )
    nro = encode_nro(schema, _columns(fields["candidates"], schema), len(ids))
    return pb.Impression(
        header=header, item_ids=ids, ro=encode_ro(schema, fields.get("ro", {})), nro=nro
    ).SerializeToString()


def item_ids_of(fields: RankFields) -> list[Id]:
    """The item ids as given, in the given order."""
    candidates = fields.get("candidates", ())
    ids = (
        candidates.get("item_id", ())
        if isinstance(candidates, Mapping)
        else [c["item_id"] for c in candidates]
    )
    if isinstance(ids, np.ndarray):
        return ids.tolist()
    return [i.item() if isinstance(i, np.generic) else i for i in ids]


def _uint64(value: Id | np.generic) -> int:
    return item_id(value.item() if isinstance(value, np.generic) else value)


def _rank_call(fields: RankFields, schema: Schema | None, *query: str) -> Call:
    given = cast(RankFields, _named(fields))
    if schema is None or given.get("first_position"):
        return _post(_with_query("/v1/rank", query), given)
    path = _with_query("/v1/rank", (*query, *["append=true"] * bool(given.get("append"))))
    return Call(
        "POST", path, encode_impression(given, schema), (("content-type", PROTOBUF), ("accept", PROTOBUF))
    )


def _named(fields: WhoFields) -> WhoFields:
    return {**fields, "request_id": fields.get("request_id") or uuid.uuid4().hex}


def _post(path: str, fields: object) -> Call:
    return Call(
        "POST", path, msgspec.json.encode(fields, enc_hook=_plain), (("content-type", JSON), ("accept", JSON))
    )


def _with_query(path: str, query: Sequence[str]) -> str:
    return f"{path}?{'&'.join(query)}" if query else path


def _columns(candidates: Any, schema: Schema) -> dict[str, Any]:
    """Columns by feature, without features that no candidate has."""
    if isinstance(candidates, Mapping):
        return {name: column for name, column in candidates.items() if name != "item_id"}
    rows = [
        {**{k: v for k, v in c.items() if k not in ("item_id", "nro")}, **(c.get("nro") or {})}
        for c in candidates
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _ranking(reply: Reply, given: list[Id]) -> Ranking:
    ranking = _decoded_ranking(reply)
    try:
        return msgspec.structs.replace(ranking, items=[given[i] for i in ranking.order])
    except IndexError as error:
        raise _not_ours(reply, error) from None


def _top_ranking(reply: Reply, given: list[Id]) -> TopRanking:
    if not _is_protobuf(reply):
        return decode_json(TopRanking, reply)
    ranking = _decoded_ranking(reply)
    try:
        top = [ScoredItem(given[i], ranking.scores[i]) for i in ranking.order]
    except IndexError as error:
        raise _not_ours(reply, error) from None
    common = {name: getattr(ranking, name) for name in TopAnswer.__struct_fields__ if name != "top"}
    return TopAnswer(top=top, **common)


def _decoded_ranking(reply: Reply) -> Ranking:
    if not _is_protobuf(reply):
        return decode_json(Ranking, reply)
    try:
        answer = pb.RankAnswer.FromString(reply.body)
        width = len(answer.tasks)
        rows = [answer.scores[at : at + width] for at in range(0, len(answer.scores), width or 1)]
        scores = [dict(zip(answer.tasks, row, strict=True)) for row in rows]
    except (DecodeError, ValueError) as error:
        raise _not_ours(reply, error) from None
    return Ranking(
        request_id=answer.request_id,
        model_version=answer.model_version,
        scores=scores,
        order=list(answer.order),
        degraded=answer.degraded,
    )


def _is_protobuf(reply: Reply) -> bool:
    return reply.headers.get("content-type", "").startswith(PROTOBUF)


def _plain(value: object) -> object:
    """Convert numpy arrays and numbers for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"expected what JSON has, got {type(value).__name__}")


def _not_ours(reply: Reply, error: Exception) -> ServingError:
    return ServingError(
        reply.status, "not_serving", f"expected an answer of serving, got one that cannot be read: {error}"
    )

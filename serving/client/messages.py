"""Requests and answers of the client: bodies as JSON, a rank also as `roo.Impression`, and answers as typed
values."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, cast

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import nearest
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
from serving.types import RankFields as RankHeader

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
        ServingError: `bad_fields`: the fields cannot be sent.
    """
    return ApiCall(_rank_call(fields, schema), lambda reply: _ranking(reply, item_ids_of(fields)))


def top_exchange(fields: RankFields, slots: int, schema: Schema | None) -> ApiCall[TopRanking]:
    """As rank_exchange; the answer has at most `slots` items."""
    call = _rank_call(fields, schema, f"top={slots}")
    return ApiCall(call, lambda reply: _top_ranking(reply, item_ids_of(fields), slots))


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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_ours(reply, error) from None


def encode_impression(fields: RankFields, schema: Schema) -> bytes:
    """Encode `fields` as a `roo.Impression` without scores. Raises WireError, as
    `roostream.wire.block.encode_nro`; ServingError for fields that serving would refuse in JSON, because
    protobuf would leave them out or change them."""
    given, ro = _checked_header(fields), fields.get("ro", {})
    path = _check_candidates(fields.get("candidates"))
    ids = [_uint64(item, path.format(n)) for n, item in enumerate(item_ids_of(fields))]
    if not isinstance(ro, Mapping):
        raise _bad_fields(f"expected an object, got {type(ro).__name__}", "$.ro")
    header = pb.Header(
        request_id=given.request_id,
        user_id=_uint64(given.user_id, "$.user_id"),
        session_id=_uint64(given.session_id, "$.session_id"),
        surface=given.surface,
        schema=schema.fingerprint,
        model_version=given.model_version,
    )
    columns = _columns(fields["candidates"])
    for path, names in (("$.ro", ro), ("$.candidates", columns)):
        for name in names:
            if not isinstance(name, str):
                raise _bad_fields(f"expected names of features as texts, got {name!r}", path)
    nro = encode_nro(schema, columns, len(ids))
    return pb.Impression(header=header, item_ids=ids, ro=encode_ro(schema, ro), nro=nro).SerializeToString()


def item_ids_of(fields: RankFields) -> list[Id]:
    """The item ids as given, in the given order."""
    candidates = fields.get("candidates", ())
    ids = (
        candidates.get("item_id", ())
        if isinstance(candidates, Mapping)
        else [c["item_id"] for c in candidates]
    )
    return ids.tolist() if isinstance(ids, np.ndarray) else [_python_number(i) for i in ids]


def _checked_header(fields: RankFields) -> RankHeader:
    """All fields but candidates and features. Raises ServingError: an unknown name or a wrong type."""
    own = {name: value for name, value in fields.items() if name not in ("candidates", "ro")}
    for name in own:
        if name not in RankHeader.__struct_fields__:
            instead = nearest(str(name), RankFields.__annotations__)
            raise _bad_fields(f"unknown field {name!r}{instead}", f"$.{name}")
    try:
        return msgspec.json.decode(_encode_json(own), type=RankHeader)
    except msgspec.ValidationError as error:
        what, _, path = str(error).rstrip("`").partition(" - at `")
        raise _bad_fields(what, path) from None


def _check_candidates(candidates: object) -> str:
    """Return the path of an item id, with a placeholder for the index. Raises ServingError: some candidate
    has none, or the column of ids is none."""
    if isinstance(candidates, Mapping):
        if "item_id" not in candidates:
            raise _bad_fields("missing required field 'item_id'", "$.candidates")
        ids = candidates["item_id"]
        is_column = ids.ndim > 0 if isinstance(ids, np.ndarray) else isinstance(ids, Sequence)
        if isinstance(ids, str | bytes) or not is_column:
            raise _bad_fields(f"expected a list of ids, got {type(ids).__name__}", "$.candidates.item_id")
        return "$.candidates.item_id[{}]"
    if not isinstance(candidates, Sequence):
        raise _bad_fields(f"expected rows or columns, got {type(candidates).__name__}", "$.candidates")
    for n, row in enumerate(candidates):
        if not isinstance(row, Mapping) or "item_id" not in row:
            raise _bad_fields("expected an object with 'item_id'", f"$.candidates[{n}]")
        nested = row.get("nro")
        if not isinstance(nested, Mapping | None):
            raise _bad_fields(f"expected an object, got {type(nested).__name__}", f"$.candidates[{n}].nro")
        if twice := sorted((row.keys() & nested.keys()) - {"item_id", "nro"}) if nested else ():
            message = f"expected {twice[0]!r} once, beside item_id or in nro, got both"
            raise _bad_fields(message, f"$.candidates[{n}].nro.{twice[0]}")
    return "$.candidates[{}].item_id"


def _uint64(value: object, path: str) -> int:
    value = _python_number(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _bad_fields(f"expected an id as int or str, got {type(value).__name__}", path)
    try:
        return item_id(value)
    except ValueError as error:
        raise _bad_fields(str(error), path) from None


def _python_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _rank_call(fields: RankFields, schema: Schema | None, *query: str) -> Call:
    given = cast(RankFields, _named(fields))
    if schema is None:
        return _post(_with_query("/v1/rank", query), given)
    header = _checked_header(given)
    if header.first_position:
        return _post(_with_query("/v1/rank", query), given)
    path = _with_query("/v1/rank", (*query, *["append=true"] * header.append))
    return Call(
        "POST", path, encode_impression(given, schema), (("content-type", PROTOBUF), ("accept", PROTOBUF))
    )


def _named(fields: WhoFields) -> WhoFields:
    given = fields.get("request_id")
    has_none = given is None or (isinstance(given, str) and not given)
    return {**fields, "request_id": uuid.uuid4().hex} if has_none else fields


def _post(path: str, fields: object) -> Call:
    return Call("POST", path, _encode_json(fields), (("content-type", JSON), ("accept", JSON)))


def _encode_json(fields: object) -> bytes:
    """Raises ServingError: JSON does not have such values."""
    try:
        _check_values(fields)
        return msgspec.json.encode(fields, enc_hook=_plain)
    except ServingError as error:
        raise _bad_fields(error.message, f"${error.path}") from None
    except UnicodeEncodeError as error:
        raise _bad_fields(f"expected texts that UTF-8 can encode: {error.reason}", "$") from None
    except (TypeError, RecursionError) as error:
        raise _bad_fields(str(error), "$") from None


_UNCHANGED = frozenset({int, str, bool, type(None)})


def _check_values(value: Any) -> None:
    """Raises ServingError with the path of a value that JSON would change silently: bytes become Base64, an
    infinity becomes null, which is a missing value."""
    if type(value) in _UNCHANGED:
        return
    if isinstance(value, bytes | bytearray | memoryview):
        raise _bad_fields("expected a text or a number, got bytes; decode them first", "")
    if isinstance(value, np.ndarray) and value.dtype.kind != "f":
        value = value.tolist() if value.dtype.kind in "SOV" else None
    if isinstance(value, float | np.floating | np.ndarray):
        if math.isinf(value) if np.ndim(value) == 0 else np.isinf(value).any():
            raise _bad_fields("expected finite numbers, or NaN for a missing one, got an infinity", "")
    elif isinstance(value, Mapping):
        _check_each(value.items(), ".{}")
    elif isinstance(value, list | tuple):
        _check_each(enumerate(value), "[{}]")


def _check_each(values: Iterable[tuple[Any, Any]], place: str) -> None:
    for name, each in values:
        try:
            _check_values(each)
        except ServingError as error:
            error.path = place.format(name) + error.path
            raise


def _with_query(path: str, query: Sequence[str]) -> str:
    return f"{path}?{'&'.join(query)}" if query else path


def _columns(candidates: Any) -> dict[str, Any]:
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
    _check_order(reply, ranking, len(given), len(given))
    return msgspec.structs.replace(ranking, items=[given[i] for i in ranking.order])


def _top_ranking(reply: Reply, given: list[Id], slots: int) -> TopRanking:
    if not _is_protobuf(reply):
        return decode_json(TopRanking, reply)
    ranking = _decoded_ranking(reply)
    _check_order(reply, ranking, len(given), min(slots, len(given)))
    top = [ScoredItem(given[i], ranking.scores[i]) for i in ranking.order]
    common = {name: getattr(ranking, name) for name in TopAnswer.__struct_fields__ if name != "top"}
    return TopAnswer(top=top, **common)


def _check_order(reply: Reply, ranking: Ranking, num_candidates: int, num_slots: int) -> None:
    """Raises ServingError: the answer does not score all candidates, or does not fill the slots, each with
    another one of them."""
    order, num_scored = ranking.order, len(ranking.scores)
    in_range = all(0 <= i < num_candidates for i in order)
    if num_scored != num_candidates or not in_range or not num_slots == len(order) == len(set(order)):
        got = f"{num_scored} scores and the order {order[:10]} for {num_candidates} candidates"
        raise _not_ours(reply, ValueError(got))


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


def _bad_fields(message: str, path: str) -> ServingError:
    return ServingError(0, "bad_fields", message, path=path)


def _not_ours(reply: Reply, error: Exception) -> ServingError:
    return ServingError(
        reply.status, "not_serving", f"expected an answer of serving, got one that cannot be read: {error}"
    )

"""What `/docs` says of the raw routes: the types that requests are parsed with, and those of the answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roo.block import main_key
from roo.schema import Feature, Schema
from serving.body import JSON, PROTOBUF
from serving.engage import EngagementBody
from serving.json_types import build_types

_ERRORS = {
    "400": "a bad field; `path` names it",
    "404": "unknown model version",
    "413": "too many bytes (also inflated), candidates or list entries",
    "415": "another media type or encoding",
    "429": "overloaded; see Retry-After",
    "503": "the feature log is full; see Retry-After",
    "504": "not scored within the deadline; nothing was logged",
}


class Fault(msgspec.Struct):
    code: str
    message: str
    path: Annotated[str, Meta(description="the field, where one is at fault")] = ""


class ErrorAnswer(msgspec.Struct):
    """Any answer that isn't 200; nothing was logged. JSON, whatever the client accepts."""

    error: Fault


class Accepted(msgspec.Struct):
    """All of a body's engagements are in the log."""

    accepted: int
    event_ids: list[int]


def describe(document: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """`document` with the raw routes, from the types that they use; idempotent."""
    types = (build_types(schema).rank, EngagementBody | list[EngagementBody], _answer_type(schema), Accepted, ErrorAnswer)
    (rank, engagements, answer, accepted, refusal), components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    binary = {"type": "string", "format": "binary"}
    rank_body = {
        JSON: {"schema": rank, "example": rank_example(schema)},
        PROTOBUF: {"schema": {**binary, "description": "a roo.Impression without scores; ?append=true adds a page"}},
    }
    rank_answer = {
        JSON: {"schema": answer},
        PROTOBUF: {"schema": {**binary, "description": "a roo.RankAnswer, for a client that accepts it"}},
    }
    example = {"request_id": "r-1", "user_id": 17, "session_id": 4, "item_id": 8, "action": schema.labels[0].action, "value": 1.0}
    told = _operation(
        "Tell what users did", {JSON: {"schema": engagements, "example": example}}, {JSON: {"schema": accepted}}, refusal
    )
    for code in ("404", "504"):
        del told["responses"][code]
    document["paths"]["/v1/rank"] = {"post": _operation("Rank the candidates of a request", rank_body, rank_answer, refusal)}
    document["paths"]["/v1/engagements"] = {"post": told}
    return document


def rank_example(schema: Schema) -> dict[str, Any]:
    """A body that this schema takes; features that are kept online are left out, as clients leave them."""
    nro = {f.name: _value(f) for f in schema.nro if not f.online and f.name != "item"}
    return {
        "request_id": "r-1",
        "user_id": 17,
        "session_id": 4,
        "ro": {f.name: _value(f) for f in schema.ro if not f.online},
        "candidates": [{"item_id": 8, "nro": nro}, {"item_id": 9, "nro": nro}],
    }


def _value(f: Feature) -> Any:
    if f.kind == "float":
        return 2.5
    if f.kind == "ids":
        return [3]
    if f.kind == "weighted_ids":
        return {"ids": [3], "weights": [0.5]}
    return {main_key(f): [8, 3], **{c: [1, 1] if kind == "ids" else [1700000000000] * 2 for c, kind in f.columns.items()}}


def _answer_type(schema: Schema) -> type[msgspec.Struct]:
    """`RankAnswer.json` (serving/answer.py) as a type."""
    names = {f"t{i}": task for i, task in enumerate(schema.tasks)}
    scores = msgspec.defstruct("Scores", [(name, float) for name in names], rename=names)
    fields: list[Any] = [
        ("request_id", str),
        ("model_version", str),
        ("scores", Annotated[list[scores], Meta(description="by candidate, in the request's order")]),  # type: ignore[valid-type]
        ("order", Annotated[list[int], Meta(description="candidates' indices, first slot first")]),
        ("degraded", Annotated[bool, Meta(description="Redis or the rows were away")]),
    ]
    return msgspec.defstruct("RankAnswer", fields, forbid_unknown_fields=True)


def _operation(summary: str, body: dict[str, Any], answer: dict[str, Any], refusal: dict[str, Any]) -> dict[str, Any]:
    error = {JSON: {"schema": refusal}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {"description": "answered and logged", "content": answer},
            **{code: {"description": text, "content": error} for code, text in _ERRORS.items()},
        },
    }

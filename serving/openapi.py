"""What `/docs` says of the raw routes, from the schema in use."""

from __future__ import annotations

from typing import Any

from roo.block import main_key
from roo.schema import Feature, Schema

_ID = {"oneOf": [{"type": "integer"}, {"type": "string"}], "description": "strings are hashed"}
_IDS = {"type": "array", "items": _ID}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}, "path": {"type": "string"}},
        }
    },
}
_ERRORS = {
    "400": "a bad field; `path` names it",
    "404": "unknown model version",
    "413": "too many bytes (also inflated), candidates or list entries",
    "415": "another media type or encoding",
    "429": "overloaded; see Retry-After",
    "503": "the feature log is full; see Retry-After",
    "504": "not scored within the deadline; nothing was logged",
}


def describe(document: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """`document` with the paths of the raw routes; idempotent."""
    rank = _operation("Rank the candidates of a request", _rank_body(schema), rank_example(schema), _rank_answer(schema), _ERRORS)
    rank["requestBody"]["content"]["application/x-protobuf"] = {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "a roo.Impression without scores; ?append=true adds a page",
        }
    }
    some = {code: text for code, text in _ERRORS.items() if code not in ("404", "504")}
    body = {"oneOf": [_ENGAGEMENT, {"type": "array", "items": _ENGAGEMENT}]}
    action = schema.labels[0].action
    example = {"request_id": "r-1", "user_id": 17, "session_id": 4, "item_id": 8, "action": action, "value": 1.0}
    answer = {"type": "object", "properties": {"accepted": {"type": "integer"}, "event_ids": _IDS}}
    document["paths"]["/v1/rank"] = {"post": rank}
    document["paths"]["/v1/engagements"] = {"post": _operation("Tell what users did", body, example, answer, some)}
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


def _type(f: Feature) -> dict[str, Any]:
    if f.kind == "float":
        return {"type": "number", "nullable": True}
    if f.kind == "ids":
        return {"oneOf": [_IDS, _ID], "nullable": True}
    names = (main_key(f), *f.columns) if f.kind == "sequence" else ("ids", "weights")
    return {"type": "object", "properties": {n: {"type": "array"} for n in names}, "nullable": True}


def _features(features: tuple[Feature, ...]) -> dict[str, Any]:
    return {f.name: _type(f) | ({"description": f"hydrated when missing: {f.online}"} if f.online else {}) for f in features}


def _rank_body(schema: Schema) -> dict[str, Any]:
    nro = _features(schema.nro)
    row = {
        "type": "object",
        "required": ["item_id"],
        "properties": {"item_id": _ID, "nro": {"type": "object", "properties": nro}},
    }
    columns = {name: {"type": "array", "items": kind} for name, kind in nro.items()}
    columnar = {"type": "object", "required": ["item_id"], "properties": {"item_id": _IDS, **columns}}
    return {
        "type": "object",
        "required": ["candidates"],
        "properties": {
            "request_id": {"type": "string", "maxLength": 64, "description": "made here when missing"},
            "user_id": _ID,
            "session_id": _ID,
            "surface": {"type": "string"},
            "ro": {"type": "object", "properties": _features(schema.ro)},
            "candidates": {"oneOf": [{"type": "array", "items": row}, columnar]},
            "append": {"type": "boolean", "description": "a page that adds candidates to an open request"},
            "first_position": {"type": "integer", "description": "place of this page's first slot"},
            "model_version": {"type": "string", "description": "404 if it isn't held"},
        },
    }


def _rank_answer(schema: Schema) -> dict[str, Any]:
    scores = {"type": "object", "properties": {task: {"type": "number"} for task in schema.tasks}}
    return {
        "type": "object",
        "properties": {
            "request_id": {"type": "string"},
            "model_version": {"type": "string"},
            "scores": {"type": "array", "items": scores, "description": "by candidate, in the request's order"},
            "order": {"type": "array", "items": {"type": "integer"}, "description": "candidates' indices, first slot first"},
            "degraded": {"type": "boolean", "description": "Redis or the rows were away"},
        },
    }


def _operation(
    summary: str, body: dict[str, Any], example: dict[str, Any], answer: dict[str, Any], errors: dict[str, str]
) -> dict[str, Any]:
    error = {"application/json": {"schema": _ERROR}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body, "example": example}}},
        "responses": {
            "200": {"description": "answered and logged", "content": {"application/json": {"schema": answer}}},
            **{code: {"description": text, "content": error} for code, text in errors.items()},
        },
    }


_ENGAGEMENT = {
    "type": "object",
    "required": ["request_id", "item_id", "action"],
    "properties": {
        "request_id": {"type": "string"},
        "user_id": _ID,
        "session_id": _ID,
        "surface": {"type": "string"},
        "item_id": _ID,
        "action": {"type": "string"},
        "value": {"type": "number"},
        "event_id": {**_ID, "description": "made of the other fields when missing: a repeated post is the same event"},
        "time_ms": {"type": "integer", "description": "the client's clock: kept, never used"},
    },
}

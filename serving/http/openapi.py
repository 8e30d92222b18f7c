"""The OpenAPI document, built from the types that bodies are parsed with and the types of the answers.

It is strict: fields that it does not name are refused, and it lists every status code that can occur.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from roostream.schema.schema import Schema
from serving import examples
from serving.errors import CODES
from serving.http.body import JSON, PROTOBUF
from serving.http.engagements import MAX_ENGAGEMENTS, EngagementBody
from serving.http.retrieval_routes import recommend_type, retrieve_type
from serving.http.routes import HEADER
from serving.http.tracing import DOCUMENTED
from serving.page.explanation import ExplainAnswer
from serving.rank_json import FORBID, NAME, RANK_QUERY, PlainId, build_types, limits

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "a bad field; `path` names it",
    401: "a valid bearer key is required; see the scheme `bearer`",
    403: "the key may not do this",
    404: "the requested model version is not loaded; send the request without one",
    408: "the body was incomplete at the deadline; send it again",
    413: "too many bytes (also inflated), candidates, list entries or engagements",
    415: "another media type, charset or encoding",
    429: "overloaded: send it again after Retry-After",
    431: "more than 32 KiB of headers",
    500: "an internal error, or a model score that is not a number; a retry can help",
    503: "the feature log is full, or the process is stopping: send it again after Retry-After",
    504: "not scored within the deadline; nothing was logged: send it again after Retry-After",
}
_RETRY = {
    "Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}, "required": True}
}
_WITH_RETRY = (429, 503, 504)
_FLAG = {"type": "boolean", "default": False}
_OWN_DEADLINE = {
    "name": "X-Deadline-Ms",
    "in": "header",
    "description": "the client's deadline in ms from now; at most the server's",
    "required": False,
    "schema": {"type": "integer", "minimum": 1},
}

_VERSION: dict[str, Any] = {
    "name": HEADER,
    "in": "header",
    "description": "as `model_version` in the body",
    "schema": {"type": "string"},
}


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """An error: one word for programs, one sentence for people."""

    code: Annotated[str, limits("one word", examples=[*CODES.values(), "unknown_model_version"])]
    message: Annotated[str, Meta(description="one sentence: expected, got, what to do")]
    path: Annotated[str, Meta(description="the field, where one is at fault")] = ""


class ErrorAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Any answer other than 200; nothing was logged. Always JSON."""

    error: Fault


class Accepted(msgspec.Struct, forbid_unknown_fields=True):
    """All engagements of the body are logged."""

    accepted: Annotated[int, limits(minimum=0, maximum=MAX_ENGAGEMENTS)]
    event_ids: Annotated[
        list[Annotated[str, limits(pattern="^[0-9]{1,20}$")]],
        Meta(
            description="64-bit numbers as text, in the body's order; sent as event_id, the same event is "
            "sent again"
        ),
    ]
    unused_actions: Annotated[
        list[Annotated[str, NAME]],
        Meta(description="actions of the body that no label and no online feature counts"),
    ]


class Readiness(msgspec.Struct, forbid_unknown_fields=True):
    """Whether answers are complete, and what is still missing."""

    ready: bool
    waiting_for: list[str]
    model_version: str
    rows_age_s: Annotated[
        float | None, Meta(description="since the rows were known to be current; null = they never were")
    ]


class Alive(msgspec.Struct, forbid_unknown_fields=True):
    """The process is up."""

    status: str


class About(msgspec.Struct, forbid_unknown_fields=True):
    """Which process this is."""

    name: str
    version: str
    schema: str
    model_version: str
    ready: bool
    rows_age_s: float | None
    links: dict[str, str]


# class names in generated clients
_NAMES = {"EngagementBody": "Engagement", "ErrorAnswer": "Error", "Accepted": "EngagementsAnswer"}


def describe(schema: Schema, version: str, *, retrieves: bool = False) -> dict[str, Any]:
    """Return the document, OpenAPI 3.1. `retrieves`: the process has a catalogue of items."""
    components = _components(schema, retrieves)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Roostream serving",
            "version": version,
            "description": "Rank the candidates of a request, and send engagements. Pages with examples: "
            "docs/http.md.",
        },
        "tags": [
            {"name": "traffic", "description": "for clients"},
            {"name": "health", "description": "for operators"},
        ],
        "paths": {
            "/v1/rank": {"post": _rank(schema)},
            "/v1/engagements": {"post": _engage(schema)},
            "/v1/explain": {"post": _explain(schema)},
            **(_retrieval() if retrieves else {}),
            "/healthz": {"get": _get("alive", "The process is up", _ok(_json("Alive")))},
            "/readyz": {"get": _get("ready", "Whether answers are complete", _readiness())},
            "/metrics": {
                "get": _get(
                    "metrics", "Prometheus metrics", _ok({"text/plain": {"schema": {"type": "string"}}})
                )
            },
            "/": {"get": _get("about", "Which process this is; an HTML page for browsers", _ok(_about()))},
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }


def _components(schema: Schema, retrieves: bool) -> dict[str, Any]:
    rank = build_types(schema).rank
    types = (
        rank,
        EngagementBody,
        *_answer_types(schema),
        Accepted,
        ExplainAnswer,
        ErrorAnswer,
        Readiness,
        Alive,
        About,
        *(retrieve_types(schema, rank) if retrieves else ()),
    )
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    named = {_NAMES.get(name, name): component for name, component in components.items()}
    for name, component in named.items():
        component["title"] = name
    return named


def _rank(schema: Schema) -> dict[str, Any]:
    binary = {"type": "string", "format": "binary"}
    body = {
        JSON: {"schema": {"$ref": _REF.format(name="RankRequest")}, "example": examples.rank_example(schema)},
        PROTOBUF: {"schema": {**binary, "description": "a roo.Impression without scores"}},
    }
    answer = {
        JSON: {
            "schema": {"anyOf": [{"$ref": _REF.format(name=name)} for name in ("RankAnswer", "TopAnswer")]},
            "example": examples.answer_example(schema),
        },
        PROTOBUF: {"schema": {**binary, "description": "a roo.RankAnswer, for a client that accepts it"}},
    }
    kinds: dict[str, Any] = {"top": {"type": "integer", "minimum": 1}}
    parameters: list[Any] = [
        {
            "name": name,
            "in": "query",
            "description": text,
            "required": False,
            "schema": kinds.get(name, _FLAG),
        }
        for name, text in RANK_QUERY.items()
    ] + [_VERSION]
    return {
        "operationId": "rank",
        "tags": ["traffic"],
        "summary": "Rank the candidates of a request",
        "parameters": [*parameters, _OWN_DEADLINE, *DOCUMENTED],
        "requestBody": {"required": True, "content": body},
        "responses": _ok(answer, "scored, and logged") | _errors(*_ERRORS),
    }


def _engage(schema: Schema) -> dict[str, Any]:
    one = {"$ref": _REF.format(name="Engagement")}
    either = {"anyOf": [one, {"type": "array", "items": one, "maxItems": MAX_ENGAGEMENTS}]}
    answer = {JSON: {"schema": {"$ref": _REF.format(name="EngagementsAnswer")}, "example": examples.ENGAGED}}
    return {
        "operationId": "engage",
        "tags": ["traffic"],
        "summary": "Send engagements",
        "parameters": [_OWN_DEADLINE, *DOCUMENTED],
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": either, "example": examples.engagement_example(schema)}},
        },
        "responses": _ok(answer, "logged")
        | _errors(*(status for status in _ERRORS if status not in (404, 504))),
    }


def _explain(schema: Schema) -> dict[str, Any]:
    body = {
        JSON: {"schema": {"$ref": _REF.format(name="RankRequest")}, "example": examples.rank_example(schema)}
    }
    return {
        "operationId": "explain",
        "tags": ["traffic"],
        "summary": "Rank without logging and explain: scores without each feature; at most 50 candidates, "
        "one call at a time",
        "parameters": [_OWN_DEADLINE, *DOCUMENTED],
        "requestBody": {"required": True, "content": body},
        "responses": _ok(_json("ExplainAnswer"), "scored; nothing is logged") | _errors(*_ERRORS),
    }


def _retrieval() -> dict[str, Any]:
    def found(operation: str, summary: str, text: str, *own: dict[str, Any]) -> dict[str, Any]:
        name = operation.capitalize()
        return {
            "operationId": operation,
            "tags": ["traffic"],
            "summary": summary,
            "parameters": [*own, _OWN_DEADLINE, *DOCUMENTED],
            "requestBody": {"required": True, "content": _json(f"{name}Request")},
            "responses": _ok(_json(f"{name}Answer"), text) | _errors(*_ERRORS),
        }

    return {
        "/v1/retrieve": {
            "post": found("retrieve", "Find items of the catalogue", "found; nothing is logged")
        },
        "/v1/recommend": {
            "post": found("recommend", "Find items and rank them", "ranked, and logged as a rank", _VERSION)
        },
    }


def _get(operation: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": operation,
        "tags": ["health"],
        "summary": summary,
        "responses": responses | _errors(431, 500) | _errors(503, unless=responses),
    }


def _ok(content: dict[str, Any], text: str = "success") -> dict[str, Any]:
    return {"200": {"description": text, "content": content}}


def _json(name: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": _REF.format(name=name)}}}


def _about() -> dict[str, Any]:
    return {**_json("About"), "text/html": {"schema": {"type": "string"}}}


def _readiness() -> dict[str, Any]:
    waiting = {"description": "still waiting for something", "headers": _RETRY}
    either = {"anyOf": [{"$ref": _REF.format(name="Readiness")}, {"$ref": _REF.format(name="Error")}]}
    return _ok(_json("Readiness"), "rows are here") | {
        "503": {**waiting, "content": {JSON: {"schema": either}}}
    }


def _errors(*statuses: int, unless: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        str(status): {"description": _ERRORS[status], "content": _json("Error")}
        | ({"headers": _RETRY} if status in _WITH_RETRY else {})
        for status in statuses
        if str(status) not in (unless or ())
    }


def _answer_types(schema: Schema) -> tuple[type[msgspec.Struct], type[msgspec.Struct]]:
    """The types of `RankAnswer.json` (serving/answer.py): for all candidates, and for the first slots
    only."""
    names = {f"t{i}": task for i, task in enumerate(schema.tasks)}
    score = Annotated[float, limits(minimum=0, maximum=1)]
    scores = msgspec.defstruct(
        "Scores", [(name, score) for name in names], rename=names, forbid_unknown_fields=True
    )
    index = Annotated[int, limits(minimum=0)]
    degraded = ("degraded", Annotated[bool, Meta(description="online features or rows were unavailable")])
    versions = [("request_id", str), ("model_version", str)]
    fields: list[Any] = [
        *versions,
        ("scores", Annotated[list[scores], Meta(description="by candidate, in the request's order")]),  # type: ignore[valid-type]
        ("order", Annotated[list[index], Meta(description="candidates' indices, first slot first")]),
        degraded,
        (
            "ranked",
            Annotated[list[PlainId], Meta(description="with ?ranked=true: item ids, first slot first")],
            [],
        ),
    ]
    slot = msgspec.defstruct("Slot", [("item_id", PlainId), ("scores", scores)], forbid_unknown_fields=True)
    slots = Annotated[list[slot], Meta(description="with ?top=…: the first slots, first slot first")]  # type: ignore[valid-type]
    top = [*versions, ("top", slots), degraded]
    whole = msgspec.defstruct("RankAnswer", fields, forbid_unknown_fields=True)
    return whole, msgspec.defstruct("TopAnswer", top, forbid_unknown_fields=True)


class FoundItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the catalogue."""

    item_id: PlainId
    product: Annotated[float, Meta(description="of its vector with the request's, both of length 1")]


class RetrieveAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Found items; nothing is logged."""

    request_id: str
    retrieval_version: str
    items: Annotated[list[FoundItem], Meta(description="the nearest first")]
    degraded: bool


def retrieve_types(schema: Schema, rank: type[msgspec.Struct]) -> tuple[type[msgspec.Struct], ...]:
    """Components of the document for retrieval; `rank` is the body of `/v1/rank`."""
    return (retrieve_type(rank), recommend_type(schema, rank), RetrieveAnswer, _recommended_type(schema))


def _recommended_type(schema: Schema) -> type[msgspec.Struct]:
    names = {f"t{i}": task for i, task in enumerate(schema.tasks)}
    score = Annotated[float, limits(minimum=0, maximum=1)]
    scores = msgspec.defstruct("ItemScores", [(name, score) for name in names], rename=names, **FORBID)
    item = msgspec.defstruct("RankedItem", [("item_id", PlainId), ("scores", scores)], **FORBID)
    fields: list[Any] = [
        ("request_id", str),
        ("retrieval_version", str),
        ("model_version", str),
        ("items", Annotated[list[item], Meta(description="first slot first")]),  # type: ignore[valid-type]
        ("degraded", bool),
    ]
    return msgspec.defstruct("RecommendAnswer", fields, **FORBID)

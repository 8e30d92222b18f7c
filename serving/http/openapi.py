"""Describes routes for FastAPI's OpenAPI document by the msgspec types that they use.

The document is strict: fields that it does not name are refused, and it lists every status code that can
occur.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from roostream.schema.ids import MASK64
from roostream.schema.schema import Schema
from serving.errors import CODES, OTHER_CODES
from serving.http.body import JSON
from serving.http.middleware import DEADLINE
from serving.http.tracing import DOCUMENTED
from serving.types import ID_TEXT, Error, PlainId, limits

VERSION_HEADER = "x-model-version"
_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "invalid JSON, UTF-8 or field, or an undeclared feature; `path` names the field: correct it",
    401: "no valid bearer key: send one",
    403: "the key lacks the scope, or a browser sent the request for a page of another site",
    404: "the model version is not loaded: leave out `model_version`",
    408: "the body was incomplete at the deadline: send it again",
    413: "too many bytes (also inflated), candidates, list entries or engagements: send less",
    415: "another media type, charset or encoding than those of this route",
    429: "overloaded: send it again after Retry-After",
    431: "more than 32 KiB of headers: send fewer",
    500: "a defect, or a model score that is not a number; serving's log has the cause: try once more",
    503: "the feature log is full, all connections are busy, or the process is stopping: send it again after "
    "Retry-After, best to another process",
    504: "not scored within the deadline; nothing was logged: send it again after Retry-After",
}
_RETRY = {
    "Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}, "required": True}
}
_WITH_RETRY = (429, 503, 504)
_DEADLINE_MS = {
    "name": DEADLINE,
    "in": "header",
    "description": "the client's deadline in ms from now; at most the server's",
    "schema": {"type": "integer", "minimum": 1},
}
VERSION = {
    "name": VERSION_HEADER,
    "in": "header",
    "description": "as `model_version` in the body",
    "schema": {"type": "string"},
}
_NAMES = {"EngagementBody": "Engagement", "Error": "ErrorAnswer"}  # an `Error` is another class in TypeScript


class TypeComponents:
    """The msgspec types that routes use, as components of the document."""

    def __init__(self, schema: Schema) -> None:
        self.schemas: dict[str, Any] = {"Id": {"title": "Id", "description": ID_TEXT, **_ID}}
        names = {f"t{i}": task for i, task in enumerate(schema.tasks)}
        score = Annotated[float, limits(minimum=0, maximum=1)]
        # The scores of a candidate, by task.
        self.scores: Any = msgspec.defstruct("Scores", [(name, score) for name in names], rename=names)

    def traffic(
        self,
        operation: str,
        summary: str,
        body: dict[str, Any],
        answer: dict[str, Any],
        parameters: Sequence[dict[str, Any]] = (),
        without: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Arguments of a route decorator. `body` and `answer` map media types to content, as `json` returns;
        `without` are status codes that cannot occur."""
        errors = self._errors(*(status for status in _ERRORS if status not in without))
        return {
            "operation_id": operation,
            "tags": ["traffic"],
            "summary": summary,
            "response_class": Response,
            "responses": {200: {"description": "success", "content": answer}, **errors},
            "openapi_extra": {
                "parameters": [*parameters, _DEADLINE_MS, *DOCUMENTED],
                "requestBody": {"required": True, "content": body},
            },
        }

    def probe(
        self,
        operation: str,
        summary: str,
        answer: dict[str, Any],
        unavailable: Sequence[Any] = (Error,),
        refusals: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Arguments of the decorator of a route for operators. `answer` maps media types to their content;
        `unavailable` are the types of an answer 503; `refusals` are the status codes for a missing key."""
        errors = self._errors(*refusals, 431, 500, 503)
        errors[503]["content"] = self.json(*unavailable)
        return {
            "operation_id": operation,
            "tags": ["health"],
            "summary": summary,
            "response_class": Response,
            "responses": {200: {"description": "success", "content": answer}, **errors},
        }

    def json(self, *kinds: Any, example: object = None) -> dict[str, Any]:
        """The content of a JSON body or answer of one of these types."""
        schemas = [self.schema_of(kind) for kind in kinds]
        shown = {} if example is None else {"example": msgspec.to_builtins(example)}
        return {JSON: {"schema": schemas[0] if len(schemas) == 1 else {"oneOf": schemas}, **shown}}

    def json_with_options(self, kind: Any, *others: Any, example: object) -> dict[str, Any]:
        """The content of an answer that is of one of these types, by the query. They are one component with
        the name of the first: of two types, Java takes the wrong one, and TypeScript reads the fields of
        both."""
        content = self.json(kind, example=example)
        names = [self.schema_of(each)["$ref"].removeprefix(_REF.format(name="")) for each in (kind, *others)]
        components = [self.schemas[name] for name in names]
        for name, component in zip(names[1:], components[1:], strict=True):
            components[0]["properties"] |= component["properties"]
            del self.schemas[name]
        components[0]["required"] = [
            field for field in components[0]["required"] if all(field in c["required"] for c in components)
        ]
        return content

    def scored(self, kind: Any) -> Any:
        """A generic type with the scores of this schema."""
        return kind[self.scores]

    def schema_of(self, kind: Any) -> dict[str, Any]:
        """The JSON Schema of a type; its structs become components."""
        made = msgspec.json.schema_components([kind], ref_template=_REF)
        text = json.dumps({"schema": made[0][0], "components": made[1]})
        for name in made[1]:
            new = _NAMES.get(name, name.removesuffix("_Scores_"))
            text = text.replace(f'"{name}": ', f'"{new}": ').replace(f'/{name}"', f'/{new}"')
        renamed = json.loads(text)
        for name, component in renamed["components"].items():
            component["title"] = name
            self.schemas[name] = for_generators(component)
        schema: dict[str, Any] = for_generators(renamed["schema"])
        return schema

    def _errors(self, *statuses: int) -> dict[int | str, Any]:
        return {
            status: {"description": _ERRORS[status], "content": self.json(Error)}
            | ({"headers": _RETRY} if status in _WITH_RETRY else {})
            for status in statuses
        }

    def document(self, app: FastAPI) -> dict[str, Any]:
        """The whole document."""
        document = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            tags=app.openapi_tags,
            routes=app.routes,
        )
        fault = self.schemas["Fault"]["properties"]["code"]
        fault["examples"] = [*CODES.values(), *itertools.chain.from_iterable(OTHER_CODES.values())]
        document["components"] = {
            "schemas": self.schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        }
        document["servers"] = [{"url": "."}]  # where the document is, also behind a proxy with a prefix
        document["security"] = [{}, {"bearer": []}]
        return document


def for_generators(schema: Any) -> Any:
    """Rewrite a JSON Schema of msgspec for generators of typed clients.

    - Java and Go use 32 bits for an `integer` without a format, Go also for a `number`. Go refuses a maximum
      beyond 64 signed bits.
    - A field with a `default` becomes a required one in TypeScript, and the default of a union does not
      compile in Go. Such a field may be left out, so that a union need not allow null, which does not compile
      in Java.
    - A union with a list does not compile in Java and TypeScript, and cannot be sent in Python. It becomes
      the list. Serving also takes the other form; answers have no such unions.
    """
    if isinstance(schema, list):
        return [for_generators(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    properties = {name: for_generators(kind) for name, kind in schema.get("properties", {}).items()}
    schema = {
        key: properties if key == "properties" else for_generators(value) for key, value in schema.items()
    }
    has_default, default = "default" in schema, schema.pop("default", None)
    if default:
        schema["description"] = f"{schema['description']}; {json.dumps(default)} if left out"
    least, most = schema.get("minimum", -(1 << 63)), schema.get("maximum", MASK64)
    if most == MASK64:
        schema.pop("maximum", None)
    if schema.get("type") == "array":
        schema.setdefault("items", {})  # any value; some generators refuse a list without it
    if schema.get("type") == "integer" and (least < -(1 << 31) or most >= 1 << 31):
        schema["format"] = "int64"
    elif schema.get("type") == "number":
        schema["format"] = "double"
    if "anyOf" in schema:
        kinds = schema.pop("anyOf")
        others = [kind for kind in kinds if kind != _NULL]
        lists = [kind for kind in others if kind.get("type") == "array"]
        if len(lists or others) > 1:
            schema["anyOf"] = others if has_default else kinds
        else:
            schema = {**(lists or others)[0], **schema}
            if "type" in schema and _NULL in kinds:
                schema["type"] = [schema["type"], "null"]
    return {"$ref": _REF.format(name="Id")} if schema.get("anyOf") == _ID["anyOf"] else schema


_NULL = {"type": "null"}
_ID: dict[str, Any] = {"anyOf": []}
_ID = for_generators(msgspec.json.schema(PlainId))


def query_parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """The fields of a struct as parameters of a query."""
    ((_,), components) = msgspec.json.schema_components([kind])
    parameters = []
    for name, schema in components[kind.__name__]["properties"].items():
        about = {"name": name, "in": "query", "description": schema.pop("description")}
        if schema.get("default", 0) < schema.get("minimum", 0):
            del schema["default"]  # it stands for an absent parameter
        parameters.append({**about, "required": False, "schema": schema})
    return parameters

"""OpenAPI documents of the routes that serving's own document leaves out: the Open Inference Protocol, which
has its own specification, the pages for browsers, and the admin interface."""

from __future__ import annotations

from typing import Any

from serving.admin import ROOT, SPLITS
from serving.http.middleware import DEADLINE
from serving.http.openapi import VERSION_HEADER
from serving.oip.tensors import HEADER_LENGTH, TYPES

_OBJECT = {"type": "object"}
_TEXT = {"type": "string"}
_ID = {"anyOf": [{"type": "integer"}, _TEXT]}
_STATUSES = (200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 503, 504)
_VERSION = {"type": "string", "enum": ["0-0", "1-2", "9-9", "newest", "x"]}
"""Loaded versions, a version that is not loaded, and texts that are not versions."""


def inference_document(model: str, inputs: list[str], outputs: list[str]) -> dict[str, Any]:
    """Describe the routes below `/v2`. `inputs` and `outputs` are the names of known tensors."""
    tensor = _struct(
        {
            "name": {"type": "string", "enum": [*inputs, "unknown"]},
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": -1, "maximum": 9},
                "maxItems": 3,
            },
            "datatype": {"type": "string", "enum": [*TYPES, "BOOL"]},
            "data": {
                "type": "array",
                "items": {"anyOf": [{"type": "number"}, {"type": "integer"}, _TEXT, {"type": "null"}]},
                "maxItems": 9,
            },
            "parameters": _struct({"binary_data_size": {"type": "integer", "minimum": 0, "maximum": 64}}),
        },
        ["name", "shape", "datatype", "data"],
    )
    parameters = _struct(
        {
            "user_id": _ID,
            "session_id": _ID,
            "surface": _TEXT,
            "append": {"type": "boolean"},
            "first_position": {"type": "integer"},
            "binary_data_output": {"type": "boolean"},
        }
    )
    wanted = _struct(
        {
            "name": {"type": "string", "enum": outputs},
            "parameters": _struct({"binary_data": {"type": "boolean"}}),
        },
        ["name"],
    )
    body = _struct(
        {
            "id": _TEXT,
            "parameters": parameters,
            "inputs": {"type": "array", "items": tensor, "minItems": 1, "maxItems": 6},
            "outputs": {"type": "array", "items": wanted, "maxItems": 3},
        },
        ["inputs"],
    )
    headers = [_header(name) for name in (HEADER_LENGTH.decode(), DEADLINE, VERSION_HEADER)]
    paths: dict[str, Any] = {}
    named = [_path("model", {"type": "string", "enum": [model, "other"]})]
    for path, parts in (
        ("/v2/models/{model}", named),
        ("/v2/models/{model}/versions/{version}", [*named, _path("version", _VERSION)]),
    ):
        paths[f"{path}/infer"] = {"post": _operation([*parts, *headers], body)}
        paths[f"{path}/ready"] = paths[path] = {"get": _operation(parts)}
    for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
        paths[path] = {"get": _operation([])}
    return _document(paths)


def page_document(paths: list[str]) -> dict[str, Any]:
    """Describe the pages for browsers. `/page/rescored.json` has two parameters."""
    found: dict[str, Any] = {path: {"get": _operation([])} for path in paths}
    rescored = [{"name": name, "in": "query", "schema": _TEXT} for name in ("request_id", "model_version")]
    found["/page/rescored.json"] = {"get": _operation(rescored)}
    return _document(found)


def admin_document() -> dict[str, Any]:
    """Describe the routes of the admin interface."""
    split = _struct(
        {
            "version": {"anyOf": [_VERSION, _TEXT, {"type": "null"}]},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
        },
        ["version", "share"],
    )
    paths: dict[str, Any] = {f"{ROOT}/{name}": {"get": _operation([])} for name in ("versions", "slow")}
    paths[f"{ROOT}/versions/resume"] = {"post": _operation([])}
    paths[f"{ROOT}/versions/{{name}}/activate"] = {"post": _operation([_path("name", _VERSION)])}
    paths |= {f"{ROOT}/{name}": {"get": _operation([]), "put": _operation([], split)} for name in SPLITS}
    return _document(paths)


def _document(paths: dict[str, Any]) -> dict[str, Any]:
    return {"openapi": "3.1.0", "info": {"title": "undocumented routes", "version": "1"}, "paths": paths}


def _operation(parameters: list[dict[str, Any]], body: dict[str, Any] | None = None) -> dict[str, Any]:
    answers = {str(status): {"description": "an answer"} for status in _STATUSES}
    content = {} if body is None else {"requestBody": {"content": {"application/json": {"schema": body}}}}
    return {"parameters": parameters, "responses": answers, **content}


def _struct(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {**_OBJECT, "properties": properties, "required": required or [], "additionalProperties": False}


def _path(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _header(name: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": {"type": "string", "pattern": "^[0-9]{0,3}$"}}

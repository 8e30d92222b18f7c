"""Checks an object against the schema of a custom resource as an API server does with strict field
validation.

JSON schema accepts unknown fields. Here a field is refused unless the schema knows it or says that unknown
fields are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_COMMON_FIELDS = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
_KEEPS_UNKNOWN_FIELDS = "x-kubernetes-preserve-unknown-fields"


def schema_violations(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield every violation with its path."""
    if path == "" and "properties" in schema:
        schema = {**schema, "properties": {**schema["properties"], **_COMMON_FIELDS}}
    if schema == {} or (value is None and schema.get("nullable")):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{path}: expected a number or text, got {value!r}"
        return
    kind = schema.get("type", "")
    if kind and not _has_type(value, kind):
        yield f"{path}: expected {kind}, got {value!r}"
        return
    yield from _check_bounds(value, schema, path)
    if isinstance(value, dict):
        yield from _check_members(value, schema, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from schema_violations(item, schema.get("items", {}), f"{path}[{index}]")


def _has_type(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _check_bounds(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: expected one of {schema['enum']}, got {value!r}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: expected {schema['pattern']}, got {value!r}"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        yield f"{path}: expected {schema.get('minimum')}..{schema.get('maximum')}, got {value!r}"
    if isinstance(value, list) and not schema.get("minItems", 0) <= len(value) <= schema.get(
        "maxItems", len(value)
    ):
        yield f"{path}: expected {schema.get('minItems')}..{schema.get('maxItems')} items, got {len(value)}"


def _check_members(value: dict[str, Any], schema: dict[str, Any], path: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: expected a value, got nothing"
    for name, inner in value.items():
        if name in known:
            yield from schema_violations(inner, known[name], f"{path}.{name}")
        elif isinstance(others, dict):
            yield from schema_violations(inner, others, f"{path}.{name}")
        elif not (others or schema.get(_KEEPS_UNKNOWN_FIELDS)):
            yield f"{path}.{name}: expected a field of the schema, got one that it doesn't know"

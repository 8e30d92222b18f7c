"""Whether an object fits the schema of a custom resource, as an API server asks with strict field validation.

JSON schema alone takes any field that it doesn't know; here one is refused unless the schema says that they
are kept.
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
_OF_EVERY_OBJECT = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {}}
_FREE = "x-kubernetes-preserve-unknown-fields"


def findings(value: Any, schema: dict[str, Any], at: str = "") -> Iterator[str]:
    """What doesn't fit, each with its path; nothing where all does."""
    if at == "" and "properties" in schema:
        schema = {**schema, "properties": {**schema["properties"], **_OF_EVERY_OBJECT}}
    if schema == {} or (value is None and schema.get("nullable")):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, int | str) or isinstance(value, bool):
            yield f"{at}: expected a number or text, got {value!r}"
        return
    kind = schema.get("type", "")
    if kind and not _is(value, kind):
        yield f"{at}: expected {kind}, got {value!r}"
        return
    yield from _bounds(value, schema, at)
    if isinstance(value, dict):
        yield from _members(value, schema, at)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from findings(item, schema.get("items", {}), f"{at}[{index}]")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _bounds(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: expected one of {schema['enum']}, got {value!r}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{at}: expected {schema['pattern']}, got {value!r}"
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        yield f"{at}: expected {schema.get('minimum')}..{schema.get('maximum')}, got {value!r}"
    if isinstance(value, list) and not schema.get("minItems", 0) <= len(value) <= schema.get(
        "maxItems", len(value)
    ):
        yield f"{at}: expected {schema.get('minItems')}..{schema.get('maxItems')} items, got {len(value)}"


def _members(value: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name}: expected a value, got nothing"
    for name, inner in value.items():
        if name in known:
            yield from findings(inner, known[name], f"{at}.{name}")
        elif isinstance(others, dict):
            yield from findings(inner, others, f"{at}.{name}")
        elif not (others or schema.get(_FREE)):
            yield f"{at}.{name}: expected a field of the schema, got one that it doesn't know"

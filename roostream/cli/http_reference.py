"""The reference page of the HTTP interface, made from the OpenAPI document of the real application.

The application is the one that `roostream serving` runs, built for the schema of `examples/shop` with a
catalogue, so that it has every route. Nothing is started: no port, no Kafka, no Redis.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from infra.options import ROOT
from roostream.runtime.store_identity import init_store, open_checkpoint_store
from serving.build import build_process
from serving.config import ServingConfig
from serving.errors import CODES, OTHER_CODES, RequestError
from serving.http.app import HttpInterface
from serving.rank_json import MAX_FLOAT

_PAGE = """\
# HTTP

Every route of a serving process, made from its OpenAPI document for the schema `examples/shop/shop.toml`. A
running process has the document of its own schema at `/openapi.json`, and pages to try it at `/docs` and
`/redoc`. [The guide](../http.md) walks through the calls and explains retries, connections and traces; the
routes `/v2` of the Open Inference Protocol are described there too.

An *id* is an integer of 64 bits, or a text that is not empty and is hashed. Fields that are not required may
be left out; fields that a type does not have are refused."""
_HEADERS = """\
## Headers

Every `POST` may have them, and a bearer key in `Authorization` where keys are on."""
_ERRORS = """\
## Errors

Every error is JSON of the type [ErrorAnswer](#erroranswer). Nothing was logged, unless the text says so. Each
route lists the statuses that it can answer with; any path can also answer 404 `not_found` and 405
`method_not_allowed`."""
_SHOP = ROOT / "examples" / "shop" / "shop.toml"
_REF = "#/components/schemas/"
_EXAMPLE = RequestError(400, "expected a number, got a string", "$.candidates[0].price")
_FIELDS = "| field | type | limits | required | meaning |\n|---|---|---|---|---|"


def http_page(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document: its routes, errors and types."""
    components = document["components"]["schemas"]
    statuses: dict[str, str] = {}
    operations = [(path, *pair) for path, methods in document["paths"].items() for pair in methods.items()]
    lists = [operation["parameters"] for _, _, operation in operations if "requestBody" in operation]
    shared = [p for p in lists[0] if all(p in others for others in lists)]
    parts = [_PAGE, _HEADERS, _parameters(shared)]
    for path, method, operation in operations:
        parts += _route(f"{method.upper()} {path}", operation, shared)
        statuses |= {s: r["description"] for s, r in operation["responses"].items() if s != "200"}
    rows = []
    for status, text in sorted(statuses.items()):
        codes = (CODES[int(status)], *OTHER_CODES.get(int(status), ()))
        rows.append(f"| {status} | {', '.join(f'`{code}`' for code in codes)} | {_cell(text)} |")
    example = f"```json\n{json.dumps(_EXAMPLE.body())}\n```"
    parts += [
        _ERRORS,
        example,
        "\n".join(("| status | code | meaning: what to do |", "|---|---|---|", *rows)),
    ]
    parts.append("## Types")
    for name, component in components.items():
        if "properties" not in component:
            continue
        parts += [f"### {name}", component.get("description", ""), _fields(component)]
    return "\n\n".join(filter(None, parts)) + "\n"


def application_document() -> dict[str, Any]:
    """The OpenAPI document of a serving process with every route."""
    home = Path(tempfile.mkdtemp(prefix="roostream-docs-"))
    try:
        items = home / "items.jsonl"
        items.write_text('{"item_id": 8}\n', encoding="utf-8")
        store = str(home / "store")
        init_store(store)
        config = ServingConfig(
            schema=str(_SHOP), store=store, home=home, bootstrap="127.0.0.1:1", items=str(items), redis=""
        )
        process = build_process(config, open_checkpoint_store(store), CollectorRegistry())
        try:
            return HttpInterface(process.context).openapi()
        finally:
            process.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _parameters(parameters: list[dict[str, Any]]) -> str:
    rows = (
        f"| `{p['name']}` | {p['in']} | {_type(p['schema'])} | {_cell(p.get('description', ''))} |"
        for p in parameters
    )
    return "\n".join(("| parameter | in | type | meaning |", "|---|---|---|---|", *rows))


def _route(title: str, operation: dict[str, Any], shared: list[dict[str, Any]]) -> Iterator[str]:
    yield f"## {title}"
    yield " ".join(
        f"{text.strip().removesuffix('.')}."
        for text in (operation["summary"], " ".join(operation.get("description", "").split()))
        if text
    )
    own = [p for p in operation.get("parameters", ()) if p not in shared]
    if own:
        yield _parameters(own)
    if "requestBody" in operation:
        yield from _content("Request", operation["requestBody"]["content"])
    yield from _content("Answer 200", operation["responses"]["200"]["content"])
    errors = [status for status in operation["responses"] if status != "200"]
    yield f"**Errors**: {', '.join(errors)} ([meaning](#errors))"


def _content(title: str, content: dict[str, Any]) -> Iterator[str]:
    """The media types of a body with their types, then its example."""
    kinds = (
        f"{_type(body['schema'])} (`{media}`{_note(body['schema'])})" if media else ""
        for media, body in content.items()
    )
    yield f"**{title}**: {', or '.join(kinds)}"
    for body in content.values():
        if "example" in body:
            yield f"```json\n{_compact_json(body['example'])}\n```"


def _note(schema: dict[str, Any]) -> str:
    return f": {schema['description']}" if schema.get("description") else ""


def _compact_json(value: Any) -> str:
    """JSON with one line for each entry of the outer objects and lists, as people write it."""
    if isinstance(value, dict) and len(json.dumps(value)) > 90:
        inner = (f"{json.dumps(key)}: {_compact_json(entry)}" for key, entry in value.items())
        return "{" + ",\n".join(inner).replace("\n", "\n ") + "}"
    if isinstance(value, list) and len(json.dumps(value)) > 90:
        return "[" + ",\n".join(map(_compact_json, value)).replace("\n", "\n ") + "]"
    return json.dumps(value, ensure_ascii=False)


def _fields(component: dict[str, Any]) -> str:
    required = component.get("required", ())
    lines = [_FIELDS]
    for name, schema in component.get("properties", {}).items():
        cells = (f"`{name}`", _type(schema), _limits(schema), "yes" * (name in required), _meaning(schema))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _type(schema: dict[str, Any]) -> str:
    """The type in words, with links to the types that have fields of their own."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return "id" if name == "Id" else f"[{name}](#{name.lower()})"
    if kinds := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, kinds)))
    if isinstance(schema.get("type"), list):
        return " or ".join(_type({**schema, "type": kind}) for kind in schema["type"])
    if schema.get("type") == "array":
        inner = _type(schema.get("items", {}))
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    if schema.get("type") == "object":
        inner = _type(schema.get("additionalProperties") or {})
        return f"map of text to ({inner})" if " or " in inner else f"map of text to {inner}"
    if schema.get("format") == "binary":
        return "protobuf"
    return {"string": "text", "boolean": "true or false"}.get(
        schema.get("type", ""), schema.get("type", "any")
    )


def _limits(schema: dict[str, Any]) -> str:
    """The limits of a value and of what is in it."""
    if schema.get("maximum") == MAX_FLOAT:
        return "float32"
    out = []
    for low, high, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " entries"),
        ("minProperties", "maxProperties", " names"),
    ):
        bounds = [_number(schema[key]) for key in (low, high) if key in schema]
        if len(bounds) == 2:
            out.append(f"{' to '.join(bounds)}{unit}")
        elif bounds:
            out.append(f"{'at least' if low in schema else 'at most'} {bounds[0]}{unit}")
    if "pattern" in schema:
        out.append(f"`{schema['pattern']}`")
    for inner in _inner(schema):
        out += [text for text in [_limits(inner)] if text and text not in out]
    return _cell("; ".join(out))


def _inner(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a value, and the type of a list's entries."""
    return [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]


def _number(value: float) -> str:
    """A power of two as one, and a number of many digits in short."""
    if isinstance(value, int) and abs(value) >= 1 << 31:
        for offset, text in ((0, ""), (1, " - 1"), (2, " - 2")):
            power = abs(value) + offset
            if power & (power - 1) == 0:
                return f"{'-' if value < 0 else ''}2^{power.bit_length() - 1}{text}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _meaning(schema: dict[str, Any]) -> str:
    """The description of a field, or of what is in it."""
    texts = (schema.get("description", ""), *map(_meaning, _inner(schema)))
    return _cell("; ".join(dict.fromkeys(text for text in texts if text)))


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\\|", "|").replace("|", "\\|"))

"""The interface, for people: made here of the document, without a script or a file from anywhere else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 "
    "1rem;color:#222;background:#fff}"
    "pre{background:#f4f4f4;padding:.8rem;overflow-x:auto;font-size:14px}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2rem "
    ".6rem;text-align:left;vertical-align:top}code{background:#f4f4f4}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre,code{background:#262626}a{color:#8bf}}"
)


def interface_page(document: Mapping[str, Any]) -> str:
    """The OpenAPI document, readable."""
    info = document["info"]
    parts = [
        f"<p>{escape(info['description'])}</p><p>For machines: <a href='/openapi.json'>/openapi.json</a></p>"
    ]
    for path, methods in document["paths"].items():
        parts += [_operation(path, method, operation) for method, operation in methods.items()]
    parts.append("<h2>Types</h2>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f"<h3 id='{escape(name)}'>{escape(name)}</h3>{_json(schema)}")
    return _page(info["title"], "".join(parts))


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    out = [
        f"<h2>{escape(method.upper())} <code>{escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
    ]
    out += [
        f"<p><code>{escape(_spelt(p))}</code> {escape(p['description'])}</p>"
        for p in operation.get("parameters", ())
    ]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        if "example" in content:
            out.append(f"<p>A body of <code>{escape(media)}</code>:</p>{_json(content['example'])}")
    rows = [
        (status, _text(answer["description"]) + _types(answer))
        for status, answer in operation["responses"].items()
    ]
    return "".join(out) + _table(rows)


def _spelt(parameter: Mapping[str, Any]) -> str:
    value = "true" if parameter["schema"]["type"] == "boolean" else "10"
    return f"?{parameter['name']}={value}" if parameter["in"] == "query" else f"{parameter['name']}: …"


def _types(answer: Mapping[str, Any]) -> str:
    """Links to what an answer holds."""
    schemas = [content["schema"] for content in answer.get("content", {}).values()]
    names = [
        one.get("$ref", "").rpartition("/")[2] for schema in schemas for one in schema.get("anyOf", [schema])
    ]
    return "".join(f" <a href='#{escape(name)}'>{escape(name)}</a>" for name in names if name)


def _table(rows: list[tuple[str, str]]) -> str:
    return (
        "<table>"
        + "".join(f"<tr><th>{escape(name)}</th><td>{cell}</td></tr>" for name, cell in rows)
        + "</table>"
    )


def _json(value: Any) -> str:
    return f"<pre>{_text(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _text(value: object) -> str:
    return escape(str(value))


def _page(title: str, body: str) -> str:
    head = (
        "<meta charset='utf-8'><meta name='viewport' "
        f"content='width=device-width'><title>{escape(title)}</title>"
    )
    body = f"<body><h1>{escape(title)}</h1>{body}</body>"
    return f"<!doctype html><html lang='en'><head>{head}<style>{_STYLE}</style></head>{body}</html>"

"""Writing the TOML files that programs read: flat tables of plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def render(table: Mapping[str, Any]) -> str:
    """A TOML document of `table`; tables within it come last, one level deep."""
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
    lines = [f"{k} = {_value(v)}\n" for k, v in plain.items()]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines.append(f"\n[{name}]\n")
            lines += [f"{k} = {_value(v)}\n" for k, v in inner.items()]
    return "".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's basic strings take JSON's escapes
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    raise TypeError(f"no TOML form of {value!r}")

"""A schema's TOML file → a checked `Schema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roo.config import build, from_dict, read_toml, where
from roo.errors import ConfigError, SchemaError, nearest
from roo.rules import take_rule
from roo.schema import Feature, Label, Schema, Table, Transform
from roo.schema_check import check
from roo.schema_expand import Lines, expand


def load_schema(path: str | Path) -> Schema:
    """Read and check a schema TOML.

    Raises:
        SchemaError: names key, value, nearest name, file and line.
    """
    try:
        return schema_from_dict(read_toml(path), path)
    except SchemaError:
        raise
    except ConfigError as error:
        raise SchemaError(str(error)) from None


def schema_from_dict(raw: Mapping[str, Any], path: str | Path | None = None) -> Schema:
    """The same from a parsed table; `path` only for messages."""
    try:
        long, blocks = expand(raw, path)
        places = Lines(path, blocks)
        return check(_parse(long, places), places)
    except SchemaError:
        raise
    except ConfigError as error:
        raise SchemaError(str(error)) from None


def _parse(raw: dict[str, Any], places: Lines) -> Schema:
    """A schema of the long form, its rows checked one by one; what they refer to is checked by `check`."""
    path = places.path
    tables = raw.pop("tables", {})
    if not isinstance(tables, dict):
        raise SchemaError(f"{path or 'schema'}: expected [tables.NAME] tables, got {tables!r}")
    for name, t in tables.items():
        if not isinstance(t, dict):
            raise SchemaError(f"{where(path, name)}expected a table [tables.{name}], got {t!r}")
    parsed: dict[str, object] = {"tables": tuple(_table(name, dict(t), path) for name, t in tables.items())}
    lists = {"ro": Feature, "nro": Feature, "label": Label, "transform": Transform}
    for key, cls in lists.items():
        rows = enumerate(raw.pop(key))
        plural = key + "s" if key in ("label", "transform") else key
        parsed[plural] = tuple(_row(cls, row, places, key, index) for index, row in rows)
    known = {*lists, "tables", "limits", "online", "name"}
    for key in raw:
        if key not in ("limits", "online", "name"):
            raise SchemaError(f"{where(path, key)}unknown key {key!r} = {raw[key]!r}{nearest(key, known)}")
    return build(Schema, {**parsed, **from_dict(Schema, raw, path)}, path)


def _table(name: str, raw: dict[str, Any], path: str | Path | None) -> Table:
    prefix = f"tables.{name}."
    rule = take_rule(raw, path, prefix)
    return build(Table, {**from_dict(Table, raw, path, prefix), "name": name, "rule": rule}, path, prefix)


def _row(cls: type[Any], raw: dict[str, Any], places: Lines, section: str, index: int) -> Any:
    values = from_dict(cls, raw, places.path, f"{section}.")
    name = values.get("output" if cls is Transform else "name", "")
    try:
        return build(cls, values, None, f"{section}.{name}.", lambda key: places.of(section, index, key.rsplit(".", 1)[-1]))
    except ConfigError as error:
        text = str(error)
        raise SchemaError(text if "key " in text else f"{places.of(section, index)}{text}") from None

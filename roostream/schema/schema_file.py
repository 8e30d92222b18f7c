"""Reads a schema's TOML file into a checked `Schema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roostream.errors import ConfigError, SchemaError, nearest
from roostream.schema.check import check
from roostream.schema.counter_declaration import CounterDeclaration
from roostream.schema.expand import RowLocations, expand
from roostream.schema.schema import Feature, Label, Schema, Table, Transform
from roostream.schema.settings import from_dict
from roostream.schema.toml_file import NO_LOCATION, SourceLocation, read_toml
from roostream.schema.update_rules import take_rule


def load_schema(path: str | Path, *, needs_features: bool = False) -> Schema:
    """Read and check a schema TOML.

    Raises:
        SchemaError: names key, value, nearest name, file and line. With `needs_features` also if the schema
        declares no feature, so that no model can be built for it.
    """
    try:
        file = read_toml(path)
    except ConfigError as error:
        raise SchemaError(str(error)) from None
    schema = schema_from_dict(file.raw, file.location)
    if needs_features and not (schema.ro or schema.nro):
        text = "expected at least one [[ro]] or [[nro]] feature, got none; add what a model predicts from"
        raise SchemaError(f"{file.location.describe()}{text}")
    return schema


def schema_from_dict(raw: Mapping[str, Any], location: SourceLocation = NO_LOCATION) -> Schema:
    """`load_schema` from a parsed table; `location` is for messages."""
    try:
        expanded, locations = expand(raw, location)
        return check(_parse(expanded, locations), locations)
    except SchemaError:
        raise
    except ConfigError as error:
        raise SchemaError(str(error)) from None


def _parse(raw: dict[str, Any], locations: RowLocations) -> Schema:
    """Parse an expanded schema row by row; `check` checks the references between rows."""
    location = locations.location
    tables = raw.pop("tables", {})
    if not isinstance(tables, dict):
        raise SchemaError(f"{location.describe('tables')}expected [tables.NAME] tables, got {tables!r}")
    for name, t in tables.items():
        if not isinstance(t, dict):
            text = f"{locations.table(name).describe()}expected a table [tables.{name}], got {t!r}"
            raise SchemaError(text)
    parsed: dict[str, object] = {
        "tables": tuple(_table(name, dict(t), locations.table(name)) for name, t in tables.items())
    }
    lists = {
        "ro": Feature,
        "nro": Feature,
        "counter": CounterDeclaration,
        "label": Label,
        "transform": Transform,
    }
    for key, cls in lists.items():
        rows = enumerate(raw.pop(key))
        plural = key + "s" if key in ("counter", "label", "transform") else key
        parsed[plural] = tuple(_row(cls, row, locations.row(key, index)) for index, row in rows)
    known = {*lists, "tables", "limits", "online", "name"}
    for key in raw:
        if key not in ("limits", "online", "name"):
            text = f"{location.describe(key)}unknown key {key!r} = {raw[key]!r}{nearest(key, known)}"
            raise SchemaError(text)
    return from_dict(Schema, raw, location, **parsed)


def _table(name: str, raw: dict[str, Any], location: SourceLocation) -> Table:
    rule = take_rule(raw, location)
    return from_dict(Table, raw, location, name=name, rule=rule)


def _row(cls: type[Any], raw: dict[str, Any], location: SourceLocation) -> Any:
    """Parse a row; messages include its name: `key 'ro.hour.default'`."""
    name = raw.get("output" if cls is Transform else "name", "")
    named = location.child(prefix=f"{location.prefix}{name}.") if isinstance(name, str) and name else location
    return from_dict(cls, raw, named)

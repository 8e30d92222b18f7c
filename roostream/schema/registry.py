"""All schemas that ever wrote samples, in the checkpoint store as `schemas/<fingerprint>.toml`."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from typing import Any, Protocol

from roostream.errors import CheckpointError, ConfigError, SchemaError, UnavailableError
from roostream.schema.schema import Registry, Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.toml_file import SourceLocation
from roostream.schema.update_rules import Rule, as_table


class Store(Protocol):
    """The used part of roostream.runtime.checkpoint_store.CheckpointStore."""

    def create(self, name: str, data: bytes) -> bool: ...
    def get(self, name: str) -> bytes: ...


def register(store: Store, schema: Schema | str) -> Schema:
    """Store a schema, or its TOML text, for all readers of `store`. Idempotent: the first one of a
    fingerprint stays.

    Raises:
        SchemaError: the text is not a schema.
    """
    if isinstance(schema, str):
        schema = _parse(schema, "schema")
    try:
        store.get(_name(schema.fingerprint))
    except CheckpointError:  # only then, so that a program that may only read can start
        store.create(_name(schema.fingerprint), to_toml(schema).encode())
    return schema


def open_registry(store: Store, own: Schema | None = None) -> Registry:
    """A function from fingerprint to schema, or None if it is not registered yet. Found schemas are cached.
    `own`: a schema that is registered; while its file is absent, no other one counts as not registered.

    The function raises CheckpointError if a file is damaged or has another schema than its name says, and
    UnavailableError if the schemas of the store are away.
    """
    known: dict[int, Schema] = {own.fingerprint: own} if own else {}

    def find(fingerprint: int) -> Schema | None:
        if fingerprint not in known:
            try:
                text = store.get(_name(fingerprint)).decode("utf-8", "replace")
            except CheckpointError:
                if own:
                    _check_present(store, own)
                return None
            known[fingerprint] = _verified(text, fingerprint)
        return known[fingerprint]

    return find


def _check_present(store: Store, schema: Schema) -> None:
    try:
        store.get(_name(schema.fingerprint))
    except CheckpointError as error:
        raise UnavailableError(
            f"expected the schema {schema.name!r}, which was registered, in the store ({error}); make the "
            "store's folder `schemas` available again, or restart this program to register it anew"
        ) from None


def to_toml(schema: Schema, *, defaults: bool = True) -> str:
    """A TOML text that `load_schema` reads as an equal schema, with one row per feature. `defaults=False`
    omits settings with their default value."""

    def block(header: str, item: object, skip: str = "") -> list[str]:
        settings = [
            f"{f.name} = {_value(getattr(item, f.name))}"
            for f in dataclasses.fields(item)  # type: ignore[arg-type]
            if f.name != skip and (defaults or getattr(item, f.name) != _default(f))
        ]
        return ["", header, *settings] if settings or header.startswith("[[") else []

    lines = [
        f"name = {_value(schema.name)}",
        *block("[limits]", schema.limits),
        *block("[online]", schema.online),
    ]
    for table in schema.tables:
        lines += block(f"[tables.{_value(table.name)}]", table, skip="name")
    sections = {"ro": schema.ro, "nro": schema.nro, "counter": schema.counters, "label": schema.labels}
    for section, rows in (*sections.items(), ("transform", schema.transforms)):
        for row in rows:
            lines += block(f"[[{section}]]", row)
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _value(value: object) -> str:
    if isinstance(value, Rule):
        value = as_table(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(k)} = {_value(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _name(fingerprint: int) -> str:
    return f"schemas/{fingerprint:016x}.toml"


def _verified(text: str, fingerprint: int) -> Schema:
    try:
        schema = _parse(text, _name(fingerprint))
    except ConfigError as error:
        raise CheckpointError(
            f"{_name(fingerprint)} is damaged: {error}; put the schema's file back"
        ) from None
    if schema.fingerprint != fingerprint:
        raise CheckpointError(
            f"{_name(fingerprint)} holds schema {schema.fingerprint:016x}; put the schema's file back"
        )
    return schema


def _parse(text: str, name: str) -> Schema:
    try:
        return schema_from_dict(tomllib.loads(text), SourceLocation(name))
    except tomllib.TOMLDecodeError as error:
        raise SchemaError(f"{name}: not TOML: {error}") from None

"""The registry stores schemas in the checkpoint store and finds them by fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.errors import CheckpointError, SchemaError, UnavailableError
from roostream.runtime.checkpoint_store import FileStore
from roostream.schema import registry as schema_registry
from roostream.schema.schema import Schema
from tests.wire.sample_builders import parse_schema

SCHEMAS = sorted((Path(__file__).parents[2] / "roostream" / "replay" / "schemas").glob("*.toml"))


def test_a_registered_schema_is_found_by_its_fingerprint(tmp_path: Path, schema: Schema) -> None:
    store = FileStore(tmp_path)
    schema_registry.register(store, schema)
    schema_registry.register(store, schema)
    find = schema_registry.open_registry(store)
    assert find(schema.fingerprint) == schema
    assert find(schema.fingerprint) is find(schema.fingerprint)
    assert find(5) is None


def test_a_schema_registered_later_is_found(tmp_path: Path, schema: Schema) -> None:
    store = FileStore(tmp_path)
    find = schema_registry.open_registry(store)
    assert find(schema.fingerprint) is None
    schema_registry.register(store, schema_registry.to_toml(schema))
    assert find(schema.fingerprint) == schema


def test_no_schema_counts_as_unknown_while_the_folder_of_schemas_is_away(
    tmp_path: Path, schema: Schema
) -> None:
    """A program that is restarted meanwhile would turn all records into dead letters."""
    store = FileStore(tmp_path / "store")
    schema_registry.register(store, schema)
    (tmp_path / "store" / "schemas").rename(tmp_path / "away")
    find = schema_registry.open_registry(store, own=schema)
    assert find(schema.fingerprint) == schema, "a program knows its own schema"
    with pytest.raises(UnavailableError, match="schemas"):
        find(5)
    (tmp_path / "away").rename(tmp_path / "store" / "schemas")
    assert find(5) is None


def test_unusual_texts_survive_writing() -> None:
    schema = parse_schema('name = "a\\"b\\\\ é 😀"\n[[label]]\nname = "c"\naction = "größe"')
    assert parse_schema(schema_registry.to_toml(schema)) == schema


def test_text_that_is_not_a_schema_is_not_stored(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="not TOML"):
        schema_registry.register(FileStore(tmp_path), "x = ")
    assert not list(tmp_path.rglob("*.toml"))


@pytest.mark.parametrize("text", ["x = ", '[[label]]\nname = "c"\naction = "c"', "\xff"])
def test_a_damaged_file_is_reported_and_not_used(tmp_path: Path, schema: Schema, text: str) -> None:
    store = FileStore(tmp_path)
    store.put(f"schemas/{schema.fingerprint:016x}.toml", text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="schemas/"):
        schema_registry.open_registry(store)(schema.fingerprint)

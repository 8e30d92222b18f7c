"""Expands families of names in a schema file: `ctr_{10m,1h}` becomes `ctr_10m` and `ctr_1h`.

Of several braces the last one varies fastest; braces may be nested. The expanded rows stand in the place of
their block, in the order of its names. So the order of features, and the fingerprint, are those of the
expanded file.

    [[ro]], [[nro]]  a row for each name; braces in `online` and `table` are paired with the names; a missing
                     name is that of the online feature
    [[counter]]      a row for each name, paired with the braces in `event`, `half_life` and `window`
    [[transform]]    a row for each input and, within an input, each operation
    [tables.NAME]    a table for each name
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from roostream.errors import SchemaError
from roostream.schema.toml_file import SourceLocation

MAX_ROWS = 4096
_MAX_LENGTH = 64
_MAX_DEPTH = 8
_SECTIONS = ("ro", "nro", "counter", "label", "transform")
_PAIRED = {"ro": ("online", "table"), "nro": ("online", "table"), "counter": ("event", "half_life", "window")}
_KEEPS_INPUT = ("rank", "share")  # their output is a new float; other operations replace the input


class RowLocations:
    """The location in the file of each expanded row.

    `blocks`: section → index of the [[section]] block of each row; `tables`: table name → its key in the
    file.
    """

    def __init__(
        self, location: SourceLocation, blocks: Mapping[str, list[int]], tables: Mapping[str, str]
    ) -> None:
        self.location, self._blocks, self._tables = location, blocks, tables

    def row(self, section: str, row: int) -> SourceLocation:
        return self.location.child(section, self._blocks[section][row], prefix=f"{section}.")

    def table(self, name: str) -> SourceLocation:
        return self.location.child("tables", self._tables[name], prefix=f"tables.{name}.")

    def describe(self, section: str, row: int, *keys: str) -> str:
        """`"file:line: "` of the first of `keys` that the row's block has, else of the block."""
        return self.row(section, row).describe_first(*keys)


class Expanded(NamedTuple):
    """A schema file with all shorthands expanded."""

    raw: dict[str, Any]  # like parsed TOML
    locations: RowLocations


def expand(raw: Mapping[str, Any], location: SourceLocation) -> Expanded:
    """Expand a parsed schema file; time and memory are bounded by MAX_ROWS per section.

    Raises:
        SchemaError: braces that are open or empty, paired keys of unequal number, too many rows; names file
        and line.
    """
    out = dict(raw)
    blocks: dict[str, list[int]] = {}
    tables: dict[str, str] = {}
    if isinstance(raw.get("tables"), dict):
        tables = _tables(raw["tables"], location)
        out["tables"] = {name: raw["tables"][key] for name, key in tables.items()}
    for section in _SECTIONS:
        given = raw.get(section, [])
        if not isinstance(given, list) or not all(isinstance(row, dict) for row in given):
            text = f"{location.describe(section) or 'schema: '}expected [[{section}]] tables, got {given!r}"
            raise SchemaError(text)
        rows: list[dict[str, Any]] = []
        blocks[section] = []
        for block, row in enumerate(given):
            try:
                new = _rows(section, row)
                if len(rows) + len(new) > MAX_ROWS:
                    text = f"expected at most {MAX_ROWS} [[{section}]] in all, got more; split the schema"
                    raise SchemaError(text)
            except SchemaError as error:
                raise SchemaError(f"{location.describe(section, block)}[[{section}]]: {error}") from None
            rows += new
            blocks[section] += [block] * len(new)
        out[section] = rows
    return Expanded(out, RowLocations(location, blocks, tables))


def names_of(pattern: str) -> tuple[str, ...]:
    """The names of a pattern: `ctr_{10m,1h}` → `("ctr_10m", "ctr_1h")`.

    Raises:
        SchemaError: a brace without its other half, an empty item, braces nested more than 8 deep, more than
        MAX_ROWS names, a name longer than 64.
    """
    names, end = _sequence(pattern, 0, depth=0)
    if end < len(pattern):
        text = f"{pattern[:80]!r}: expected '{{' before the '}}' at {end}; write a family as 'ctr_{{10m,1h}}'"
        raise SchemaError(text)
    return tuple(names)


def _sequence(pattern: str, at: int, depth: int) -> tuple[list[str], int]:
    """The names from index `at` on, and the index of their end: the pattern's end, a `}` or, in braces, a
    comma."""
    names = [""]
    while at < len(pattern) and pattern[at] != "}" and not (depth and pattern[at] == ","):
        if pattern[at] == "{":
            items, at = _braces(pattern, at, depth + 1)
        else:
            literal = re.compile(r"[^{},]+" if depth else r"[^{}]+").match(pattern, at)
            assert literal
            items, at = [literal[0].strip() if depth else literal[0]], literal.end()
        if len(names) * len(items) > MAX_ROWS:
            raise SchemaError(f"{pattern[:80]!r}: expected at most {MAX_ROWS} names, got more; split it")
        names = [name + item for name in names for item in items]
        if max(map(len, names)) > _MAX_LENGTH:
            text = f"{pattern[:80]!r}: expected names of at most {_MAX_LENGTH} characters, got longer"
            raise SchemaError(text)
    return names, at


def _braces(pattern: str, start: int, depth: int) -> tuple[list[str], int]:
    """The items of the braces that open at `start`, and the index behind them."""
    if depth > _MAX_DEPTH:
        text = f"{pattern[:80]!r}: expected braces at most {_MAX_DEPTH} deep, got deeper"
        raise SchemaError(text)
    items: list[str] = []
    at = start
    while at == start or pattern[at] == ",":
        names, at = _sequence(pattern, at + 1, depth)
        if at == len(pattern):
            raise SchemaError(f"{pattern[:80]!r}: expected '}}' for the '{{' at {start}, got none; close it")
        if "" in names:
            text = f"{pattern[:80]!r}: expected a name between braces and commas, got none at {at}"
            raise SchemaError(text)
        items += names
        if len(items) > MAX_ROWS:
            raise SchemaError(f"{pattern[:80]!r}: expected at most {MAX_ROWS} names, got more; split it")
    return items, at + 1


def _tables(tables: Mapping[str, Any], location: SourceLocation) -> dict[str, str]:
    """Table name → its key in the file. Raises SchemaError: a name occurs twice."""
    out: dict[str, str] = {}
    for key in tables:
        at = f"{location.describe('tables', key)}[tables.{key}]"
        try:
            names = names_of(key)
        except SchemaError as error:
            raise SchemaError(f"{at}: {error}") from None
        for name in names:
            if name in out:
                raise SchemaError(f"{at}: table {name!r} occurs twice; give each table its own name")
            out[name] = key
    return out


def _rows(section: str, row: dict[str, Any]) -> list[dict[str, Any]]:
    if section == "transform":
        return _transforms(row)
    if section == "label":
        return [row]
    if section == "counter":
        entity = row.get("entity")
        return _named({**row, "entity": [entity]} if isinstance(entity, str) else row, _PAIRED[section])
    return _named(
        {"name": row["online"], **row} if "name" not in row and "online" in row else row, _PAIRED[section]
    )


def _named(row: dict[str, Any], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each name, with its part of the paired `keys`."""
    if not isinstance(row.get("name"), str):
        return [row]  # absent or of another type: an error when the row is read
    names = names_of(row["name"])
    paired = {key: names_of(row[key]) for key in keys if isinstance(row.get(key), str) and "{" in row[key]}
    for key, values in paired.items():
        if len(values) != len(names):
            text = f"expected one {key} for each of {len(names)} names, got {len(values)}: {row[key]!r}"
            raise SchemaError(text)
    endings, online = (
        [name.rpartition("_")[2] for name in group] for group in (names, paired.get("online", names))
    )
    if endings != online and sorted(endings) == sorted(online):
        raise SchemaError(
            f"expected online in the order of {row['name']!r}, got {row['online']!r}; write both in one order"
        )
    return [
        {**row, "name": name, **{key: values[i] for key, values in paired.items()}}
        for i, name in enumerate(names)
    ]


def _transforms(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each input and, within it, each operation."""
    if "input" in row and "inputs" in row:
        raise SchemaError("expected input or inputs, got both; keep one")
    ops = _listed(row, "op")
    inputs: list[str] = []
    for pattern in _listed(row, "inputs" if "inputs" in row else "input"):
        inputs += names_of(pattern)
        if len(inputs) * len(ops) > MAX_ROWS:
            text = f"expected at most {MAX_ROWS} inputs times operations, got more; split the transform"
            raise SchemaError(text)
    output = row.get("output", "{input}")
    if len(inputs) > 1 and isinstance(output, str) and "{input}" not in output:
        text = f"expected {{input}} in the output of {len(inputs)} inputs, got {output!r}"
        raise SchemaError(text)
    rest = {key: value for key, value in row.items() if key not in ("input", "inputs", "op", "output")}
    return [
        {**rest, "output": _output(row, i, op), "input": i, "op": op}
        for i, op in itertools.product(inputs, ops)
    ]


def _listed(row: Mapping[str, Any], key: str) -> list[str]:
    """A text or a list of texts as a list."""
    if key not in row:
        raise SchemaError(f"expected {key}, got nothing; add it")
    value = [row[key]] if isinstance(row[key], str) else row[key]
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise SchemaError(f"expected a text or a list of texts in {key}, got {value!r}")
    if not value:
        text = f"expected at least one entry in {key}, got an empty list; name one or remove the transform"
        raise SchemaError(text)
    return value


def _output(row: Mapping[str, Any], name: str, op: str) -> Any:
    """The output's name: `output` with `{input}` and `{op}` replaced; by default rank and share keep the
    input."""
    pattern = row.get("output", "{input}_{op}" if op in _KEEPS_INPUT else "{input}")
    return pattern.replace("{input}", name).replace("{op}", op) if isinstance(pattern, str) else pattern

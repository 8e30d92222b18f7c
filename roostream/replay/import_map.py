"""Which columns of another site's Parquet say what: the file that `roostream import parquet --map` reads.

request = ["user", "shown_at"]      rows that are equal in these are one request
time = "shown_at"                   item = "article"       user = "user"
[features]                          schema's name → column; one that isn't named has a column of its own name, or none
basket = "basket_value"
history = { item = "read_ids", time = "read_at" }       a sequence: its table and its columns; weighted ids: ids, weights
[actions]                           what was done → the column that says so, above 0 or true
click = { column = "clicked" }
read = { column = "seconds", least = 5.0, value = "seconds" }
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, Literal

from roostream.errors import ConfigError, nearest
from roostream.schema.schema import Feature, Schema
from roostream.schema.settings import SettingError, Settings, load, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionColumn(Settings):
    """An action, done where its column says so."""

    column: str = setting(help="a boolean or a number: done where it is true, above 0, or at least `least`")
    least: float = setting(0.0, "done from this number on; 0 = above 0")
    value: str = setting("", "column of the action's value; '' = that of `column`")
    time: str = setting("", "column of its time; '' = a second behind the request")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportMap(Settings):
    """See the module. Read with `load_map`, which checks it against the schema."""

    request: tuple[str, ...] = setting(help="columns in which rows of one request are equal")
    item: str = setting(help="column of what was shown")
    time: str = setting(help="column of when: a timestamp, a number (time_unit), or text as ISO 8601")
    time_unit: Literal["ms", "s", "us"] = setting("ms", "of times that are numbers: ms | s | us")
    user: str = setting("", "column of who saw it")
    session: str = setting("", "column of the session")
    surface: str = setting("", "column of where it was shown")
    weight: str = setting("", "column of the request's sampling weight")
    position: str = setting("", "column of the place in the list, from 0; '' = in the order of rows")
    propensity: str = setting("", "column of the chance with which it was shown")
    features: dict[str, Any] = setting(
        factory=dict, help="table: schema's name -> column, or a table of columns"
    )
    actions: dict[str, ActionColumn] = setting(factory=dict, help="table: action -> its column")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.request:
            raise setting_error(
                "request",
                "at least one column",
                self.request,
                "name the request's id, or the user and the time",
            )
        for name, given in self.features.items():
            parts = given if isinstance(given, dict) else {"": given}
            if not parts or not all(isinstance(column, str) and column for column in parts.values()):
                raise SettingError(
                    f"features.{name}", f"expected a column, or a table of columns, got {given!r}"
                )

    def plain(self) -> dict[str, str]:
        """What a row of a log's table is called (roostream/replay/table_log.py) → column, of what is there once a row."""
        named = {
            "item_id": self.item,
            "user_id": self.user,
            "session_id": self.session,
            "surface": self.surface,
        }
        named |= {"weight": self.weight, "position": self.position, "propensity": self.propensity}
        return {name: column for name, column in named.items() if column}

    def parts_of(self, feature: Feature, known: Collection[str]) -> dict[str, str]:
        """Part → column; "" is the part of a feature that is one column. {}: the files (columns `known`) don't have it."""
        given = self.features.get(feature.name, feature.name if feature.name in known else {})
        return dict(given) if isinstance(given, dict) else {"": given}

    def columns(self, schema: Schema, known: Collection[str]) -> Iterator[str]:
        """Every column that is read, some more than once."""
        yield from (*self.request, self.time, *self.plain().values())
        for feature in (*schema.ro, *schema.nro):
            yield from self.parts_of(feature, known).values()
        for action in self.actions.values():
            yield from filter(None, (action.column, action.value, action.time))


def load_map(path: str, schema: Schema) -> ImportMap:
    """Raises ConfigError: an unknown key, a feature or a part of one that the schema doesn't declare, an action that it doesn't
    know; names key, file and line."""
    its = load(ImportMap, path)
    features = {f.name: f for f in (*schema.ro, *schema.nro)}
    for name, given in its.features.items():
        if name not in features:
            raise ConfigError(
                f"{path}: features.{name}: expected a feature of the schema, got another name{nearest(name, features)}"
            )
        parts = _parts(features[name])
        for part in given if isinstance(given, dict) else ():
            if part not in parts:
                wanted = " and ".join(parts) or "one column, as text"
                raise ConfigError(
                    f"{path}: features.{name}.{part}: expected {wanted}, got another name{nearest(part, parts)}"
                )
    wanted_actions = {*(label.action for label in schema.labels), schema.online.click}
    for name in its.actions:
        if name not in wanted_actions:
            known = ", ".join(sorted(wanted_actions))
            near = nearest(name, wanted_actions)
            raise ConfigError(
                f"{path}: actions.{name}: expected an action of the schema ({known}), got another{near}"
            )
    return its


def check_columns(path: str, its: ImportMap, schema: Schema, known: Collection[str]) -> None:
    """Raises ConfigError: the file has no such column; names the nearest."""
    for column in its.columns(schema, known):
        if column not in known:
            raise ConfigError(
                f"{path}: column {column!r} is absent{nearest(column, known)}; correct the map, or leave it out there"
            )


def _parts(feature: Feature) -> tuple[str, ...]:
    if feature.kind == "weighted_ids":
        return ("ids", "weights")
    return (feature.table, *feature.columns) if feature.kind == "sequence" else ()

"""The column map of `roostream import parquet --map`: which columns of another site's Parquet files hold
which values.

request = ["user", "shown_at"]      rows with equal values in these columns form one request
time = "shown_at"                   item = "article"       user = "user"
[features]                          feature of the schema → column; default: of the same name
basket = "basket_value"
history = { item = "read_ids", time = "read_at" }   sequence: table and columns; weighted: ids, weights
[actions]                           action → the column that is true or above 0 where it happened
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
    """The columns of one action."""

    column: str = setting(help="the action happened where this is true, above 0, or at least `least`")
    least: float = setting(0.0, "smallest number that counts; 0 = any number above 0")
    value: str = setting("", "column of the action's value; '' = `column`")
    time: str = setting("", "column of the action's time; '' = one second after the request")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportMap(Settings):
    """The map of the module's docstring. `load_map` checks it against the schema."""

    request: tuple[str, ...] = setting(help="columns whose values identify a request")
    item: str = setting(help="column of the item's id")
    time: str = setting(help="column of the time: a timestamp, a number (time_unit), or ISO 8601 text")
    time_unit: Literal["ms", "s", "us"] = setting("ms", "unit of times that are numbers")
    user: str = setting("", "column of the user's id")
    session: str = setting("", "column of the session's id")
    surface: str = setting("", "column of the surface on which the list was shown")
    weight: str = setting("", "column of the request's sampling weight")
    position: str = setting("", "column of the position in the list, from 0; '' = order of the rows")
    propensity: str = setting("", "column of the probability with which the item was shown")
    features: dict[str, Any] = setting(factory=dict, help="feature of the schema -> column, or columns")
    actions: dict[str, ActionColumn] = setting(factory=dict, help="table: action -> its columns")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.request:
            text = "name the request's id, or the user and the time"
            raise setting_error("request", "at least one column", self.request, text)
        for name, given in self.features.items():
            parts = given if isinstance(given, dict) else {"": given}
            if not parts or not all(isinstance(column, str) and column for column in parts.values()):
                text = f"expected a column, or a table of columns, got {given!r}"
                raise SettingError(f"features.{name}", text)

    def plain(self) -> dict[str, str]:
        """Name of a single-valued column in a table log (table_log.py) → column of the files."""
        named = {
            "item_id": self.item,
            "user_id": self.user,
            "session_id": self.session,
            "surface": self.surface,
        }
        named |= {"weight": self.weight, "position": self.position, "propensity": self.propensity}
        return {name: column for name, column in named.items() if column}

    def parts_of(self, feature: Feature, known: Collection[str]) -> dict[str, str]:
        """Part of a feature → column; a feature of one column has the part "". {} if the files do not have
        the feature."""
        given = self.features.get(feature.name, feature.name if feature.name in known else {})
        return dict(given) if isinstance(given, dict) else {"": given}

    def columns(self, schema: Schema, known: Collection[str]) -> Iterator[str]:
        """Every column that is read, possibly repeated."""
        yield from (*self.request, self.time, *self.plain().values())
        for feature in (*schema.ro, *schema.nro):
            yield from self.parts_of(feature, known).values()
        for action in self.actions.values():
            yield from filter(None, (action.column, action.value, action.time))


def load_map(path: str, schema: Schema) -> ImportMap:
    """Read a map. Raises ConfigError: an unknown key, or a feature, part or action that the schema does not
    have."""
    column_map = load(ImportMap, path)
    features = {f.name: f for f in (*schema.ro, *schema.nro)}
    for name, given in column_map.features.items():
        if name not in features:
            text = f"{path}: features.{name}: expected a feature of the schema{nearest(name, features)}"
            raise ConfigError(text)
        parts = _parts(features[name])
        for part in given if isinstance(given, dict) else ():
            if part not in parts:
                wanted = " and ".join(parts) or "one column, as text"
                text = f"{path}: features.{name}.{part}: expected {wanted}{nearest(part, parts)}"
                raise ConfigError(text)
    wanted_actions = {*(label.action for label in schema.labels), schema.online.click}
    for name in column_map.actions:
        if name not in wanted_actions:
            known = ", ".join(sorted(wanted_actions))
            near = nearest(name, wanted_actions)
            text = f"{path}: actions.{name}: expected an action of the schema ({known}), got another{near}"
            raise ConfigError(text)
    return column_map


def check_columns(path: str, column_map: ImportMap, schema: Schema, known: Collection[str]) -> None:
    """Raises ConfigError: a column of the map is not in the file; names the nearest."""
    for column in column_map.columns(schema, known):
        if column not in known:
            text = f"{path}: column {column!r} is absent{nearest(column, known)}; correct the map"
            raise ConfigError(text)


def _parts(feature: Feature) -> tuple[str, ...]:
    if feature.kind == "weighted_ids":
        return ("ids", "weights")
    return (feature.table, *feature.columns) if feature.kind == "sequence" else ()

"""The column map of `roostream import table --map`: which columns of another site's tables hold which values.

request = ["user", "shown_at"]      rows with equal values in these columns form one request, if user, session
                                    and surface are equal too
time = "shown_at"                   item = "article"       user = "user"
[features]                          feature of the schema → column; default: of the same name; "" = none
basket = "basket_value"
history = { item = "read_ids", time = "read_at" }   sequence: table and columns; weighted: ids, weights
[actions]                           action → the column that is true or above 0 where it happened
click = { column = "clicked" }
read = { column = "seconds", least = 5.0, value = "seconds" }

Where a row is a request, `lists` names the columns of lists with an entry for each shown item:

lists = ["articles", "prices"]      item = "articles"
[actions]                           action → the column of its item, or of a list of its items
click = { items = "clicked_articles" }

Where actions are rows of their own, `event` names the column that says what a row is:

event = "event_type"                shown = ["view"]     # other values are the names of actions
event_value = "revenue"                                  # the action's value; an empty cell is 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from roostream.errors import ConfigError, nearest
from roostream.schema.schema import Feature, Schema
from roostream.schema.settings import SettingError, Settings, load, setting, setting_error

OWN_NAMES = frozenset(
    {"request_id", "user_id", "session_id", "surface", "weight", "item_id", "position", "propensity"}
)
"""What a line of the log says of a request and its candidates beside features. No feature of a table may have
such a name, unless it has the same column."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActionColumn(Settings):
    """The columns of one action."""

    column: str = setting("", "the action happened where this is true, above 0, or at least `least`")
    items: str = setting(
        "", "instead of `column`: column of the item, or of a list of the items, of the action"
    )
    least: float = setting(0.0, "smallest number that counts; 0 = any number above 0")
    value: str = setting("", "column of the action's value; '' = `column`, with `items` 1")
    time: str = setting("", "column of the action's time; '' = one second after the request")

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.column) == bool(self.items):
            raise setting_error("column", "either column or items", self.column, "name one of the two")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportMap(Settings):
    """The map of the module's docstring. `load_map` checks it against the schema."""

    request: tuple[str, ...] = setting(help="columns whose values identify a request")
    item: str = setting(help="column of the item's id")
    time: str = setting(help="column of the time: a timestamp, a number (time_unit), or text")
    time_unit: Literal["ms", "s", "us", "ns"] = setting("ms", "unit of times that are numbers")
    day_first: bool = setting(False, "times as 03/04/2024: true = April 3, false = March 4")
    user: str = setting("", "column of the user's id")
    session: str = setting("", "column of the session's id")
    surface: str = setting("", "column of the surface on which the list was shown")
    weight: str = setting("", "column of the request's sampling weight")
    position: str = setting("", "column of the position in the list, from 0; '' = order of the rows")
    propensity: str = setting("", "column of the probability with which the item was shown")
    lists: tuple[str, ...] = setting(
        (), "columns of lists with an entry for each shown item; () = every row is a shown item"
    )
    event: str = setting("", "column that says what a row is; '' = every row is a shown item")
    shown: tuple[str, ...] = setting((), "values of `event` of rows that are shown items; others are actions")
    event_value: str = setting("", "column of the value of an action that is a row; '' or an empty cell = 1")
    features: dict[str, Any] = setting(factory=dict, help="feature of the schema -> column, or columns")
    actions: dict[str, ActionColumn] = setting(factory=dict, help="table: action -> its columns")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.request:
            text = "name the request's id, or the user and the time"
            raise setting_error("request", "at least one column", self.request, text)
        if self.lists and self.item not in self.lists:
            raise setting_error("lists", f"item = {self.item!r} among them", self.lists, "add it")
        if self.lists and self.event:
            text = "rows of events have one item each; remove one of the two"
            raise setting_error("lists", "no lists beside event", self.lists, text)
        if bool(self.event) != bool(self.shown):
            text = "event names the column, shown its values for shown items; set both or none"
            raise setting_error("shown", "event and shown together", self.shown, text)
        if self.event_value and not self.event:
            text = "it belongs to actions that are rows of their own; see actions.NAME.value for others"
            raise setting_error("event_value", "'' without event", self.event_value, text)
        if self.event and not (self.user or self.session):
            raise setting_error("user", "a column, since actions are rows of their own", self.user, "name it")
        for name, given in self.features.items():
            parts = given if isinstance(given, dict) else {"": given}
            if given != "" and (
                not parts or not all(isinstance(column, str) and column for column in parts.values())
            ):
                text = f"expected a column, or a table of columns, got {given!r}"
                raise SettingError(f"features.{name}", text)

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that are equal in all rows of a request, and only there. A request id is often unique
        within a user only."""
        return tuple(dict.fromkeys((*self.request, *filter(None, (self.user, self.session, self.surface)))))

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
        """The columns that hold a feature, by the part of it that each holds. A feature that one column
        holds has the part "". Empty: the files do not have the feature. `known`: the files' columns."""
        given = self.features.get(feature.name, feature.name if feature.name in known else {})
        if given == "":
            return {}
        return dict(given) if isinstance(given, dict) else {"": given}

    def columns(self, schema: Schema, known: Collection[str]) -> Iterator[str]:
        """Every column that is read, possibly repeated."""
        of_events = filter(None, (self.event, self.event_value))
        yield from (*self.request, self.time, *of_events, *self.plain().values())
        for feature in (*schema.ro, *schema.nro):
            yield from self.parts_of(feature, known).values()
        for action in self.actions.values():
            yield from filter(None, (action.column, action.items, action.value, action.time))


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
    """Check that the file at `path`, whose columns are `known`, has every column of the map.

    Raises:
        ConfigError: it lacks one; the message names the nearest. Or a feature has one of `OWN_NAMES`.
    """
    for feature in (*schema.ro, *schema.nro):
        parts = column_map.parts_of(feature, known)
        if feature.name in OWN_NAMES and parts and parts != {"": column_map.plain().get(feature.name)}:
            raise ConfigError(
                f"{path}: feature {feature.name!r}: expected another name, since a log has a {feature.name} "
                f"of its own; rename the feature to such as '{feature.name}_value', and map it to its column"
            )
    for column in column_map.columns(schema, known):
        if column not in known:
            text = f"{path}: column {column!r} is absent{nearest(column, known)}; correct the map"
            raise ConfigError(text)


def _parts(feature: Feature) -> tuple[str, ...]:
    if feature.kind == "weighted_ids":
        return ("ids", "weights")
    return (feature.table, *feature.columns) if feature.kind == "sequence" else ()


def check_types(
    path: str,
    column_map: ImportMap,
    schema: Schema,
    arrow: pa.Schema,
    example: Callable[[str], str] = lambda column: "",
) -> None:
    """Raises ConfigError: a column of the map has a type that cannot be used for what the map says, or its
    name is that of two columns. `example` names a cell of the column for the message."""
    expectations = (*_of_requests(column_map), *_of_features(column_map, schema, arrow.names))
    for key, column, expected, fits in expectations:
        if arrow.names.count(column) > 1:
            raise ConfigError(f"{path}: two columns are named {column!r}; rename one")
        if not fits(kind := plain(arrow.field(column).type)):
            text = f"{path}: column {column!r} ({key}): expected {expected}, got {kind}{example(column)}"
            raise ConfigError(f"{text}; convert the column")


class _Expectation(NamedTuple):
    """What a key of the map expects of its column."""

    key: str
    column: str
    expected: str
    fits: Callable[[pa.DataType], bool]


def _of_requests(column_map: ImportMap) -> Iterator[_Expectation]:
    for column in column_map.request:
        yield _Expectation("request", column, "text or numbers", _is_plain)
    for expected, fits, keys in (
        ("integers or text", _is_id_or_float, ("item", "user", "session")),
        ("integers or text", _is_id, ("event",)),
        ("numbers", _is_number, ("weight", "propensity", "event_value")),
        ("text", _is_text, ("surface",)),
        ("integers", _is_integer_or_float, ("position",)),
    ):
        for key in keys:
            if column := getattr(column_map, key):
                yield _Expectation(key, column, expected, fits)
    times = {"time": column_map.time}
    for name, action in column_map.actions.items():
        times |= {f"actions.{name}.time": action.time} if action.time else {}
        for key in ("column", "value"):
            if column := getattr(action, key):
                yield _Expectation(f"actions.{name}.{key}", column, "true or false, or numbers", _is_number)
        if action.items:
            text = "integers or text, or lists of these"
            yield _Expectation(f"actions.{name}.items", action.items, text, _is_ids_or_float)
    for key, column in times.items():
        yield _Expectation(key, column, "timestamps, numbers or text", _is_time)


def _of_features(column_map: ImportMap, schema: Schema, known: Collection[str]) -> Iterator[_Expectation]:
    for feature in (*schema.ro, *schema.nro):
        for part, column in column_map.parts_of(feature, known).items():
            key = f"features.{feature.name}{f'.{part}' if part else ''}"
            if feature.kind == "float":
                yield _Expectation(key, column, "numbers", _is_number)
            elif part == "weights" or part in feature.time_columns:
                fits = _is_list_of(_is_number, pa.types.is_timestamp)
                yield _Expectation(key, column, "lists of numbers or times", fits)
            elif part or feature.kind == "ids":
                fits = _is_list_of(_is_id) if part else _is_ids_or_float
                yield _Expectation(key, column, "integers or text, or lists of these", fits)
            else:
                yield _Expectation(key, column, "structs or lists", pa.types.is_nested)


def numeric_columns(column_map: ImportMap, schema: Schema, arrow: pa.Schema) -> dict[str, pa.DataType]:
    """Column → the type that it is cast to: decimals, 16-bit floats, and truth values of float features, are
    numbers. Ids and positions that are floats, as pandas writes them beside missing ones, are integers."""
    used = [
        (feature.kind, column)
        for feature in (*schema.ro, *schema.nro)
        for column in column_map.parts_of(feature, arrow.names).values()
    ]
    floats = {column for kind, column in used if kind == "float"}
    whole = {column_map.item, column_map.user, column_map.session, column_map.position}
    whole |= {column for kind, column in used if kind == "ids"}
    whole |= {action.items for action in column_map.actions.values()}
    found = {}
    for column in set(column_map.columns(schema, arrow.names)):
        kind = arrow.field(column).type
        if pa.types.is_decimal(kind):
            found[column] = pa.int64() if _is_integer(kind) and column not in floats else pa.float64()
        elif pa.types.is_floating(kind) and column in whole - floats:
            found[column] = pa.int64()
        elif pa.types.is_float16(kind) or (pa.types.is_boolean(kind) and column in floats):
            found[column] = pa.float64()
    return found


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of values that may be categories, such as those of pandas: that of the categories."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _is_integer(kind: pa.DataType) -> bool:
    """Also a decimal without digits after the point whose values fit 64 bits."""
    is_whole = pa.types.is_decimal(kind) and kind.scale == 0 and kind.precision <= 18
    return bool(pa.types.is_integer(kind) or is_whole or pa.types.is_null(kind))


def _is_id(kind: pa.DataType) -> bool:
    return _is_integer(kind) or _is_text(kind)


def _is_integer_or_float(kind: pa.DataType) -> bool:
    """Whether `numeric_columns` makes integers of it. Its values must be whole numbers."""
    return _is_integer(kind) or bool(pa.types.is_floating(kind))


def _is_id_or_float(kind: pa.DataType) -> bool:
    return _is_id(kind) or bool(pa.types.is_floating(kind))


def _is_ids_or_float(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind)) or _is_list_of(_is_id, or_plain=True)(kind)


def _is_number(kind: pa.DataType) -> bool:
    is_real = pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_boolean(kind)
    return bool(_is_integer(kind) or is_real)


def _is_time(kind: pa.DataType) -> bool:
    is_date = pa.types.is_timestamp(kind) or pa.types.is_date(kind)
    return bool(is_date or pa.types.is_integer(kind) or pa.types.is_floating(kind) or _is_text(kind))


def _is_plain(kind: pa.DataType) -> bool:
    is_bytes = (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )
    return not (is_bytes or pa.types.is_nested(kind))


def _is_list_of(
    *fits: Callable[[pa.DataType], bool], or_plain: bool = False
) -> Callable[[pa.DataType], bool]:
    """Whether a type is a list of fitting values, or with `or_plain` such a value itself."""

    def check(kind: pa.DataType) -> bool:
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not is_list and not or_plain:
            return bool(pa.types.is_null(kind))
        inner = plain(kind.value_type) if is_list else kind
        is_decimal = pa.types.is_decimal(inner) and is_list  # inside lists nothing is cast
        return not is_decimal and any(fit(inner) for fit in fits)

    return check

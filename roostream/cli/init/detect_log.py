"""Read a log of any form and find what its columns are, for `roostream init --from`.

.jsonl            lines of docs/bring-your-own-data.md
.csv, .parquet    two tables, of shown candidates and of engagements
.parquet          one row per shown item with any column names: a map for `roostream import parquet` is made
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.csv

from roostream.cli.init.column_values import ColumnValues, Kind
from roostream.errors import ConfigError, nearest
from roostream.replay.input_files import open_file
from roostream.replay.parquet_log import parquet_file
from roostream.schema.settings import SettingError, check_name

MAX_LINES = 200_000
_ROLES = {
    "user": "user_id user userid uid visitor_id visitor customer_id customer member_id account_id",
    "item": "item_id item itemid article_id article product_id product video_id news_id movie_id sku asin "
    "content_id document_id listing_id ad_id track_id song_id",
    "request": "request_id request impression_id impression list_id search_id query_id page_view "
    "page_view_id pageview view_id",
    "time": "time timestamp time_ms ts event_time shown_at impression_time created_at date_time datetime",
    "session": "session_id session",
    "position": "position pos",
    "propensity": "propensity propensity_score",
}
_CHOSEN = ("user", "item", "request", "time")  # roles with a flag
_ACTION = re.compile(
    r"(is_|has_)?(click(ed)?|tap(ped)?|open(ed)?|like[ds]?|hate[ds]?|follow(ed)?|comment(ed)?|forward(ed)?|share[ds]?|"
    r"order(ed)?|purchased?|bought|buy|cart|add_to_cart|saved?|long_view|label|converted|conversion|"
    r"install(ed)?|paid|booked|played|read|watched|profile_enter)"
)
_CLICKS = ("click", "clicked", "is_click", "clicks", "tap", "open")
_OF_REQUESTS = ("request_id", "time", "user_id", "session_id", "surface", "weight")
_OF_CANDIDATES = ("item_id", "position", "propensity")
_ENGAGEMENTS = ("request_id", "time", "item_id", "action")


@dataclasses.dataclass
class FoundFeature:
    """A feature that the log has."""

    name: str
    side: str  # ro, nro
    kind: Kind
    distinct: int = 0  # ids
    key: str = ""  # of a sequence's ids
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    column: str = ""  # of a flat table


@dataclasses.dataclass
class FoundLog:
    """Features, actions and sizes that were found in a log. `assumed`: the conclusions that were drawn from
    names and values, one sentence each, for the user to check."""

    form: str  # jsonl, csv, parquet, flat
    features: list[FoundFeature]
    actions: dict[str, int]
    click: str
    requests: int
    candidates: int
    items: int
    users: int
    is_complete: bool  # False: only the first lines were read
    assumed: list[str]
    map: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a flat table


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the command line says about the log; "" = find it."""

    engagements: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    click: str = ""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)  # user, item, request, time


def detect_log(paths: Sequence[str], choices: Choices) -> FoundLog:
    """Read the first 200,000 lines or rows of each file, and find what they are.

    Raises:
        ConfigError: a file cannot be read, has another form, or is ambiguous; names the flag that decides.
    """
    forms = {re.sub(r"\.(gz|zst)$", "", path).rpartition(".")[2] for path in (*paths, *choices.engagements)}
    form = forms.pop() if len(forms) == 1 else ""
    if form not in ("jsonl", "json", "csv", "parquet"):
        raise ConfigError(
            f"{', '.join(paths)}: expected files that all end in .jsonl, all in .csv or all in .parquet "
            "(or .gz, .zst of these); docs/bring-your-own-data.md describes the forms"
        )
    if form in ("jsonl", "json"):
        return _jsonl(paths, choices)
    rows, complete = _table_rows(paths, form)
    known = set(rows[0]) if rows else set()
    is_flat = not {"request_id", "time", "item_id"} <= known or not choices.engagements
    if not is_flat:
        return _two_tables(rows, complete, form, choices)
    if form == "csv":
        raise ConfigError(
            f"{paths[0]}: expected columns request_id, time and item_id, and --engagements FILE with the "
            f"clicks, got {', '.join(sorted(known)) or 'an empty file'}; a table with other columns can be "
            "read as .parquet"
        )
    return _flat(paths[0], rows, complete, choices)


def _jsonl(paths: Sequence[str], choices: Choices) -> FoundLog:
    sides = {"ro": dict[str, ColumnValues](), "nro": dict[str, ColumnValues]()}
    actions, requests, candidates, complete = Counter[str](), 0, 0, True
    items, users = ColumnValues("item_id"), ColumnValues("user_id")
    for path in paths:
        with open_file(path) as file:
            for number, raw in enumerate(file, 1):
                if number > MAX_LINES:
                    complete = False
                    break
                line = _decode(raw, f"{path}:{number}") if raw.strip() else {}
                if line.get("type") == "engagement":
                    actions[str(line.get("action"))] += 1
                elif line.get("type") == "impression":
                    requests += 1
                    users.add(line.get("user_id"))
                    rows = _candidate_rows(line.get("candidates"), f"{path}:{number}")
                    candidates += len(rows)
                    _add(sides["ro"], line.get("ro") or {})
                    for row in rows:
                        items.add(row.get("item_id"))
                        _add(sides["nro"], {k: v for k, v in row.items() if k != "item_id"})
                elif line:
                    raise ConfigError(
                        f'{path}:{number}: expected "type" "impression" or "engagement", got '
                        f"{str(line.get('type'))[:64]!r}; docs/bring-your-own-data.md describes the lines"
                    )
    if not requests:
        raise ConfigError(f"{paths[0]}: expected at least one impression, got none; name the right files")
    features = [_feature(v, side) for side, columns in sides.items() for v in columns.values() if v.present]
    return FoundLog(
        "jsonl", features, dict(actions), _click(actions, choices.click), requests, candidates,
        items.num_distinct(), users.num_distinct(), complete, _assumed(features),
    )  # fmt: skip


def _decode(raw: bytes, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"{where}: expected a JSON object ({error}); correct the line") from None


def _candidate_rows(candidates: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(candidates, dict) and all(isinstance(column, list) for column in candidates.values()):
        return [dict(zip(candidates, row, strict=False)) for row in zip(*candidates.values(), strict=False)]
    if not isinstance(candidates, list) or not all(isinstance(row, dict) for row in candidates):
        raise ConfigError(f"{where}: candidates: expected rows or columns; correct the line")
    return [{**row, **row["nro"]} if isinstance(row.get("nro"), dict) else row for row in candidates]


def _add(columns: dict[str, ColumnValues], row: dict[str, Any]) -> None:
    for name, value in row.items():
        if name != "nro" or not isinstance(value, dict):
            columns.setdefault(name, ColumnValues(name)).add(value)


def _two_tables(rows: list[dict[str, Any]], complete: bool, form: str, choices: Choices) -> FoundLog:
    done, all_done = _table_rows(choices.engagements, form)
    for name in _ENGAGEMENTS:
        if done and name not in done[0]:
            raise ConfigError(
                f"{choices.engagements[0]}: column {name!r} is absent{nearest(name, done[0])}; expected "
                f"{', '.join(_ENGAGEMENTS)}"
            )
    actions = Counter(str(row["action"]) for row in done)
    reserved = {*_OF_REQUESTS, *_OF_CANDIDATES, *choices.ignore}
    columns, sides, numbers = _columns(rows, ("request_id", "user_id", "time"))
    features = [
        _feature(values, sides[name])
        for name, values in columns.items()
        if name not in reserved and values.present
    ]
    users = columns["user_id"].num_distinct() if "user_id" in columns else 0
    return FoundLog(
        form, features, dict(actions), _click(actions, choices.click), numbers, len(rows),
        columns["item_id"].num_distinct(), users, complete and all_done, _assumed(features),
    )  # fmt: skip


def _flat(path: str, rows: list[dict[str, Any]], complete: bool, choices: Choices) -> FoundLog:
    if not rows:
        raise ConfigError(f"{path}: expected rows, got an empty file")
    columns, _, _ = _columns(rows, ())
    roles = {role: _role(path, role, columns, choices) for role in _ROLES}
    for role in ("time", "item"):
        if not roles[role]:
            raise ConfigError(
                f"{path}: no column is recognized as the {role}; name it with --{role} COLUMN (columns: "
                f"{', '.join(columns)})"
            )
    request = [roles["request"]] if roles["request"] else [c for c in (roles["user"], roles["time"]) if c]
    taken = {*filter(None, roles.values()), *choices.ignore}
    flags = {
        n: v for n, v in columns.items() if n not in taken and v.is_flag and _ACTION.fullmatch(_snake(n))
    }
    if choices.click and choices.click not in flags:
        if choices.click not in columns:
            raise ConfigError(
                f"{path}: --click: no column {choices.click!r}{nearest(choices.click, columns)}; expected "
                "one that is true or above 0 where a user clicked"
            )
        flags[choices.click] = columns[choices.click]
    counts = Counter({name: sum(bool(row.get(name)) for row in rows) for name in flags})
    click = _click(counts, choices.click, "columns", path)
    _, sides, requests = _columns(rows, tuple(request))
    features = []
    for name, values in columns.items():
        if name not in taken and name not in flags and values.present:
            feature = _feature(values, sides[name], _snake(name))
            features.append(dataclasses.replace(feature, column=name))
    column_map: dict[str, Any] = {"request": request, "time": roles["time"], "item": roles["item"]}
    unit = columns[roles["time"]].time_unit()
    column_map |= {"time_unit": unit} if unit in ("s", "us") else {}
    column_map |= {r: roles[r] for r in ("user", "session", "position", "propensity") if roles[r]}
    column_map["features"] = {f.name: f.column for f in features if f.name != f.column}
    column_map["actions"] = {_snake(name): name for name in flags}
    assumed = [f"column {column!r} is the {role}" for role, column in roles.items() if column]
    if not roles["request"]:
        assumed.append(f"rows with equal {' and '.join(request)} are one request")
    assumed += [f"column {name!r} is true where a user did it" for name in flags]
    if requests > 0.9 * len(rows):
        assumed.append("most lists have one item, so nothing can be compared within a list")
    return FoundLog(
        "flat", features, {_snake(name): n for name, n in counts.items()}, _snake(click), requests, len(rows),
        columns[roles["item"]].num_distinct(),
        columns[roles["user"]].num_distinct() if roles["user"] else 0,
        complete, [*assumed, *_assumed(features)], column_map,
    )  # fmt: skip


def _role(path: str, role: str, columns: dict[str, ColumnValues], choices: Choices) -> str:
    """The column of a role, by name and content; "" = none."""
    if given := choices.columns.get(role, ""):
        if given not in columns:
            raise ConfigError(f"{path}: --{role}: no column {given!r}{nearest(given, columns)}")
        return given
    names = _ROLES[role].split()
    fits = [
        n for n, v in columns.items() if _snake(n) in names and n not in choices.ignore and _fits(role, v)
    ]
    if not fits and role == "time":
        fits = [n for n, v in columns.items() if n not in choices.ignore and v.time_unit()]
    if exact := [n for n in fits if _snake(n) == names[0]]:
        fits = exact
    if len(fits) > 1:
        raise ConfigError(
            f"{path}: {' and '.join(map(repr, fits))} may be the {role}; "
            + (
                f"choose one with --{role} COLUMN"
                if role in _CHOSEN
                else "leave one out with --ignore COLUMN"
            )
        )
    return fits[0] if fits else ""


def _fits(role: str, values: ColumnValues) -> bool:
    if role == "time":
        return bool(values.time_unit())
    if role == "propensity":
        return values.is_number
    return values.is_whole if role == "position" else values.is_id


def _columns(
    rows: Sequence[dict[str, Any]], request: Sequence[str]
) -> tuple[dict[str, ColumnValues], dict[str, str], int]:
    """Values by column; whether a column is of requests (equal in all rows of each) or of candidates; and the
    number of requests."""
    columns, first, varies = dict[str, ColumnValues](), dict[tuple[Any, ...], dict[str, Any]](), set[str]()
    for row in rows:
        other = first.setdefault(tuple(str(row.get(name)) for name in request), row)
        for name, value in row.items():
            columns.setdefault(name, ColumnValues(name)).add(value)
            if other.get(name) != value:
                varies.add(name)
    has_lists = len(first) < len(rows)
    sides = {name: "ro" if has_lists and name not in varies else "nro" for name in columns}
    return columns, sides, len(first)


def _feature(values: ColumnValues, side: str, name: str = "") -> FoundFeature:
    name = name or values.name
    try:
        check_name("feature", name)
    except SettingError as error:
        raise ConfigError(f"{error}; rename it in the log") from None
    kind = values.kind()
    key, columns = values.sequence() if kind == "sequence" else ("", {})
    return FoundFeature(name, side, kind, values.num_distinct(), key, dict(columns))


def _assumed(features: Sequence[FoundFeature]) -> list[str]:
    sides = {"ro": "of the request", "nro": "of a candidate"}
    return [f"feature {f.name!r} {sides[f.side]} is of kind {f.kind}" for f in features]


def _click(actions: Counter[str], given: str, what: str = "actions", path: str = "the log") -> str:
    """The action to predict first. Raises ConfigError: there is none, or it is not clear which."""
    if given and given in actions:
        return given
    if given:
        raise ConfigError(f"--click: no engagement has action {given!r}{nearest(given, actions)}")
    if len(actions) == 1:
        return next(iter(actions))
    if found := [name for name in _CLICKS if name in actions]:
        return found[0]
    if not actions:
        raise ConfigError(f"{path}: no {what} of users found; name what users did with --click NAME")
    names = ", ".join(f"{name} ({count:,})" for name, count in actions.most_common(8))
    raise ConfigError(f"{path} has several {what}: {names}; choose the main one with --click NAME")


def _snake(name: str) -> str:
    """`userId` → `user_id`, `Price (EUR)` → `price_eur`."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return re.sub(r"[^a-z0-9_-]+", "_", text).strip("_-")[:64]


def _table_rows(paths: Sequence[str], form: str) -> tuple[list[dict[str, Any]], bool]:
    """The first rows of each file, and whether they are all."""
    rows, complete = list[dict[str, Any]](), True
    for path in paths:
        taken = 0
        for table in _parquet_pieces(path) if form == "parquet" else _csv_pieces(path):
            if taken >= MAX_LINES:
                complete = False
                break
            found = table.to_pylist()
            taken += len(found)
            rows += found if form == "parquet" else [_parsed(row) for row in found]
    return rows, complete


def _parquet_pieces(path: str) -> Iterator[pa.RecordBatch]:
    with parquet_file(path) as file:
        yield from file.iter_batches()


def _csv_pieces(path: str) -> Iterator[pa.RecordBatch]:
    with open_file(path) as file:
        names = file.readline().decode("utf-8", "replace").removeprefix("\ufeff").strip().split(",")
        file.seek(0)
        options = pyarrow.csv.ConvertOptions(
            column_types={name.strip('"'): pa.string() for name in names},
            null_values=[""],
            strings_can_be_null=True,
        )
        try:
            yield from pyarrow.csv.open_csv(file, convert_options=options)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{path}: expected CSV in UTF-8 ({str(error).splitlines()[0]})") from None


def _parsed(row: dict[str, str | None]) -> dict[str, Any]:
    return {name: None if cell is None else _cell(cell) for name, cell in row.items()}


def _cell(cell: str) -> Any:
    try:
        return json.loads(cell) if cell[:1] in "[{-0123456789" else cell
    except ValueError:
        return cell

"""Read a log of any form and find what its columns are, for `roostream init --from`.

.jsonl            lines of docs/bring-your-own-data.md
.csv, .parquet    two tables, of shown candidates and of engagements
all of these      one row per shown item, or per request with lists, with any column names: a map for
                  `roostream import table` is made
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from roostream.cli.init.column_values import ColumnValues, Kind
from roostream.errors import ConfigError, nearest
from roostream.replay.import_map import OWN_NAMES
from roostream.replay.input_files import open_file
from roostream.replay.log_lines import json_object
from roostream.replay.parquet_log import damaged_file, parquet_file, times_in_ms
from roostream.replay.table_files import LINE, LISTS, as_parquet, form_of
from roostream.replay.table_log import OF_ENGAGEMENTS
from roostream.schema.settings import SettingError, check_name

MAX_LINES = 200_000  # of each file
MAX_CELLS = 5_000_000  # of all files; a million need about 8 s and 150 MB
_ROWS = 8192  # of a Parquet file at once
_CHANCE = 1e-6
_MIN_PLACES = 10  # rows in lists of several items
_MIN_SHARE_OF_ROWS = 0.95  # with lists of equal lengths; the import refuses the other rows
_MIN_UNIQUE = 100  # values that may be all different by chance
_NO_NAME = re.compile(r"(column|unnamed|index_level)_\d+")
_ROLES = {
    "user": "user_id user userid uid visitor_id visitor visitorid customer_id customer member_id account_id "
    "viewer_id viewer reader_id reader reviewer_id shopper_id subscriber_id",
    "item": "item_id item itemid article_id article product_id product video_id news_id movie_id sku asin "
    "content_id document_id doc_id listing_id ad_id track_id song_id",
    "request": "request_id request req_id impression_id impression list_id search_id query_id page_view "
    "page_view_id pageview view_id slate_id auction_id",
    "time": "time timestamp time_ms ts event_time shown_at impression_time created_at date_time datetime",
    "session": "session_id session user_session visit_id visit",
    "position": "position pos",
    "propensity": "propensity propensity_score",
}
_IDS = re.compile(r"_(uuid|guid|hash|key)$")  # `user_uuid` is a `user_id`
_CHOSEN = ("user", "item", "request", "time")  # roles with a flag
_ACTION = re.compile(
    r"(is_|has_)?(click(ed)?|tap(ped)?|open(ed)?|like[ds]?|hate[ds]?|follow(ed)?|comment(ed)?|forward(ed)?|share[ds]?|"
    r"order(ed)?|purchased?|bought|buy|cart|add_to_cart|saved?|skip(ped)?|dislike[ds]?|hid(e|den)|long_view|label|converted|conversion|"
    r"install(ed)?|paid|booked|played|read|watched|profile_enter)"
)
_CLICKS = ("click", "clicked", "is_click", "clicks", "tap", "open")
_ITEM_LIST = re.compile(
    r"((shown|displayed|candidate|impression|recommended|ranked)_)?"
    r"(item|article|product|video|news|movie|document|doc|listing|ad|track|song|content)s?(_ids?)?"
    r"(_(list|shown|displayed|in_?view))?|slate|(candidate|shown|impression)_ids"
)
_PAST = re.compile(r"(.*_)?(history|recent|previous|prior|past|last)(_.*)?")  # no list of shown items
_RATING = re.compile(r"(user_)?(rating|stars|score|grade)|overall(_rating)?")
_EVENT = re.compile(r"(event|action|interaction|behaviou?r|activity|feedback)(_?(type|name|kind))?|type|kind")
_SHOWN = (
    "impression",
    "show",
    "shown",
    "exposure",
    "display",
    "view",
    "item_view",
    "view_item",
    "view_item_list",
    "viewed",
    "product_view",
    "product_viewed",
    "pageview",
    "page_view",
    "pv",
)
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
    longest: int = 0  # number of entries of the longest list


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
    types: pa.Schema | None = None  # of a flat table's columns
    ignored: list[str] = dataclasses.field(default_factory=list)  # columns of two tables that are not used
    is_anonymous: bool = False  # no request has a user or a session
    max_candidates: int = 0  # number of candidates of the longest list


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the command line says about the log; "" = find it."""

    engagements: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    click: str = ""
    columns: dict[str, str] = dataclasses.field(default_factory=dict)  # user, item, request, time


def detect_log(paths: Sequence[str], choices: Choices) -> FoundLog:
    """Read the first lines or rows of each file, up to MAX_LINES and MAX_CELLS, and find what they are.

    Raises:
        ConfigError: a file cannot be read, has another form, or is ambiguous; names the flag that decides.
    """
    form = form_of([*paths, *choices.engagements])
    if form == "jsonl" and not choices.engagements and _has_own_lines(paths[0]):
        if given := [f"--{role}" for role in choices.columns] or ["--ignore"] * bool(choices.ignore):
            raise ConfigError(
                f"{given[0]}: expected a table, got the log's own lines, whose names are fixed; remove the "
                "option, and delete from the schema what is not wanted"
            )
        return _jsonl(paths, choices)
    with tempfile.TemporaryDirectory() as folder:
        # `replay parquet` takes objects as they are.
        are_read = form == "parquet" and bool(choices.engagements)

        def first_rows(files: Sequence[str]) -> tuple[list[dict[str, Any]], bool, pa.Schema]:
            if not are_read:
                files = as_parquet(files, Path(folder), _refuse, MAX_LINES, keep_missing=None)
            return _table_rows(files, choices.ignore)

        rows, complete, types = first_rows(paths)
        if not choices.engagements:
            _check_ignored(paths[0], choices, rows)
            lists = _item_lists(paths[0], rows, choices)
            if lists.each:
                choices = dataclasses.replace(choices, columns=choices.columns | {"item": lists.each[0]})
                rows, is_all = _row_per_item(rows, lists)
                complete &= is_all
            for n, field in enumerate(types):
                if field.name in lists.each:
                    types = types.set(n, pa.field(field.name, field.type.value_type))
            return dataclasses.replace(_flat(paths[0], rows, complete, choices, lists), types=types)
        done, all_done, _ = first_rows(choices.engagements)
        _check_ignored(paths[0], choices, [*rows, *done])
    if form == "jsonl":
        raise ConfigError(
            "--engagements: expected tables; in JSON lines, engagements stand beside impressions"
        )
    if absent := [name for name in ("request_id", "time", "item_id") if rows and name not in rows[0]]:
        raise ConfigError(
            f"{paths[0]}: expected columns request_id, time and item_id beside --engagements, got no "
            f"{absent[0]!r}{nearest(absent[0], rows[0])}; rename the columns, or join both tables to one "
            "with a row per shown item and a column such as 'clicked'"
        )
    return _two_tables(rows, done, complete and all_done, form, choices)


def _check_ignored(path: str, choices: Choices, rows: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError: a column to leave out does not exist. Misspelt, it would become a feature."""
    known = {name for row in rows for name in row} if choices.ignore else set()
    for name in choices.ignore:
        if rows and name not in known:
            raise ConfigError(f"{path}: --ignore: no column {name!r}{nearest(name, known)}")


def _has_own_lines(path: str) -> bool:
    """Whether the first line is an impression or an engagement of docs/bring-your-own-data.md."""
    with open_file(path) as file:
        number, first = next(((n, line) for n, line in enumerate(file, 1) if line.strip()), (1, b"{}"))
    keys = _decode(first, f"{path}:{number}").keys()
    return "type" in keys and ("candidates" in keys or {"request_id", "action"} <= keys)


def _jsonl(paths: Sequence[str], choices: Choices) -> FoundLog:
    sides = {"ro": dict[str, ColumnValues](), "nro": dict[str, ColumnValues]()}
    actions, requests, candidates, longest, complete = Counter[str](), 0, 0, 0, True
    items, users, sessions = ColumnValues("item_id"), ColumnValues("user_id"), ColumnValues("session_id")
    for path in paths:
        cells = 0
        with open_file(path) as file:
            for number, raw in enumerate(file, 1):
                if number > MAX_LINES or cells > MAX_CELLS // len(paths):
                    complete = False
                    break
                line = _decode(raw, f"{path}:{number}") if raw.strip() else {}
                if line.get("type") == "engagement":
                    actions[str(line.get("action"))] += 1
                elif line.get("type") == "impression":
                    requests += 1
                    users.add(line.get("user_id"))
                    sessions.add(line.get("session_id"))
                    rows = _candidate_rows(line.get("candidates"), f"{path}:{number}")
                    candidates, longest = candidates + len(rows), max(longest, len(rows))
                    cells += sum(map(len, rows))
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
    for values in (*sides["ro"].values(), *sides["nro"].values()):
        if values.bools:
            raise ConfigError(
                f"{paths[0]}: feature {values.name!r}: expected numbers or ids, got true and false; write 1 "
                "and 0"
            )
    features = [_feature(v, side) for side, columns in sides.items() for v in columns.values() if v.present]
    return FoundLog(
        "jsonl", features, dict(actions), _click(actions, choices.click, _no_actions(paths[0])), requests,
        candidates, items.num_distinct(), users.num_distinct(), complete, _assumed(features),
        is_anonymous=not (users.present or sessions.present), max_candidates=longest,
    )  # fmt: skip


def _decode(raw: bytes, where: str) -> dict[str, Any]:
    try:
        return json_object(raw)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; correct the line") from None


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


def _two_tables(
    rows: list[dict[str, Any]], done: list[dict[str, Any]], complete: bool, form: str, choices: Choices
) -> FoundLog:
    for name in _ENGAGEMENTS:
        if done and name not in done[0]:
            raise ConfigError(
                f"{choices.engagements[0]}: column {name!r} is absent{nearest(name, done[0])}; expected "
                f"{', '.join(_ENGAGEMENTS)}"
            )
    actions = Counter(str(row["action"]) for row in done)
    rows = [{name: _cell(cell) for name, cell in row.items()} for row in rows]
    reserved = {*_OF_REQUESTS, *_OF_CANDIDATES, *choices.ignore}
    columns, sides, lengths = _columns(rows, ("request_id", "user_id", "time"))
    for name, values in columns.items():
        if name not in reserved and values.time_unit() == "text":
            raise ConfigError(f"column {name!r} is a time, which is no kind of feature; add --ignore {name}")
        if name not in reserved and _is_numbering(values):
            raise ConfigError(f"column {name!r} has the numbers of the rows; add --ignore {name}")
    features = [
        _feature(values, sides[name])
        for name, values in columns.items()
        if name not in reserved and values.present
    ]
    ignored = [n for n, values in columns.items() if n not in reserved and not values.present]
    assumed = [f"column {n!r} is empty, so it is ignored" for n in ignored]
    known = {*OF_ENGAGEMENTS, *columns, *choices.ignore}
    more = [n for n in (done[0] if done else ()) if n not in known]
    assumed += [f"column {n!r} of engagements is ignored" for n in more]
    users = columns["user_id"].num_distinct() if "user_id" in columns else 0
    return FoundLog(
        form, features, dict(actions), _click(actions, choices.click, _no_actions(choices.engagements[0])),
        len(lengths), len(rows), columns["item_id"].num_distinct(), users, complete,
        [*assumed, *_assumed(features)], ignored=[*ignored, *more], max_candidates=max(lengths, default=0),
        is_anonymous=not any(columns[n].present for n in ("user_id", "session_id") if n in columns),
    )  # fmt: skip


class _ItemLists(NamedTuple):
    """The columns of a table with a row for each request. `each`: those of lists with an entry for each shown
    item, that of the items first; empty = a row is a shown item. `chosen`: those of the item, or of lists of
    the items, with an action."""

    each: list[str]
    chosen: list[str]


def _item_lists(path: str, rows: Sequence[dict[str, Any]], choices: Choices) -> _ItemLists:
    """Find the columns that are lists. Raises ConfigError: several may be the lists of shown items."""
    cells: dict[str, list[Any]] = {}
    for row in rows:
        for name, cell in row.items():
            if cell is not None and name not in choices.ignore:
                cells.setdefault(name, []).append(cell)
    lists = {name for name, its in cells.items() if all(isinstance(cell, list) for cell in its)}
    given = choices.columns.get("item", "")
    items = [given] if given in lists else []
    if not given:
        of_ids = [name for name in cells if name in lists and _has_ids(cells[name])]
        items = [n for n in of_ids if _ITEM_LIST.fullmatch(_snake(n)) or _snake(n) in LISTS]
    has_item = not given and any(_snake(name) in _ROLES["item"].split() for name in cells.keys() - lists)
    if len(items) > 1 and not has_item:
        names = " and ".join(map(repr, items))
        raise ConfigError(f"{path}: {names} may be the lists of shown items; choose one with --item COLUMN")
    if len(items) != 1:
        return _ItemLists([], [])
    shown = [row for row in rows if row.get(items[0])]

    def is_chosen(name: str) -> bool:
        if name not in lists and not _ACTION.fullmatch(_action_name(name)):
            return False
        own = [(_as_list(cell), row[items[0]]) for row in shown if (cell := row.get(name)) not in (None, [])]
        return (
            bool(own)
            and _has_ids([entries for entries, _ in own])
            and all(set(entries) <= set(items_shown) for entries, items_shown in own)
        )

    each = [
        name
        for name in lists
        if not _PAST.fullmatch(_snake(name))
        and sum(row.get(name) is None or len(row[name]) == len(row[items[0]]) for row in shown)
        >= _MIN_SHARE_OF_ROWS * len(shown)
    ]
    each = sorted(each, key=lambda name: (name != items[0], list(cells).index(name)))
    chosen = [name for name in cells if name not in each and is_chosen(name)]
    if has_item and not lists.intersection(chosen):  # a row is a shown item, with a list such as a history
        return _ItemLists([], [])
    return _ItemLists(each, chosen)


def _as_list(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]


def _has_ids(lists: Sequence[list[Any]]) -> bool:
    return all(type(entry) in (int, str, type(None)) for entries in lists for entry in entries)


def _row_per_item(rows: Sequence[dict[str, Any]], lists: _ItemLists) -> tuple[list[dict[str, Any]], bool]:
    """A row for each entry of the lists, at most about MAX_LINES, and whether these are all. The columns of
    `chosen` say whether the item is in them. Rows whose lists have other lengths are left out."""
    out: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        shown = row.get(lists.each[0]) or []
        if any(row.get(name) is not None and len(row[name]) != len(shown) for name in lists.each):
            continue
        for n, item in enumerate(shown):
            own = {name: None if row.get(name) is None else _number(row[name][n]) for name in lists.each}
            own |= {name: item in _as_list(row.get(name)) for name in lists.chosen}
            out.append(row | own)
        if len(out) >= min(MAX_LINES, MAX_CELLS // len(row)):
            return out, number == len(rows)
    return out, True


def _flat(
    path: str, rows: list[dict[str, Any]], complete: bool, choices: Choices, lists: _ItemLists
) -> FoundLog:
    """A table with a row for each shown item, with columns of actions, a rating, or rows of actions. `lists`:
    what a row for each request had."""
    if not rows:
        raise ConfigError(f"{path}: expected at least one row, got none")
    columns, _, _ = _columns(rows, ())
    roles = {role: _role(path, role, columns, choices) for role in _ROLES}
    _check_roles(path, roles, columns)
    free = [n for n in columns if n not in {*filter(None, roles.values()), *choices.ignore}]
    times = [n for n in free if columns[n].time_unit() == "text"]
    numbering = [n for n in free if _is_numbering(columns[n])]
    free = [n for n in free if n not in (*times, *numbering)]
    owner = roles["user"] or roles["session"]
    event, shown = _event(path, columns, free, owner)
    request = [roles["request"]] if roles["request"] else [c for c in (owner, roles["time"]) if c]
    identity = [*request, *filter(None, (roles["user"], roles["session"]))]  # as `import table` has it
    actions, assumed = dict[str, dict[str, Any]](), list[str]()
    if event:
        counts = Counter(str(row[event]) for row in rows if row.get(event) not in (None, "", *shown))
        click = _click(
            counts, choices.click, f"{path}: expected rows of actions beside those with {shown[0]!r}"
        )
        rows = [row for row in rows if row.get(event) in shown]
        names = " or ".join(map(repr, shown))
        assumed += [f"column {event!r} says what a row is: with {names} a shown item, else an action"]
        assumed += ["an action belongs to the newest earlier row that shows the item to the same user"]
    else:
        actions = _action_columns(path, columns, free, choices.click, lists.chosen)
        advice = _advice_on_events(columns, free)
        counts, click, how = _count_actions(path, rows, actions, choices, lists, advice)
        assumed += how
    if lists.each:
        names = ", ".join(map(repr, lists.each))
        assumed.append(f"a row is a request, with an entry for each shown item in {names}")
    used = {event, *map(_column, actions.values())}
    if not roles["position"]:
        roles["position"] = _places(rows, identity, [n for n in free if n not in used])
        free = [n for n in free if n != roles["position"]]
    shown_columns, sides, lengths = _columns(rows, identity)
    late = _late_columns(rows, [n for n in free if n not in used], actions)
    assumed += [
        f"column {n!r} has values only where a user acted: it is known too late for a feature and left out"
        for n in late
    ]
    free = [n for n in free if n not in used and n not in late]
    assumed += [
        f"column {n!r} has values only in rows of actions; `event_value` in the map makes it their value"
        for n in free
        if columns[n].present and not shown_columns[n].present
    ]
    unique = _unique_columns(rows, identity, shown_columns, sides, free)
    assumed += unique.values()
    features = [
        dataclasses.replace(
            _feature(shown_columns[name], sides[name], _feature_name(name, number)), column=name
        )
        for number, name in enumerate(columns, 1)
        if name in free and name not in unique and shown_columns[name].present
    ]
    _check_distinct(path, [f.column for f in features])
    column_map: dict[str, Any] = {"request": request, "time": roles["time"], "item": roles["item"]}
    unit = columns[roles["time"]].time_unit()
    column_map |= {"time_unit": unit} if unit in ("s", "us", "ns") else {}
    column_map |= {"day_first": True} if columns[roles["time"]].is_day_first else {}
    column_map |= {r: roles[r] for r in ("user", "session", "position", "propensity") if roles[r]}
    column_map |= {"event": event, "shown": shown} if event else {}
    column_map |= {"lists": lists.each} if lists.each else {}
    column_map["features"] = {f.name: f.column for f in features if f.name != f.column}
    column_map["actions"] = actions
    named = [f"column {column!r} is the {role}" for role, column in roles.items() if column]
    named += [] if roles["user"] else ["no column is recognized as the user; if one is, use --user COLUMN"]
    named += [] if roles["request"] else [f"rows with equal {' and '.join(request)} are one request"]
    left_out = {
        "is empty, so it": [n for n in free if not columns[n].present],
        "is a time, which is no kind of feature, so it": times,
        "has the numbers of the rows, so it": numbering,
    }
    assumed += [f"column {n!r} {why} is left out" for why, names in left_out.items() for n in names]
    if len(lengths) > 0.9 * len(rows):
        assumed.append("most lists have one item, so nothing can be compared within a list")
    return FoundLog(
        "flat", features, dict(counts), click, len(lengths), len(rows),
        columns[roles["item"]].num_distinct(),
        columns[roles["user"]].num_distinct() if roles["user"] else 0,
        complete, [*named, *assumed, *_assumed(features)], column_map,
        is_anonymous=not (roles["user"] or roles["session"]), max_candidates=max(lengths, default=0),
    )  # fmt: skip


def _count_actions(
    path: str,
    rows: Sequence[dict[str, Any]],
    actions: dict[str, dict[str, Any]],
    choices: Choices,
    lists: _ItemLists,
    advice: str,
) -> tuple[Counter[str], str, list[str]]:
    """Count the actions. Returns (action → number of rows with it, the action to predict first, a sentence
    about each column of an action). `advice`: what the user can do if there is no action."""
    counts = Counter(
        {name: sum(_happened(row.get(_column(a)), a) for row in rows) for name, a in actions.items()}
    )
    absent = (
        f"{path}: expected a column that is true or above 0 where a user acted, such as 'clicked', found "
        f"none; name it with --click COLUMN. {advice}"
    )
    main = _action_name(choices.click) if choices.click in lists.chosen else _snake(choices.click)
    click = _click(counts, main, absent, f"{path} has several such columns")
    sentences = []
    for name, a in actions.items():
        how = f"is {a['least']:g} or more where a user liked it" if "least" in a else ""
        how = how or ("has the items with this action" if "items" in a else "")
        how = how or f"is {_true_where(rows, a['column'])} where a user did it"
        if counts[name] == len(rows):
            how += ", which is so in every row; for a rating, set `least` in the map to what counts as liked"
        sentences.append(f"column {_column(a)!r} {how}")
    return counts, click, sentences


def _true_where(rows: Sequence[dict[str, Any]], column: str) -> str:
    """What the cells of an action's column are where the action happened."""
    return "true" if all(row.get(column) in (None, 0, 1) for row in rows) else "above 0"


def _check_roles(path: str, roles: dict[str, str], columns: dict[str, ColumnValues]) -> None:
    """Raises ConfigError: no column is the time, or none is the item."""
    for role in ("time", "item"):
        if not roles[role]:
            lists = [n for n, v in columns.items() if v.entries is not None and v.entries.parts]
            remedy = f"; if {lists[0]!r} has the shown items, rename it to 'candidates'" if lists else ""
            raise ConfigError(
                f"{path}: no column is recognized as the {role}; name it with --{role} COLUMN (columns: "
                f"{', '.join(columns)}){remedy if role == 'item' else ''}"
            )


def _unique_columns(
    rows: Sequence[dict[str, Any]],
    request: Sequence[str],
    columns: dict[str, ColumnValues],
    sides: dict[str, str],
    names: Sequence[str],
) -> dict[str, str]:
    """The columns with an id of its own in every request, or in every row, and a sentence for each: nothing
    can be learned of ids that never occur again."""
    found = dict[str, str]()
    for name in names:
        if not columns[name].present or columns[name].entries is not None or columns[name].kind() != "ids":
            continue
        what = "request" if sides[name] == "ro" else "row"
        owners: dict[Any, Any] = {}
        for number, row in enumerate(rows):
            owner = tuple(row.get(column) for column in request) if what == "request" else number
            if row.get(name) is not None and owners.setdefault(row[name], owner) != owner:
                break
        else:
            if len(owners) >= _MIN_UNIQUE:
                found[name] = f"column {name!r} has another id in every {what}, so it is left out"
                if what == "request":
                    found[name] += f"; if it is the request's id, use --request {name}"
    return found


def _is_numbering(values: ColumnValues) -> bool:
    """Whether this is the index of a pandas table, which has no name."""
    return values.is_whole and bool(_NO_NAME.fullmatch(_snake(values.name)))


def _places(rows: Sequence[dict[str, Any]], request: Sequence[str], names: Sequence[str]) -> str:
    """The column with the places in each list, which it numbers from 0 or from 1 whatever its name is; "" =
    none does so, or several do."""
    lists: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        lists.setdefault(tuple(row.get(name) for name in request), []).append(row)
    longer = [shown for shown in lists.values() if len(shown) > 1]

    def has_places(name: str, shown: Sequence[dict[str, Any]]) -> bool:
        places = sorted(row[name] for row in shown if type(row.get(name)) is int)
        return places in (list(range(len(shown))), list(range(1, len(shown) + 1)))

    if sum(map(len, longer)) < _MIN_PLACES:  # a column of few rows may do so by chance
        return ""
    found = [name for name in names if all(has_places(name, shown) for shown in longer)]
    return found[0] if len(found) == 1 else ""


def _event(
    path: str, columns: dict[str, ColumnValues], free: Sequence[str], owner: str
) -> tuple[str, list[str]]:
    """The column that says what a row is, and its values that mean a shown item; ("", []) = there is none.

    Raises:
        ConfigError: there is one, but no `owner`, the column of the user or session.
    """
    for name in free:
        values = {value for value in columns[name].distinct if isinstance(value, str)}
        shown = [value for value in sorted(values) if _snake(value) in _SHOWN]
        if _EVENT.fullmatch(_snake(name)) and shown and len(shown) < len(values) <= 50:
            if not owner:
                raise ConfigError(
                    f"{path}: column {name!r} has rows of actions beside those of shown items, but no column "
                    f"is recognized as the user; name it with --user COLUMN (columns: {', '.join(columns)})"
                )
            return name, shown
    return "", []


def _advice_on_events(columns: dict[str, ColumnValues], free: Sequence[str]) -> str:
    """What to do with a table that has no column of actions."""
    for name in free:
        values = sorted(value for value in columns[name].distinct if isinstance(value, str))
        if _EVENT.fullmatch(_snake(name)) and 1 < len(values) <= 50:
            some = ", ".join(values[:5])
            return f"If rows are events, call those of shown items 'view' in {name!r}, which has {some}"
    return "A log of clicks alone needs the items that were shown, too"


def _late_columns(
    rows: Sequence[dict[str, Any]], names: Sequence[str], actions: dict[str, dict[str, Any]]
) -> list[str]:
    """The columns that are empty, false or 0 in all rows without an action, such as the seconds that a user
    watched. A column that would do so by chance with a probability of _CHANCE or more is none of them."""
    acted = [any(_happened(row.get(_column(a)), a) for a in actions.values()) for row in rows]
    share, late = sum(acted) / len(acted), []
    for name in names:
        filled = [happened for row, happened in zip(rows, acted, strict=True) if row.get(name)]
        if all(filled) and share ** len(filled) < _CHANCE:
            late.append(name)
    return late


def _check_distinct(path: str, names: Sequence[str]) -> None:
    """Raises ConfigError: two columns get the same name in the schema."""
    found: dict[str, str] = {}
    for name in filter(_snake, names):
        if (other := found.setdefault(_snake(name), name)) != name:
            raise ConfigError(
                f"{path}: columns {other!r} and {name!r} would both be called {_snake(name)!r}; leave one "
                "out with --ignore COLUMN"
            )


def _action_columns(
    path: str, columns: dict[str, ColumnValues], free: Sequence[str], click: str, chosen: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Action → its column, and of a rating the least that counts as liked: 4 of 5, 8 of 10. `chosen`: columns
    of the items with an action."""
    found = [n for n in free if n in chosen or (columns[n].is_flag and _ACTION.fullmatch(_snake(n)))]
    if click and click not in found:
        if click not in columns:
            raise ConfigError(
                f"{path}: --click: no column {click!r}{nearest(click, columns)}; expected "
                "one that is true or above 0 where a user clicked"
            )
        found.append(click)
    ratings = [n for n in free if columns[n].is_number and _RATING.fullmatch(_snake(n))]
    if not found and len(ratings) == 1:
        found = ratings
    _check_distinct(path, found)
    return {
        _action_name(n) if n in chosen else _snake(n): {
            "items" if n in chosen else "column": n,
            **({"least": 0.8 * columns[n].high} if n in ratings else {}),
        }
        for n in found
    }


def _action_name(column: str) -> str:
    """The action of a column with items: `clicked_articles` → `clicked`; another name stays."""
    name = _snake(column)
    return next((word for word in (name, *name.split("_")) if _ACTION.fullmatch(word)), name)


def _column(action: dict[str, Any]) -> str:
    return str(action.get("column") or action["items"])


def _happened(cell: Any, action: dict[str, Any]) -> bool:
    return isinstance(cell, int | float) and cell > 0 and cell >= action.get("least", 0)


def _role(path: str, role: str, columns: dict[str, ColumnValues], choices: Choices) -> str:
    """The column of a role, by name and content; "" = none."""
    if given := choices.columns.get(role, ""):
        if given not in columns:
            raise ConfigError(f"{path}: --{role}: no column {given!r}{nearest(given, columns)}")
        if role == "time" and not columns[given].time_unit():
            raise _no_times(path, columns[given])
        return given
    names = _ROLES[role].split()
    fits = [
        n
        for n, v in columns.items()
        if _IDS.sub("_id", _snake(n)) in names and n not in choices.ignore and _fits(role, v)
    ]
    if not fits and role == "time":
        fits = [n for n, v in columns.items() if n not in choices.ignore and v.time_unit()]
        if not fits and (named := [v for n, v in columns.items() if _snake(n) in names and v.present]):
            raise _no_times(path, named[0])
    for usual in ([names[0]], names):  # before names such as `user_uuid`
        fits = [n for n in fits if _snake(n) in usual] or fits
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


def _no_times(path: str, values: ColumnValues) -> ConfigError:
    return ConfigError(
        f"{path}: column {values.name!r}: expected times such as '2023-05-23T12:00:00', or all as s, ms, µs "
        f"or ns since 1970, got others such as {str(values.example)[:64]!r}; convert them, or name another "
        "column with --time COLUMN"
    )


def _fits(role: str, values: ColumnValues) -> bool:
    if role == "time":
        return bool(values.time_unit())
    if role == "propensity":
        return values.is_number
    return values.is_whole if role == "position" else values.is_id


def _columns(
    rows: Sequence[dict[str, Any]], request: Sequence[str]
) -> tuple[dict[str, ColumnValues], dict[str, str], list[int]]:
    """Values by column; whether a column is of requests (equal in all rows of each) or of candidates; and the
    number of rows of each request."""
    columns, first, varies = dict[str, ColumnValues](), dict[tuple[Any, ...], dict[str, Any]](), set[str]()
    lengths = Counter[tuple[Any, ...]]()
    for row in rows:
        key = tuple(str(row.get(name)) for name in request)
        lengths[key] += 1
        other = first.setdefault(key, row)
        for name, value in row.items():
            values = columns.get(name)
            if values is None:
                values = columns[name] = ColumnValues(name)
            values.add(value)
            if other.get(name) != value:
                varies.add(name)
    has_lists = len(first) < len(rows)
    sides = {name: "ro" if has_lists and name not in varies else "nro" for name in columns}
    return columns, sides, [*lengths.values()]


def _feature(values: ColumnValues, side: str, name: str = "") -> FoundFeature:
    name = name or values.name
    try:
        check_name("feature", name)
    except SettingError as error:
        raise ConfigError(f"{error}; rename it in the log") from None
    kind = values.kind()
    key, columns = values.sequence() if kind == "sequence" else ("", {})
    return FoundFeature(name, side, kind, values.num_distinct(), key, dict(columns), longest=values.longest)


def _assumed(features: Sequence[FoundFeature]) -> list[str]:
    sides = {"ro": "of the request", "nro": "of a candidate"}
    return [f"feature {f.name!r} {sides[f.side]} is of kind {f.kind}" for f in features]


def _no_actions(path: str) -> str:
    return f"{path}: expected engagements beside impressions, got none; add them, or name their file too"


def _click(
    actions: Counter[str], given: str, absent: str, several: str = "the log has several actions"
) -> str:
    """The action to predict first.

    Raises:
        ConfigError: there is none (`absent`), or it is not clear which (`several`).
    """
    if given and given in actions:
        return given
    if given:
        known = ", ".join(sorted(actions)) or "none has any"
        near = nearest(given, actions) or "; choose one of them"
        raise ConfigError(f"--click: expected an action of the log ({known}), got {given!r}{near}")
    if len(actions) == 1:
        return next(iter(actions))
    if found := [name for name in _CLICKS if name in actions]:
        return found[0]
    if not actions:
        raise ConfigError(absent)
    names = ", ".join(f"{name} ({count:,})" for name, count in actions.most_common(8))
    raise ConfigError(f"{several}: {names}; choose the main one with --click NAME")


def _feature_name(column: str, number: int) -> str:
    """The name of the feature that a flat table has in its column `number`."""
    name = _snake(column) or f"column_{number}"
    return f"{name}_value" if name in OWN_NAMES else name


def _snake(name: str) -> str:
    """`userId` → `user_id`, `Price (EUR)` → `price_eur`, `Größe` → `grosse`; "" without a Latin letter or
    digit."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).casefold()
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.sub(r"[^a-z0-9_-]+", "_", text).strip("_-")[:64]


def _table_rows(paths: Sequence[str], ignore: Sequence[str]) -> tuple[list[dict[str, Any]], bool, pa.Schema]:
    """The first rows of each Parquet file, whether they are all, and the types of the first file's
    columns."""
    rows, complete, types = list[dict[str, Any]](), True, None
    for path in paths:
        with parquet_file(path) as file:
            types = types or file.schema_arrow
            left = max(1, min(MAX_LINES, MAX_CELLS // (len(file.schema_arrow.names) * len(paths))))
            complete &= file.metadata.num_rows <= left
            try:
                for batch in file.iter_batches(min(left, _ROWS)):
                    table = times_in_ms(pa.Table.from_batches([batch[:left]]))
                    found = _cells(path, table, ignore)
                    left -= len(found)
                    rows += [{n: _number(cell) for n, cell in row.items() if n != LINE} for row in found]
                    if not left:
                        break
            except (pa.ArrowInvalid, OSError) as error:
                raise damaged_file(path, error) from None
    return rows, complete, types


def _cells(path: str, table: pa.Table, ignore: Sequence[str]) -> list[dict[str, Any]]:
    """The rows. A column to `ignore` is empty if Python cannot hold its times.

    Raises:
        ConfigError: another column has such a time.
    """
    try:
        return table.to_pylist()
    except OverflowError:
        pass
    for n, name in enumerate(table.column_names):
        try:
            table.column(n).to_pylist()
        except OverflowError:
            if name not in ignore:
                raise ConfigError(
                    f"{path}: column {name!r}: expected times before the year 10000, got a later one; "
                    f"correct it, such as its unit, or leave it out with --ignore {name}"
                ) from None
            table = table.set_column(n, name, pa.nulls(len(table)))
    return table.to_pylist()


def _number(cell: Any) -> Any:
    """A decimal or 16-bit float as the number that `import table` makes of it."""
    if isinstance(cell, np.generic):
        return cell.item()
    if not isinstance(cell, Decimal):
        return cell
    return int(cell) if cell.as_tuple().exponent == 0 else float(cell)


def _cell(cell: Any) -> Any:
    """The object that a text is as JSON, as in a column of weighted ids or sequences."""
    try:
        return json.loads(cell) if isinstance(cell, str) and cell[:1] == "{" else cell
    except (ValueError, RecursionError):
        return cell


def _refuse(where: str, error: Exception) -> None:
    raise ConfigError(f"{where}: {error}; correct the line") from None

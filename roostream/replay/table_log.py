"""A log as tables: files with one row per shown candidate, and files with one row per engagement.

parquet_log.py and csv_log.py read the tables. This module converts rows to the lines of log_lines.py, and
these to events.

    impressions   request_id  time  item_id  [user_id session_id surface weight position propensity]  features
    engagements   request_id  time  item_id  action  [user_id session_id surface value event_id]

Rows with the same request, user, session and time form one impression, in their order. Its request features
must agree.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from roostream.errors import ConfigError, nearest
from roostream.replay.datasets import DatasetOptions, EventLog
from roostream.replay.events import Event, Request
from roostream.replay.input_files import check_files
from roostream.replay.log_lines import UNREADABLE, EngagementLine, ImpressionLine, LogLineReader
from roostream.replay.parse_time import line_time, parse_time_ms
from roostream.schema.schema import Schema
from roostream.schema.settings import setting

_NEEDED = ("request_id", "time", "item_id")
_WHO = ("user_id", "session_id", "surface")
_OF_IMPRESSIONS = (*_NEEDED, *_WHO, "weight", "position", "propensity")
OF_ENGAGEMENTS = (*_NEEDED, "action", *_WHO, "value", "event_id")
_ROWS = 4096
_LIST_AS_TEXT = re.compile(r"""\[(?:\s*|.*[,'"].*|[\s\d.]+)\]""", re.DOTALL)
"""How Python, NumPy and JSON write a list. An id such as `[deleted]` is none."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions(DatasetOptions):
    """Settings of a log in Parquet or CSV tables: one row per shown candidate, one per engagement."""

    impressions: tuple[str, ...] = setting(help="files with one row per shown candidate, in any order")
    engagements: tuple[str, ...] = setting((), "files with one row per engagement, in any order")
    ignore: tuple[str, ...] = setting((), "columns to ignore, which are not features of the schema")
    skip_bad: bool = setting(
        False, "count bad rows and leave their requests out, instead of stopping at the first"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_files("impressions", self.impressions, needed=True)
        check_files("engagements", self.engagements, needed=False)


class LogTable(NamedTuple):
    """The rows of a file. `line_N` is the line of each; `value(column, cell)` converts a cell or raises
    ValueError."""

    path: str
    table: pa.Table
    line_N: np.ndarray
    value: Callable[[str, Any], Any]

    def where(self, row: int) -> str:
        return f"{self.path}:{int(self.line_N[row])}"


Read = Callable[[str, LogLineReader], LogTable]


def open_tables(options: TableOptions, schema: Schema, read: Read) -> EventLog:
    """Open the tables with `read` and return their events. Memory: the Arrow tables and one slice of rows as
    Python objects.

    Raises:
        ConfigError: a file cannot be read, lacks a column, or has an unknown one; the message names file and
        column. LogError: a row with an invalid time that is not skipped; while events are read, any bad row.
    """
    reader = LogLineReader(schema, skip_bad=options.skip_bad)
    features = {f.name for f in (*schema.ro, *schema.nro)}
    shown = [read(path, reader) for path in options.impressions]
    done = [read(path, reader) for path in options.engagements]
    there = {name for table in (*shown, *done) for name in table.table.column_names}
    for name in options.ignore:
        if name not in there:
            raise ConfigError(
                f"--ignore: expected columns of the tables, got {name!r}{nearest(name, there)}; correct it"
            )
    shown = [_checked(table, _OF_IMPRESSIONS, _NEEDED, features, options.ignore) for table in shown]
    done = [_engagement_table(table, features, options.ignore) for table in done]
    for table in (*shown, *done):
        _check_types(table)
    impressions, engagements = _impressions(shown, schema, reader), _engagements(done, reader)
    events = heapq.merge(impressions, engagements, key=lambda e: (e.time_ms, not isinstance(e, Request)))
    ids = [t.table["request_id"] for t in shown]
    return EventLog(
        events=events,
        num_requests=0 if any(pa.types.is_nested(x.type) for x in ids) else sum(len(x.unique()) for x in ids),
        refuse=lambda event, error: reader.refuse(event.where, error),
        skipped=reader.skipped,
    )


def _checked(
    table: LogTable, known: Sequence[str], needed: Sequence[str], features: set[str], ignore: Sequence[str]
) -> LogTable:
    """The table with its known columns only."""
    names = [n for n in table.table.column_names if n not in ignore]
    if doubled := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigError(f"{table.path}: expected column {doubled[0]!r} once, got it twice; keep one")
    for name in needed:
        if name not in names:
            raise ConfigError(
                f"{table.path}: column {name!r} is absent{nearest(name, names)}; expected {', '.join(needed)}"
            )
    for name in names:
        if name not in known and name not in features:
            near = nearest(name, [*known, *features])
            remedy = "declare or --ignore it"
            if name == "action":
                remedy = "give a table of engagements with --engagements, or --ignore the column"
            raise ConfigError(f"{table.path}: column {name!r} is not a feature of the schema{near}; {remedy}")
    return table._replace(table=table.table.select(names))


def _engagement_table(table: LogTable, features: set[str], ignore: Sequence[str]) -> LogTable:
    """The table with the columns of engagements. Others may repeat those of the shown items."""
    known = (*OF_ENGAGEMENTS, *_OF_IMPRESSIONS)
    checked = _checked(table, known, (*_NEEDED, "action"), features, ignore)
    names = [name for name in checked.table.column_names if name in OF_ENGAGEMENTS]
    return checked._replace(table=checked.table.select(names))


def _check_types(table: LogTable) -> None:
    """Raises ConfigError: a column beside `time` has times, which Python may not be able to hold."""
    for field, column in zip(table.table.schema, table.table.columns, strict=True):
        if field.name != "time" and pa.types.is_temporal(field.type) and column.null_count < len(column):
            raise ConfigError(
                f"{table.path}: column {field.name!r}: expected numbers, ids or lists, got {field.type}; "
                "convert the column, or --ignore it"
            )


class _TimedRow(NamedTuple):
    time_ms: int
    where: str  # file:line
    row: Row  # the cells that can be read
    error: ValueError | None  # of the first other one


class _RowsByTime:
    """The rows of several files in time order, read in slices.

    `damaged`: ids of the requests with a row that cannot be assigned to them: it has no readable time, and is
    therefore not among the rows, or no readable user, session or surface.
    """

    def __init__(self, tables: Sequence[LogTable], reader: LogLineReader) -> None:
        self.tables, self.reader, self.damaged = tables, reader, set[Any]()
        times, places = [np.zeros(0, np.int64)], [np.zeros((0, 2), np.int64)]
        for number, table in enumerate(tables):
            time_ms_N = self._times(table)
            kept_N = np.flatnonzero(time_ms_N >= 0)
            times.append(time_ms_N[kept_N])
            places.append(np.stack([np.full(len(kept_N), number), kept_N], axis=1))
        time_ms_N = np.concatenate(times)
        order_N = np.argsort(time_ms_N, kind="stable")
        self._time_ms_N, self._place_N2 = time_ms_N[order_N], np.concatenate(places)[order_N]

    def rows(self) -> Iterator[_TimedRow]:
        """The rows with a time, in time order."""
        for start in range(0, len(self._time_ms_N), _ROWS):
            place_N2 = self._place_N2[start : start + _ROWS]
            slices: dict[int, list[Row]] = {}
            for number in np.unique(place_N2[:, 0]).tolist():
                rows_N = place_N2[place_N2[:, 0] == number, 1]
                slices[number] = self.tables[number].table.take(pa.array(rows_N)).to_pylist()[::-1]
            for time_ms, (number, row) in zip(
                self._time_ms_N[start : start + _ROWS].tolist(), place_N2.tolist(), strict=True
            ):
                table, cells, error = self.tables[number], Row(), None
                for name, cell in slices[number].pop().items():
                    try:
                        if cell not in (None, ""):
                            cells[name] = _value(table, name, cell)
                    except ValueError as wrong:
                        error = error or wrong
                        if name in _WHO:  # the other rows of its request seem to be of another one
                            self.damaged |= _request_ids(table, row)
                yield _TimedRow(time_ms, table.where(row), cells, error)

    def _times(self, table: LogTable) -> np.ndarray:
        """Times of the rows in ms, int64 [N]; -1 for a skipped row, whose request is then in `damaged`."""
        column, known = table.table["time"], dict[int | str, int]()
        if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        out = np.empty(len(column), np.int64)
        for row, cell in enumerate(column.to_pylist()):
            try:
                time = _time_cell(cell)
                if time not in known:
                    known[time] = parse_time_ms(time)
                out[row] = known[time]
            except ValueError as error:
                self.reader.refuse(table.where(row), ValueError(f"time: {error}"))
                self.damaged |= _request_ids(table, row)
                out[row] = -1
        return out


def _time_cell(cell: object) -> int | str:
    if isinstance(cell, bool) or not isinstance(cell, (int, str)):
        got = "nothing" if cell is None else repr(cell)
        raise ValueError(f"expected a time as text, or ms since 1970, got {got}")
    return cell


def _value(table: LogTable, name: str, cell: Any) -> Any:
    """Convert a cell. Raises ValueError: it cannot be read, or is a list or an object and tells requests
    apart."""
    value = table.value(name, cell)
    if name in ("request_id", *_WHO) and isinstance(value, (list, dict)):
        raise ValueError(f"{name}: expected an integer or text, got {str(value)[:64]}")
    return value


def _request_ids(table: LogTable, row: int) -> set[Any]:
    """The id of a row's request; empty if the cell is, or cannot be read."""
    cell = table.table["request_id"][row].as_py()
    try:
        return set() if cell is None else {_value(table, "request_id", cell)}
    except ValueError:
        return set()


def _impressions(tables: Sequence[LogTable], schema: Schema, reader: LogLineReader) -> Iterator[Event]:
    """Impressions in time order; at equal times in the order of their first rows. A request with a row that
    cannot be read is left out, because the rest of it is not the list that was shown."""

    def key(row: Row) -> tuple[object, ...]:
        return tuple(row.get(name) for name in ("request_id", *_WHO))

    by_time = _RowsByTime(tables, reader)
    for time_ms, moment in itertools.groupby(by_time.rows(), key=lambda row: row.time_ms):
        groups: dict[tuple[object, ...], list[_TimedRow]] = {}
        for row in moment:
            groups.setdefault(key(row.row), []).append(row)
        for (request_id, *_), rows in groups.items():
            bad = [(row.where, row.error) for row in rows if row.error]
            for where, error in bad:
                reader.refuse(where, error)
            if bad or request_id in by_time.damaged:
                continue
            try:
                yield reader.event(rows_to_impression([r.row for r in rows], time_ms, schema), rows[0].where)
            except UNREADABLE as error:
                reader.refuse(rows[0].where, error)


def rows_to_impression(rows: Sequence[Row], time_ms: int, schema: Schema) -> ImpressionLine:
    """Convert the rows of one request, in their order, to one impression.

    Raises:
        ValueError: the rows differ in a request feature, or have a list of ids as text, which would be one.
    """
    ro, nro = {f.name for f in schema.ro}, {f.name for f in schema.nro}
    first, names = rows[0], dict.fromkeys(name for row in rows for name in row)
    for name in names.keys() & (ro | {"weight"}):
        if any(not _equal(row.get(name), first.get(name)) for row in rows):
            text = f"{name}: expected one value in all rows of request {first.get('request_id')!r}"
            raise ValueError(text)
    for name in (f.name for f in (*schema.ro, *schema.nro) if f.kind == "ids" and f.name in names):
        for cell in (row.get(name) for row in rows):
            if isinstance(cell, str) and _LIST_AS_TEXT.fullmatch(cell):
                raise ValueError(
                    f'{name}: expected an id, or a list such as ["a", "b"] in CSV, got the text '
                    f"{cell[:64]!r}; write it as such a list"
                )
    columns = {name: [row.get(name) for row in rows] for name in names if name in nro or name == "item_id"}
    given: Row = {
        name: first[name] for name in ("user_id", "session_id", "surface", "weight") if name in first
    }
    for key, name in (("positions", "position"), ("propensities", "propensity")):
        if name in names:
            given[key] = [row.get(name) for row in rows]
    line: Row = {
        "type": "impression",
        "request_id": _request_id(first),
        "time": line_time(time_ms),
        "candidates": columns,
        "ro": {name: first[name] for name in names if name in ro and name in first},
    }
    return msgspec.convert(line | given, ImpressionLine)


def _engagements(tables: Sequence[LogTable], reader: LogLineReader) -> Iterator[Event]:
    """Engagements in time order."""
    for time_ms, where, row, error in _RowsByTime(tables, reader).rows():
        if error:
            reader.refuse(where, error)
            continue
        try:
            line = {**row, "type": "engagement", "request_id": _request_id(row)}
            line["time"] = line_time(time_ms)
            yield reader.event(msgspec.convert(line, EngagementLine), where)
        except UNREADABLE as error:
            reader.refuse(where, error)


def _request_id(row: Row) -> str:
    """The request id as text; an integer becomes its digits."""
    value = row.get("request_id")
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"request_id: expected text or an integer, got {value!r}")
    return str(value)


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))

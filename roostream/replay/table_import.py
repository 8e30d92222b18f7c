"""Import another site's tables, with one row per shown item, as a log of requests
(docs/bring-your-own-data.md).

    files ─► Parquet ─► columns by the map ─► buckets ─► impression lines and engagement lines ─► OUT.jsonl

Rows with equal request columns, user, session and surface form one request. A hash of these columns assigns
each row to a bucket, a temporary file of Arrow batches; then each bucket is read completely. A bucket has
about BUCKET_BYTES however large the input is, unless a single request is larger. The time of a request is
that of its earliest row. Its candidates are its rows, by position or in file order. The lines of the log are
not in time order; datasets sort them.

Requests of one user (or session) with equal ids that differ in session or surface get ids of their own.

With `event` in the map, rows are shown items or actions, and an action belongs to the newest earlier row that
showed the item to this user. Then a bucket has all rows of its users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from roostream.errors import ConfigError, SetupError, WireError
from roostream.replay.events import Event, Request
from roostream.replay.file_endings import packing_of
from roostream.replay.import_map import ImportMap, check_columns, check_types, numeric_columns, plain
from roostream.replay.log_lines import UNREADABLE, EngagementLine, ImpressionLine, LogLineReader
from roostream.replay.parquet_log import damaged_file, lists_in_ms, parquet_file
from roostream.replay.parse_time import EARLIEST_MS, LATEST_NUMBER_MS, parse_table_time_ms
from roostream.replay.table_files import LINE, as_parquet, first_text, with_row_per_item
from roostream.replay.table_log import Row, rows_to_impression
from roostream.schema.ids import hash64
from roostream.schema.schema import Feature, Schema
from roostream.wire.block import nro_columns, ro_columns

_ROWS = 8192
_WHERE = "roostream: file and row"  # no column of a site is called so
_TIME_MS = "roostream: time in ms"
_OWNER = "roostream: owner"
_NO_TIME = np.iinfo(np.int64).min  # of a cell that is not a time
_PER_MS = {"ms": 1.0, "s": 1e3, "us": 1e-3, "ns": 1e-6}
_CLICK_DELAY_MS = 1000


@dataclasses.dataclass
class ImportCounts:
    """Result of an import."""

    rows: int = 0
    requests: int = 0
    engagements: int = 0
    skipped: int = 0  # requests with an invalid value, and rows without a request
    first_skipped: tuple[str, ...] = ()  # the messages of the first ones
    warnings: list[str] = dataclasses.field(default_factory=list)  # about rows that were left out


class _Input(NamedTuple):
    """The files' names for messages, the files as Parquet, their used columns with the types that hold the
    cells of all files, the number of rows and the estimated size as Arrow tables."""

    paths: Sequence[str]
    files: Sequence[str]
    columns: dict[str, pa.DataType]
    num_rows: int
    num_bytes: int


def import_table(
    paths: Sequence[str],
    schema: Schema,
    column_map: ImportMap,
    out: Path,
    *,
    skip_bad: bool = False,
    progress: Callable[[int, int], None] = lambda done, rows: None,
) -> ImportCounts:
    """Write the log `out` (.jsonl or .jsonl.gz). `progress` is called with the number of rows read and the
    total.

    On failure no file is left behind.

    Raises:
        ConfigError: a file is no table (table_files.py), lacks a column of the map or has it with an unusable
        type, or `out` exists or has another ending.
        LogError: a bad row without `skip_bad`; names file and row.
        SetupError: there is no space.
    """
    if not out.name.lower().endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"{out}: expected a name that ends in .jsonl or .jsonl.gz; choose such a name")
    if out.exists():
        raise ConfigError(f"{out}: expected a new file, but it exists; remove it or choose another name")
    counts, reader = ImportCounts(), LogLineReader(schema, skip_bad=skip_bad)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            files = as_parquet(paths, Path(folder), reader.refuse, None, column_map.lists, reader.count_empty)
            if lists := column_map.lists:
                in_order = [column_map.item, *(name for name in lists if name != column_map.item)]
                files = with_row_per_item(paths, files, in_order, Path(folder), reader.refuse)
            given = _check(paths, files, schema, column_map)
            part = Path(folder) / "out"
            open_out = partial(gzip.open, compresslevel=6) if packing_of(out.name) else open
            with cast(BinaryIO, open_out(part, "wb")) as file:
                rows = _batches(given, column_map, schema, reader, counts, progress)
                number = max(1, min(MAX_BUCKETS, -(-given.num_bytes // BUCKET_BYTES)))
                together = column_map.identity
                if _has_owners(column_map):
                    together = (_OWNER,) if column_map.event else (_OWNER, *column_map.request)
                for bucket in into_buckets(rows, together, Path(folder), number):
                    for lines in _requests(bucket, schema, column_map, reader, given.paths):
                        counts.requests += 1
                        counts.engagements += len(lines) - 1
                        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
            shutil.move(part, out)
    except OSError as error:
        text = f"{out}: cannot be written ({error.strerror}); free space or choose another folder"
        raise SetupError(text) from None
    skipped = reader.skipped()
    counts.skipped, counts.first_skipped = skipped.number, skipped.first
    counts.warnings = skipped.warnings()
    return counts


def _check(paths: Sequence[str], files: Sequence[str], schema: Schema, column_map: ImportMap) -> _Input:
    num_rows = num_bytes = 0
    columns: dict[str, pa.DataType] = {}
    for path, name in zip(paths, files, strict=True):
        with parquet_file(name) as file:
            known = file.schema_arrow.names
            check_columns(path, column_map, schema, known)
            check_types(path, column_map, schema, file.schema_arrow, partial(first_text, file))
            wanted = sorted({*column_map.columns(schema, known), *({LINE} & set(known))})
            if columns and wanted != list(columns):
                text = f"{path}: expected the columns of {paths[0]}, got others; import them apart"
                raise ConfigError(text)
            numbers = numeric_columns(column_map, schema, file.schema_arrow)
            for column in wanted:
                kind = numbers.get(column) or plain(file.schema_arrow.field(column).type)
                columns[column] = _common_type(path, column, columns.get(column, kind), kind)
            num_rows += file.metadata.num_rows
            num_bytes += _arrow_bytes(file, set(columns))
    return _Input(paths, files, columns, num_rows, num_bytes)


def _common_type(path: str, column: str, before: pa.DataType, kind: pa.DataType) -> pa.DataType:
    """The type that holds the cells of this file and of those before. pandas and Spark write a column without
    values as nulls, and one with missing numbers as floats.

    Raises:
        ConfigError: there is none.
    """
    if kind == before:
        return kind
    kinds = [pa.timestamp(k.unit) if pa.types.is_timestamp(k) else k for k in (before, kind)]  # in UTC
    kinds = [pa.int8() if pa.types.is_boolean(k) else k for k in kinds]
    try:
        fields = [pa.schema([(column, k)]) for k in kinds]
        return pa.unify_schemas(fields, promote_options="permissive").field(column).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise ConfigError(
            f"{path}: column {column!r}: expected the type of the other files, {before}, got {kind}; convert "
            "it, or import the files apart"
        ) from None


def _arrow_bytes(file: pq.ParquetFile, columns: set[str]) -> int:
    """Estimated size in memory: twice the uncompressed size, because of dictionary encoding."""
    total, metadata = 0, file.metadata
    for group in range(metadata.num_row_groups):
        chunks = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
        total += sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)
    return 2 * total


def _batches(
    given: _Input,
    column_map: ImportMap,
    schema: Schema,
    reader: LogLineReader,
    counts: ImportCounts,
    progress: Callable[[int, int], None],
) -> Iterator[pa.RecordBatch]:
    """The rows of all files with their time, file and row, without those that name no request; those that
    were read are counted."""
    for number, path in enumerate(given.paths):
        first = 0
        with parquet_file(given.files[number]) as file:
            numbers = numeric_columns(column_map, schema, file.schema_arrow)
            try:
                for batch in file.iter_batches(_ROWS, columns=list(given.columns)):
                    place_N = first + 1 + np.arange(len(batch), dtype=np.int64)
                    if LINE in given.columns:
                        place_N = np.asarray(batch.column(LINE))
                    where_N = (number << 40) + place_N
                    first += len(batch)
                    names = [*given.columns, _TIME_MS, _WHERE]
                    arrays = [
                        _as_type(path, n, _as_number(path, n, batch.column(n), numbers.get(n)), kind)
                        for n, kind in given.columns.items()
                    ]
                    times_N = _times(batch.column(column_map.time), column_map)
                    arrays += [pa.array(times_N), pa.array(where_N)]
                    rows = pa.RecordBatch.from_arrays(arrays, names)
                    if _has_owners(column_map):
                        rows = rows.append_column(_OWNER, pa.array(_owners(rows, column_map)))
                    yield _with_request(rows, column_map, reader, given.paths)
                    counts.rows += len(batch)
                    progress(counts.rows, given.num_rows)
            except (pa.ArrowInvalid, OSError) as error:
                raise damaged_file(path, error) from None


def _as_number(path: str, name: str, column: pa.Array, as_type: pa.DataType | None) -> pa.Array:
    """Raises ConfigError: floats that are to be integers are none, or may have lost digits."""
    if as_type is None:
        return column
    if pa.types.is_floating(column.type) and pa.types.is_integer(as_type):
        column = column.cast(pa.float64())
        column = pc.if_else(pc.is_nan(column), None, column)
        wrong = column.filter(
            pc.or_(pc.not_equal(pc.floor(column), column), pc.greater(pc.abs(column), 2**53))
        )
        if len(wrong):
            raise ConfigError(
                f"{path}: column {name!r}: expected whole numbers up to 2^53, as floats can hold, got "
                f"{wrong[0].as_py()!r}; convert the column to integers or text"
            )
    return column.cast(as_type, safe=False)


def _as_type(path: str, name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Raises ConfigError: a value is beyond the type that was found for all files."""
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"{path}: column {name!r}: expected {kind}, as in the other files, got {column.type} ({error}); "
            "convert it, or import the files apart"
        ) from None


def _with_request(
    batch: pa.RecordBatch, column_map: ImportMap, reader: LogLineReader, paths: Sequence[str]
) -> pa.RecordBatch:
    """The rows that name a request; the others are refused one by one."""
    has_id_N = np.array([bool(id_) for id_ in request_ids(batch, column_map.request)], dtype=np.bool_)
    for row in np.flatnonzero(~has_id_N).tolist():
        columns = " and ".join(map(repr, column_map.request))
        where = _place(paths, batch.column(_WHERE)[row].as_py())
        reader.refuse(where, ValueError(f"expected a request in {columns}, got nothing"))
    return batch if has_id_N.all() else batch.filter(pa.array(has_id_N))


def _place(paths: Sequence[str], at: int) -> str:
    """`file:row`, or of a text file `file:line`; both count from 1."""
    return f"{paths[at >> 40]}:{at & ((1 << 40) - 1)}"


def _requests(
    bucket: pa.Table, schema: Schema, column_map: ImportMap, reader: LogLineReader, paths: Sequence[str]
) -> Iterator[list[ImpressionLine | EngagementLine]]:
    """The lines of each request with its impression first; requests in the order of their earliest row."""
    done: dict[int, list[Row]] = {}
    if column_map.event:
        bucket, done = _split_actions(bucket, column_map, reader, paths)
    id_N = request_ids(bucket, column_map.request)
    time_ms_N = bucket.column(_TIME_MS).to_numpy()
    keys: dict[tuple[str, ...], int] = {}
    texts = [_texts(bucket.column(column)) for column in column_map.identity]
    number_N = np.array([keys.setdefault(key, len(keys)) for key in zip(*texts, strict=True)], dtype=np.int64)
    begin_ms_U = np.full(len(keys), np.iinfo(np.int64).max)
    np.minimum.at(begin_ms_U, number_N, time_ms_N)
    place_N = np.zeros(len(bucket))
    if column_map.position:
        place_N = bucket.column(column_map.position).to_numpy().astype(np.float64)
    if _has_owners(column_map):
        id_N = _distinct_ids(id_N, bucket.column(_OWNER).to_pylist(), number_N, [*keys], begin_ms_U)
    order_N = np.lexsort((np.arange(len(bucket)), place_N, number_N, begin_ms_U[number_N]))
    table = _renamed(bucket.take(pa.array(order_N)), schema, column_map)
    id_N, number_N = id_N[order_N], number_N[order_N]
    for first, rows in _runs(table, number_N):
        where = _place(paths, rows[0][_WHERE])
        try:
            for row in rows:
                if row[_TIME_MS] == _NO_TIME:
                    where = _place(paths, row[_WHERE])
                    raise ValueError(
                        f"column {column_map.time!r}: expected a time, got none that can be read"
                    )
            time_ms = int(begin_ms_U[number_N[first]])
            if not EARLIEST_MS <= time_ms <= LATEST_NUMBER_MS:
                raise ValueError(
                    f"column {column_map.time!r}: expected a time in the years 1980 to 2299, got {time_ms} "
                    f"ms since 1970 by time_unit = {column_map.time_unit!r}; correct it in the map, or "
                    "the time"
                )
            lines = _lines(rows, str(id_N[first]), time_ms, schema, column_map)
            for row, at in zip(rows, order_N[first : first + len(rows)].tolist(), strict=True):
                lines += [_engagement(str(id_N[first]), row, action) for action in done.get(at, ())]
            for line in lines:
                _check_features(schema, reader.event(line, where))
        except (*UNREADABLE, WireError) as error:
            reader.refuse(where, error)
            continue
        yield lines


def _check_features(schema: Schema, event: Event) -> None:
    """Raises WireError: a replay could not encode the features of this request."""
    if isinstance(event, Request):
        if event.ro:
            ro_columns(schema, event.ro)
        if event.nro or len(event.items_n) > schema.limits.max_candidates:
            nro_columns(schema, event.nro, len(event.items_n))


def _split_actions(
    bucket: pa.Table, column_map: ImportMap, reader: LogLineReader, paths: Sequence[str]
) -> tuple[pa.Table, dict[int, list[Row]]]:
    """The rows of shown items, and by the number of such a row the actions on its item. An action belongs to
    the newest row before it with the same item and user; at equal times the shown item comes first. Actions
    without such a row are refused."""
    event = _texts(bucket.column(column_map.event))
    is_shown_N = np.isin(np.array(event, dtype=object), column_map.shown)
    columns = [column_map.item, *(() if column_map.time in column_map.request else column_map.request)]
    texts = [_texts(bucket.column(column)) for column in dict.fromkeys(columns)]
    keys = list(zip(bucket.column(_OWNER).to_pylist(), *texts, strict=True))
    time_ms_N, number_N = bucket.column(_TIME_MS).to_numpy(), np.cumsum(is_shown_N) - 1
    values = bucket.column(column_map.event_value).to_pylist() if column_map.event_value else None
    newest: dict[tuple[str, ...], int] = {}
    done: dict[int, list[Row]] = {}
    for n in np.lexsort((~is_shown_N, time_ms_N)).tolist():
        if is_shown_N[n]:
            newest[keys[n]] = int(number_N[n])
            continue
        place = _place(paths, bucket.column(_WHERE)[n].as_py())
        if not event[n]:
            shown = " or ".join(map(repr, column_map.shown))
            wrong = f"column {column_map.event!r}: expected {shown} or an action, got nothing"
        elif time_ms_N[n] == _NO_TIME:
            wrong = f"column {column_map.time!r}: expected a time, got none that can be read"
        elif keys[n] not in newest:
            wrong = f"action {event[n]!r}: expected an earlier row that shows the item to this user, got none"
        else:
            action = {"action": event[n], "time": int(time_ms_N[n])}
            if values and values[n] is not None:
                action["value"] = float(values[n])
            done.setdefault(newest[keys[n]], []).append(action)
            continue
        reader.refuse(place, ValueError(wrong))
    return bucket.filter(pa.array(is_shown_N)), done


def _has_owners(column_map: ImportMap) -> bool:
    """Whether rows need their owner: to find the rows that actions belong to, or requests of one owner that
    have the same id and differ in session or surface."""
    return bool(column_map.event or {*column_map.identity} - {*column_map.request, column_map.user})


def _distinct_ids(
    id_N: np.ndarray,
    owners: Sequence[str],
    number_N: np.ndarray,
    keys: Sequence[tuple[str, ...]],
    begin_ms_U: np.ndarray,
) -> np.ndarray:
    """`id_N`, with a hash for each request whose owner has an earlier one of the same id. `number_N`: of each
    row's request; `keys`: the cells that tell requests apart, by number. The joiner would take requests of
    one owner and id for pages of one request."""
    first_N = np.unique(number_N, return_index=True)[1]
    taken, id_U = set[tuple[str, str]](), np.array(id_N[first_N], dtype=object)
    for number in np.lexsort((np.arange(len(keys)), begin_ms_U)).tolist():
        if (owned := (owners[first_N[number]], id_U[number])) in taken:
            id_U[number] = f"{hash64(msgspec.json.encode(keys[number])):016x}"
        taken.add(owned)
    return id_U[number_N]


def _owners(rows: pa.RecordBatch, column_map: ImportMap) -> list[str]:
    """Whose each row is: the user's, without one the session's, without both the request's alone."""
    known = [_texts(rows.column(name)) for name in (column_map.user, column_map.session) if name]
    each = zip(*known, request_ids(rows, column_map.request), strict=True)
    return [next((f"{n}:{text}" for n, text in enumerate(texts) if text), "") for texts in each]


def _engagement(request_id: str, row: Row, action: Row) -> EngagementLine:
    """The line of an action that has a row of its own; `row` shows the item."""
    header = {key: row[key] for key in ("user_id", "session_id", "surface") if row.get(key) not in (None, "")}
    line = {"type": "engagement", "request_id": request_id, "item_id": row.get("item_id"), "value": 1.0}
    return msgspec.convert(line | header | action, EngagementLine)


def _runs(table: pa.Table, number_N: np.ndarray) -> Iterator[tuple[int, list[Row]]]:
    """Groups of adjacent rows with equal numbers, and the index of the first; rows become Python objects in
    slices."""
    changes = np.flatnonzero(np.diff(number_N)) + 1
    starts = [0, *changes.tolist(), len(table)] if len(table) else [0]
    rows: list[Row] = []
    rows_start = 0
    for first, end in itertools.pairwise(starts):
        if end > rows_start + len(rows):
            rows, rows_start = table.slice(first, max(_ROWS, end - first)).to_pylist(), first
        yield first, rows[first - rows_start : end - rows_start]


def _lines(
    rows: list[Row], request_id: str, time_ms: int, schema: Schema, column_map: ImportMap
) -> list[ImpressionLine | EngagementLine]:
    plain = [
        {name: cell for name, cell in row.items() if cell not in (None, "") and "\0" not in name}
        for row in rows
    ]
    for row in plain:
        if "item_id" not in row:
            raise ValueError(f"column {column_map.item!r}: expected an item's id in every row, got nothing")
        row["request_id"] = request_id
        del row[_WHERE], row[_TIME_MS]
    lines: list[ImpressionLine | EngagementLine] = [rows_to_impression(plain, time_ms, schema)]
    for row, own, name, item, value in _done(rows, plain, column_map):
        action, done_ms = column_map.actions[name], row[f"time\0{name}"]
        header: Row = {key: own[key] for key in ("user_id", "session_id", "surface") if key in own}
        line: Row = {"type": "engagement", "request_id": request_id, "action": name, **header}
        if done_ms == _NO_TIME:
            raise ValueError(
                f"action {name!r}: expected a time in column {action.time!r} where it happened, got none "
                "that can be read"
            )
        line["time"] = time_ms + _CLICK_DELAY_MS if done_ms is None else done_ms
        line |= {"item_id": item, "value": float(value or 0.0)}
        lines.append(msgspec.convert(line, EngagementLine))
    return lines


def _done(
    rows: list[Row], plain: list[Row], column_map: ImportMap
) -> list[tuple[Row, Row, str, object, float | None]]:
    """The actions of a request: the row as it is, and as `plain`; the name, the item and the value. Last come
    items of actions that their rows do not show: the joiner reports them as dead letters."""
    done, unseen = [], []
    for row, own in zip(rows, plain, strict=True):
        for name, action in column_map.actions.items():
            cell = row[f"column\0{name}"]
            if action.items:
                named = cell if isinstance(cell, list) else [cell]
                unseen += [(row, own, name, item, 1.0) for item in named if item not in (None, "")]
                cell = float(own["item_id"] in named)
            if cell is not None and (cell >= action.least if action.least else cell > 0):
                done.append((row, own, name, own["item_id"], cell))
    given = {(name, item) for _, _, name, item, _ in done}
    for each in unseen:
        if (each[2], each[3]) not in given:
            given.add((each[2], each[3]))
            done.append(each)
    return [
        (row, own, name, item, row[f"value\0{name}"] if column_map.actions[name].value else value)
        for row, own, name, item, value in done
    ]


def _renamed(table: pa.Table, schema: Schema, column_map: ImportMap) -> pa.Table:
    """The columns with the names of table_log.py, and the columns of actions with a NUL in their names."""
    columns: dict[str, Any] = {name: table.column(column) for name, column in column_map.plain().items()}
    for feature in (*schema.ro, *schema.nro):
        if parts := column_map.parts_of(feature, table.column_names):
            columns[feature.name] = _feature(table, feature, parts)
    for name, action in column_map.actions.items():
        column = action.column or action.items
        cell = table.column(column)
        columns[f"column\0{name}"] = cell.cast(pa.int64()) if pa.types.is_boolean(cell.type) else cell
        columns[f"value\0{name}"] = table.column(action.value or column)
        times = pa.nulls(len(table), pa.int64())
        if action.time:
            times = pa.array(_times(table.column(action.time), column_map))
        columns[f"time\0{name}"] = times
    return pa.table({**columns, _TIME_MS: table.column(_TIME_MS), _WHERE: table.column(_WHERE)})


def _feature(table: pa.Table, feature: Feature, parts: dict[str, str]) -> Any:
    if "" in parts:
        return lists_in_ms(table.column(parts[""]))
    columns = {part: lists_in_ms(table.column(column)) for part, column in parts.items()}
    there = next(iter(columns.values())).is_valid().combine_chunks()
    arrays = [column.combine_chunks() for column in columns.values()]
    return pa.StructArray.from_arrays(arrays, list(columns), mask=pa.compute.invert(there))


def _times(column: pa.Array | pa.ChunkedArray, column_map: ImportMap) -> np.ndarray:
    """int64 ms [N]; _NO_TIME where the cell is empty or not a time."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        column = column.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
        return np.asarray(pc.fill_null(column, _NO_TIME))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers = pc.fill_null(column.cast(pa.float64(), safe=False), float("nan"))
        # Below the next ms, but the times 1700000000.123 s and 1700000000123000000 ns are no exact floats.
        scaled_N = np.floor(np.asarray(numbers, dtype=np.float64) * _PER_MS[column_map.time_unit] + 0.0005)
        is_time_N = np.abs(scaled_N) < 2.0**62  # False for NaN
        return np.where(is_time_N, np.where(is_time_N, scaled_N, 0.0).astype(np.int64), _NO_TIME)
    known = {text: _time_of(text, column_map.day_first) for text in set(column.to_pylist())}
    return np.array([known[text] for text in column.to_pylist()], dtype=np.int64)


def _time_of(text: str | None, day_first: bool) -> int:
    try:
        return _NO_TIME if text is None else parse_table_time_ms(text, day_first)
    except ValueError:
        return _NO_TIME


BUCKET_BYTES = 64 << 20
MAX_BUCKETS = 256  # maximum number of open files


def request_ids(table: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> np.ndarray:
    """Text [N]: the request id of each row from its columns; a hash if that is longer than 64 bytes or could
    mean other cells, "" if all are empty."""
    texts = [_texts(table.column(column)) for column in columns]
    known: dict[tuple[str, ...], str] = {}
    for cells in zip(*texts, strict=True):
        if cells not in known:
            joined = "|".join(cells) if any(cells) else ""
            if len(cells) > 1 and any("|" in cell for cell in cells):
                joined = f"{hash64(msgspec.json.encode(cells)):016x}"
            known[cells] = joined if len(joined.encode()) <= 64 else f"{hash64(joined):016x}"
    return np.array([known[cells] for cells in zip(*texts, strict=True)], dtype=object)


def into_buckets(
    batches: Iterable[pa.RecordBatch], columns: Sequence[str], folder: Path, number: int
) -> Iterator[pa.Table]:
    """Partition rows, so that rows with equal `columns` are in the same table and keep their order.

    Raises:
        OSError: the folder cannot be written; the caller removes its files.
    """
    paths = [folder / f"{n}.arrow" for n in range(number)]
    with contextlib.ExitStack() as opened:
        writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
        for batch in batches:
            at_N = _bucket(batch, columns, number)
            for n in np.unique(at_N).tolist():
                if n not in writers:
                    writers[n] = opened.enter_context(pa.ipc.new_file(str(paths[n]), batch.schema))
                writers[n].write_batch(batch.take(pa.array(np.flatnonzero(at_N == n))))
    for path in paths:
        if path.exists():
            with pa.ipc.open_file(str(path)) as reader:
                yield reader.read_all()
            path.unlink()


def _bucket(batch: pa.RecordBatch, columns: Sequence[str], number: int) -> np.ndarray:
    """int64 [N]: a hash of the columns; an empty cell is the same as an empty text."""
    mixed_N = np.zeros(len(batch), dtype=np.uint64)
    for column in columns:
        coded = pc.dictionary_encode(batch.column(column))
        hashes_U = np.array([hash64(text) for text in [*_texts(coded.dictionary), ""]], dtype=np.uint64)
        at_N = pc.fill_null(coded.indices, len(hashes_U) - 1).to_numpy(zero_copy_only=False)
        mixed_N = mixed_N * np.uint64(0x9E3779B97F4A7C15) + hashes_U[at_N]
    return (mixed_N % np.uint64(number)).astype(np.int64)


def _texts(column: pa.Array | pa.ChunkedArray) -> list[str]:
    """The cells as text, an empty one as "". Arrow writes also times that Python cannot hold, in UTC those of
    unknown zones."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp(column.type.unit))
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        column = column.cast(pa.string())
    return ["" if cell is None else str(cell) for cell in column.to_pylist()]

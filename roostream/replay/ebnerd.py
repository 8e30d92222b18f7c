"""Dataset `ebnerd`: the Parquet files of the EB-NeRD news dataset, of any week and size, several files at
once.

behaviors.parquet, one row per request: `impression_id`, `impression_time`, `user_id`, `session_id`,
`article_ids_inview`, `article_ids_clicked`; optional: `article_id` (the page; null = front page),
`device_type`, `is_sso_user`, `is_subscriber`, `gender`, `age`, `postcode`, `next_read_time`. history.parquet,
one row per user: `user_id`, `article_id_fixed`, `impression_time_fixed`.

The data has no click times, so a click is at request + 1 s. A `read` of the first clicked article has
`next_read_time` as its value and ends at click + `next_read_time`, or at the end of the join window if that
is earlier. Times without zone are UTC.

A history may overlap the log: that of the second week holds the clicks of the first. A click that the log
also has, of the same user on the same article, is dropped from the history; the other clicks change the
counters at their own times (encoder.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roostream.errors import ConfigError
from roostream.replay.datasets import Clicks, DatasetOptions, EventLog, check_offered
from roostream.replay.events import Action, Event, Request, in_time_order
from roostream.replay.input_files import check_files
from roostream.replay.parquet_log import parquet_file, read_columns
from roostream.replay.parse_time import EARLIEST_MS, LATEST_MS
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.settings import setting

CLICK_DELAY_MS = 1000
RO_OFFERED = ("user", "device", "page", "front_page", "sso", "subscriber", "gender", "age", "postcode")
NRO_OFFERED = ("item",)
_SLICE_ROWS = 4096

_REQUIRED: dict[str, pa.DataType] = {
    "impression_id": pa.int64(),
    "impression_time": pa.timestamp("ms"),
    "user_id": pa.int64(),
    "session_id": pa.int64(),
    "article_ids_inview": pa.large_list(pa.int64()),
    "article_ids_clicked": pa.large_list(pa.int64()),
}
_OPTIONAL: dict[str, pa.DataType] = {
    "article_id": pa.int64(),
    "device_type": pa.int64(),
    "is_sso_user": pa.float32(),
    "is_subscriber": pa.float32(),
    "gender": pa.float32(),
    "age": pa.float32(),
    "postcode": pa.float32(),
    "next_read_time": pa.float32(),
}
_HISTORY: dict[str, pa.DataType] = {
    "user_id": pa.int64(),
    "article_id_fixed": pa.large_list(pa.int64()),
    "impression_time_fixed": pa.large_list(pa.timestamp("ms")),
}
_FLOATS = {"sso": "is_sso_user", "subscriber": "is_subscriber"} | {
    n: n for n in ("gender", "age", "postcode")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DatasetOptions):
    """Settings of the dataset."""

    default_schema: ClassVar[Path | None] = Path(__file__).parent / "schemas" / "ebnerd.toml"
    rehearsed_batches: ClassVar[int] = 200
    ranker: ClassVar[Mapping[str, object]] = {"list_layers": 2, "linear": False, "scale_rates": False}
    behaviors: tuple[str, ...] = setting(help="behaviors.parquet files, in any order")
    history: tuple[str, ...] = setting((), "history.parquet files")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_files("behaviors", self.behaviors, needed=True)
        check_files("history", self.history, needed=False)


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`."""
    return EventLog(
        events=events(options.behaviors, schema, window_ms),
        num_requests=num_requests(options.behaviors),
        unlogged_clicks=without_logged_clicks(histories(options.history), options.behaviors)
        if options.history
        else None,
    )


def events(behaviors: Sequence[str], schema: Schema, window_ms: int) -> Iterator[Event]:
    """All requests and actions in event time; requests at equal times by impression id. They have the
    features of `schema`.

    Memory: the used columns as Arrow tables (some 100 bytes per request), and one slice as Python objects.

    Raises:
        ConfigError: before the first event, if a file is not Parquet, lacks a column, or has one of another
        type; names file and column.
        SchemaError: the schema declares a feature that is neither online nor in the dataset.
    """
    check_offered(schema, "EB-NeRD", {"ro": RO_OFFERED, "nro": NRO_OFFERED})
    names = frozenset(f.name for f in (*schema.ro, *schema.nro))
    table = pa.concat_tables([_read(path, _REQUIRED, _OPTIONAL) for path in behaviors])
    keys = [("impression_time", "ascending"), ("impression_id", "ascending")]
    order = pc.sort_indices(table, sort_keys=keys)
    return in_time_order(_requests_with_actions(table, order, names, window_ms))


def histories(paths: Sequence[str]) -> Clicks:
    """The clicks of the histories, in time order over all users. Raises as `events`."""
    parts: list[list[np.ndarray]] = [[np.zeros(0, dtype=np.int64)] * 3]
    for path in paths:
        table = _read(path, _HISTORY, nullable=("article_id_fixed", "impression_time_fixed"))
        for batch in table.combine_chunks().to_batches(max_chunksize=1 << 20):
            items, times = _list_rows(batch["article_id_fixed"]), _list_rows(batch["impression_time_fixed"])
            counts = [len(x) for x in items]
            if counts != [len(x) for x in times]:
                raise ConfigError(
                    f"{path}: expected equal lengths of article_id_fixed and impression_time_fixed"
                )
            parts.append(
                [np.repeat(batch["user_id"].to_numpy(), counts), np.concatenate(items), np.concatenate(times)]
            )
    users_N, items_N, times_N = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order_N = np.argsort(times_N, kind="stable")
    return Clicks(users_N[order_N], items_N[order_N], times_N[order_N])


def without_logged_clicks(clicks: Clicks, behaviors: Sequence[str]) -> Clicks:
    """Remove clicks that the log has too: same user and article, not before the log begins. Raises as
    `events`."""
    column = {"impression_time": _REQUIRED["impression_time"]}
    times = [_read(path, column)["impression_time"].cast(pa.int64()) for path in behaviors]
    begins = [first_ms for times_N in times if (first_ms := pc.min(times_N).as_py()) is not None]
    if not begins or not len(clicks.time_ms_N) or clicks.time_ms_N[-1] < min(begins):
        return clicks
    logged: set[tuple[int, int]] = set()  # (user, article)
    needed = {name: _REQUIRED[name] for name in ("user_id", "article_ids_clicked")}
    for path in behaviors:
        for chunk in _read(path, needed).to_batches():
            users, clicked = chunk["user_id"].to_pylist(), _list_rows(chunk["article_ids_clicked"])
            for user, items in zip(users, clicked, strict=True):
                logged.update((user, item) for item in items.tolist())
    at_N = np.flatnonzero(clicks.time_ms_N >= min(begins))
    pairs = zip(clicks.user_N[at_N].tolist(), clicks.item_N[at_N].tolist(), strict=True)
    logged_N = at_N[np.array([pair in logged for pair in pairs], dtype=np.bool_)]
    return Clicks(*(np.delete(column, logged_N) for column in clicks))


def _read(
    path: str,
    required: Mapping[str, pa.DataType],
    optional: Mapping[str, pa.DataType] = MappingProxyType({}),
    nullable: Collection[str] = (),
) -> pa.Table:
    """As `read_columns`. Raises also ConfigError: a list has a null, or a time is in another unit than its
    type says."""
    table = read_columns(path, required, optional, nullable)
    for name in required:
        at, column = f"{path}: column {name!r}", table[name]
        if pa.types.is_large_list(column.type):
            column = pc.list_flatten(column)
            if column.null_count:
                raise ConfigError(
                    f"{at}: expected a value in every entry of its lists, got {column.null_count} nulls; "
                    "remove these entries"
                )
        if pa.types.is_timestamp(column.type) and len(column):
            bounds = pc.min_max(column.cast(pa.int64())).as_py()
            if wrong := [ms for ms in bounds.values() if not EARLIEST_MS <= ms <= LATEST_MS]:
                raise ConfigError(
                    f"{at}: expected times from 1980 to 9999, got {wrong[0]} ms since 1970; convert numbers "
                    "to ms, or to timestamps"
                )
    return table


def num_requests(behaviors: Sequence[str]) -> int:
    """Number of rows, from the footers of the files. Raises as `events`."""
    total = 0
    for path in behaviors:
        with parquet_file(path) as file:
            total += file.metadata.num_rows
    return total


def _requests_with_actions(
    table: pa.Table, order: pa.Array, names: frozenset[str], window_ms: int
) -> Iterator[tuple[Request, list[Action]]]:
    """Requests in `order` with their actions, converted to Python objects in slices."""
    for start in range(0, len(order), _SLICE_ROWS):
        slice_ = table.take(order.slice(start, _SLICE_ROWS)).combine_chunks()
        column_names = (*_OPTIONAL, "impression_id", "user_id", "session_id")
        columns: dict[str, Any] = {name: slice_[name].to_pylist() for name in column_names}
        times = slice_["impression_time"].cast(pa.int64()).to_pylist()
        shown, clicked = (
            _list_rows(slice_[name].combine_chunks())
            for name in ("article_ids_inview", "article_ids_clicked")
        )
        for k, time_ms in enumerate(times):
            row = {name: values[k] for name, values in columns.items()}
            request = _request(row, time_ms, shown[k], names)
            yield request, _actions(request, clicked[k].tolist(), row["next_read_time"], window_ms)


def _request(row: dict[str, Any], time_ms: int, items_n: np.ndarray, names: frozenset[str]) -> Request:
    """Convert a row to a request with those features in `names` that are not null."""
    page = row["article_id"]
    ro: dict[str, object] = {name: row[column] for name, column in _FLOATS.items()}
    ro |= {"user": [row["user_id"]], "front_page": float(page is None)}
    if row["device_type"] is not None:
        ro["device"] = [row["device_type"]]
    if page is not None:
        ro["page"] = [page]
    return Request(
        request_id=str(row["impression_id"]),
        user_id=row["user_id"],
        session_id=row["session_id"],
        time_ms=time_ms,
        items_n=items_n,
        ro={name: value for name, value in ro.items() if name in names},
        nro={"item": items_n} if "item" in names else {},
    )


def _actions(request: Request, clicked: list[int], read_s: float | None, window_ms: int) -> list[Action]:
    """The clicks of a row, and the reading of the first clicked article; the module says how times are
    set."""

    def action(name: str, number: int, item: int, time_ms: int, value: float) -> Action:
        event_id = hash64(f"{request.request_id}/{name}/{number}")
        header = request.request_id, request.user_id, request.session_id
        return Action(*header, time_ms, event_id, item, name, value)

    click_ms = request.time_ms + CLICK_DELAY_MS
    out = [action("click", n, item, click_ms, 1.0) for n, item in enumerate(clicked)]
    if clicked and read_s is not None and np.isfinite(read_s) and read_s >= 0:
        end_ms = min(click_ms + round(read_s * 1000), request.time_ms + window_ms)
        out.append(action("read", 0, clicked[0], end_ms, read_s))
    return out


def _list_rows(column: pa.Array) -> list[np.ndarray]:
    """The rows of a list column without null entries, as int64 views; a null row is empty."""
    values = column.values
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    flat, offsets = values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [flat[a:b] if ok else flat[:0] for a, b, ok in zip(offsets[:-1], offsets[1:], valid, strict=True)]

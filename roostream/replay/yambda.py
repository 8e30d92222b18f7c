"""Dataset `yambda`: the Parquet files of Yandex's music dataset (arXiv 2505.22238), of any size, in the flat
and in the sequential form.

listens.parquet, one row per listen: `uid`, `item_id`, `timestamp`, `is_organic`, `played_ratio_pct`,
`track_length_seconds`; likes.parquet and dislikes.parquet: the first four. multi_event.parquet has the rows
of all files and their `event_type`. In the sequential form a row is a user, and all other columns are lists
(`item_ids`, `timestamps`).

The dataset says what was played and not what was shown, so lists are made of listens:

- **A request** is up to `max_candidates` listens in a row of a user, without a pause of `session_gap`, a
  track twice, or a join window from first to last. Its time is that of the first listen. The later tracks
  were chosen after it, so the default model does not compare candidates. With `max_candidates = 1` each
  listen is a request, as in MLPerf's DLRMv4 benchmark.
- **Candidates** are recommended listens (`is_organic` = 0). Those that the user chose are only in the user's
  history and the counters, or with `organic = "candidates"` candidates like the others, as in that benchmark.
- **Actions**: `listen_plus`, a track of which at least half was played, with the percentage as its value;
  `like` and `dislike`, which belong to the newest request of the user with that track if it is not older than
  a join window. Other reactions are left out, as are unlikes and undislikes.
- **Times** are seconds since an unpublished start, in steps of five. Here the start is 2024-01-01, so day 300
  is 2024-10-27. Hours of the day are shifted by an unknown constant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roostream.errors import ConfigError
from roostream.replay.datasets import Clicks, DatasetOptions, EventLog, check_offered
from roostream.replay.events import Action, Request, in_time_order
from roostream.replay.input_files import check_files
from roostream.replay.parquet_log import parquet_file, read_columns
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.settings import setting, setting_error

START_MS = 1_704_067_200_000  # 2024-01-01
_MAX_TIMESTAMP = 1_000_000_000  # 31 years; seconds since 1970, or ms of a year, are more
LISTENED_PCT = 50
RO_OFFERED = ("user",)
NRO_OFFERED = ("item", "track_length_s", "organic")

_EVENTS = ("listen", "like", "dislike", "unlike", "undislike")
_COMMON = {"uid": pa.int64(), "item_id": pa.int64(), "timestamp": pa.int64(), "is_organic": pa.int8()}
_OF_LISTENS = {"played_ratio_pct": pa.float32(), "track_length_seconds": pa.float32()}
_LIST_NAMES = {"item_id": "item_ids", "timestamp": "timestamps"}  # column → its name in the sequential form


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DatasetOptions):
    """Settings of the dataset."""

    default_schema: ClassVar[Path | None] = Path(__file__).parent / "schemas" / "yambda.toml"
    ranker: ClassVar[Mapping[str, object]] = {"list_layers": 0}  # a list shows what the user went on to play
    multi_event: tuple[str, ...] = setting((), "multi_event.parquet files, which have all events")
    listens: tuple[str, ...] = setting((), "or listens.parquet files")
    likes: tuple[str, ...] = setting((), "likes.parquet files")
    dislikes: tuple[str, ...] = setting((), "dislikes.parquet files")
    organic: Literal["history", "candidates"] = setting(
        "history",
        "listens that were not recommended: history = only in histories and counters; candidates = also in "
        "requests",
    )
    session_gap_ms: int = setting(1_800_000, "a pause of a user that begins a new request", ge=1000)
    max_candidates: int = setting(20, "maximum number of listens in a request", ge=1, le=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("multi_event", "listens", "likes", "dislikes"):
            check_files(name, getattr(self, name), needed=False)
        if bool(self.multi_event) == bool(self.listens):
            raise setting_error(
                "listens", "either multi_event or listens", ", ".join(self.listens), "give one of the two"
            )
        if self.multi_event and (self.likes or self.dislikes):
            text = "no other files beside multi_event, which has these events too"
            raise setting_error("likes", text, ", ".join((*self.likes, *self.dislikes)), "leave them out")


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`. Memory: all events as arrays, some 50 bytes each."""
    check_offered(schema, "Yambda", {"ro": RO_OFFERED, "nro": NRO_OFFERED})
    files = {"": options.multi_event, "listen": options.listens}
    files |= {"like": options.likes, "dislike": options.dislikes}
    table = pa.concat_tables(_read(path, event) for event, paths in files.items() for path in paths)
    listens = _listens(_events(table, "listen"))
    shown = listens if options.organic == "candidates" else listens.take(~listens.organic_N)
    requests = _split_into_requests(shown, options, window_ms)
    reactions = _reactions(table, shown, requests, window_ms)
    names = frozenset(f.name for f in (*schema.ro, *schema.nro))
    return EventLog(
        events=in_time_order(_requests_with_actions(shown, requests, reactions, names)),
        num_requests=len(requests.first_L),
        unlogged_clicks=_unlogged_clicks(listens) if options.organic == "history" else None,
    )


def _events(table: pa.Table, event: str) -> pa.Table:
    return table.filter(pc.equal(table["event"], _EVENTS.index(event)))


class _Listens(NamedTuple):
    """Listens ordered by user and time."""

    user_N: np.ndarray  # int64
    time_ms_N: np.ndarray  # int64
    item_N: np.ndarray  # int64
    organic_N: np.ndarray  # bool
    played_pct_N: np.ndarray  # float32
    length_s_N: np.ndarray  # float32

    def take(self, index: np.ndarray | slice) -> _Listens:
        return _Listens(*(column_N[index] for column_N in self))


class _Requests(NamedTuple):
    """Requests in the order of users: listens `first_L[l]` to `first_L[l + 1]` are the candidates of l."""

    first_L: np.ndarray  # int64
    session_L: np.ndarray  # int64
    number_L: np.ndarray  # int64: of the user's requests


def _listens(table: pa.Table) -> _Listens:
    columns = {name: table[name].to_numpy() for name in (*_COMMON, *_OF_LISTENS)}
    listens = _Listens(
        columns["uid"],
        START_MS + 1000 * columns["timestamp"],
        columns["item_id"],
        columns["is_organic"] != 0,
        columns["played_ratio_pct"],
        columns["track_length_seconds"],
    )
    return listens.take(np.lexsort((listens.time_ms_N, listens.user_N)))


def _split_into_requests(shown: _Listens, options: Options, window_ms: int) -> _Requests:
    """Split the listens of each user into sessions and requests, by the rules in the module's docstring."""
    first_listens, sessions, numbers = [], [], []
    user, last_ms, begin_ms, session, number = -1, 0, 0, 0, 0
    items: set[int] = set()
    rows = zip(shown.user_N.tolist(), shown.time_ms_N.tolist(), shown.item_N.tolist(), strict=True)
    for n, (row_user, time_ms, item) in enumerate(rows):
        is_new_session = row_user != user or time_ms - last_ms >= options.session_gap_ms
        is_full = len(items) == options.max_candidates or time_ms - begin_ms >= window_ms
        if is_new_session or is_full or item in items:
            session += is_new_session
            number = 0 if row_user != user else number + 1
            first_listens.append(n)
            sessions.append(session)
            numbers.append(number)
            begin_ms = time_ms
            items.clear()
        items.add(item)
        user, last_ms = row_user, time_ms
    return _Requests(*(np.array(column, np.int64) for column in (first_listens, sessions, numbers)))


def _reactions(
    table: pa.Table, shown: _Listens, requests: _Requests, window_ms: int
) -> dict[int, list[tuple[str, int, int]]]:
    """Request → its likes and dislikes: action, item and time in ms."""
    found: dict[int, list[tuple[str, int, int]]] = {}
    for action in ("like", "dislike"):
        rows = _events(table, action)
        user_M, item_M = rows["uid"].to_numpy(), rows["item_id"].to_numpy()
        time_ms_M = START_MS + 1000 * rows["timestamp"].to_numpy()
        newest_M = _newest_listens(shown, user_M, item_M, time_ms_M)
        request_M = np.searchsorted(requests.first_L, newest_M, side="right") - 1
        for m in np.flatnonzero(newest_M >= 0).tolist():
            request = int(request_M[m])
            if time_ms_M[m] - shown.time_ms_N[requests.first_L[request]] < window_ms:
                found.setdefault(request, []).append((action, int(item_M[m]), int(time_ms_M[m])))
    return found


def _newest_listens(
    shown: _Listens, user_M: np.ndarray, item_M: np.ndarray, time_ms_M: np.ndarray
) -> np.ndarray:
    """int64 [M]: the newest listen of this user to this item, at this time or before; -1 = none."""
    num_listens = len(shown.user_N)
    is_reaction = np.repeat([False, True], [num_listens, len(user_M)])
    user = np.concatenate((shown.user_N, user_M))
    item = np.concatenate((shown.item_N, item_M))
    order = np.lexsort((is_reaction, np.concatenate((shown.time_ms_N, time_ms_M)), item, user))
    listen_place = np.where(is_reaction[order], -1, np.arange(len(order)))
    before = np.maximum.accumulate(listen_place) if len(order) else listen_place
    newest = np.where(before < 0, -1, order[before])
    is_same = (user[newest] == user[order]) & (item[newest] == item[order])
    found = np.full(len(order), -1, np.int64)
    found[order] = np.where((newest >= 0) & is_same, newest, -1)
    return found[num_listens:]


def _unlogged_clicks(listens: _Listens) -> Clicks:
    """The organic listens of at least half a track."""
    chosen = listens.take(listens.organic_N & (listens.played_pct_N >= LISTENED_PCT))
    chosen = chosen.take(np.argsort(chosen.time_ms_N, kind="stable"))
    return Clicks(chosen.user_N, chosen.item_N, chosen.time_ms_N)


def _requests_with_actions(
    shown: _Listens,
    requests: _Requests,
    reactions: dict[int, list[tuple[str, int, int]]],
    names: frozenset[str],
) -> Iterator[tuple[Request, list[Action]]]:
    """Requests in time order with their actions."""
    end_L = np.append(requests.first_L[1:], len(shown.user_N))
    for n in np.argsort(shown.time_ms_N[requests.first_L], kind="stable").tolist():
        rows = shown.take(slice(int(requests.first_L[n]), int(end_L[n])))
        user, items = int(rows.user_N[0]), rows.item_N
        request_id = f"{user}-{requests.number_L[n]}"
        offered: dict[str, Any] = {
            "item": items,
            "track_length_s": rows.length_s_N,
            "organic": rows.organic_N.astype(np.float32),
        }
        request = Request(
            request_id=request_id,
            user_id=user,
            session_id=int(requests.session_L[n]),
            time_ms=int(rows.time_ms_N[0]),
            items_n=items,
            ro={"user": [user]} if "user" in names else {},
            nro={name: column for name, column in offered.items() if name in names},
        )
        played = zip(items.tolist(), rows.time_ms_N.tolist(), rows.played_pct_N.tolist(), strict=True)
        done = [("listen_plus", item, at_ms, pct) for item, at_ms, pct in played if pct >= LISTENED_PCT]
        done += [(action, item, at_ms, 1.0) for action, item, at_ms in reactions.get(n, ())]
        header = request_id, user, request.session_id
        yield (
            request,
            [
                Action(*header, at_ms, hash64(f"{request_id}/{action}/{item}"), item, action, value)
                for action, item, at_ms, value in done
            ],
        )


def _read(path: str, event: str) -> pa.Table:
    """The rows of a file in the flat form, with the column `event`, the place of their type in _EVENTS.
    `event`: the type of all rows; "" = the file has a column of types.

    Raises:
        ConfigError: the file is not Parquet, lacks a column, or has one with other values; names file and
            column.
    """
    kinds = {**_COMMON, **({} if event else {"event_type": pa.string()})}
    kinds |= _OF_LISTENS if event in ("", "listen") else {}
    with parquet_file(path) as file:
        is_sequential = "item_ids" in file.schema_arrow.names
    if is_sequential:
        lists = {_LIST_NAMES.get(name, name): pa.large_list(kind) for name, kind in kinds.items()}
        table = _flatten(path, read_columns(path, {**lists, "uid": kinds["uid"]}, {}), kinds)
    else:
        table = read_columns(path, kinds, {}, nullable=tuple(_OF_LISTENS))
    bounds = pc.min_max(table["timestamp"]).as_py()
    if wrong := [s for s in bounds.values() if s is not None and not 0 <= s < _MAX_TIMESTAMP]:
        raise ConfigError(
            f"{path}: column 'timestamp': expected seconds since the start of the data, got {wrong[0]}; is "
            "this the right file?"
        )
    types = table["event_type"] if "event_type" in kinds else pa.repeat(event, len(table))
    columns = {name: table[name] for name in _COMMON} | {"event": pc.index_in(types, pa.array(_EVENTS))}
    if columns["event"].null_count:
        unknown = types.filter(pc.is_null(columns["event"]))[0].as_py()
        raise ConfigError(
            f"{path}: column 'event_type': expected {', '.join(_EVENTS)}, got {unknown!r}; is this the right "
            "file?"
        )
    is_listen = pc.equal(columns["event"], _EVENTS.index("listen"))
    for name, kind in _OF_LISTENS.items():
        columns[name] = table[name] if name in kinds else pa.nulls(len(table), kind)
        _check_no_nulls(path, name, columns[name].filter(is_listen))
    return pa.table(columns)


def _flatten(path: str, table: pa.Table, names: Collection[str]) -> pa.Table:
    """One row per event of a table with one row per user, with the columns `names`.

    Raises:
        ConfigError: the lists of a user have different lengths, or a null.
    """
    lists = {name: table[_LIST_NAMES.get(name, name)] for name in names if name != "uid"}
    length_U = pc.list_value_length(lists["item_id"])
    columns = {"uid": pa.array(np.repeat(table["uid"].to_numpy(), length_U.to_numpy()))}
    for name, column in lists.items():
        if not pc.list_value_length(column).equals(length_U):
            raise ConfigError(
                f"{path}: column {name!r}: expected lists as long as item_ids, got other lengths; is this "
                "the right file?"
            )
        columns[name] = pc.list_flatten(column)
        if name not in _OF_LISTENS:
            _check_no_nulls(path, name, columns[name])
    return pa.table(columns)


def _check_no_nulls(path: str, name: str, column: Any) -> None:
    if column.null_count:
        raise ConfigError(
            f"{path}: column {name!r}: expected a value for every event, got {column.null_count} nulls; is "
            "this the right file?"
        )

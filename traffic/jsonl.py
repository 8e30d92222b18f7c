"""A generic log: one impression or engagement a line, as docs/bring-your-own-data.md says, and a schema TOML.

Lines may come in any order; they are replayed by time. A file is read twice: once for the times (16 bytes a line are
kept), once in time order.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from roo.config import setting
from roo.errors import RoostreamError, nearest
from roo.ids import hash64, item_id, signed
from roo.schema import Schema
from traffic.datasets import DatasetOptions, EventLog
from traffic.events import Action, Event, Request
from traffic.files import check_files, open_file
from traffic.times import parse_time_ms

Id = int | str


class LogError(RoostreamError):
    """A line that can't be used; says file and line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DatasetOptions):
    """Where the files are, and what to do with lines that can't be used."""

    log: tuple[str, ...] = setting(help="files with one impression or engagement a line, in any order")
    skip_bad: bool = setting(False, "count bad lines and go on instead of stopping at the first")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_files("log", self.log, needed=True)


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `traffic.datasets.DatasetModule`; engagements have times of their own, so `window_ms` changes nothing."""
    log = JsonlLog(options.log, schema, skip_bad=options.skip_bad)
    return EventLog(events=log.events(), refuse=log.refuse, skipped=lambda: (log.num_skipped, log.first_skipped))


class ImpressionLine(msgspec.Struct, tag_field="type", tag="impression", forbid_unknown_fields=True):
    """`candidates`: rows `[{"item_id": …, "<feature>": …}]` or columns `{"item_id": […], "<feature>": […]}`."""

    request_id: str
    time: int | str
    candidates: list[dict[str, Any]] | dict[str, list[Any]]
    user_id: Id = 0
    session_id: Id = 0
    surface: str = ""
    ro: dict[str, Any] | None = msgspec.field(default_factory=dict)
    positions: list[int] = []
    propensities: list[float] = []
    weight: float = 1.0


class EngagementLine(msgspec.Struct, tag_field="type", tag="engagement", forbid_unknown_fields=True):
    """Names its request by `request_id` and the same user and session."""

    request_id: str
    time: int | str
    item_id: Id
    action: str
    user_id: Id = 0
    session_id: Id = 0
    event_id: Id = 0
    value: float = 0.0
    surface: str = ""


class _Timed(msgspec.Struct):
    time: int | str
    type: str = ""


_DECODER = msgspec.json.Decoder(ImpressionLine | EngagementLine)
_TIMES = msgspec.json.Decoder(_Timed)


class JsonlLog:
    """`events()` replays the files; with `skip_bad`, `num_skipped` counts the lines left out and `first_skipped` tells why."""

    def __init__(self, paths: Sequence[str], schema: Schema, *, skip_bad: bool = False) -> None:
        self.paths, self.schema, self.skip_bad = tuple(paths), schema, skip_bad
        self.num_skipped, self.first_skipped = 0, ""
        self._names = {side: {f.name for f in getattr(schema, side)} for side in ("ro", "nro")}

    def events(self) -> Iterator[Event]:
        """In event time; an impression before an engagement of the same time, else in the order of files and lines.

        Raises:
            LogError: a bad line, unless `skip_bad`; `path:line: what, expected, got`.
            ConfigError: a file can't be read.
        """
        self.num_skipped, self.first_skipped = 0, ""
        times, places = self._scan()
        files = [open_file(path) for path in self.paths]
        try:
            for k in np.argsort(times, kind="stable").tolist():
                number, line, offset = places[3 * k], places[3 * k + 1], places[3 * k + 2]
                if files[number].tell() != offset:
                    files[number].seek(offset)
                event = self._event(files[number].readline(), f"{self.paths[number]}:{line}")
                if event is not None:
                    yield event
        finally:
            for file in files:
                file.close()

    def _scan(self) -> tuple[np.ndarray, array[int]]:
        """Sort keys (twice the time in ms, odd for engagements) and (file, line, offset) of every usable line."""
        times, places = array("q"), array("q")
        for number, path in enumerate(self.paths):
            with open_file(path) as file:
                offset = 0
                for line, raw in enumerate(file, 1):
                    if raw.strip():
                        key = self._sort_key(raw, f"{path}:{line}")
                        if key is not None:
                            times.append(key)
                            places.extend((number, line, offset))
                    offset += len(raw)
        return np.array(times, dtype=np.int64), places

    def _sort_key(self, raw: bytes, where: str) -> int | None:
        try:
            head = _TIMES.decode(raw)
            return 2 * _time_ms(head.time) + (head.type != "impression")
        except (msgspec.MsgspecError, ValueError) as error:
            self._refuse(where, error)
            return None

    def _event(self, raw: bytes, where: str) -> Event | None:
        try:
            line = _DECODER.decode(raw)
            return self._request(line, where) if isinstance(line, ImpressionLine) else _action(line, where)
        except (msgspec.MsgspecError, ValueError) as error:
            self._refuse(where, error)
            return None

    def refuse(self, event: Event, error: Exception) -> None:
        """The event's features don't fit the schema: as for a bad line."""
        self._refuse(event.where, error)

    def _refuse(self, where: str, error: Exception) -> None:
        message = f"{where}: {error}; correct the line, or use --skip-bad to leave such lines out"
        if not self.skip_bad:
            raise LogError(message) from None
        self.num_skipped += 1
        self.first_skipped = self.first_skipped or message

    def _request(self, line: ImpressionLine, where: str) -> Request:
        """ValueError with what is wrong: an undeclared feature, columns of unequal length, an id or time of another form."""
        columns = _columns(line.candidates)
        if "item_id" not in columns:
            raise ValueError("candidates: expected an item_id for each, got none")
        items = [_signed_id(i) for i in columns.pop("item_id")]
        for side, given in (("ro", line.ro or {}), ("nro", columns)):
            for name in given:
                if name not in self._names[side]:
                    raise ValueError(
                        f"unknown {side} feature {name!r}{nearest(name, self._names[side])}; declare it in the schema"
                    )
        for name, column in (*columns.items(), ("positions", line.positions), ("propensities", line.propensities)):
            if column and len(column) != len(items):
                raise ValueError(f"{name}: expected {len(items)} values, one a candidate, got {len(column)}")
        return Request(
            request_id=_request_id(line.request_id),
            user_id=item_id(line.user_id),
            session_id=item_id(line.session_id),
            time_ms=_time_ms(line.time),
            items_n=np.array(items, dtype=np.int64),
            ro=line.ro,
            nro=columns,
            surface=line.surface,
            positions=line.positions,
            propensities=line.propensities,
            weight=line.weight,
            where=where,
        )


def _action(line: EngagementLine, where: str) -> Action:
    user, session, item = item_id(line.user_id), item_id(line.session_id), item_id(line.item_id)
    at_ms = _time_ms(line.time)
    event_id = item_id(line.event_id) if line.event_id else hash64(f"{user}/{line.request_id}/{item}/{line.action}/{at_ms}")
    request_id = _request_id(line.request_id)
    return Action(request_id, user, session, at_ms, event_id, item, line.action, line.value, line.surface, where)


def _columns(candidates: list[dict[str, Any]] | dict[str, list[Any]]) -> dict[str, list[Any]]:
    if isinstance(candidates, dict):
        return dict(candidates)
    names = dict.fromkeys(name for row in candidates for name in row)
    for n, row in enumerate(candidates):
        if "item_id" not in row:
            raise ValueError(f"candidates[{n}]: expected an item_id, got {', '.join(row) or 'nothing'}")
    return {name: [row.get(name) for row in candidates] for name in names} or {"item_id": []}


def _signed_id(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"item_id: expected an integer or a string, got {value!r}")
    return signed(item_id(value))


def _time_ms(value: int | str) -> int:
    try:
        return parse_time_ms(value)
    except ValueError as error:
        raise ValueError(f"time: {error}") from None


def _request_id(text: str) -> str:
    if not 0 < len(text.encode()) <= 64:
        raise ValueError(f"request_id: expected 1 to 64 bytes, got {len(text.encode())}")
    return text

"""The lines of a generic log (docs/bring-your-own-data.md): decode and check them, and convert them to
events.

Everything that the joiner or the codec would reject later is rejected here, where file and line are known.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from roostream.errors import RoostreamError, nearest, printable
from roostream.replay.datasets import Skipped
from roostream.replay.events import Action, Event, Request
from roostream.replay.parse_time import parse_time_ms
from roostream.schema.ids import hash64, item_id, signed
from roostream.schema.schema import Schema
from roostream.wire.records import MAX_WEIGHT

Id = int | str
MAX_NAME_BYTES = 64
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_POSITIONS = 1 << 31
_MAX_MESSAGES = 10
_AT_BYTE = re.compile(r"\(byte (\d+)\)$")


class LogError(RoostreamError):
    """A line that cannot be used; the message names file and line."""


class ImpressionLine(
    msgspec.Struct, tag_field="type", tag="impression", forbid_unknown_fields=True, omit_defaults=True
):
    """`candidates` are rows `[{"item_id": …, "<feature>": …}]` or columns `{"item_id": […], "<feature>":
    […]}`.

    Features may also be in a table `nro` beside `item_id`.
    """

    request_id: str
    time: int | str
    candidates: list[dict[str, Any]] | dict[str, Any]
    user_id: Id = 0
    session_id: Id = 0
    surface: str = ""
    ro: dict[str, Any] | None = msgspec.field(default_factory=dict)
    positions: list[int] = []
    propensities: list[float] = []
    weight: float = 1.0


class EngagementLine(
    msgspec.Struct, tag_field="type", tag="engagement", forbid_unknown_fields=True, omit_defaults=True
):
    """Refers to its request by `request_id` and the same user and session."""

    request_id: str
    time: int | str
    item_id: Id
    action: str
    user_id: Id = 0
    session_id: Id = 0
    event_id: Id = 0
    value: float = 0.0
    surface: str = ""


Line = ImpressionLine | EngagementLine
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of decoding and checking a line: not JSON, another structure, an invalid value, or nested too
deep."""


def without_bom(line: bytes) -> bytes:
    """A line without the byte order mark that some programs write at the start of a file."""
    return line.removeprefix(codecs.BOM_UTF8)


def json_object(line: bytes) -> dict[str, Any]:
    """The object on a line. Raises ValueError: it is none in UTF-8."""
    line = without_bom(line)
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"expected a JSON object on each line ({json_error(error, line)})") from None


def json_error(error: Exception, line: bytes) -> Exception:
    """The error of a line that is not a JSON object in UTF-8, with what stands where reading ended."""
    if isinstance(error, UnicodeDecodeError):
        return ValueError(
            "expected text in UTF-8, got another encoding, such as Windows-1252; convert the file"
        )
    if isinstance(error, RecursionError):
        return error
    if line.lstrip().startswith(b"["):
        return ValueError("expected an object, got a list; write one object per line, as `jq -c '.[]'` does")
    if line.strip() == b"{":
        return ValueError("expected a whole object, got `{`; write one object per line, as `jq -c .` does")
    found = _AT_BYTE.search(str(error))
    if not found:
        return error
    there = line[int(found[1]) :].strip()
    if there.startswith((b"NaN", b"Infinity")):
        return ValueError(f"expected JSON, which has no {there[:3].decode()}; write null")
    return ValueError(f"{error}: {there[:16].decode(errors='replace')!r}")


class LogLineReader:
    """Converts the lines of a log to events of a schema. With `skip_bad`, bad lines are counted instead of
    raised."""

    def __init__(self, schema: Schema, *, skip_bad: bool = False) -> None:
        self.schema, self.skip_bad = schema, skip_bad
        self._num_skipped, self._first_skipped, self._empty_rows = 0, list[str](), 0
        self._names = {side: {f.name for f in getattr(schema, side)} for side in ("ro", "nro")}

    def event(self, line: Line, where: str) -> Event:
        """Convert one line, which stands at `where` (file:line). Raises ValueError: a value is not valid."""
        return self._request(line, where) if isinstance(line, ImpressionLine) else _action(line, where)

    def refuse(self, where: str, error: Exception) -> None:
        """Skip and count a bad line.

        Raises:
            LogError: if `skip_bad` is off; the message is `path:line: …`.
        """
        reason = "brackets nested too deep" if isinstance(error, RecursionError) else str(error)
        message = printable(f"{where}: {reason}")
        if not self.skip_bad:
            raise LogError(f"{message}; correct the line, or use --skip-bad to skip such lines") from None
        self._num_skipped += 1
        if len(self._first_skipped) < _MAX_MESSAGES:
            self._first_skipped.append(message)

    def count_empty(self, number: int) -> None:
        """Count rows of a table that are empty in every column."""
        self._empty_rows += number

    def skipped(self) -> Skipped:
        """The lines skipped so far."""
        return Skipped(self._num_skipped, tuple(self._first_skipped), self._empty_rows)

    def _request(self, line: ImpressionLine, where: str) -> Request:
        columns = _columns(line.candidates, "nro" in self._names["nro"])
        if "item_id" not in columns:
            raise ValueError("candidates: expected an item_id for each, got none")
        items = [_id("item_id", i) for i in columns.pop("item_id")]
        self._check_names("ro", line.ro or {})
        self._check_names("nro", columns)
        given = columns | {"positions": line.positions, "propensities": line.propensities}
        for name, column in given.items():
            if column and len(column) != len(items):
                text = f"{name}: expected {len(items)} values, one per candidate, got {len(column)}"
                raise ValueError(text)
        _check_numbers(line)
        return Request(
            request_id=_text("request_id", line.request_id, min_bytes=1),
            user_id=_id("user_id", line.user_id),
            session_id=_id("session_id", line.session_id),
            time_ms=_time_ms(line.time),
            items_n=np.array([signed(i) for i in items], dtype=np.int64),
            ro=line.ro,
            nro=columns,
            surface=_text("surface", line.surface),
            positions=line.positions,
            propensities=line.propensities,
            weight=line.weight,
            where=where,
        )

    def _check_names(self, side: str, given: Mapping[str, object]) -> None:
        known = self._names[side]
        for name in given:
            if name not in known:
                other = "ro" if side == "nro" else "nro"
                hint = nearest(name[:MAX_NAME_BYTES], known)
                if name in self._names[other]:
                    hint = f"; it is declared as {other}"
                text = f"unknown {side} feature {name[:MAX_NAME_BYTES]!r}{hint}; declare it in the schema"
                raise ValueError(text)


def _check_numbers(line: ImpressionLine) -> None:
    """Check positions, propensities and weight; the encoder checks the features."""
    for position in line.positions:
        if not 0 <= position < _POSITIONS:
            raise ValueError(f"positions: expected 0 to {_POSITIONS - 1}, got {position}")
    for propensity in line.propensities:
        if not 0 < np.float32(propensity) <= 1:
            text = f"propensities: expected probabilities above 0 and at most 1, got {propensity:g}"
            raise ValueError(text)
    if not 0 < np.float32(line.weight) <= MAX_WEIGHT:  # in records both are 32-bit, and a weight of 0 is 1
        raise ValueError(
            f"weight: expected a number above 0 and at most {MAX_WEIGHT:.0f}, got {line.weight:g}; remove an "
            "impression that should not count"
        )


def _action(line: EngagementLine, where: str) -> Action:
    user, session, item = (_id(name, getattr(line, name)) for name in ("user_id", "session_id", "item_id"))
    request_id, action = (_text(name, getattr(line, name), min_bytes=1) for name in ("request_id", "action"))
    at_ms, surface = _time_ms(line.time), _text("surface", line.surface)
    if not abs(line.value) <= _LARGEST_FLOAT:
        raise ValueError(f"value: expected a finite 32-bit float, got {line.value:g}")
    event_id = _id("event_id", line.event_id)
    if line.event_id == 0:
        parts = [user, session, request_id, item, action, at_ms, line.value, surface]
        event_id = hash64(msgspec.json.encode(parts))
    return Action(request_id, user, session, at_ms, event_id, item, action, line.value, surface, where)


def _columns(
    candidates: list[dict[str, Any]] | dict[str, Any], nro_is_a_feature: bool
) -> dict[str, list[Any]]:
    """Columns by name; features under `nro` are moved beside `item_id`."""
    if isinstance(candidates, dict):
        flat = candidates if nro_is_a_feature else _flat(candidates, "candidates")
        for name, column in flat.items():
            if not isinstance(column, list):
                raise ValueError(
                    f"candidates.{name}: expected a list with one value per candidate, got {_shown(column)}"
                )
        return dict(flat)
    rows = candidates
    if not nro_is_a_feature:
        rows = [_flat(row, f"candidates[{n}]") for n, row in enumerate(candidates)]
    names = dict.fromkeys(name for row in rows for name in row)
    for n, row in enumerate(rows):
        if "item_id" not in row:
            raise ValueError(f"candidates[{n}]: expected an item_id, got {', '.join(row) or 'nothing'}")
    return {name: [row.get(name) for row in rows] for name in names} or {"item_id": []}


def _flat(row: dict[str, Any], where: str) -> dict[str, Any]:
    inner = row.get("nro")
    if inner is None:
        return {name: value for name, value in row.items() if name != "nro"} if "nro" in row else row
    if not isinstance(inner, dict):
        raise ValueError(f"{where}.nro: expected features by name, got {_shown(inner)}")
    outer = {name: value for name, value in row.items() if name != "nro"}
    if doubled := sorted(outer.keys() & inner.keys()):
        raise ValueError(f"{where}: {doubled[0]!r} is both beside item_id and under nro; keep one")
    return outer | inner


def _id(name: str, value: object) -> int:
    """uint64."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{name}: expected an integer or a string, got {_shown(value)}")
    try:
        return item_id(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _text(name: str, text: str, min_bytes: int = 0) -> str:
    if not min_bytes <= len(text.encode()) <= MAX_NAME_BYTES:
        wanted = f"{min_bytes} to {MAX_NAME_BYTES}" if min_bytes else f"at most {MAX_NAME_BYTES}"
        raise ValueError(f"{name}: expected {wanted} bytes, got {len(text.encode())}")
    return text


def _time_ms(value: int | str) -> int:
    try:
        return parse_time_ms(value)
    except ValueError as error:
        raise ValueError(f"time: {error}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_NAME_BYTES else f"{text[:MAX_NAME_BYTES]}…"

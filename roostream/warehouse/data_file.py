"""What the table's log says of a file, and where it lies."""

from __future__ import annotations

import dataclasses
import re
import secrets
from datetime import UTC, date, datetime

_DAY_MS = 86_400_000
_NAME = re.compile(
    r"[^/]+/\d+/[0-9a-f]{16}/(?:t((?:[0-9a-f]{2})+)/)?(?:sealed-)?(\d+)-[0-9a-f]+\.parquet", re.ASCII
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of rows of one day, partition and writer's schema."""

    path: str  # below the table's own folder
    bytes: int
    rows: int  # requests
    candidates: int
    day: date  # of the close of its samples, UTC
    partition: int  # of the topic that they came from
    fingerprint: int  # of the schema that wrote them
    first_offset: int
    last_offset: int
    first_close_ms: int
    last_close_ms: int
    sealed: bool = False
    topic: str = ""  # id of the topic that they came from, of which their offsets are; "" of files that don't say (format 1)


def day_of(close_ms: int) -> date:
    """The day, in UTC, of a time in ms."""
    return datetime.fromtimestamp(close_ms // 1000, UTC).date()


def day_bounds_ms(day: date) -> tuple[int, int]:
    """[first, end) of a day in ms."""
    first = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000
    return first, first + _DAY_MS


def new_path(
    day: date, partition: int, fingerprint: int, candidates: int, *, topic: str = "", sealed: bool = False
) -> str:
    """A path that no other file has. How many candidates it holds and of which topic is in it, since a log has no place for that;
    the topic's id, in which Kafka has capitals and slashes, by the hexadecimal digits of its letters."""
    of_topic = f"t{topic.encode().hex()}/" if topic else ""
    name = f"{'sealed-' if sealed else ''}{candidates}-{secrets.token_hex(12)}.parquet"
    return f"{day.isoformat()}/{partition}/{fingerprint:016x}/{of_topic}{name}"


def candidates_of(path: str) -> int:
    """Of a path of `new_path`; 0 of another."""
    found = _NAME.fullmatch(path)
    return int(found[2]) if found else 0


def topic_of(path: str) -> str:
    """Of a path of `new_path`: the topic's id; "" of another."""
    found = _NAME.fullmatch(path)
    return bytes.fromhex(found[1]).decode("utf-8", "replace") if found and found[1] else ""

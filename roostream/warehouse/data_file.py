"""What the table's log says of a file, and the form of its path."""

from __future__ import annotations

import dataclasses
import re
import secrets
from datetime import UTC, date, datetime

LATEST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999, the latest close time that can be stored."""
_DAY_MS = 86_400_000
_NAME = re.compile(
    r"[^/]+/\d+/[0-9a-f]{16}/(?:t((?:[0-9a-f]{2})+)/)?(?:sealed-)?(\d+)-[0-9a-f]+\.parquet", re.ASCII
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of rows of one close day, partition and schema."""

    path: str  # below the table's own folder
    bytes: int
    rows: int  # requests
    candidates: int
    day: date  # UTC day of its samples' close times
    partition: int  # of the topic
    fingerprint: int  # of the schema that wrote the samples
    first_offset: int
    last_offset: int
    first_close_ms: int
    last_close_ms: int
    sealed: bool = False
    topic: str = ""  # id of the topic that the offsets belong to; "" in files of format 1


def day_of(close_ms: int) -> date:
    """The UTC day of a time in ms."""
    return datetime.fromtimestamp(close_ms // 1000, UTC).date()


def day_bounds_ms(day: date) -> tuple[int, int]:
    """[first, end) of a day in ms."""
    first = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000
    return first, first + _DAY_MS


def new_path(
    day: date, partition: int, fingerprint: int, candidates: int, *, topic: str = "", sealed: bool = False
) -> str:
    """A unique path.

    It holds the number of candidates and the topic's id, since the log has no place for them. Kafka's topic
    ids have capitals and slashes, so the id is written in hexadecimal.
    """
    of_topic = f"t{topic.encode().hex()}/" if topic else ""
    name = f"{'sealed-' if sealed else ''}{candidates}-{secrets.token_hex(12)}.parquet"
    return f"{day.isoformat()}/{partition}/{fingerprint:016x}/{of_topic}{name}"


def candidates_of(path: str) -> int:
    """The number of candidates in a path of `new_path`; 0 for any other path."""
    found = _NAME.fullmatch(path)
    return int(found[2]) if found else 0


def is_file_path(path: str) -> bool:
    """Whether `new_path` makes such paths. Other files in a table's folder belong to somebody else."""
    return _NAME.fullmatch(path) is not None


def topic_of(path: str) -> str:
    """The topic id in a path of `new_path`; "" for any other path."""
    found = _NAME.fullmatch(path)
    return bytes.fromhex(found[1]).decode("utf-8", "replace") if found and found[1] else ""

"""What a session reads: a version of the table, which days and rows of it, in which order, with which labels.

Two sessions with one digest read the same rows in the same order, whoever plans them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import xxhash

from roostream.errors import ConfigError

Labels = Literal["latest", "as_streamed"]
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """`from_offsets`: partition of `samples` → rows of the topic below it are left out: earlier sessions had them."""

    table: str
    version: int  # of the table's log: fixed, so that what comes later changes nothing
    first_day: str = ""  # YYYY-MM-DD, UTC, by close time; "" = from the first
    last_day: str = ""  # of the same, in it; "" = up to the last
    features: tuple[str, ...] = ()  # columns that are read, () = all; others are as if they were missing
    topic: str = ""  # id of the topic that `from_offsets` are of: files of another were an earlier session's; "" = all are of it
    graph: str = ""  # digest of the transforms that readers run; "" = those of the schema
    from_offsets: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shuffle_seed: int | None = 0  # of the files of a day; None = by their offsets
    labels: Labels = (
        "latest"  # with the corrections that came until then; "as_streamed": as they were at the close
    )
    batch_requests: int = 1024  # what a reader makes at once

    def __post_init__(self) -> None:
        """Raises ConfigError: a day that is none, days the wrong way round, or unknown labels."""
        for day in (self.first_day, self.last_day):
            if day and not DAY.fullmatch(day):
                raise ConfigError(f"expected a day as YYYY-MM-DD, got {day!r}")
        if self.first_day and self.last_day and self.last_day < self.first_day:
            raise ConfigError(
                f"expected days in order, got {self.first_day}..{self.last_day}; the first comes first"
            )
        if self.labels not in get_args(Labels):
            raise ConfigError(f"expected labels {' or '.join(get_args(Labels))}, got {self.labels!r}")

    def has_day(self, day: str) -> bool:
        return self.first_day <= day and (not self.last_day or day <= self.last_day)

    def plain(self) -> dict[str, Any]:
        """As manifests and calls carry it."""
        body = dataclasses.asdict(self)
        if not self.topic:
            del body["topic"]  # as before it was known, so that digests stay
        return {
            **body,
            "features": list(self.features),
            "from_offsets": {str(p): at for p, at in sorted(self.from_offsets.items())},
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> SessionSpec:
        """Inverse of `plain`. TypeError, ValueError, KeyError: it is none."""
        offsets = {int(p): int(at) for p, at in told["from_offsets"].items()}
        return cls(**{**told, "features": tuple(told["features"]), "from_offsets": offsets})

    @property
    def digest(self) -> str:
        """16 hex digits."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.plain(), sort_keys=True).encode())


def days_of(text: str) -> tuple[str, str]:
    """First and last day of "A..B", "A.." or "..B"; a day alone is both.

    Raises:
        ConfigError: it is none of these.
    """
    first, dots, last = text.partition("..")
    days = (first, last) if dots else (first, first)
    if not any(days) or not all(DAY.fullmatch(day) for day in days if day):
        raise ConfigError(
            f"expected days as 2024-05-01..2024-05-07, got {text!r}; either end may be left out"
        )
    return days

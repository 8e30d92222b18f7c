"""What the values of a column or feature of a log are: the kind of feature that can hold them."""

from __future__ import annotations

import re
from typing import Any, Literal

from roostream.errors import ConfigError
from roostream.replay.parse_time import EARLIEST_MS, LATEST_NUMBER_MS, day_and_month, parse_table_time_ms

Kind = Literal["float", "ids", "weighted_ids", "sequence"]
_MAX_DISTINCT = 10_000
_LARGEST_EXACT = 1 << 24  # a 32-bit float represents whole numbers up to this exactly
# A column of whole numbers whose name has one of these words is taken for ids.
_ID_WORDS = frozenset(
    {
        *("id", "ids", "author", "brand", "campaign", "categories", "category", "city", "code", "country"),
        *("device", "genre", "genres", "lang", "language", "page", "publisher", "seller", "shop", "source"),
        *("store", "surface", "tag", "tags", "topic", "topics", "type"),
    }
)
_RECENT_MS = 978_307_200_000  # 2001 began: numbers that are not called times may be ids
_TIME_NAME = re.compile(r"(.*_)?(time|times|timestamps?|ts|at|date)(_.*)?", re.IGNORECASE)
_TIME_UNITS = {"ms": 1.0, "s": 1000.0, "us": 1e-3, "ns": 1e-6}


class ColumnValues:
    """Statistics of the values of a column or feature. Call `add` with every value; None is missing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.present = self.bools = self.floats = self.fractions = self.texts = self.lists = 0
        self.low = self.high = 0.0
        self.not_times = 0  # texts that are no time as `parse_table_time_ms` reads it
        self.example: Any = None  # the first of them, else the newest value
        self.may_be_day_first = self.may_be_month_first = True  # of times such as 3/4/2024
        self.parts: dict[str, ColumnValues] = {}  # of objects, by key
        self.entries: ColumnValues | None = None  # of lists
        self.longest = 0  # number of entries of the longest list, also within objects
        self.distinct: set[Any] = set()

    def add(self, value: Any) -> None:
        if value is None or value != value:
            return
        self.present += 1
        if isinstance(value, dict):
            for key, part in value.items():
                of_part = self.parts.setdefault(str(key), ColumnValues(str(key)))
                of_part.add(part)
                self.longest = max(self.longest, of_part.longest)
        elif isinstance(value, list):
            self.lists += 1
            self.longest = max(self.longest, len(value))
            self.entries = self.entries or ColumnValues(self.name)
            for entry in value:
                self.entries.add(entry)
        else:
            self._add_scalar(value)

    def _add_scalar(self, value: Any) -> None:
        if len(self.distinct) < _MAX_DISTINCT:
            self.distinct.add(value)
        self.example = value if self.not_times == 0 else self.example
        if isinstance(value, bool):
            self.bools += 1
        elif isinstance(value, int | float):
            self.floats += isinstance(value, float)
            self.fractions += value != int(value) if abs(value) < float("inf") else 1
            self.low, self.high = min(self.low, value), max(self.high, value)
        elif isinstance(value, str):
            self.texts += 1
            if self.not_times == 0:
                self._add_time(value)
        else:  # a value of Arrow: a timestamp, a decimal, bytes
            self.texts += 1
            self.not_times += not hasattr(value, "isoformat")

    def _add_time(self, text: str) -> None:
        if order := day_and_month(text):
            self.may_be_day_first &= order[0] <= 31 and order[1] <= 12
            self.may_be_month_first &= order[0] <= 12 and order[1] <= 31
        try:
            parse_table_time_ms(text, self.is_day_first)
        except ValueError:
            self.not_times += 1

    @property
    def is_day_first(self) -> bool:
        """Whether times such as 3/4/2024 name the day first; if both are possible, the month."""
        return self.may_be_day_first and not self.may_be_month_first

    def num_distinct(self) -> int:
        """Distinct values, of lists those of their entries; at most 10,000 are counted."""
        return len(self.distinct) if self.entries is None else self.entries.num_distinct()

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        return bool(
            self.present and not (self.bools or self.fractions or self.texts or self.lists or self.parts)
        )

    @property
    def is_number(self) -> bool:
        return self.is_number_or_flag and not self.bools

    @property
    def is_id(self) -> bool:
        return bool(self.present and not (self.bools or self.fractions or self.lists or self.parts))

    @property
    def is_number_or_flag(self) -> bool:
        return bool(self.present and not (self.texts or self.lists or self.parts))

    @property
    def is_flag(self) -> bool:
        """Whether all values are true or false, or 0 or 1."""
        return self.is_number_or_flag and self.distinct <= {0, 1}

    def time_unit(self) -> str:
        """The unit of these times, "text" for ISO 8601 and timestamps, or "" if they are no times."""
        since_ms = EARLIEST_MS if _is_called_time(self.name) else _RECENT_MS
        if self.texts == self.present and self.present:
            return "" if self.not_times else "text"
        for unit, factor in _TIME_UNITS.items():
            low = min((v for v in self.distinct if isinstance(v, int | float)), default=0) * factor
            if self.is_number and low >= since_ms and self.high * factor <= LATEST_NUMBER_MS:
                return unit
        return ""

    def kind(self) -> Kind:
        """The kind of feature that holds the values.

        Raises:
            ConfigError: no kind can hold them; says what to change.
        """
        if self.parts:
            if plain := [key for key, part in self.parts.items() if part.present and part.entries is None]:
                raise ConfigError(
                    f"feature {self.name!r} is an object with {plain[0]!r}, which is no list and no kind of "
                    "feature holds; make each value a feature of its own, or leave it out (of tables with "
                    "--ignore)"
                )
            return "weighted_ids" if set(self.parts) == {"ids", "weights"} else "sequence"
        if self.entries is not None:
            if self.entries.fractions or self.entries.bools or self.entries.lists or self.entries.parts:
                raise ConfigError(
                    f"feature {self.name!r} is a list of something else than ids, which no kind of feature "
                    "holds; make each entry a feature of its own, or leave it out (of tables with --ignore)"
                )
            return "ids"
        if self.bools and not self.texts:
            return "float"
        words = set(re.split(r"[_-]", self.name.lower()))
        if self.floats and not self.texts:
            return "float"  # readers of logs take only whole numbers as ids, and 1.0 is none
        is_number = not self.texts and self.high <= _LARGEST_EXACT
        return "float" if is_number and not (self.is_whole and words & _ID_WORDS) else "ids"

    def sequence(self) -> tuple[str, dict[str, Literal["ids", "time_ms"]]]:
        """The key of a sequence's ids, and its other columns.

        Raises:
            ConfigError: a column of times is not in ms.
        """
        keys = [key for key, part in self.parts.items() if part.entries is None or not part.entries.fractions]
        main = next((key for key in ("ids", "item", *keys) if key in keys), "ids")
        times = set[str]()
        for key, part in self.parts.items():
            unit = part.entries.time_unit() if part.entries is not None and not part.entries.fractions else ""
            if unit in ("s", "us", "ns") and key != main and _is_called_time(key):
                raise ConfigError(
                    f"feature {self.name!r}: expected times in ms since 1970 in {key!r}, got such as "
                    f"{part.entries and part.entries.example}, which are in {unit}; convert them, or rename "
                    "the column if it has ids"
                )
            times |= {key} if unit in ("ms", "text") else set()
        return main, {key: "time_ms" if key in times else "ids" for key in self.parts if key != main}


def _is_called_time(name: str) -> bool:
    return bool(_TIME_NAME.fullmatch(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)))

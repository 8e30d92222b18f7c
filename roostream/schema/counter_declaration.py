"""Declarations of counters: `[[counter]]` of a schema, and the built-in counters of every schema."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.schema.settings import SettingError, Settings, check_name, check_text, setting

SHOWN = "shown"
"""Event of a shown list; every other event is the action of an engagement."""
Aggregation = Literal[
    "count", "rate", "expected", "since", "age", "last", "history", "length", "distinct", "in_last_list"
]
HALF_LIVES = {"10m": 600_000, "1h": 3_600_000, "6h": 21_600_000, "24h": 86_400_000}
MAX_COUNTERS = 256
MAX_DISTINCT = 512
_DEFAULT_DISTINCT = 64
_TIME_SCALES: dict[str, tuple[str, ...]] = {
    "count": ("half_life", "window"),
    "rate": ("half_life", "window"),
    "expected": ("half_life",),
    "distinct": ("window",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CounterDeclaration(Settings):
    """A counter of an entity's events, and the value that requests read; docs/schema.md, "Counters"."""

    name: str = setting(help="name for `online`; unique, also among the built-in counters")
    entity: tuple[str, ...] = setting(
        help="field or cross of fields: user | session | surface | hour | weekday | item | an ids feature"
    )
    event: str = setting("", "shown, or the action of engagements; empty = the click of [online]")
    aggregation: Aggregation = setting(
        "count", "count | rate | expected | since | age | last | history | length | distinct | in_last_list"
    )
    half_life_ms: int = setting(0, "an event counts half after this time; 0 = no decay", ge=0, le=1 << 40)
    window_ms: int = setting(0, "count only events of this last time, in 12 steps; 0 = all", ge=0, le=1 << 40)
    length: int = setting(
        0, "history: entries kept, 0 = history_len; distinct: values kept, 0 = 64", ge=0, le=10_000
    )
    of: str = setting("item", "distinct: the field whose values are counted")
    prior: float = setting(
        0.0,
        "rate: the value without a view, which weighs as much as 10 views; 0 = the value 0.1, weight 1",
        ge=0,
        lt=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("counter", self.name)
        if self.event:
            check_text("event", self.event)
        if not self.entity or len(set(self.entity)) < len(self.entity):
            text = f"expected one field or several different ones, got {list(self.entity)}"
            raise self._error("entity", text)
        allowed = _TIME_SCALES.get(self.aggregation, ())
        for key, value in (("half_life", self.half_life_ms), ("window", self.window_ms)):
            if value and key not in allowed:
                able = ", ".join(a for a in _TIME_SCALES if key in _TIME_SCALES[a])
                raise self._error(
                    key,
                    f"expected no {key} for aggregation {self.aggregation!r}, got one; it is for {able}",
                )
        if self.half_life_ms and self.window_ms:
            raise self._error("window", "expected a half_life or a window, got both; keep one")
        if 0 < self.window_ms < 12_000:
            text = f"expected at least 12 s, got {self.window_ms} ms; a window has 12 steps"
            raise self._error("window", text)
        if self.prior and self.aggregation != "rate":
            text = f"expected none for aggregation {self.aggregation!r}, got {self.prior}; remove it"
            raise self._error("prior", text)
        self._check_event()
        self._check_length()

    def _check_event(self) -> None:
        """Some aggregations need shown lists, others need engagements."""
        only_shown, never_shown = ("expected", "in_last_list"), ("rate", "last", "history", "length")
        if self.aggregation in only_shown and self.event != SHOWN:
            text = f"expected 'shown' for aggregation {self.aggregation!r}, got {self.event!r}"
            raise self._error("event", text)
        if self.aggregation in never_shown and self.event == SHOWN:
            text = f"expected an action for aggregation {self.aggregation!r}, got 'shown'; name one"
            raise self._error("event", text)

    def _check_length(self) -> None:
        if self.of != "item" and self.aggregation != "distinct":
            text = f"expected none for aggregation {self.aggregation!r}, got {self.of!r}; remove it"
            raise self._error("of", text)
        if self.length and self.aggregation not in ("history", "length", "distinct"):
            text = f"expected none for aggregation {self.aggregation!r}, got {self.length}; remove it"
            raise self._error("length", text)
        if self.aggregation == "distinct" and self.length > MAX_DISTINCT:
            raise self._error("length", f"expected at most {MAX_DISTINCT} distinct values, got {self.length}")

    def _error(self, key: str, text: str) -> SettingError:
        return SettingError(key, text, f"counter {self.name!r}")

    @property
    def num_distinct(self) -> int:
        return self.length or _DEFAULT_DISTINCT


def built_in() -> tuple[CounterDeclaration, ...]:
    """The counters of every schema; an empty event is the click of [online]."""
    of_items = [
        CounterDeclaration(
            name=f"{what}_{life}", entity=("item",), event=event, aggregation=how, half_life_ms=ms
        )
        for what, event, how in _DECAYED
        for life, ms in HALF_LIVES.items()
    ]
    return (*of_items, *_OTHERS)


_DECAYED: tuple[tuple[str, str, Aggregation], ...] = (
    ("views", SHOWN, "count"),
    ("clicks", "", "count"),
    ("expected", SHOWN, "expected"),
    ("ctr", "", "rate"),
)
_PAIR = ("user", "item")
_OTHERS = (
    CounterDeclaration(name="age_s", entity=("item",), event=SHOWN, aggregation="age"),
    CounterDeclaration(name="user_views", entity=_PAIR, event=SHOWN),
    CounterDeclaration(name="user_clicks", entity=_PAIR),
    CounterDeclaration(name="user_view_age_s", entity=_PAIR, event=SHOWN, aggregation="since"),
    CounterDeclaration(name="user_click_age_s", entity=_PAIR, aggregation="since"),
    CounterDeclaration(name="in_last_list", entity=_PAIR, event=SHOWN, aggregation="in_last_list"),
    CounterDeclaration(name="history", entity=("user",), aggregation="history"),
    CounterDeclaration(name="history_len", entity=("user",), aggregation="length"),
    CounterDeclaration(name="gap_s", entity=("user",), event=SHOWN, aggregation="since"),
)

"""Random events, and an oracle that computes declared counters by definition from the whole list of
events."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np

from roostream.online.counters import Counters
from roostream.online.entity_fields import FieldReader
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict

T0 = 1_700_000_000_000
MINUTE, HOUR = 60_000, 3_600_000
USERS, PAGES, ITEMS, CATEGORIES = range(4), (0, "home", 7), (5, 6, -3, 2**63 + 1), (0, 11, "shoes")
COUNTERS: list[dict[str, Any]] = [
    {
        "name": "here_ctr_1h",
        "entity": ["page", "item"],
        "event": "click",
        "aggregation": "rate",
        "half_life": "1h",
    },
    {
        "name": "here_expected",
        "entity": ["item", "page"],
        "event": "shown",
        "aggregation": "expected",
        "half_life": "1h",
    },
    {"name": "here_views_12m", "entity": ["page", "item"], "event": "shown", "window": "12m"},
    {"name": "orders_of_category", "entity": "category", "event": "order"},
    {"name": "order_rate_1h", "entity": "item", "event": "order", "aggregation": "rate", "window": "1h"},
    {"name": "last_order", "entity": "item", "event": "order", "aggregation": "last"},
    {"name": "user_category_views", "entity": ["user", "category"], "event": "shown"},
    {"name": "user_category_since", "entity": ["user", "category"], "aggregation": "since"},
    {"name": "user_page_item_clicks", "entity": ["user", "page", "item"], "half_life": "10m"},
    {"name": "at_this_hour", "entity": ["hour", "weekday", "item"], "event": "shown"},
    {"name": "user_here", "entity": ["user", "page"], "event": "shown", "aggregation": "age"},
    {"name": "page_clicks", "entity": ["page"], "event": "click", "window": "2h"},
    {"name": "orders", "entity": "user", "event": "order", "aggregation": "history", "length": 3},
    {"name": "num_orders", "entity": "user", "event": "order", "aggregation": "length", "length": 2},
    {
        "name": "page_past",
        "entity": ["page", "surface"],
        "event": "click",
        "aggregation": "history",
        "length": 4,
    },
    {
        "name": "session_items",
        "entity": "session",
        "event": "shown",
        "aggregation": "distinct",
        "window": "30m",
    },
    {
        "name": "user_categories",
        "entity": "user",
        "event": "click",
        "aggregation": "distinct",
        "of": "category",
    },
    {
        "name": "user_pages",
        "entity": "user",
        "event": "click",
        "aggregation": "distinct",
        "of": "page",
        "length": 1,
    },
]


def schema_with_counters(counters: list[dict[str, Any]]) -> Schema:
    """Build a schema with the counters, a feature for each of them, and the fields that they use."""
    past = {"kind": "ids", "table": "item"}
    features: dict[str, list[dict[str, Any]]] = {
        "ro": [{"name": "page", "kind": "ids", "table": "item"}],
        "nro": [{"name": "item", **past}, {"name": "category", "kind": "ids", "table": "item"}],
    }
    for c in counters:
        side = (
            "nro"
            if {"item", "category"} & {*([c["entity"]] if isinstance(c["entity"], str) else c["entity"])}
            else "ro"
        )
        features[side].append({"online": c["name"], **(past if c.get("aggregation") == "history" else {})})
    label = [{"name": "click", "action": "click"}]
    return schema_from_dict({"tables": {"item": {"dim": 1}}, **features, "counter": counters, "label": label})


class ShownList(NamedTuple):
    """A request whose candidates were shown to a user."""

    request: str
    user: int
    session: int
    surface: str
    page: int | str
    items: list[int]
    categories: list[int | str]
    time_ms: int

    @property
    def header(self) -> tuple[int, int, str, str]:
        return self.user, self.session, self.surface, self.request

    @property
    def ro(self) -> dict[str, Any]:
        return {"page": [self.page]} if self.page else {}

    @property
    def nro(self) -> dict[str, Any]:
        return {"category": [[c] if c else None for c in self.categories]}


class Engagement(NamedTuple):
    """An action of a user on an item of a shown list."""

    shown_list: ShownList
    item: int
    action: str
    value: float
    time_ms: int


def random_events(seed: int, count: int) -> list[ShownList | Engagement]:
    """Draw events in time order, each at another millisecond. Engagements are with items of earlier lists,
    some of which are old."""
    rng = random.Random(seed)
    lists: list[ShownList] = []
    events: list[ShownList | Engagement] = []
    time_ms = T0
    for n in range(count):
        time_ms += rng.choice(
            (1000, 2 * MINUTE, 20 * MINUTE, 26 * HOUR if n % 9 == 8 else 1)
        ) + rng.randrange(1000)
        if not lists or rng.random() < 0.5:
            items = rng.sample(ITEMS, rng.randrange(1, 4))
            session, surface = rng.randrange(3), rng.choice(("", "app"))
            categories = [rng.choice(CATEGORIES) for _ in items]
            lists.append(
                ShownList(
                    f"r{n}",
                    rng.choice(USERS),
                    session,
                    surface,
                    rng.choice(PAGES),
                    items,
                    categories,
                    time_ms,
                )
            )
            events.append(lists[-1])
        else:
            shown_list = rng.choice(lists[-4:])
            action = rng.choice(("click", "click", "order", "like"))
            events.append(
                Engagement(shown_list, rng.choice(shown_list.items), action, float(rng.randrange(9)), time_ms)
            )
    return events


def apply_events(counters: Counters, reader: FieldReader, events: list[ShownList | Engagement]) -> None:
    for event in events:
        if isinstance(event, ShownList):
            fields = reader.from_values(event.header, event.ro, event.nro, len(event.items))
            counters.apply_impression(event.user, event.items, event.time_ms, fields)
        else:
            counters.apply_engagement(
                event.shown_list.user,
                event.item,
                event.action,
                event.value,
                event.time_ms,
                reader.from_header(event.shown_list.header),
            )


class CountedEvent(NamedTuple):
    """An event of one entity, as the oracle counts it. `share`: 1 / the number of items in the list."""

    ids: dict[str, int | str]
    time_ms: int
    value: float
    share: float


class Oracle:
    """Keeps all events and counts them again for each value."""

    def __init__(self, events: list[ShownList | Engagement]) -> None:
        self.events = events
        self._events_by_name: dict[tuple[str, bool], list[CountedEvent]] = {}

    def candidate_value(
        self, counter: dict[str, Any], request: ShownList, index: int, now_ms: int
    ) -> float | None:
        """Compute the counter's value for a candidate; None if it is missing."""
        entity = entity_fields(counter)
        ids = self._ids(request, index, now_ms)
        if any(not ids[f] for f in entity if f != "item"):
            is_new = "user" in entity and not ids["user"]
            return counter_value(counter, [], [], now_ms) if is_new else None
        events = [
            counted
            for counted in self._events(self._event(counter))
            if all(counted.ids[f] == ids[f] for f in entity) and has_all_ids(counted, entity)
        ]
        views = [
            counted
            for counted in self._events("shown")
            if all(counted.ids[f] == ids[f] for f in entity) and has_all_ids(counted, entity)
        ]
        return counter_value(counter, events, views, now_ms)

    def request_value(self, counter: dict[str, Any], request: ShownList, now_ms: int) -> Any:
        """Compute the counter's value for a request; None if it is missing."""
        entity, ids = entity_fields(counter), self._ids(request, 0, now_ms)
        if any(not ids[f] for f in entity):
            return None
        events = self._events(self._event(counter), each_list_once=counter.get("aggregation") != "distinct")
        events = [counted for counted in events if all(counted.ids[f] == ids[f] for f in entity)]
        aggregation = counter.get("aggregation", "count")
        if aggregation in ("history", "length"):
            newest = [counted.ids["item"] for counted in reversed(events)][: counter["length"]]
            return newest if aggregation == "history" else float(len(newest))
        if aggregation == "distinct":
            after_ms = now_ms - duration_ms(counter["window"]) if "window" in counter else -1
            newest_ms_by_value = {
                counted.ids[counter.get("of", "item")]: counted.time_ms for counted in events
            }
            kept = sorted((t for value, t in newest_ms_by_value.items() if value), reverse=True)[
                : counter.get("length", 64)
            ]
            return float(sum(t > after_ms for t in kept))
        return counter_value(counter, events, [], now_ms)

    def _event(self, counter: dict[str, Any]) -> str:
        return counter.get("event", "click")

    def _events(self, name: str, each_list_once: bool = False) -> list[CountedEvent]:
        """Return all events of this name. A shown list is an event for each candidate, or one event in
        all."""
        if (name, each_list_once) not in self._events_by_name:
            self._events_by_name[name, each_list_once] = self._find_events(name, each_list_once)
        return self._events_by_name[name, each_list_once]

    def _find_events(self, name: str, each_list_once: bool) -> list[CountedEvent]:
        out = []
        for event in self.events:
            if isinstance(event, ShownList) and name == "shown":
                share = 1 / len(event.items)
                for index in range(1 if each_list_once else len(event.items)):
                    out.append(
                        CountedEvent(self._ids(event, index, event.time_ms), event.time_ms, 0.0, share)
                    )
            elif isinstance(event, Engagement) and name == event.action:
                shown_list = event.shown_list
                ids = self._ids(shown_list, shown_list.items.index(event.item), event.time_ms)
                if event.time_ms - shown_list.time_ms > 24 * HOUR:
                    ids |= {"page": 0, "category": 0}
                out.append(CountedEvent(ids, event.time_ms, event.value, 0.0))
        return out

    def _ids(self, shown_list: ShownList, index: int, time_ms: int) -> dict[str, int | str]:
        hour, day = time_ms // HOUR, time_ms // (24 * HOUR)
        time = {"hour": hour % 24 + 1, "weekday": (day + 3) % 7 + 1}
        header_fields = {
            "user": shown_list.user,
            "session": shown_list.session,
            "surface": shown_list.surface,
            "page": shown_list.page,
        }
        return {
            **header_fields,
            **time,
            "item": signed_id(shown_list.items[index]),
            "category": shown_list.categories[index],
        }


def counter_value(
    counter: dict[str, Any], events: list[CountedEvent], views: list[CountedEvent], now_ms: int
) -> float | None:
    """Compute a counter by its definition in docs/schema.md."""
    aggregation = counter.get("aggregation", "count")

    def weight(counted: CountedEvent) -> float:
        if "half_life" in counter:
            return 2.0 ** ((counted.time_ms - now_ms) / duration_ms(counter["half_life"]))
        if "window" not in counter:
            return 1.0
        step_ms = duration_ms(counter["window"]) / 12
        return float(math.floor(counted.time_ms / step_ms) > math.floor(now_ms / step_ms) - 12)

    if aggregation == "expected":
        return sum(weight(counted) * counted.share for counted in events)
    if aggregation == "rate":
        return (sum(map(weight, events)) + 0.1) / (sum(map(weight, views)) + 1)
    if aggregation == "last":
        return events[-1].value if events else None
    if aggregation == "since":
        return (now_ms - events[-1].time_ms) / 1000 if events else None
    if aggregation == "age":
        return (now_ms - events[0].time_ms) / 1000 if events else 0.0
    return sum(map(weight, events))


def entity_fields(counter: dict[str, Any]) -> list[str]:
    return [counter["entity"]] if isinstance(counter["entity"], str) else counter["entity"]


def signed_id(item: int) -> int:
    return item - (1 << 64) if item >= 1 << 63 else item


def duration_ms(text: str) -> int:
    """Parse a duration such as "12m" or "1h"."""
    return int(text[:-1]) * (MINUTE if text[-1] == "m" else HOUR)


def has_all_ids(counted: CountedEvent, entity: list[str]) -> bool:
    return all(counted.ids[f] for f in entity if f != "item")


def request_lists(seed: int, now_ms: int) -> list[ShownList]:
    """Build a request for every user on every page."""
    rng = random.Random(seed)
    categories = [rng.choice(CATEGORIES) for _ in ITEMS]
    return [
        ShownList("asked", user, 1 + user % 2, "app", page, list(ITEMS), categories, now_ms)
        for user in USERS
        for page in PAGES
    ]


def assert_counters_equal_oracle(
    schema: Schema, oracle: Oracle, counters: Counters, request: ShownList, now_ms: int
) -> None:
    """Check that the counters of the request equal those of the oracle."""
    fields = FieldReader(schema).from_values(request.header, request.ro, request.nro, len(request.items))
    ro, nro = counters.read(request.user, request.items, now_ms, fields)
    for c in COUNTERS:
        if c["name"] in nro:
            values = [
                oracle.candidate_value(c, request, index, now_ms) for index in range(len(request.items))
            ]
            expected = np.array([np.nan if x is None else x for x in values], np.float32)
            np.testing.assert_allclose(
                nro[c["name"]], expected, rtol=2e-6, err_msg=f"{c['name']} of {request}"
            )
        else:
            expected_ro, got = oracle.request_value(c, request, now_ms), ro.get(c["name"])
            if isinstance(expected_ro, float):
                assert math.isclose(float(str(got)), expected_ro, rel_tol=2e-6), (c["name"], request)
            else:
                assert got == expected_ro, (c["name"], request)

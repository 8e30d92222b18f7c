"""Declared counters by their definitions, over the whole list of events, beside random events for them."""

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


def schema_with(counters: list[dict[str, Any]]) -> Schema:
    """A schema with the counters, a feature for each, and the fields that they are made of."""
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


class List(NamedTuple):
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
    of: List
    item: int
    action: str
    value: float
    time_ms: int


def random_events(seed: int, count: int) -> list[List | Engagement]:
    """In time order, each at its own millisecond; engagements are with what was shown, sometimes long ago."""
    rng = random.Random(seed)
    lists: list[List] = []
    events: list[List | Engagement] = []
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
                List(
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
            of = rng.choice(lists[-4:])
            action = rng.choice(("click", "click", "order", "like"))
            events.append(Engagement(of, rng.choice(of.items), action, float(rng.randrange(9)), time_ms))
    return events


def count(counters: Counters, reader: FieldReader, events: list[List | Engagement]) -> None:
    for e in events:
        if isinstance(e, List):
            fields = reader.from_values(e.header, e.ro, e.nro, len(e.items))
            counters.apply_impression(e.user, e.items, e.time_ms, fields)
        else:
            counters.apply_engagement(
                e.of.user, e.item, e.action, e.value, e.time_ms, reader.from_header(e.of.header)
            )


class Seen(NamedTuple):
    """One event of one entity's, as an oracle counts it."""

    ids: dict[str, int | str]
    time_ms: int
    value: float
    share: float


class Oracle:
    """Holds all events and counts them anew for each question."""

    def __init__(self, events: list[List | Engagement]) -> None:
        self.events = events
        self._known: dict[tuple[str, bool], list[Seen]] = {}

    def of_candidate(self, counter: dict[str, Any], asked: List, at: int, now_ms: int) -> float | None:
        """A candidate's value; None = missing."""
        entity = fields_of(counter)
        ids = self._ids(asked, at, now_ms)
        if any(not ids[f] for f in entity if f != "item"):
            is_new = "user" in entity and not ids["user"]
            return number(counter, [], [], now_ms) if is_new else None
        seen = [
            s
            for s in self._seen(self._event(counter))
            if all(s.ids[f] == ids[f] for f in entity) and _known(s, entity)
        ]
        views = [
            s for s in self._seen("shown") if all(s.ids[f] == ids[f] for f in entity) and _known(s, entity)
        ]
        return number(counter, seen, views, now_ms)

    def of_request(self, counter: dict[str, Any], asked: List, now_ms: int) -> Any:
        """A request's value; None = missing."""
        entity, ids = fields_of(counter), self._ids(asked, 0, now_ms)
        if any(not ids[f] for f in entity):
            return None
        events = self._seen(self._event(counter), each_list_once=counter.get("aggregation") != "distinct")
        seen = [s for s in events if all(s.ids[f] == ids[f] for f in entity)]
        how = counter.get("aggregation", "count")
        if how in ("history", "length"):
            newest = [s.ids["item"] for s in reversed(seen)][: counter["length"]]
            return newest if how == "history" else float(len(newest))
        if how == "distinct":
            after_ms = now_ms - minutes(counter["window"]) if "window" in counter else -1
            newest_of = {s.ids[counter.get("of", "item")]: s.time_ms for s in seen}
            kept = sorted((t for value, t in newest_of.items() if value), reverse=True)[
                : counter.get("length", 64)
            ]
            return float(sum(t > after_ms for t in kept))
        return number(counter, seen, [], now_ms)

    def _event(self, counter: dict[str, Any]) -> str:
        return counter.get("event", "click")

    def _seen(self, event: str, each_list_once: bool = False) -> list[Seen]:
        """Of a list each candidate, or the list once."""
        if (event, each_list_once) not in self._known:
            self._known[event, each_list_once] = self._all(event, each_list_once)
        return self._known[event, each_list_once]

    def _all(self, event: str, each_list_once: bool) -> list[Seen]:
        out = []
        for e in self.events:
            if isinstance(e, List) and event == "shown":
                places = range(1 if each_list_once else len(e.items))
                out += [Seen(self._ids(e, at, e.time_ms), e.time_ms, 0.0, 1 / len(e.items)) for at in places]
            elif isinstance(e, Engagement) and event == e.action:
                ids = self._ids(e.of, e.of.items.index(e.item), e.time_ms)
                if e.time_ms - e.of.time_ms > 24 * HOUR:
                    ids |= {"page": 0, "category": 0}
                out.append(Seen(ids, e.time_ms, e.value, 0.0))
        return out

    def _ids(self, of: List, at: int, time_ms: int) -> dict[str, int | str]:
        hour, day = time_ms // HOUR, time_ms // (24 * HOUR)
        time = {"hour": hour % 24 + 1, "weekday": (day + 3) % 7 + 1}
        own = {"user": of.user, "session": of.session, "surface": of.surface, "page": of.page}
        return {**own, **time, "item": signed_id(of.items[at]), "category": of.categories[at]}


def number(counter: dict[str, Any], seen: list[Seen], views: list[Seen], now_ms: int) -> float | None:
    """By the definition of docs/schema.md."""
    how = counter.get("aggregation", "count")

    def weight(s: Seen) -> float:
        if "half_life" in counter:
            return 2.0 ** ((s.time_ms - now_ms) / minutes(counter["half_life"]))
        if "window" not in counter:
            return 1.0
        step_ms = minutes(counter["window"]) / 12
        return float(math.floor(s.time_ms / step_ms) > math.floor(now_ms / step_ms) - 12)

    if how == "expected":
        return sum(weight(s) * s.share for s in seen)
    if how == "rate":
        return (sum(map(weight, seen)) + 0.1) / (sum(map(weight, views)) + 1)
    if how == "last":
        return seen[-1].value if seen else None
    if how == "since":
        return (now_ms - seen[-1].time_ms) / 1000 if seen else None
    if how == "age":
        return (now_ms - seen[0].time_ms) / 1000 if seen else 0.0
    return sum(map(weight, seen))


def fields_of(counter: dict[str, Any]) -> list[str]:
    return [counter["entity"]] if isinstance(counter["entity"], str) else counter["entity"]


def signed_id(item: int) -> int:
    return item - (1 << 64) if item >= 1 << 63 else item


def minutes(text: str) -> int:
    """ms of "12m" or "1h"."""
    return int(text[:-1]) * (MINUTE if text[-1] == "m" else HOUR)


def _known(s: Seen, entity: list[str]) -> bool:
    return all(s.ids[f] for f in entity if f != "item")


def asked_lists(seed: int, now_ms: int) -> list[List]:
    """A list for every user on every page."""
    rng = random.Random(seed)
    categories = [rng.choice(CATEGORIES) for _ in ITEMS]
    return [
        List("asked", user, 1 + user % 2, "app", page, list(ITEMS), categories, now_ms)
        for user in USERS
        for page in PAGES
    ]


def assert_is(schema: Schema, oracle: Oracle, counters: Counters, asked: List, now_ms: int) -> None:
    """What the counters read is what the oracle says."""
    fields = FieldReader(schema).from_values(asked.header, asked.ro, asked.nro, len(asked.items))
    ro, nro = counters.read(asked.user, asked.items, now_ms, fields)
    for c in COUNTERS:
        if c["name"] in nro:
            wanted = [oracle.of_candidate(c, asked, at, now_ms) for at in range(len(asked.items))]
            expected = np.array([np.nan if x is None else x for x in wanted], np.float32)
            np.testing.assert_allclose(nro[c["name"]], expected, rtol=2e-6, err_msg=f"{c['name']} of {asked}")
        else:
            expected_ro, got = oracle.of_request(c, asked, now_ms), ro.get(c["name"])
            if isinstance(expected_ro, float):
                assert math.isclose(float(str(got)), expected_ro, rel_tol=2e-6), (c["name"], asked)
            else:
                assert got == expected_ro, (c["name"], asked)

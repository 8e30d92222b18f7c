"""Logs as a new user has them, as joined samples in time order: public ones and generated ones.

EB-NeRD   its own schema, with the histories before the week
MIND      lists of a news portal
KuaiRand  likes and hates of videos; ten in a row of a user are a list
Criteo    impressions of ads; twenty in a row are a list, with floats and ids but no user and no item
shop      generated: items that stay, users with stable tastes
news      generated: items that live for hours and whose popularity swings
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import criteo_log, public_logs
from benchmarks.common.dataset_paths import CRITEO, EBNERD, KUAIRAND, MIND
from roostream.online.counter_seed import seed as seed_counters
from roostream.replay import ebnerd
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Event, Request, in_time_order
from roostream.replay.visitors import Visitors
from roostream.replay.world import World, WorldConfig
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema, schema_from_dict
from roostream.wire.records import Record

SCHEMA = Path(__file__).with_name("first_logs.toml")
_KUAIRAND_LIST, _CRITEO_LIST = 10, 20
_START_MS = 1_700_000_000_000
_HOUR_MS = 3_600_000


class FirstLog(NamedTuple):
    """A log to learn from."""

    events: Callable[[Schema, int], Iterable[Event]]  # schema, seed of a generator
    folder: Path | None = None  # None: generated
    schema: Callable[[], Schema] = lambda: load_schema(SCHEMA)
    prepare: Callable[[ReplayEncoder], object] = lambda encoder: None


def samples(name: str, max_requests: int, seed: int) -> tuple[Schema, list[Record]]:
    """Schema and samples of the first `max_requests` requests of a log. `seed`: of generated logs; a run of
    a public log has another seed of the model only."""
    log = LOGS[name]
    schema = log.schema()
    number = seed if log.folder is None else 0
    return schema, public_logs.cached_samples(
        f"first-{name}-{max_requests}-{number}", lambda: _joined(log, schema, max_requests, number)
    )


def _joined(log: FirstLog, schema: Schema, max_requests: int, seed: int) -> list[Record]:
    encoder = ReplayEncoder(schema)
    log.prepare(encoder)
    return public_logs.joined_samples(encoder, log.events(encoder.schema, seed), max_requests)


def _mind(schema: Schema, seed: int) -> Iterator[Event]:
    """MIND's events; histories are those that Roostream keeps."""
    for event in public_logs.mind_events():
        if isinstance(event, Request):
            yield dataclasses.replace(event, ro={"user": event.ro["user"]} if event.ro else {})
        else:
            yield event


def _kuairand(schema: Schema, seed: int) -> Iterator[Event]:
    """Lists of ten in a row of a user, at the time of the last; like and hate are the classes, so a like is
    the click."""
    authors = {}
    with (KUAIRAND / "video_features_basic_pure.csv").open(newline="") as lines:
        authors = {row["video_id"]: hash64(row["author_id"]) >> 1 for row in csv.DictReader(lines)}
    waiting: dict[str, list[dict[str, str]]] = {}
    lists: list[list[dict[str, str]]] = []
    with gzip.open(KUAIRAND / "kuairand27k_like_or_hate_kcore15.csv.gz", "rt", newline="") as text:
        for row in sorted(csv.DictReader(text, delimiter="\t"), key=lambda row: int(row["time_ms"])):
            of_user = waiting.setdefault(row["user_id"], [])
            if all(row["video_id"] != other["video_id"] for other in of_user):
                of_user.append(row)
            if len(of_user) == _KUAIRAND_LIST:
                lists.append(waiting.pop(row["user_id"]))
    for number, rows in enumerate(lists):
        items = [int(row["video_id"]) for row in rows]
        clicked = [n for n, row in enumerate(rows) if row["label"] == "1"]
        category = [[authors.get(row["video_id"], 0)] for row in rows]
        request = _request(number, int(rows[0]["user_id"]), int(rows[-1]["time_ms"]), items, category)
        yield request
        yield from (_click(request, n, 0) for n in clicked)


def _criteo(schema: Schema, seed: int) -> Iterator[Event]:
    """Lists of twenty in a row, one a second: the log has no times."""
    rows = [row for number in range(criteo_log.PARTS) for row in criteo_log.impressions(number)]
    for number in range(len(rows) // _CRITEO_LIST):
        part = rows[number * _CRITEO_LIST : (number + 1) * _CRITEO_LIST]
        nro: dict[str, Any] = {
            f"i{f + 1}": [row.floats[f] for row in part] for f in range(criteo_log.NUM_FLOATS)
        }
        for t in range(criteo_log.NUM_TABLES):
            nro[f"c{t + 1}"] = [[row.ids[t]] if row.ids[t] is not None else [] for row in part]
        items_n = np.arange(number * _CRITEO_LIST, (number + 1) * _CRITEO_LIST, dtype=np.int64) + 1
        time_ms = _START_MS + 1000 * number
        request = Request(f"r{number}", number + 1, 0, time_ms, items_n, {}, nro)
        yield request
        yield from (_click(request, n, 0) for n, row in enumerate(part) if row.label > 0)


def _generated(schema: Schema, seed: int, *, world: WorldConfig, gap_ms: float) -> Iterator[Event]:
    """Visits of users to a world, `gap_ms` apart on average; a click is 1 to 10 s after its request."""
    site = World(dataclasses.replace(world, seed=seed))
    return in_time_order(_visits(site, Visitors(site, seed, "site"), gap_ms))


def _visits(site: World, visitors: Visitors, gap_ms: float) -> Iterator[tuple[Request, list[Action]]]:
    time_ms, number = float(_START_MS), 0
    while True:
        time_ms += visitors.gap_s(1.0) * gap_ms
        visit = visitors.next(int(time_ms))
        category = [[site.category_of(item) + 1] for item in visit.items_n.tolist()]
        request = _request(number, visit.user_id, visit.time_ms, visit.items_n.tolist(), category)
        place = {item: n for n, item in enumerate(visit.items_n.tolist())}
        clicks = [
            _click(request, place[r.item_id], round(r.delay_s * 1000))
            for r in visitors.react(visit, visit.items_n, visit.time_ms)
            if r.action == "click"
        ]
        yield request, clicks
        number += 1


def _request(number: int, user: int, time_ms: int, items: list[int], category: list[list[int]]) -> Request:
    items_n = np.array(items, np.int64)
    nro = {"item": items_n, "category": category}
    return Request(f"r{number}", user, user, time_ms, items_n, {"user": [user]}, nro)


def _click(request: Request, place: int, delay_ms: int) -> Action:
    item = int(request.items_n[place])
    return Action(
        request.request_id,
        request.user_id,
        request.session_id,
        request.time_ms + delay_ms,
        hash64(f"{request.request_id}/{item}"),
        item,
        "click",
        1.0,
    )


def _criteo_schema() -> Schema:
    ids = [{"name": f"c{t}", "kind": "ids", "table": f"c{t}"} for t in range(1, criteo_log.NUM_TABLES + 1)]
    floats = [{"name": f"i{n}"} for n in range(1, criteo_log.NUM_FLOATS + 1)]
    return schema_from_dict(
        {
            "name": "criteo",
            "tables": {str(table["table"]): {"dim": 8} for table in ids},
            "nro": [*ids, *floats],
            "label": [{"name": "click", "action": "click"}],
        }
    )


def _ebnerd(schema: Schema, seed: int) -> Iterator[Event]:
    return ebnerd.events([str(EBNERD / "behaviors.parquet")], schema, _HOUR_MS)


def _histories(encoder: ReplayEncoder) -> None:
    seed_counters(encoder.counters, *ebnerd.histories([str(EBNERD / "history.parquet")]))


_SHOP = WorldConfig(
    num_users=3000, num_items=1000, item_life_ms=1 << 50, mean_candidates=12, drift=0.0, examination_power=0.3
)
_NEWS = WorldConfig(
    num_users=1000, num_items=300, item_life_ms=6 * _HOUR_MS, mean_candidates=20, examination_power=0.3
)

LOGS = {
    "EB-NeRD": FirstLog(
        _ebnerd, EBNERD, lambda: load_schema(ebnerd.Options.default_schema or ""), _histories
    ),
    "MIND": FirstLog(_mind, MIND),
    "KuaiRand": FirstLog(_kuairand, KUAIRAND),
    "Criteo": FirstLog(_criteo, CRITEO, _criteo_schema),
    "shop": FirstLog(functools.partial(_generated, world=_SHOP, gap_ms=20_000.0)),
    "news": FirstLog(functools.partial(_generated, world=_NEWS, gap_ms=20_000.0)),
}

"""Logs as a new user has them, as joined samples in time order: public ones and generated ones.

Their schemas are those that `roostream init --from` writes for their first requests.

EB-NeRD   lists of a news portal, with features of the request
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
import json
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.common import criteo_log, public_logs
from benchmarks.common.dataset_paths import CRITEO, EBNERD, KUAIRAND, MIND
from roostream.cli.init.detect_log import Choices, detect_log
from roostream.cli.init.sample_log import sample_lines
from roostream.cli.init.schema_text import schema_text
from roostream.replay import ebnerd
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Event, Request, in_time_order
from roostream.replay.visitors import Visitors
from roostream.replay.world import World, WorldConfig
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.records import Record

_DETECTED_REQUESTS = 2_000
_KUAIRAND_LIST, _CRITEO_LIST = 10, 20
_SAMPLE_REQUESTS, _SAMPLE_SEED = 6_000, 7
_START_MS = 1_700_000_000_000
_HOUR_MS = 3_600_000


class FirstLog(NamedTuple):
    """A log to learn from."""

    events: Callable[[int], Iterator[Event]]  # seed of a generator
    folder: Path | None = None  # None: generated


def samples(name: str, max_requests: int, seed: int) -> tuple[Schema, list[Record]]:
    """Schema and samples of the first `max_requests` requests of a log. `seed`: of generated logs; a run of
    a public log has another seed of the model only."""
    log = LOGS[name]
    number = seed if log.folder is None else 0
    schema = found_schema(name, log.events(number))
    return schema, public_logs.cached_samples(
        f"first-{name}-{max_requests}-{number}",
        lambda: public_logs.joined_samples(ReplayEncoder(schema), log.events(number), max_requests),
    )


def found_schema(name: str, events: Iterable[Event]) -> Schema:
    """The schema that `roostream init --from` writes for the first requests of a log."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes(b"".join(_lines(events)))
        text = schema_text(name.lower(), detect_log([str(path)], Choices()), name)
    return schema_from_dict(tomllib.loads(text))


def _lines(events: Iterable[Event]) -> Iterator[bytes]:
    """As in docs/bring-your-own-data.md. What `init` declares by itself, ids of user and item, is left
    out."""
    left = _DETECTED_REQUESTS
    for event in events:
        if isinstance(event, Action):
            line: dict[str, Any] = {"type": "engagement", "item_id": event.item_id, "action": event.action}
        elif left:
            left -= 1
            columns = {name: column for name, column in event.nro.items() if name != "item"}
            line = {
                "type": "impression",
                "ro": {k: v for k, v in (event.ro or {}).items() if k != "user" and v is not None},
                "candidates": {"item_id": event.items_n.tolist(), **columns},
            }
        else:
            return
        who = {"request_id": event.request_id, "user_id": event.user_id, "time": event.time_ms}
        yield msgspec.json.encode(who | line) + b"\n"


def _mind(seed: int) -> Iterator[Event]:
    """MIND's events; histories are those that Roostream keeps."""
    for event in public_logs.mind_events():
        if isinstance(event, Request):
            yield dataclasses.replace(event, ro={"user": event.ro["user"]} if event.ro else {})
        else:
            yield event


def _kuairand(seed: int) -> Iterator[Event]:
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


def _criteo(seed: int) -> Iterator[Event]:
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
        request = Request(f"r{number}", 0, number + 1, time_ms, items_n, {}, nro)
        yield request
        yield from (_click(request, n, 0) for n, row in enumerate(part) if row.label > 0)


def _generated(seed: int, *, world: WorldConfig, gap_ms: float) -> Iterator[Event]:
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


def _ebnerd(seed: int) -> Iterator[Event]:
    """The features that the log has; histories are those that Roostream keeps."""
    ids = [{"name": name, "kind": "ids", "table": name} for name in ("user", "device", "page")]
    floats = [{"name": name} for name in ebnerd.RO_OFFERED[len(ids) :]]
    offered = schema_from_dict(
        {
            "name": "ebnerd",
            "tables": {str(feature["name"]): {"dim": 8} for feature in ids},
            "ro": [*ids, *floats],
            "nro": [{"name": "item", "kind": "ids", "table": "user"}],
            "label": [{"name": "click", "action": "click"}],
        }
    )
    return ebnerd.events([str(EBNERD / "behaviors.parquet")], offered, _HOUR_MS)


def _sample(seed: int) -> Iterator[Event]:
    """The sample log of `roostream init`, with another seed than its own in each run."""
    for number, text in enumerate(sample_lines(_SAMPLE_REQUESTS, seed=_SAMPLE_SEED + seed)):
        line = json.loads(text)
        user = hash64(line["user_id"])
        if line["type"] == "engagement":
            item = hash64(line["item_id"]) >> 1
            value = line.get("value", 0.0)
            yield Action(line["request_id"], user, 0, line["time"], number + 1, item, line["action"], value)
            continue
        shown = line["candidates"]
        items_n = np.array([hash64(row["item_id"]) >> 1 for row in shown], np.int64)
        nro = {"category": [[hash64(row["category"]) >> 1] for row in shown]}
        nro["price"] = [row["price"] for row in shown]
        yield Request(line["request_id"], user, 0, line["time"], items_n, line["ro"], nro)


_SHOP = WorldConfig(
    num_users=3000, num_items=1000, item_life_ms=1 << 50, mean_candidates=12, drift=0.0, examination_power=0.3
)
_NEWS = WorldConfig(
    num_users=1000, num_items=300, item_life_ms=6 * _HOUR_MS, mean_candidates=20, examination_power=0.3
)

LOGS = {
    "EB-NeRD": FirstLog(_ebnerd, EBNERD),
    "MIND": FirstLog(_mind, MIND),
    "KuaiRand": FirstLog(_kuairand, KUAIRAND),
    "Criteo": FirstLog(_criteo, CRITEO),
    "sample": FirstLog(_sample),
    "shop": FirstLog(functools.partial(_generated, world=_SHOP, gap_ms=20_000.0)),
    "news": FirstLog(functools.partial(_generated, world=_NEWS, gap_ms=20_000.0)),
}

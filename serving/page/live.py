"""The live list of the front page: items of recent traffic, which a visitor clicks like any client's user.

`/page/items.json` gives the page a list to rank, as JSON texts, because ids exceed the integers of a browser.
`/page/rescored.json` scores the logged request of a click again with its features as logged. What its scores
changed is the effect of training; the rest of a change since the click is the effect of online features.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from roostream.online.counters import sources_of
from roostream.runtime.metrics_server import PAGE_HEADERS
from roostream.schema.counter_plan import USER, plan_of
from roostream.schema.ids import hash64, unsigned
from roostream.schema.schema import Schema
from roostream.wire.block import decode_block
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.scorer import probabilities
from serving.versions.loaded_versions import LoadedVersion
from serving.versions.recent_requests import ScoredRequest

REQUEST_PREFIX = "page-"  # of the page's requests; others are not scored again
NUM_ITEMS = 12
MIN_ITEMS = 2  # fewer have no order
_PER_KIND = 3
_MAX_READ = 40  # recent requests whose items are offered
_MAX_REMEMBERED = 64  # requests of clicks
_DEMO_KINDS = (
    "Politics", "Sport", "Science", "Music", "Business", "Travel", "Film", "Health", "Food", "Games", "Books",
    "Weather",
)  # fmt: skip
_DEMO_NAMES = {hash64(f"category/{i}"): name for i, name in enumerate(_DEMO_KINDS)}
"""Names for the category ids of the simulated site (roostream/replay/simulation.py)."""


class LivePage:
    """The data of the live list. `rng` chooses the items."""

    def __init__(self, context: ServingContext, rng: random.Random | None = None) -> None:
        self.context, self.schema, self.rng = context, context.schema, rng or random.Random()
        self._clicked: dict[str, ScoredRequest] = {}  # by request id, oldest first
        self._is_busy = False

    @property
    def routes(self) -> dict[str, Callable[[Request], Coroutine[Any, Any, Response]]]:
        """GET routes by path."""
        return {
            "/page/items.json": partial(_answer, self._items),
            "/page/rescored.json": partial(_answer, self._rescored),
        }

    async def _items(self, request: Request) -> dict[str, Any]:
        return self.items()

    async def _rescored(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        if self._is_busy:
            raise RequestError(429, "another list is being scored; try again", retry_after_s=1)
        self._is_busy = True
        try:
            loop, executor = asyncio.get_running_loop(), self.context.executor
            names = query.get("request_id", ""), query.get("model_version", "")
            return await loop.run_in_executor(executor, self.rescored, *names)
        finally:
            self._is_busy = False

    def items(self) -> dict[str, Any]:
        """Return a list to rank. Each call chooses other items; there are none before the first traffic."""
        schema, config = self.schema, self.context.config
        recent = self.context.recent.newest_traffic(_MAX_READ)
        rows, action = _candidates(schema, recent), _action(schema)
        kind_feature = _kind_feature(schema, rows)
        return {
            "request_prefix": REQUEST_PREFIX,
            "items": self._chosen(rows, kind_feature),
            "kind_feature": kind_feature,
            "user_features": _user_features(schema, recent),
            "item_features": _item_features(schema),
            "click_features": _click_features(schema, action),
            "online_features": [f.name for f in (*schema.ro, *schema.nro) if f.online],
            "action": action,
            "value": max((1.0, *(label.threshold for label in schema.labels if label.action == action))),
            "task": schema.tasks[self.context.service.policy.task],
            "join_window_ms": config.join_window_ms,
        }

    def rescored(self, request_id: str, model_version: str = "") -> dict[str, Any]:
        """Return the scores of a logged request when it was ranked, and those of the same features now. Call
        in the scoring thread.

        Raises:
            RequestError: 404: this process does not remember the request, or the version is not loaded; 400,
            500.
        """
        request = self._clicked.get(request_id)
        if request is None and request_id.startswith(REQUEST_PREFIX):
            request = self.context.recent.find(request_id)
        if request is None:
            raise RequestError(
                404, f"this process does not remember request {shown(request_id)!r} of this page"
            )
        self._clicked[request_id] = request
        if len(self._clicked) > _MAX_REMEMBERED:
            del self._clicked[next(iter(self._clicked))]
        service = self.context.service
        version, task = service.versions.named(model_version), service.policy.task
        now_nT = probabilities(request.score_with(version, service.rows))
        return {
            "request_ms": request.time_ms,
            "now_ms": self.context.watermark.clock.now_ms(),
            "model_version": version.name,
            "trained_up_to_ms": trained_up_to_ms(service.versions.loaded, version.name),
            "then": request.scores_nT[:, task].tolist(),
            "now": now_nT[:, task].tolist(),
        }

    def _chosen(self, rows: dict[int, dict[str, Any]], kind_feature: str) -> list[dict[str, str]]:
        """Choose NUM_ITEMS items in random order: several of each kind if the items have kinds."""
        by_kind: dict[int | None, list[int]] = {}
        for item in self.rng.sample(sorted(rows), len(rows)):
            by_kind.setdefault(_kind(rows[item], kind_feature), []).append(item)
        kinds = [k for k, items in by_kind.items() if k is not None and len(items) >= _PER_KIND]
        first = [item for kind in kinds for item in by_kind[kind][:_PER_KIND]]
        others = [item for items in by_kind.values() for item in items if item not in set(first)]
        chosen = (first[: NUM_ITEMS // _PER_KIND * _PER_KIND] + others)[:NUM_ITEMS]
        self.rng.shuffle(chosen)
        is_demo = self.schema.name == "demo"
        return [
            {
                "id": str(unsigned(item)),
                "candidate": msgspec.json.encode({"item_id": unsigned(item), "nro": rows[item]}).decode(),
                **item_names(item, _kind(rows[item], kind_feature), is_demo),
            }
            for item in (chosen if len(chosen) >= MIN_ITEMS else ())
        ]


def trained_up_to_ms(loaded: Iterable[LoadedVersion], name: str) -> int | None:
    """Event time up to which a loaded version was trained; None = unknown."""
    return next((v.trained_up_to_ms for v in loaded if v.version.name == name), 0) or None


def _candidates(schema: Schema, recent: list[ScoredRequest]) -> dict[int, dict[str, Any]]:
    """Item id → the features that clients send with it, as of the newest request that has the item."""
    filled = sources_of(schema, "nro")
    given = [f.name for f in schema.nro if f.name not in filled]
    rows: dict[int, dict[str, Any]] = {}
    for request in recent:
        columns = decode_block(schema, "nro", request.nro, len(request.item_ids))
        for i, item in enumerate(request.item_ids.tolist()):
            if item not in rows:
                values = {name: _plain(columns[name][i]) for name in given}
                rows[item] = {name: value for name, value in values.items() if value is not None}
    return rows


def _kind_feature(schema: Schema, rows: dict[int, dict[str, Any]]) -> str:
    """The first ids feature that clients send and whose first id several items share; "" if there is none."""
    for f in schema.nro:
        if f.kind == "ids" and f.name not in sources_of(schema, "nro"):
            kinds = [kind for row in rows.values() if (kind := _kind(row, f.name)) is not None]
            if 1 < len(set(kinds)) <= len(kinds) // 2:
                return f.name
    return ""


def _kind(row: dict[str, Any], kind_feature: str) -> int | None:
    return next(iter(row.get(kind_feature) or ()), None)


def _plain(value: Any) -> Any:
    """A value of a candidate as JSON; None = missing."""
    if isinstance(value, float | np.floating):
        return None if np.isnan(value) else float(value)
    return value


def item_names(item: int, kind: int | None, is_demo: bool) -> dict[str, str]:
    """Return what the page calls an item and its kind; the simulated site has names of its own."""
    if is_demo and kind is not None and unsigned(kind) in _DEMO_NAMES:
        name = _DEMO_NAMES[unsigned(kind)]
        return {"name": f"{name} story {item & 0xFFFFF}", "kind": name}
    return {"name": f"Item {unsigned(item)}", "kind": "" if kind is None else f"{unsigned(kind)}"}


def _action(schema: Schema) -> str:
    """What a click of the visitor is: the click of the online features if a label counts it."""
    actions = [label.action for label in schema.labels]
    return schema.online.click if schema.online.click in actions or not actions else actions[0]


def _user_features(schema: Schema, recent: list[ScoredRequest]) -> list[str]:
    """Request features that recent clients sent with the user's own id; the page does the same."""
    own: dict[str, bool] = {}
    for request in recent:
        values = decode_block(schema, "ro", request.ro, 1)
        for f in schema.ro:
            if f.kind == "ids" and not f.online and len(values.get(f.name) or ()) == 1:
                key = unsigned(values[f.name][0]).to_bytes(8, "little")
                own[f.name] = own.get(f.name, True) and key == request.key
    return [name for name, is_own in own.items() if is_own]


def _item_features(schema: Schema) -> list[str]:
    """Features whose ids are items: those with the table of the candidate's own id."""
    own = {name for name, source in sources_of(schema, "nro").items() if source == "item_id"}
    tables = {f.table for f in schema.nro if f.name in own}
    return [f.name for f in (*schema.nro, *schema.ro) if f.table in tables]


def _click_features(schema: Schema, action: str) -> list[str]:
    """Features that a click changes, and that nothing but this user's clicks changes."""
    counters = {
        r.counter.name
        for r in schema.derived(plan_of).readings
        if USER in r.entity.of_request
        and r.event == action
        and r.counter.aggregation in ("history", "length", "count")
        and not r.counter.half_life_ms
        and not r.counter.window_ms
    }
    return [f.name for f in (*schema.nro, *schema.ro) if f.online in counters]


async def _answer(
    call: Callable[[Request], Coroutine[Any, Any, dict[str, Any]]], request: Request
) -> Response:
    headers = dict(PAGE_HEADERS)
    try:
        return JSONResponse(await call(request), headers=headers)
    except RequestError as error:
        return JSONResponse(error.body(), error.status, {**headers, **error.headers()})

"""Generated joiner input like the demo's: impressions with about 20 candidates, engagements, pages, retries.

The mix is the simulated site's (`roostream/replay/visitors.py`): 2.2 engagements a request, a second page for
one request in seven,
3 % of the engagements sent twice. Deterministic: the same arguments give the same bytes.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from roostream.schema.ids import key_bytes
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro

START_MS = 1_700_000_000_000
LATENESS_MS = 1_000
NUM_ITEMS = 300


class Event(NamedTuple):
    """One record: arrival order is the order of the list; times are out of order by less than LATENESS_MS."""

    topic: str  # impressions | engagements
    key: bytes
    time_ms: int
    value: bytes


_USERS, _RATE = 500, 25.0


def events(schema: Schema, num_requests: int, *, seed: int = 0) -> list[Event]:
    """About 3.4 events a request, 25 requests a second of event time, in order of arrival."""
    rng, maker = random.Random(seed), Maker(schema, seed)
    arriving: list[tuple[int, int, Event]] = []
    often = [user**-0.6 for user in range(2, _USERS + 2)]
    time_ms = float(START_MS)
    for n, user in enumerate(rng.choices(range(1, _USERS + 1), often, k=num_requests)):
        time_ms += rng.expovariate(_RATE) * 1000
        for event in _request(rng, maker, f"bench-{n}", user, int(time_ms)):
            arriving.append((event.time_ms + rng.randrange(LATENESS_MS), len(arriving), event))
    return [event for _, _, event in sorted(arriving)]


def _request(rng: random.Random, maker: Maker, request_id: str, user: int, time_ms: int) -> list[Event]:
    shown = rng.sample(range(1, NUM_ITEMS + 1), rng.randrange(12, 29))
    out = [maker.impression(request_id, user, time_ms, shown)]
    if rng.random() < 0.14:
        page = [item for item in rng.sample(range(1, NUM_ITEMS + 1), 20) if item not in shown]
        out.append(
            maker.impression(request_id, user, time_ms + rng.randrange(1_000, 6_000), page, setup=False)
        )
    for _ in range(_clicks(rng)):
        item, delay_ms = rng.choice(shown), 300 + int(min(rng.expovariate(1 / 1200), 7_500))
        for action, at_ms, value in (
            ("click", delay_ms, 1.0),
            ("read", delay_ms + rng.randrange(1_200, 6_000), 20.0),
        ):
            event_id = rng.getrandbits(63) + 1
            event = maker.engagement(request_id, user, time_ms + at_ms, item, event_id, action, value)
            out += [event] * (2 if rng.random() < 0.03 else 1)
    return out


def _clicks(rng: random.Random) -> int:
    """1.1 on average, as a few likely places give them."""
    return sum(rng.random() < 0.22 for _ in range(5))


class Maker:
    """Makes single events. Feature blocks come from a few that are encoded once: the joiner copies them
    without a look."""

    def __init__(self, schema: Schema, seed: int = 0) -> None:
        self.schema = schema
        self._rng = np.random.default_rng(seed)
        self._ro = [self._ro_block() for _ in range(16)]
        self._nro: dict[int, bytes] = {}

    def impression(
        self, request_id: str, user: int, time_ms: int, items: list[int], *, setup: bool = True
    ) -> Event:
        """`opens`: with an RO block, as a request's first page has."""
        n, tasks = len(items), len(self.schema.labels)
        message = pb.Impression(
            header=self._header(request_id, user, time_ms),
            item_ids=items,
            nro=self._nro_block(n),
            scores=[0.25] * (n * tasks),
            positions=range(n),
        )
        if setup:
            message.ro = self._ro[time_ms % len(self._ro)]
        return self._event("impressions", wire.IMPRESSION, message)

    def engagement(
        self,
        request_id: str,
        user: int,
        time_ms: int,
        item: int,
        event_id: int,
        action: str = "click",
        value: float = 1.0,
    ) -> Event:
        header = self._header(request_id, user, time_ms)
        message = pb.Engagement(header=header, event_id=event_id, item_id=item, action=action, value=value)
        return self._event("engagements", wire.ENGAGEMENT, message)

    def _header(self, request_id: str, user: int, time_ms: int) -> pb.Header:
        return pb.Header(
            request_id=request_id,
            user_id=user,
            session_id=user * 1_000,
            surface="home",
            time_ms=time_ms,
            schema=self.schema.fingerprint,
            model_version="1-7",
        )

    def _event(self, topic: str, kind: int, message: pb.Impression | pb.Engagement) -> Event:
        h = message.header
        return Event(
            topic, key_bytes(h.user_id, h.session_id, h.request_id), h.time_ms, wire.encode(kind, message)
        )

    def _ro_block(self) -> bytes:
        values: dict[str, object] = {}
        for f in self.schema.ro:
            ids = self._rng.integers(1, NUM_ITEMS, 20).tolist()
            if f.kind == "float":
                values[f.name] = float(self._rng.random())
            elif f.kind == "ids":
                values[f.name] = ids[:1]
        return encode_ro(self.schema, values)

    def _nro_block(self, num_rows: int) -> bytes:
        if num_rows not in self._nro:
            columns: dict[str, object] = {}
            for f in self.schema.nro:
                if f.kind == "float":
                    columns[f.name] = self._rng.random(num_rows).astype(np.float32)
                elif f.kind == "ids":
                    columns[f.name] = self._rng.integers(1, NUM_ITEMS, num_rows)
            self._nro[num_rows] = encode_nro(self.schema, columns, num_rows)
        return self._nro[num_rows]

"""A generated stream of events as producers write it, with several users, pages, duplicates, retries,
orphans, bad records and heartbeats."""

from __future__ import annotations

import random

from roostream.schema.ids import key_bytes
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.joiner.cases import engagement, impression, record

WINDOW_MS, LATENESS_MS, HORIZON_MS = 20_000, 1_000, 60_000
START_MS = 1_700_000_000_000
SETTINGS = {
    "window_ms": WINDOW_MS,
    "lateness_ms": LATENESS_MS,
    "late_horizon_ms": HORIZON_MS,
    "next_request": "session",
    "linger_ms": 500,
    "engaged_threshold": 3,
    "terminal_actions": ("buy",),
}
Message = pb.Impression | pb.Engagement


def messages(seed: int, *, num_users: int = 12, num_requests: int = 25) -> list[Message]:
    """Distinct events and copies of some, in no order."""
    rng = random.Random(seed)
    out: list[Message] = []
    for user in range(1, num_users + 1):
        for n in range(num_requests):
            out += _request(rng, user, f"{user}-{n}", START_MS + rng.randrange(300_000))
    return out + rng.sample(out, len(out) // 20)


def _request(rng: random.Random, user: int, request: str, time_ms: int) -> list[Message]:
    session, items = rng.choice([4, 5]), rng.sample(range(1, 50), rng.randrange(1, 8))
    ids = {"request": request, "user": user, "session": session}
    out: list[Message] = [
        impression(time_ms, items, ro=rng.choice([None, 1.0, 2.0]), scores=[0.5] * (4 * len(items)), **ids)
    ]
    if rng.random() < 0.3:
        out.append(impression(time_ms + rng.randrange(25_000), [items[0], 60, 61], ro=None, tag=9.0, **ids))
    for _ in range(rng.randrange(5)):
        item = rng.choice([*items, *items, 60, 99])
        action = rng.choice(["click", "click", "dwell", "buy"])
        after_ms = rng.choice([rng.randrange(15_000), rng.randrange(40_000), rng.randrange(150_000)])
        event = rng.getrandbits(63) + 1
        out.append(
            engagement(
                time_ms + after_ms, item, event=event, action=action, value=float(rng.randrange(9)), **ids
            )
        )
    if rng.random() < 0.05:
        out.append(
            engagement(
                time_ms,
                1,
                event=rng.getrandbits(63) + 1,
                request=f"{request}-never",
                user=user,
                session=session,
            )
        )
    return out


def bad_records(time_ms: int) -> list[Record]:
    """One record of each kind that the decoder refuses. Their timestamps are `time_ms`."""
    good = impression(time_ms, [1, 2])
    key = key_bytes(good.header.user_id, good.header.session_id, good.header.request_id)
    unknown = impression(time_ms, [1])
    unknown.header.schema = 99
    infinite = engagement(time_ms, event=1, value=float("inf"))
    values = [
        b"\x01",
        b"\xff\x01nothing",
        bytes((wire.IMPRESSION, wire.VERSION)) + b"\xff\xff",
        wire.encode(wire.IMPRESSION, unknown),
        wire.encode(wire.ENGAGEMENT, infinite),
    ]
    return [Record("impressions", 0, 0, time_ms, key, v) for v in values]


def arrivals(seed: int) -> list[Record]:
    """All records in the order of production. Disorder stays within the lateness bound. Heartbeats and end
    markers are on every partition. Partition -1 means that the producer chooses by key."""
    rng = random.Random(seed)
    events = messages(seed)
    timed = [(m.header.time_ms + rng.randrange(LATENESS_MS + 1), record(m, partition=-1)) for m in events]
    middle_ms = START_MS + 150_000
    timed += [(middle_ms, r) for r in bad_records(middle_ms)]
    last_ms = max(m.header.time_ms for m in events)
    for beat_ms in range(START_MS, last_ms, 10_000):
        timed += [(beat_ms, r) for r in on_every_partition(pb.Heartbeat(time_ms=beat_ms))]
    timed.sort(key=lambda pair: pair[0])
    end = on_every_partition(pb.EndMarker(time_ms=last_ms + 2 * HORIZON_MS + LATENESS_MS + 1))
    return [r for _, r in timed] + end


def on_every_partition(message: pb.Heartbeat | pb.EndMarker) -> list[Record]:
    """A copy of the message on each partition of both topics."""
    original = record(message)
    return [
        original._replace(topic=t, partition=p, key=bytes(8))
        for t in ("impressions", "engagements")
        for p in range(4)
    ]


def with_offsets(records: list[Record]) -> list[Record]:
    """The records with the partitions and offsets that a topic would give them."""
    ends: dict[tuple[str, int], int] = {}
    out = []
    for r in records:
        partition = r.partition if r.partition >= 0 else int.from_bytes(r.key or b"", "little") % 4
        offset = ends.get((r.topic, partition), 0)
        ends[r.topic, partition] = offset + 1
        out.append(r._replace(partition=partition, offset=offset))
    return out

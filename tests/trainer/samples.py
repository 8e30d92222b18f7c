"""A small schema and samples for it. Each sample has its own user, so the pushes to a user's row count how
often the sample was trained."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from roostream.models.config import RankerConfig
from roostream.schema.ids import sample_id
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record
from trainer.deployment_identity import DeploymentIdentity

T0 = 1_700_000_000_000
NUM_ITEMS = 7
MODEL = RankerConfig(
    request_layers=(4,),
    history_attention=False,
    cross_layers=1,
    width=4,
    list_layers=0,
    list_heads=1,
    deep_layers=(4,),
    task_layers=(4,),
)


TABLES: dict[str, Any] = {
    "tables": {"user": {"dim": 2}, "item": {"dim": 4, "rule": "rowwise_adagrad"}},
    "ro": [{"name": "user", "kind": "ids", "table": "user"}, {"name": "hour", "kind": "float"}],
    "nro": [{"name": "item", "kind": "ids", "table": "item"}, {"name": "age", "kind": "float"}],
    "label": [{"name": "click", "action": "click", "fold": "any"}],
}


@cache
def schema() -> Schema:
    return schema_from_dict(TABLES)


@cache
def sample(
    number: int,
    *,
    num_candidates: int = 3,
    close_ms: int | None = None,
    user: int | None = None,
    fingerprint: int = 0,
) -> bytes:
    """Encode sample `number` (from 1). Its user is `number` unless given; its labels and features depend on
    the number only. `fingerprint`: that of another schema with the same features; 0 = that of `schema()`."""
    s, random = schema(), np.random.default_rng(number)
    items = (random.integers(0, NUM_ITEMS, num_candidates) + 1).tolist()
    time_ms = T0 + number * 1000
    message = pb.Sample(
        header=pb.Header(
            request_id=f"r{number}",
            user_id=user or number,
            time_ms=time_ms,
            schema=fingerprint or s.fingerprint,
        ),
        sample_id=number,
        close_reason=pb.CLOSE_WINDOW,
        close_ms=time_ms + 500 if close_ms is None else close_ms,
        ro=encode_ro(s, {"user": [user or number], "hour": float(number % 24)}),
        item_ids=items,
        parts=[
            pb.Part(
                nro=encode_nro(s, {"item": items, "age": random.random(num_candidates)}, num_candidates),
                num_rows=num_candidates,
            )
        ],
        labels=(random.random(num_candidates) < 0.4).astype(float).tolist(),
        weight=1.0,
    )
    return wire.encode(wire.SAMPLE, message)


KAFKA: dict[str, Any] = {"cluster_id": "c", "topics": {"samples": "1"}}


def identity(**changes: Any) -> DeploymentIdentity:
    """The identity of a deployment with one shard."""
    settings: dict[str, Any] = {"schema": schema(), "registry": {}.get, "kafka": KAFKA, "num_shards": 1}
    settings |= {"num_buckets": 64, "num_partitions": 4, "seed": 0}
    return DeploymentIdentity(**{**settings, **changes})


def correction(
    number: int, candidate: int, *, event: int = 1, after: float = 1.0, before: float | None = None
) -> Record:
    """The correction record of an engagement 10 s after the close. It sets one candidate's label to `after`.
    `before`: the label before it; that of the sample unless given."""
    message = pb.Sample.FromString(sample(number)[2:])
    message.labels_before[:] = message.labels
    if before is not None:
        message.labels_before[candidate] = before
    message.labels[:] = message.labels_before
    message.labels[candidate] = after
    message.sample_id = sample_id(number.to_bytes(8, "little"), f"r{number}", event)
    engaged_ms = message.close_ms + 10_000
    message.event_ids[:], message.event_candidates[:], message.event_times[:] = (
        [event],
        [candidate],
        [engaged_ms],
    )
    message.event_actions[:], message.event_values[:], message.actions[:] = [0], [1.0], ["click"]
    value = wire.encode(wire.CORRECTION, message)
    return Record("corrections", number % 2, 0, engaged_ms, number.to_bytes(8, "little"), value)


def with_offsets(records: list[Record]) -> list[Record]:
    """Number the records of each partition in their order."""
    ends: Counter[tuple[str, int]] = Counter()
    out = []
    for record in records:
        at = record.topic, record.partition
        out.append(record._replace(offset=ends[at]))
        ends[at] += 1
    return out


def records(numbers: list[int], *, num_partitions: int = 2) -> list[Record]:
    """One record per sample number, in this order; the number decides the partition. A repeated number is a
    second emission of the same sample."""
    out, ends = [], dict.fromkeys(range(num_partitions), 0)
    for number in numbers:
        p = number % num_partitions
        out.append(
            Record(
                "samples", p, ends[p], T0 + number * 1000 + 500, number.to_bytes(8, "little"), sample(number)
            )
        )
        ends[p] += 1
    return out

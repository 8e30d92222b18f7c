"""The first requests of a public log as joined samples, as a replay produces them, but without a stack."""

from __future__ import annotations

import dataclasses
import functools
import gzip
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.common.dataset_paths import EBNERD, MIND
from benchmarks.harness.fixture_cache import cached_bytes
from roostream.online.counter_seed import seed
from roostream.replay import ebnerd
from roostream.replay.encoder import ReplayEncoder
from roostream.replay.events import Action, Event, Request
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record

_MAX_REQUESTS = 300
_WINDOW_MS = 3_600_000


def pointwise(schema: Schema) -> Schema:
    """The schema without floats that depend on the rest of the list, and without floats made of them."""
    removed = {t.output for t in schema.transforms if t.op in ("rank", "share")}
    kept = (t for t in schema.transforms if t.op not in ("rank", "share") and t.input not in removed)
    return dataclasses.replace(schema, transforms=tuple(kept))


def ebnerd_batch() -> Batch:
    """EB-NeRD's first requests, with histories and counters of their time."""
    schema = pointwise(load_schema(ebnerd.Options.default_schema or ""))
    behaviors, history = str(EBNERD / "behaviors.parquet"), str(EBNERD / "history.parquet")
    encoder = ReplayEncoder(schema)
    seed(encoder.counters, *ebnerd.histories([history]))
    return _batch(encoder, ebnerd.events([behaviors], schema, _WINDOW_MS))


def mind_batch() -> Batch:
    """MIND's first requests, with the histories of their lines."""
    return _batch(ReplayEncoder(mind_schema()), mind_events())


def mind_events() -> Iterator[Event]:
    """In time order; a click is at its request's time."""
    categories = _categories()
    with gzip.open(MIND / "behaviors_first2000.tsv.gz", "rt", encoding="utf-8") as lines:
        rows = sorted((_time_ms(row[2]), row) for row in (line.rstrip("\n").split("\t") for line in lines))
    for time_ms, (number, user, _, history, shown) in rows:
        user_id = hash64(user)
        news, labels = zip(*(entry.rsplit("-", 1) for entry in shown.split()), strict=True)
        items_n = np.array([_news_id(name) for name in news], dtype=np.int64)
        read = history.split()[::-1]
        yield Request(
            request_id=number,
            user_id=user_id,
            session_id=0,
            time_ms=time_ms,
            items_n=items_n,
            ro={
                "user": [user_id],
                "history": {
                    "item": [_news_id(name) for name in read],
                    "category": [categories[name] for name in read],
                },
            },
            nro={"item": items_n, "category": [[categories[name]] for name in news]},
        )
        for item, label in zip(items_n.tolist(), labels, strict=True):
            if label == "1":
                yield Action(number, user_id, 0, time_ms, hash64(f"{number}/{item}"), item, "click", 1.0)


def _categories() -> dict[str, int]:
    """News → id of its category."""
    names = (MIND / "news_id_list.txt").read_text(encoding="utf-8").split()
    with gzip.open(MIND / "news_mind.tsv.gz", "rt", encoding="utf-8") as lines:
        return {name: hash64(line.split("\t")[1]) >> 1 for name, line in zip(names, lines, strict=True)}


def _news_id(name: str) -> int:
    return int(name[1:])


def _time_ms(text: str) -> int:
    return round(datetime.strptime(text, "%m/%d/%Y %I:%M:%S %p").replace(tzinfo=UTC).timestamp() * 1000)


def samples_of(name: str, users: int, history: int) -> tuple[Schema, list[Record]]:
    """`name`: EB-NeRD or MIND; `users` and `history` limit EB-NeRD only. Cached for the runs of a
    benchmark."""
    schema = ebnerd_schema(history) if name == "EB-NeRD" else mind_schema()
    make = functools.partial(ebnerd_samples, users, history) if name == "EB-NeRD" else mind_samples
    return schema, cached_samples(f"{name}-{history}-{users}", lambda: make()[1])


def cached_samples(name: str, make: Callable[[], list[Record]]) -> list[Record]:
    """The samples of `make`, cached for the runs of a benchmark."""
    return _unpacked(cached_bytes(name, lambda: _packed(make())))


def _packed(records: list[Record]) -> bytes:
    out = pa.BufferOutputStream()
    table = pa.table(
        {
            "time": [r.timestamp_ms for r in records],
            "value": pa.array([r.value for r in records], pa.large_binary()),
        }
    )
    with pa.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)
    return out.getvalue().to_pybytes()


def _unpacked(data: bytes) -> list[Record]:
    times, values = pa.ipc.open_stream(data).read_all().columns
    pairs = zip(times.to_pylist(), values.to_pylist(), strict=True)
    return [Record("samples", 0, n, time_ms, b"", value) for n, (time_ms, value) in enumerate(pairs)]


@functools.cache
def mind_samples() -> tuple[Schema, list[Record]]:
    """Samples of all of MIND's requests, in time order."""
    encoder = ReplayEncoder(mind_schema())
    return encoder.schema, list(_samples(encoder, mind_events(), 1 << 30, None))


def ebnerd_users(users: int, history: int) -> tuple[Batch, list[Record]]:
    """All requests of EB-NeRD's first `users` users in time order, with histories of up to `history` clicks,
    and the impressions that serving would have logged."""
    logged: list[Record] = []
    schema, samples = ebnerd_samples(users, history, logged)
    return Decoder(schema, {schema.fingerprint: schema}.get).decode(samples)[0], logged


def ebnerd_schema(history: int) -> Schema:
    """The shipped schema, pointwise, with histories of up to `history` clicks."""
    schema = pointwise(load_schema(ebnerd.Options.default_schema or ""))
    longer = [dataclasses.replace(f, max_len=history) if f.name == "history" else f for f in schema.ro]
    return dataclasses.replace(
        schema, ro=tuple(longer), online=dataclasses.replace(schema.online, history_len=history)
    )


def mind_schema() -> Schema:
    return load_schema(Path(__file__).parent / "mind.toml")


def ebnerd_samples(
    users: int, history: int, logged: list[Record] | None = None
) -> tuple[Schema, list[Record]]:
    """The samples of `ebnerd_users`; `logged` receives the logged impressions."""
    schema = ebnerd_schema(history)
    encoder = ReplayEncoder(schema)
    behaviors, clicks = str(EBNERD / "behaviors.parquet"), str(EBNERD / "history.parquet")
    seed(encoder.counters, *ebnerd.histories([clicks]))
    chosen = sorted(
        {hash64(str(e.user_id)): e.user_id for e in ebnerd.events([behaviors], schema, _WINDOW_MS)}.items()
    )[:users]
    raw_ids = {user for _, user in chosen}
    events = (e for e in ebnerd.events([behaviors], schema, _WINDOW_MS) if e.user_id in raw_ids)
    return encoder.schema, list(_samples(encoder, events, 1 << 30, logged))


def _batch(
    encoder: ReplayEncoder,
    events: Iterable[Event],
    max_requests: int = _MAX_REQUESTS,
    logged: list[Record] | None = None,
) -> Batch:
    schema = encoder.schema
    return Decoder(schema, {schema.fingerprint: schema}.get).decode(
        list(_samples(encoder, events, max_requests, logged))
    )[0]


def joined_samples(encoder: ReplayEncoder, events: Iterable[Event], max_requests: int) -> list[Record]:
    """Samples of the first `max_requests` requests of `events`, in time order."""
    return list(_samples(encoder, events, max_requests, None))


def _samples(
    encoder: ReplayEncoder, events: Iterable[Event], max_requests: int, logged: list[Record] | None
) -> Iterator[Record]:
    """Samples of the first `max_requests` requests; `logged` receives their logged impressions."""
    samples: dict[str, pb.Sample] = {}
    for event in events:
        if isinstance(event, Request) and len(samples) == max_requests:
            break
        record = encoder.record(event)
        if isinstance(event, Request):
            if logged is not None:
                logged.append(record)
            shown = wire.decode(record.value)[1]
            assert isinstance(shown, pb.Impression)
            samples[event.request_id] = _sample(encoder.schema, shown, len(samples) + 1)
        else:
            _fold(encoder.schema, samples[event.request_id], event)
    for number, sample in enumerate(samples.values()):
        yield Record("samples", 0, number, sample.close_ms, b"", wire.encode(wire.SAMPLE, sample))


def _sample(schema: Schema, shown: pb.Impression, number: int) -> pb.Sample:
    num_rows = len(shown.item_ids)
    return pb.Sample(
        header=shown.header,
        sample_id=number,
        close_reason=pb.CLOSE_WINDOW,
        close_ms=shown.header.time_ms + _WINDOW_MS,
        ro=shown.ro,
        item_ids=shown.item_ids,
        parts=[pb.Part(nro=shown.nro, num_rows=num_rows)],
        labels=[0.0] * (num_rows * len(schema.labels)),
        weight=1.0,
    )


def _fold(schema: Schema, sample: pb.Sample, action: Action) -> None:
    """Set the labels of an action. All labels of both logs' schemas are binary."""
    for t, label in enumerate(schema.labels):
        if label.action == action.action and action.value >= label.threshold:
            sample.labels[list(sample.item_ids).index(action.item_id) * len(schema.labels) + t] = 1.0

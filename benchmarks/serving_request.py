"""Where does the time of one rank request go, in process?

One rank request in process, in total and by stage: from the bytes of the body to the response and the log
record.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from param_server.replica.replica import Replica
from roostream.models.config import RankerConfig
from roostream.models.inputs import build_inputs
from roostream.online.entity_fields import NO_FIELDS, EntityFields
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import buckets_of
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup, build_lookup
from serving.client.messages import encode_impression
from serving.config import ServingConfig
from serving.context import ServingContext
from serving.feature_log.log import FeatureLog
from serving.http.app import HttpInterface
from serving.http.body import JSON, PROTOBUF
from serving.inflight_watermark import InflightWatermark
from serving.metrics import ServingMetrics
from serving.rank import RankService
from serving.rank_json import JsonParser
from serving.request import RequestBlocks
from serving.request_batch import RequestColumns, build_batch
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions

NOW_MS = data.T0_MS + 1_000


class Online:
    """Hydrated values that are there already: Redis is not part of this question."""

    def __init__(self, schema: Schema, candidates: int) -> None:
        rng = np.random.default_rng(2)
        ro = data.ro_values(schema, rng)
        self.ro = {f.online: ro[f.name] for f in schema.ro if f.online}
        self.nro = {
            f.online: rng.exponential(2.0, candidates).astype(np.float32) for f in schema.nro if f.online
        }

    def read(
        self, user_id: int, item_ids: np.ndarray, time_ms: int, fields: EntityFields = NO_FIELDS
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return self.ro, self.nro


class Inline(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Case:
    """A service with rows in its replica, and the body of one request."""

    def __init__(self, candidates: int) -> None:
        torch.set_num_threads(1)
        self.schema = data.demo_schema()
        self.version = first_version(self.schema, RankerConfig(), 0)
        self.replica = Replica(self.schema, 0)
        self.service = RankService(
            self.schema, LoadedVersions(self.version), self.replica, Online(self.schema, candidates)
        )
        self.parser = JsonParser(self.schema)
        self.body = body_of(self.schema, candidates)
        request = self.parser.parse(self.body)
        self.online = Online(self.schema, candidates)
        self.request = RequestColumns(*self._blocks()[2:], request.item_ids, NOW_MS)
        self.batch = build_batch(self.schema, [self.request])
        self.lookup = build_lookup(self.batch)
        fill(self.replica, self.schema, self.lookup)
        self.rows = self.replica.gather(self.lookup)

    def _blocks(self) -> RequestBlocks:
        request = self.parser.parse(self.body)
        hydrated = self.online.read(0, request.item_ids, NOW_MS)
        self.service.completion.open(request)
        return self.service.completion.encode(request, NOW_MS, *hydrated)

    # Stages, each from what the one before it gave.

    def whole(self) -> None:
        self.service.rank(self.parser.parse(self.body), NOW_MS).answer.json()

    def parse(self) -> None:
        self.parser.parse(self.body)

    def parse_and_encode(self) -> None:
        self._blocks()

    def to_batch(self) -> None:
        build_batch(self.schema, [self.request])

    def look_up(self) -> None:
        build_lookup(self.batch)

    def gather(self) -> None:
        self.replica.gather(self.lookup)

    def forward(self) -> None:
        self.version.forward(self.batch, self.lookup, self.rows)

    def modules(self) -> None:
        with torch.inference_mode():
            self.version.model(build_inputs(self.batch, self.lookup, self.rows))


@contextlib.contextmanager
def stage(name: str, candidates: int) -> Iterator[Work]:
    """`name`: a method of `Case`."""
    yield Work(getattr(Case(candidates), name))


@contextlib.contextmanager
def endpoint(candidates: int, form: str = "json") -> Iterator[Work]:
    """What the server calls for a request, without its socket: admission, the whole, the feature log, the
    answer's body. `form`: json, protobuf."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(asyncio.new_event_loop()) as loop:
        home, case = Path(folder), Case(candidates)
        settings = ServingConfig(
            schema=str(data.DEMO),
            store=str(home / "store"),
            home=home,
            bootstrap="127.0.0.1:1",
            deadline_ms=60_000,
            max_log_bytes=1 << 30,
        )
        parts = ServingContext(
            config=settings,
            schema=case.schema,
            service=case.service,
            log=FeatureLog.open(home / "log", max_bytes=1 << 33, segment_bytes=8 << 20),
            watermark=InflightWatermark(FakeClock(NOW_MS)),
            metrics=ServingMetrics(CollectorRegistry()),
            executor=Inline(),
            waiting_for=lambda: [],
        )
        asked = HttpInterface(parts)
        try:
            body = (
                case.body
                if form == "json"
                else encode_impression(msgspec.json.decode(case.body), case.schema)
            )
            media = PROTOBUF if form == "protobuf" else JSON
            yield Work(lambda: loop.run_until_complete(_answer(asked, body, media.encode())))
        finally:
            parts.log.close()


async def _answer(asked: HttpInterface, body: bytes, media: bytes) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", media), (b"accept", media)]
    await asked(
        {"type": "http", "method": "POST", "path": "/v1/rank", "headers": headers, "query_string": b""},
        receive,
        send,
    )
    assert sent[0]["status"] == 200, sent


def fill(replica: Replica, schema: Schema, lookup: Lookup) -> None:
    """Give the replica a row for every key of the lookup, as the rows topic would."""
    rng = np.random.default_rng(3)
    for stack, found in lookup.stacks.items():
        width = schema.stacks[stack][0].dim
        bucket_U = buckets_of(found.id_U, found.table_U, replica.num_buckets)
        for at in {(int(t), int(b)) for t, b in zip(found.table_U, bucket_U, strict=True)}:
            ids = found.id_U[(found.table_U == at[0]) & (bucket_U == at[1])]
            sequence = replica.version(stack, at[1])[1] + 1
            delta = pb.RowDelta(
                schema=schema.fingerprint,
                bucket=at[1],
                incarnation=1,
                sequence=sequence,
                table_id=at[0],
                dim=width,
                stack=stack,
            )
            delta.ids.extend(ids.view(np.uint64).tolist())
            delta.rows.extend(rng.normal(0, 0.1, len(ids) * width).tolist())
            replica.apply(delta)


def body_of(schema: Schema, candidates: int) -> bytes:
    """What a client of the demo sends: online features are left out."""
    rng = np.random.default_rng(1)
    items_n = distinct(data.zipf_ids(rng, 100 * candidates))[:candidates]
    assert len(items_n) == candidates
    ro = {name: value for name, value in data.ro_values(schema, rng).items() if not _online(schema, name)}
    columns = data.nro_columns(schema, rng, items_n)
    sent = {
        name: [_plain(v) for v in column]
        for name, column in columns.items()
        if not _online(schema, name) and name != "item"
    }
    rows = [
        {"item_id": int(item), "nro": {name: column[n] for name, column in sent.items()}}
        for n, item in enumerate(items_n)
    ]
    return msgspec.json.encode(
        {"request_id": "r-1", "user_id": 17, "session_id": 4, "ro": ro, "candidates": rows}
    )


def distinct(ids: np.ndarray) -> np.ndarray:
    """In order of their first."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]


def _online(schema: Schema, name: str) -> bool:
    return any(f.online for f in (*schema.ro, *schema.nro) if f.name == name)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


_HERE = "benchmarks.serving_request"
_STAGE = f"{_HERE}:stage"


def _request(candidates: int) -> Row:
    return Row(
        name=f"a request of {candidates} candidates",
        unit="requests",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("whole", _STAGE, ("whole", candidates)),
            Subject("through the endpoint, with the log", f"{_HERE}:endpoint", (candidates,), "stage"),
            Subject(
                "through the endpoint, with the log, protobuf",
                f"{_HERE}:endpoint",
                (candidates, "protobuf"),
                "stage",
            ),
            Subject("parse", _STAGE, ("parse", candidates), "stage"),
            Subject("parse, fill, encode blocks", _STAGE, ("parse_and_encode", candidates), "stage"),
            Subject("values to batch", _STAGE, ("to_batch", candidates), "stage"),
            Subject("look up keys", _STAGE, ("look_up", candidates), "stage"),
            Subject("gather rows", _STAGE, ("gather", candidates), "stage"),
            Subject("its forward pass by modules", _STAGE, ("modules", candidates), "stage"),
            Subject("forward pass alone", _STAGE, ("forward", candidates), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="serving-request",
    summary="Where does the time of one rank request go, in process?",
    rows=tuple(_request(n) for n in (20, 50, 200, 1000)),
    interpretation="""\
What is left is spread: the forward pass is one kernel (docs/decisions/0051); reading JSON, completing and encoding the blocks
that are logged, and writing the answer cost about as much each. "By modules" is what the forward pass cost before, with the
inputs that are made for modules; a user's own model goes that way. In protobuf a request saves what reading JSON costs and no
more; docs/decisions/0051 says where the rest goes, and what would make it less.

The demo schema; HTTP, Redis and Kafka left out, rows in the replica. "whole" is the body's bytes to the answer's bytes and the
record for the log. The stages are timed alone, each with the processor's caches to itself, and don't add up to the whole.
The limit is the model's forward pass on a batch and rows that are there already.""",
)

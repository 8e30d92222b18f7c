"""Where does the time of one rank request go, in process?

One rank request in process, in total and by stage: from the bytes of the body to the response and the log
record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.common import samples as data
from benchmarks.common.http_interface import NOW_MS, asgi_requests, http_interface
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from param_server.replica.replica import Replica
from roostream.models.config import RankerConfig
from roostream.models.inputs import build_inputs
from roostream.online.entity_fields import NO_FIELDS, EntityFields
from roostream.schema.ids import buckets_of
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup, build_lookup
from serving.answer import ENCODER
from serving.client.messages import encode_impression
from serving.online_features.hydration import Hydrated, HydrationRequest
from serving.rank import RankService
from serving.rank_json import JsonParser
from serving.request import RequestBlocks
from serving.request_batch import RequestColumns, build_batch
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions


class Online:
    """Online feature values from memory instead of Redis."""

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

    def read_all(self, requests: Sequence[HydrationRequest]) -> Sequence[Hydrated]:
        return [(self.ro, self.nro)] * len(requests)


class Case:
    """A rank service with rows in its replica, and one request with its intermediate results."""

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

    def whole(self) -> None:
        ENCODER.encode(self.service.rank(self.parser.parse(self.body), NOW_MS).answer)

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
def endpoint(candidates: int, form: str = "json", *, in_executor: bool = False) -> Iterator[Work]:
    """What the server calls for a request, without its socket: admission, ranking, the feature log, the
    answer's body. `form`: json, protobuf. `in_executor`: never score in the event loop, so that every call
    takes the same path, whatever recent passes took."""
    case = Case(candidates)
    case.service.row_reads_wait = in_executor
    body = case.body if form == "json" else encode_impression(msgspec.json.decode(case.body), case.schema)
    with http_interface(case.schema, case.service) as app, asgi_requests(app, body, form) as post:
        yield Work(post)


def fill(replica: Replica, schema: Schema, lookup: Lookup) -> None:
    """Give the replica a row for every key of the lookup, as the rows topic would."""
    rng = np.random.default_rng(3)
    for stack, keys in lookup.stacks.items():
        width = schema.stacks[stack][0].dim
        bucket_U = buckets_of(keys.id_U, keys.table_U, replica.num_buckets)
        pairs = {(int(t), int(b)) for t, b in zip(keys.table_U, bucket_U, strict=True)}
        for table, bucket in pairs:
            ids = keys.id_U[(keys.table_U == table) & (bucket_U == bucket)]
            delta = pb.RowDelta(
                schema=schema.fingerprint,
                bucket=bucket,
                incarnation=1,
                sequence=replica.version(stack, bucket)[1] + 1,
                table_id=table,
                dim=width,
                stack=stack,
            )
            delta.ids.extend(ids.view(np.uint64).tolist())
            delta.rows.extend(rng.normal(0, 0.1, len(ids) * width).tolist())
            replica.apply(delta)


def body_of(schema: Schema, candidates: int) -> bytes:
    """The JSON body of a request without online features."""
    rng = np.random.default_rng(1)
    items_n = distinct(data.zipf_ids(rng, 100 * candidates))[:candidates]
    assert len(items_n) == candidates
    ro = {name: value for name, value in data.ro_values(schema, rng).items() if not _online(schema, name)}
    columns = data.nro_columns(schema, rng, items_n)
    values = {
        name: [_plain(v) for v in column]
        for name, column in columns.items()
        if not _online(schema, name) and name != "item"
    }
    rows = [
        {"item_id": int(item), "nro": {name: column[n] for name, column in values.items()}}
        for n, item in enumerate(items_n)
    ]
    return msgspec.json.encode(
        {"request_id": "r-1", "user_id": 17, "session_id": 4, "ro": ro, "candidates": rows}
    )


def distinct(ids: np.ndarray) -> np.ndarray:
    """Unique ids in order of their first occurrence."""
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
"Whole" covers the body's bytes to the answer's bytes and the log record; HTTP, Redis and Kafka are left
out, and the rows are in the replica. The stages are timed alone with warm caches, so they do not add up to
the whole. The limit is the compiled forward pass on a batch and rows that exist already; "by modules" is
the same pass with torch modules, as for a custom model. Protobuf saves the cost of parsing JSON and nothing
else (decision 0051).""",
)

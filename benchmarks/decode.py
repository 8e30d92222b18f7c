"""How fast does a poll become a batch?

Decodes the messages of a Kafka poll: our decoder, and protobuf message by message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.record_source import build_chunk


def _records(requests: int, candidates: int) -> tuple[Schema, list[Record]]:
    schema = data.demo_schema()
    return schema, data.sample_records(schema, requests, candidates=candidates)


@contextlib.contextmanager
def ours(requests: int, candidates: int) -> Iterator[Work]:
    """Messages → records → chunk: batch, rejects and progress, as the worker's source makes it."""
    schema, records = _records(requests, candidates)
    messages: list[tuple[Any, ...]] = [tuple(record) for record in records]
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    yield Work(lambda: build_chunk([Record(*message) for message in messages], decoder, 0), requests)


@contextlib.contextmanager
def protobuf(requests: int, candidates: int) -> Iterator[Work]:
    """Messages → parsed one by one → the same columns by numpy; nothing is checked."""
    schema, records = _records(requests, candidates)
    messages: list[tuple[Any, ...]] = [tuple(record) for record in records]
    yield Work(lambda: plain_decode(schema, [Record(*message) for message in messages]), requests)


@contextlib.contextmanager
def memcpy(requests: int, candidates: int) -> Iterator[Work]:
    _, records = _records(requests, candidates)
    yield Work(lambda: np.frombuffer(b"".join(r.value for r in records), np.uint8).copy(), requests)


def plain_decode(schema: Schema, records: Sequence[Record]) -> dict[str, np.ndarray]:
    """The columns of a batch by protobuf and numpy, without kernels and checks."""
    samples = [pb.Sample.FromString(record.value[2:]) for record in records]
    out = {
        "time_ms_R": np.array([s.header.time_ms for s in samples]),
        "close_ms_R": np.array([s.close_ms for s in samples]),
        "sample_id_R": np.array([s.sample_id for s in samples], np.uint64),
        "item_B": np.concatenate([np.array(s.item_ids, np.uint64) for s in samples]),
        "label_BT": np.concatenate([np.array(s.labels, np.float32) for s in samples]).reshape(
            -1, len(schema.labels)
        ),
    }
    ro = [pb.Block.FromString(s.ro) for s in samples]
    nro = [pb.Block.FromString(part.nro) for s in samples for part in s.parts]
    for side, blocks in (("ro", ro), ("nro", nro)):
        floats, lists = schema.floats(side), schema.lists(side)  # type: ignore[arg-type]
        float_NF = np.concatenate([np.array(b.floats, np.float32) for b in blocks]).reshape(-1, len(floats))
        default_F = np.array([f.default for f in floats], np.float32)
        out[f"{side}_present"] = ~np.isnan(float_NF)
        out[f"{side}_float"] = np.where(out[f"{side}_present"], float_NF, default_F)
        out[f"{side}_lengths"] = (
            np.concatenate([np.array(b.lengths, np.int32) for b in blocks]).reshape(-1, len(lists)).T
        )
        out |= _plain_lists(side, blocks, len(lists), [1 + len(f.id_columns) for f in lists])
        out[f"{side}_times"] = np.concatenate([np.array(b.times, np.int64) for b in blocks])
    return out


def _plain_lists(
    side: str, blocks: Sequence[pb.Block], num_lists: int, columns_K: Sequence[int]
) -> dict[str, np.ndarray]:
    """Ids of each list feature over all blocks, which store them by row."""
    ids_K: list[list[np.ndarray]] = [[] for _ in range(num_lists)]
    for block in blocks:
        ids, start = np.array(block.ids, np.uint64), 0
        for n, length in enumerate(block.lengths):
            width = length * columns_K[n % num_lists]
            ids_K[n % num_lists].append(ids[start : start + width])
            start += width
    return {f"{side}_ids_{k}": np.concatenate(parts) for k, parts in enumerate(ids_K)}


_HERE = "benchmarks.decode"


def _decode(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"a poll of {requests} samples of {candidates} candidates",
        unit="samples",
        clock="cpu",
        subjects=(
            Subject("chunk", f"{_HERE}:ours", size),
            Subject("protobuf-python + numpy", f"{_HERE}:protobuf", size, "peer"),
            Subject("memcpy of the bytes", f"{_HERE}:memcpy", size, "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="decode",
    summary="How fast does a poll become a batch?",
    rows=(_decode(64, 11), _decode(512, 5), _decode(64, 200)),
    interpretation="""\
The figure covers a poll's messages to the batch that is trained, with rejects and progress, and checks of
every shape, limit and number. The peer parses message by message with protobuf-python (upb) and builds the
same columns with numpy, without checks. The demo schema, histories of 30. Decoding dominates over copying,
as the memcpy of the same bytes shows.""",
)

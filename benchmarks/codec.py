"""How fast are samples decoded into a batch, and blocks encoded?

Decodes samples into a batch and encodes feature blocks: our codec, plain protobuf with numpy, and a copy of
the same bytes.
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
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.decode import Decoder
from roostream.wire.records import Record


def _records(count: int, candidates: int) -> tuple[Schema, list[Record]]:
    schema = data.demo_schema()
    return schema, data.sample_records(schema, count, candidates=candidates)


@contextlib.contextmanager
def decode_ours(count: int, candidates: int) -> Iterator[Work]:
    schema, records = _records(count, candidates)
    decoder = Decoder(schema, {schema.fingerprint: schema}.get)
    yield Work(lambda: decoder.decode(records), count)


@contextlib.contextmanager
def decode_protobuf(count: int, candidates: int) -> Iterator[Work]:
    """What one would write without kernels: parse each message, one array a field and feature,
    concatenate."""
    schema, records = _records(count, candidates)
    yield Work(lambda: plain_decode(schema, records), count)


@contextlib.contextmanager
def copy_bytes(count: int, candidates: int) -> Iterator[Work]:
    _, records = _records(count, candidates)
    source = np.frombuffer(b"".join(r.value for r in records), np.uint8)
    target = np.empty_like(source)
    yield Work(lambda: np.copyto(target, source), count)


@contextlib.contextmanager
def encode_ours(count: int, candidates: int) -> Iterator[Work]:
    """The two blocks of each request, from the values that serving has."""
    schema, requests = _values(count, candidates)

    def step() -> None:
        for ro, nro in requests:
            encode_ro(schema, ro)
            encode_nro(schema, nro, candidates)

    yield Work(step, count)


@contextlib.contextmanager
def encode_protobuf(count: int, candidates: int) -> Iterator[Work]:
    """One message a block, values appended one by one."""
    schema, requests = _values(count, candidates)

    def step() -> None:
        for ro, nro in requests:
            _plain_ro(schema, ro).SerializeToString()
            _plain_nro(schema, nro, candidates).SerializeToString()

    yield Work(step, count)


@contextlib.contextmanager
def copy_blocks(count: int, candidates: int) -> Iterator[Work]:
    schema, requests = _values(count, candidates)
    blocks = b"".join(encode_ro(schema, ro) + encode_nro(schema, nro, candidates) for ro, nro in requests)
    source = np.frombuffer(blocks, np.uint8)
    target = np.empty_like(source)
    yield Work(lambda: np.copyto(target, source), count)


def _values(count: int, candidates: int) -> tuple[Schema, list[tuple[dict[str, Any], dict[str, Any]]]]:
    schema, requests = data.demo_schema(), []
    for number in range(count):
        rng = np.random.default_rng(number)
        items_n = data.zipf_ids(rng, candidates)
        requests.append((data.ro_values(schema, rng), data.nro_columns(schema, rng, items_n)))
    return schema, requests


def plain_decode(schema: Schema, records: Sequence[Record]) -> dict[str, np.ndarray]:
    """The columns that a batch has, by protobuf and numpy: floats, ids, lengths and labels of all
    requests."""
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
    """Ids of each list feature over all blocks: blocks have them by row, a batch has them by feature."""
    found: list[list[np.ndarray]] = [[] for _ in range(num_lists)]
    for block in blocks:
        ids, at = np.array(block.ids, np.uint64), 0
        for n, length in enumerate(block.lengths):
            width = length * columns_K[n % num_lists]
            found[n % num_lists].append(ids[at : at + width])
            at += width
    return {f"{side}_ids_{k}": np.concatenate(parts) for k, parts in enumerate(found)}


def _plain_ro(schema: Schema, values: dict[str, Any]) -> pb.Block:
    return _plain_block(schema, "ro", [values])


def _plain_nro(schema: Schema, columns: dict[str, Any], num_rows: int) -> pb.Block:
    return _plain_block(
        schema, "nro", [{name: column[n] for name, column in columns.items()} for n in range(num_rows)]
    )


def _plain_block(schema: Schema, side: str, rows: list[dict[str, Any]]) -> pb.Block:
    block = pb.Block()
    for row in rows:
        block.floats.extend(float(row[f.name]) for f in schema.floats(side))  # type: ignore[arg-type]
        for f in schema.lists(side):  # type: ignore[arg-type]
            value = row[f.name]
            if isinstance(value, dict):
                ids, *_ = value.values()
                block.lengths.append(len(ids))
                block.ids.extend(ids)
                for column in f.id_columns:
                    block.ids.extend(value[column])
                for column in f.time_columns:
                    block.times.extend(value[column])
            else:
                ids = value if isinstance(value, list) else [int(value)]
                block.lengths.append(len(ids))
                block.ids.extend(ids)
    return block


_HERE = "benchmarks.codec"


def _decode(candidates: int) -> Row:
    size = (64, candidates)
    return Row(
        name=f"decode 64 samples of {candidates} candidates",
        unit="samples",
        clock="cpu",
        subjects=(
            Subject("decoder", f"{_HERE}:decode_ours", size),
            Subject("plain protobuf + numpy", f"{_HERE}:decode_protobuf", size, "peer"),
            Subject("memcpy of the bytes", f"{_HERE}:copy_bytes", size, "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="codec",
    summary="How fast are samples decoded into a batch, and blocks encoded?",
    rows=(
        _decode(20),
        _decode(200),
        Row(
            name="encode the blocks of 64 requests of 20 candidates",
            unit="requests",
            clock="cpu",
            subjects=(
                Subject("encoder", f"{_HERE}:encode_ours", (64, 20)),
                Subject("plain protobuf", f"{_HERE}:encode_protobuf", (64, 20), "peer"),
                Subject("memcpy of the bytes", f"{_HERE}:copy_blocks", (64, 20), "limit"),
            ),
        ),
    ),
    interpretation="""\
Decoding is five to six times as fast as the plain way, encoding about as fast although it checks everything.

The demo schema, histories of 30. The decoder checks every shape, cap and number, which the plain one does not; it still has to
beat it, since every poll of a worker is decoded. What separates it from memcpy is the walk over fields, not the copying.""",
)

"""Logs for the selection benchmarks: Criteo's sample in six parts, and a generated log for machines without
it.

Criteo: 6 parts of 10,000 impressions, 13 floats, 26 ids, a click in 3.2 %. Each impression is a request with
one candidate.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.common.dataset_paths import CRITEO
from benchmarks.harness.fixture_cache import cached_bytes
from roostream.schema.ids import splitmix64
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record

PARTS, NUM_FLOATS, NUM_TABLES = 6, 13, 26
_T0_MS = 1_700_000_000_000
_GENERATED_ROWS = 2_000  # of a part


def has_criteo() -> bool:
    return len(list(CRITEO.glob("part-*.orc"))) == PARTS


@functools.cache
def schema() -> Schema:
    tables = {f"c{t}": {"dim": 16} for t in range(1, NUM_TABLES + 1)}
    ids = [{"name": f"c{t}", "kind": "ids", "table": f"c{t}"} for t in range(1, NUM_TABLES + 1)]
    floats = [{"name": f"i{n}", "kind": "float"} for n in range(1, NUM_FLOATS + 1)]
    return schema_from_dict(
        {
            "tables": tables,
            "nro": [*ids, *floats],
            "label": [{"name": "click", "action": "click", "fold": "any"}],
        }
    )


@functools.cache
def part(number: int, *, criteo: bool, max_records: int | None = None) -> tuple[Record, ...]:
    """The first `max_records` impressions of a part (None = all) as samples, each its own request."""
    name = f"selection-{'criteo' if criteo else 'generated'}-{number}-{max_records or 'all'}"
    encoded = cached_bytes(
        name, lambda: msgspec.msgpack.encode(_messages(number, criteo=criteo, max_records=max_records))
    )
    first = number * 1_000_000
    return tuple(
        _record(first + n, value) for n, value in enumerate(msgspec.msgpack.decode(encoded, type=list[bytes]))
    )


def _messages(number: int, *, criteo: bool, max_records: int | None) -> list[bytes]:
    labels, floats, ids = _criteo(number, max_records) if criteo else _generated(number)
    first, rows = number * 1_000_000, itertools.islice(zip(labels, floats, ids, strict=True), max_records)
    return [_message(first + n, label, float_F, id_K) for n, (label, float_F, id_K) in enumerate(rows)]


def _record(number: int, value: bytes) -> Record:
    return Record("samples", 0, number, _T0_MS + number, splitmix64(number).to_bytes(8, "little"), value)


def _message(number: int, label: float, floats: list[float | None], ids: list[int | None]) -> bytes:
    values = {f"i{n + 1}": [x] for n, x in enumerate(floats)} | {
        f"c{t + 1}": [[i] if i is not None else []] for t, i in enumerate(ids)
    }
    present = {name: value for name, value in values.items() if value[0] is not None}
    time_ms = _T0_MS + number
    message = pb.Sample(
        header=pb.Header(
            request_id=f"r{number}", user_id=number + 1, time_ms=time_ms, schema=schema().fingerprint
        ),
        sample_id=splitmix64(number),
        close_reason=pb.CLOSE_WINDOW,
        close_ms=time_ms,
        ro=encode_ro(schema(), {}),
        item_ids=[number + 1],
        parts=[pb.Part(nro=encode_nro(schema(), present, 1), num_rows=1)],
        labels=[label],
        weight=1.0,
    )
    return wire.encode(wire.SAMPLE, message)


class CriteoImpression(NamedTuple):
    """A row of Criteo's sample; None = missing."""

    label: float
    floats: list[float | None]
    ids: list[int | None]


def impressions(number: int) -> list[CriteoImpression]:
    """The rows of a part of Criteo's sample."""
    return [CriteoImpression(*row) for row in zip(*_criteo(number, None), strict=True)]


def _criteo(
    number: int, max_records: int | None
) -> tuple[list[float], list[list[float | None]], list[list[int | None]]]:
    from pyarrow import orc

    table = orc.read_table(CRITEO / f"part-{number}.orc").slice(0, max_records).to_pydict()

    def column(name: str) -> list[Any]:
        return [x[0] if x else None for x in table[name]]

    floats = [column(f"i{n}") for n in range(1, NUM_FLOATS + 1)]
    ids = [column(f"c{t}") for t in range(1, NUM_TABLES + 1)]
    labels = [float(x[0] if isinstance(x, list) else x) for x in table["label"]]
    return labels, [*map(list, zip(*floats, strict=True))], [*map(list, zip(*ids, strict=True))]


def _generated(number: int) -> tuple[list[float], list[list[float | None]], list[list[int | None]]]:
    """Zipf ids, each with an effect on the click that is the same in all parts."""
    random = np.random.default_rng(number)
    ids = np.minimum(random.zipf(1.3, (_GENERATED_ROWS, NUM_TABLES)), 5_000)
    effect = np.random.default_rng(99).normal(0, 0.4, (NUM_TABLES, 5_001))
    odds = -3.5 + effect[np.arange(NUM_TABLES), ids].sum(axis=1)
    labels = (random.random(_GENERATED_ROWS) < 1 / (1 + np.exp(-odds))).astype(float)
    floats = random.exponential(1.0, (_GENERATED_ROWS, NUM_FLOATS))
    return labels.tolist(), floats.tolist(), ids.tolist()

"""A few batches of requests with about equally many impressions, trained repeatedly."""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks.common import samples as data
from benchmarks.common.public_logs import ebnerd_batch, mind_batch
from benchmarks.common.rebatch import cut
from roostream.schema.schema_file import load_schema
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder

HISTORY = 50
_LOGS = {"EB-NeRD": ebnerd_batch, "MIND": mind_batch}


@functools.cache
def pool(of: str | int, size: int, batches: int) -> tuple[Batch, ...]:
    """`of`: a log, or how many candidates every made-up request has; `size`: impressions a batch."""
    batch = _made_up(of, size * batches // of) if isinstance(of, int) else _log(of)
    return tuple(cut(batch, size)[:batches])


def _made_up(candidates: int, requests: int) -> Batch:
    schema = load_schema(Path(__file__).parent / "site.toml")
    records = data.sample_records(schema, requests, candidates=candidates, history=HISTORY)
    return Decoder(schema, {schema.fingerprint: schema}.get).decode(records)[0]


@functools.cache
def _log(name: str) -> Batch:
    return _LOGS[name]()

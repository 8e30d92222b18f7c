"""The training loop over samples in memory, with one shard in the same process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.train_step import Silent
from roostream.models.config import RankerConfig
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.schema.schema import Schema
from roostream.schema.settings import from_dict
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.config import LoopConfig
from trainer.loop import LoopDependencies, TrainLoop
from trainer.record_source import RecordSource
from trainer.rows import Rows

_AT = (("samples", 0),)


def build_loop(
    schema: Schema, records: list[Record], model: RankerConfig, settings: Mapping[str, Any], rows: Rows
) -> TrainLoop:
    """`records`: of one partition, offsets from 0; `settings`: as in a worker's TOML, `batch_requests` among
    them, which batches have from the first on."""
    given = {"first_batch_requests": settings["batch_requests"], "dedupe_horizon_ms": 1 << 40, **settings}
    clock = SystemClock()
    source = RecordSource(
        MemoryConsumer(_AT, records), Decoder(schema, {schema.fingerprint: schema}.get), clock, max_wait_ms=0
    )
    wiring = LoopDependencies(source=source, rows=rows, outputs=Silent(), clock=clock)
    return TrainLoop(from_dict(LoopConfig, given), schema, model, wiring)

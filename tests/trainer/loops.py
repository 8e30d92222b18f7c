"""A training loop over records in memory and one fake shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from roo import roo_pb2 as pb
from roo.wire import Record
from runtime.clock import FakeClock
from runtime.transport import InMemoryTransport
from tests.trainer import samples
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.memory_store import MemoryStore
from trainer.config import LoopConfig
from trainer.loop import TrainLoop
from trainer.source import ListSource


@dataclasses.dataclass
class Built:
    loop: TrainLoop
    source: ListSource
    shard: FakeShard
    transport: InMemoryTransport
    clock: FakeClock
    predicted: list[pb.Prediction]
    letters: list[pb.DeadLetter]
    stages: list[tuple[str, float]]

    def train_all(self) -> Built:
        while self.loop.step() or self.loop.finish():
            pass
        return self

    def pushes(self, table: str = "user") -> dict[int, int]:
        id_ = samples.schema().table_by_name[table].id
        return {i: row.pushes for (t, i), row in self.shard.rows.items() if t == id_}


def build(records: Sequence[Record], **settings: Any) -> Built:
    schema, clock = samples.schema(), FakeClock(samples.T0)
    shard = FakeShard(0, schema, MemoryStore(), {})
    shard.restored = True
    transport = InMemoryTransport(shard.handle)
    predicted: list[pb.Prediction] = []
    letters: list[pb.DeadLetter] = []
    stages: list[tuple[str, float]] = []
    source = ListSource(records, num_partitions=2)
    loop = TrainLoop(
        LoopConfig(**{"batch_requests": 4, **settings}),
        schema,
        samples.MODEL,
        source,
        FakeRows(schema, [transport]),
        predicted.append,
        letters.append,
        clock,
        on_freshness=lambda stage, ms: stages.append((stage, ms)),
    )
    return Built(loop, source, shard, transport, clock, predicted, letters, stages)

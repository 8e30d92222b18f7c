"""Builds a training loop over records in memory and one fake shard."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.fake_shard import FakeRows, FakeShard
from tests.trainer.memory_store import MemoryStore
from trainer.config import LoopConfig
from trainer.loop import LoopDependencies, TrainLoop
from trainer.predictions import Prediction
from trainer.record_source import RecordSource
from trainer.rows import ShardRows

PARTITIONS = (("samples", 0), ("samples", 1))


class MemoryOutputs:
    """In-memory `DurableOutputs`. `flush_error` makes a flush fail. `refusal`: why the broker refused a
    message. `full`: a prediction waits in the full queue until `interrupt`."""

    def __init__(self) -> None:
        self.predicted: list[pb.Prediction] = []
        self.letters: list[pb.DeadLetter] = []
        self.num_flushes = self.num_begun = 0
        self.flush_error = self.refusal = ""
        self.full = False
        self.is_waiting, self._interrupted = threading.Event(), threading.Event()

    def begin(self) -> None:
        self.num_begun += 1
        self.refusal = ""
        self._interrupted.clear()

    def refused(self) -> str:
        return self.refusal

    def interrupt(self) -> None:
        self._interrupted.set()

    def prediction(self, prediction: Prediction) -> None:
        if self.full:
            self.is_waiting.set()
            assert self._interrupted.wait(10)
            raise UnavailableError("the queue is full")
        _, message = wire.decode(prediction.value)
        assert isinstance(message, pb.Prediction)
        self.predicted.append(message)

    def dead_letter(self, letter: pb.DeadLetter) -> None:
        self.letters.append(letter)

    def flush(self) -> None:
        if self.flush_error or self.refusal:
            raise UnavailableError(self.flush_error or self.refusal)
        self.num_flushes += 1


@dataclasses.dataclass
class Built:
    """A training loop and the fakes around it. `stages`: the reported freshness (stage, ms)."""

    loop: TrainLoop
    reader: MemoryConsumer
    shard: FakeShard
    transport: InMemoryTransport
    clock: FakeClock
    outputs: MemoryOutputs
    stages: list[tuple[str, float]]

    @property
    def predicted(self) -> list[pb.Prediction]:
        return self.outputs.predicted

    @property
    def letters(self) -> list[pb.DeadLetter]:
        return self.outputs.letters

    def train_all(self) -> Built:
        while self.loop.step() or self.loop.finish():
            pass
        self.loop.feed.drain()  # the last push may not be finished yet
        return self

    def offsets(self) -> list[int]:
        """The next offsets to train in partitions 0 and 1."""
        return [self.loop.partitions.progress[partition] for partition in PARTITIONS]

    def bits(self) -> dict[str, bytes]:
        """The bytes of all weights, rows and optimizer states."""
        shared = {name: value.tobytes() for name, value in self.loop.snapshot().shared.items()}
        return shared | self.shard.bits()

    def pushes(self, table: str = "user") -> dict[int, int]:
        id_ = samples.schema().table_by_name[table].id
        return {i: row.pushes for (t, i), row in self.shard.rows.items() if t == id_}


def build(
    records: Sequence[Record],
    *,
    partitions: tuple[Partition, ...] = PARTITIONS,
    rewire: Callable[[LoopDependencies], LoopDependencies] = lambda dependencies: dependencies,
    **settings: Any,
) -> Built:
    """Build a loop. `rewire` may replace its dependencies; `settings` are those of `LoopConfig`."""
    schema, clock = samples.schema(), FakeClock(samples.T0)
    shard = FakeShard(0, schema, MemoryStore(), {})
    shard.restored = True
    transport = InMemoryTransport(shard.handle)
    stages: list[tuple[str, float]] = []
    reader = MemoryConsumer(partitions, [r for r in records if (r.topic, r.partition) in partitions])
    outputs = MemoryOutputs()
    whole = {"batch_requests": 4, **settings}
    config = LoopConfig(**{"first_batch_requests": whole["batch_requests"], **whole})
    dependencies = LoopDependencies(
        source=RecordSource(reader, Decoder(schema, {}.get), clock, max_wait_ms=config.max_batch_wait_ms),
        rows=ShardRows(FakeRows(schema, [transport])),  # type: ignore[arg-type]
        outputs=outputs,
        clock=clock,
        on_freshness=lambda stage, ms: stages.append((stage, ms)),
    )
    loop = TrainLoop(config, schema, samples.MODEL, rewire(dependencies))
    return Built(loop, reader, shard, transport, clock, outputs, stages)


def assert_a_restored_loop_continues_bit_equal(
    records: Sequence[Record], steps: int, **settings: Any
) -> tuple[Built, Built]:
    """Take a snapshot of a loop after some steps, restore another loop from it, and check that both end with
    the same bits and the same predictions. Returns both."""
    original, restored = build(records, **settings), build(records, **settings)
    for _ in range(steps):
        original.loop.step()
    snapshot = original.loop.snapshot()
    rows = {key: row.copy() for key, row in original.shard.rows.items()}
    num_before = len(original.predicted)
    restored.loop.step()
    restored.shard.rows = rows
    restored.loop.restore(snapshot)
    restored.predicted.clear()
    assert restored.train_all().bits() == original.train_all().bits()
    assert restored.predicted == original.predicted[num_before:]
    return original, restored

"""A replay in this process, without Kafka and Flink: the same `join.py`, training loop and shards, called directly.

records ─► LocalEngine ─► samples, by close time ─► TrainLoop ─► shards behind in-memory transports
   └──────────┴──────────────────┴──────────────────────┴──► accounts, metrics
"""

from __future__ import annotations

import heapq
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping

from command.accounts import Accounts
from command.replay.prediction_metrics import PredictionMetrics
from command.replay.stage import Outcome, Stage, joiner_settings
from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from models.build import load_model_config
from param_server.blobs import MemoryBlobs
from param_server.calls import Calls
from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.segments import Segments
from param_server.server import Shard
from param_server.table import shapes_of
from roo import roo_pb2 as pb
from roo import wire
from roo.ids import key_bytes
from roo.schema import Schema
from roo.wire import Record
from runtime.checkpoint_store import FileStore
from runtime.clock import SystemClock
from runtime.program import Stop
from runtime.topics import DEAD_LETTERS, PARTITIONS, PREDICTIONS, SAMPLES
from runtime.transport import InMemoryTransport
from traffic.config import ReplayConfig
from traffic.partition import partition_of
from trainer.config import LoopConfig
from trainer.loop import TrainLoop
from trainer.source import PartitionLag


def replay_in_process(config: ReplayConfig, schema: Schema, records: Iterable[Record], stage: Stage, stop: Stop) -> Outcome:
    """Memory: the joiner's open window, the rows, and the audit of the ids."""
    with tempfile.TemporaryDirectory(prefix="roostream-replay-") as store:
        return _Local(config, schema, FileStore(store)).run(records, stage, stop)


class ReadySamples:
    """A trainer `Source` that holds only what waits to be trained: oldest close first, as the worker's merge of partitions is.
    Offsets count samples; there is no way back, so only the beginning can be sought."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, Record]] = []
        self._given = dict.fromkeys(range(PARTITIONS[SAMPLES]), 0)
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, record: Record) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (record.timestamp_ms, record.partition, self._count, record))

    def poll(self, max_records: int, timeout_s: float, partition: int | None = None) -> list[Record]:
        assert partition is None, "exact mode needs a source with partitions"
        taken = [heapq.heappop(self._waiting)[3] for _ in range(min(max_records, len(self._waiting)))]
        for record in taken:
            self._given[record.partition] = record.offset + 1
        return taken

    def seek(self, offsets: Mapping[int, int]) -> None:
        assert not any(offsets.values()) and self._count == 0, "a replay in one process has no way back"

    def positions(self) -> dict[int, int]:
        return dict(self._given)

    def end_offsets(self) -> dict[int, int]:
        return dict(self._given)

    def lag(self) -> dict[int, PartitionLag]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


class _Local:
    """The parts, wired."""

    def __init__(self, config: ReplayConfig, schema: Schema, store: FileStore) -> None:
        self.schema = schema
        self.accounts = Accounts()
        self.metrics = PredictionMetrics(schema.tasks, config.measure_from_ms)
        self.samples = ReadySamples()
        self.offsets: Counter[tuple[str, int]] = Counter()
        registry = {schema.fingerprint: schema}.get
        self.joiner = LocalEngine(JoinerConfig(engine="local", **joiner_settings(config)), schema, registry)
        client = Client(schema, _shards(config, schema, store), seed=config.seed, worker=0)
        client.set_incarnation(1)
        settings = LoopConfig(
            batch_requests=config.batch_requests,
            max_batch_wait_ms=3_600_000,
            seed=config.seed,
            freeze_at_ms=config.freeze_weights_at_ms,
        )
        self.loop = TrainLoop(
            settings,
            schema,
            load_model_config(config.model),
            self.samples,
            client,
            self._predicted,
            self._rejected,
            SystemClock(),
        )

    def run(self, records: Iterable[Record], stage: Stage, stop: Stop) -> Outcome:
        for record in records:
            if stop.is_set():
                break
            placed = record._replace(offset=self._next_offset(record.topic, record.partition))
            self.accounts.add(placed)
            self._write(self.joiner.process(placed))
            if len(self.samples) >= self.loop.config.batch_requests:
                self._train(stage)
        self._write(self.joiner.end_of_input())
        self._train(stage)
        self.loop.step()
        self.loop.finish()
        stage.at(trained=self.loop.counts.requests)
        untrained = self.accounts.untrained_below(self.accounts.sample_ends)
        return Outcome(accounts=self.accounts, metrics=self.metrics, untrained=untrained)

    def _train(self, stage: Stage) -> None:
        while len(self.samples) >= self.loop.config.batch_requests:
            self.loop.step()
        stage.at(joined=self.accounts.sums().samples, trained=self.loop.counts.requests)

    def _write(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            time_ms = output.timestamp_ms if output.timestamp_ms is not None else self.joiner.watermark_ms
            record = self._add(output.topic, output.key, output.value, time_ms)
            if record.topic == SAMPLES:
                self.samples.put(record)

    def _predicted(self, prediction: pb.Prediction) -> None:
        value = wire.encode(wire.PREDICTION, prediction)
        self.metrics.add(self._add(PREDICTIONS, prediction.sample_id.to_bytes(8, "little"), value, prediction.time_ms))

    def _rejected(self, letter: pb.DeadLetter) -> None:
        self._add(DEAD_LETTERS, key_bytes(0, 0), wire.encode(wire.DEAD_LETTER, letter), 0)

    def _add(self, topic: str, key: bytes, value: bytes, time_ms: int) -> Record:
        """A record of an output topic, at the place that Kafka would give it, counted."""
        partition = partition_of(key, PARTITIONS[topic])
        record = Record(topic, partition, self._next_offset(topic, partition), time_ms, key, value)
        self.accounts.add(record)
        return record

    def _next_offset(self, topic: str, partition: int) -> int:
        self.offsets[topic, partition] += 1
        return self.offsets[topic, partition] - 1


def _shards(config: ReplayConfig, schema: Schema, store: FileStore) -> list[InMemoryTransport]:
    """Shards at their beginning, in incarnation 1, that commit and publish nothing."""
    transports = []
    for index in range(config.num_shards):
        identity = ShardIdentity(schema=schema, index=index, num_shards=config.num_shards, seed=config.seed, publishing=False)
        shard = Shard(identity, Segments(MemoryBlobs(), shapes_of(identity.schema), identity.num_buckets), store, SystemClock())
        shard.restore(1, "")
        transports.append(InMemoryTransport(Calls(shard).handle))
    return transports

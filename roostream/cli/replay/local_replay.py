"""The local engine of a replay: the joiner, the training loop and shards in this process, without Kafka and
Flink.

records ─► LocalEngine ─► samples, by close time ─► TrainLoop ─► shards behind in-memory transports
   └──────────┴──────────────────┴──────────────────────┴──► accounts, metrics

Records from a warehouse are samples already and bypass the joiner.

Several models have a queue, a training loop and shards each. They share the records, the joiner, the counters
and the baselines. The predictions of the first are those of the replay; of the others only metrics are kept.

With `as_served`, requests are also scored at their own time. The training loop scores a sample when it is
trained, with weights that have seen one join window of the future, so only `AsServedScorer` shows the cost of
late labels:

    impression ──► waits ──► scored before the next step (weights do not change in between)
    sample, corrections ──► labels, corrected until the end

With `streaming_window_ms`, the samples of a window wait until the window is complete. They are then scored
with the weights of the windows before, and trained (streaming_windows.py).

Letters: n candidates of a request, B of several, T tasks, R requests.
"""

from __future__ import annotations

import dataclasses
import heapq
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.cli.replay.outcome import (
    LocalJoin,
    LocalTopics,
    OtherModel,
    Outcome,
    ReplayProgress,
    TrainingSummary,
)
from roostream.cli.replay.prediction_metrics import PredictionMetrics
from roostream.cli.replay.program_settings import program_settings, with_model_settings
from roostream.cli.replay.streaming_windows import SampleWindows, StreamingEvaluation, Window
from roostream.cli.skew.scored_lists import sample_of
from roostream.errors import ConfigError, UnavailableError
from roostream.models.build import load_model_config
from roostream.replay.config import ReplayConfig
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import (
    CORRECTIONS,
    DEAD_LETTERS,
    DEFAULT_PARTITIONS,
    IMPRESSIONS,
    PREDICTIONS,
    SAMPLES,
    Partition,
    Progress,
    all_partitions,
)
from roostream.runtime.program import Stop
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.runtime.work_unit import TableInput
from roostream.schema.ids import NO_KEY, sample_id
from roostream.schema.schema import Registry, Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.batch_source import NewestIds
from trainer.chunks import Chunk
from trainer.config import LoopConfig
from trainer.device.numerics import set_numerics
from trainer.loop import LoopDependencies, TrainLoop
from trainer.monitoring.progressive_metrics import DailyMetrics, Report, ScoredBatch
from trainer.predictions import Outputs, Prediction
from trainer.record_source import build_chunk
from trainer.rows import ShardRows


def replay_in_process(
    config: ReplayConfig,
    schema: Schema,
    records: Iterable[Record],
    progress: ReplayProgress,
    stop: Stop,
    registry: Registry | None = None,
) -> Outcome:
    """Run a replay. `registry`: the schemas that wrote samples among `records`; None = `schema` alone.
    Memory: the joiner's open window, the rows, and the ids for the audit.

    Raises:
        UnavailableError: `stop` was set.
    """
    writers = registry or {schema.fingerprint: schema}.get
    with tempfile.TemporaryDirectory(prefix="roostream-replay-") as store:
        return _LocalReplay(config, schema, Path(store), writers, stop).run(records, progress)


class SampleQueue:
    """A `BatchSource` of the samples that wait to be trained, oldest first, as in the worker's merge of
    partitions.

    It cannot seek back: only the start is a valid position.
    """

    def __init__(
        self,
        decoder: Decoder,
        clock: Clock,
        topics: Sequence[str] = (SAMPLES,),
        before_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        """`topics` are trained. `before_chunk` is called before a chunk is returned, so before its
        training."""
        self.decoder, self.clock, self.topics, self.before_chunk = decoder, clock, tuple(topics), before_chunk
        self._waiting: list[tuple[int, int, int, Record]] = []
        self._given: Progress = dict.fromkeys(all_partitions(self.topics, DEFAULT_PARTITIONS), 0)
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, record: Record) -> None:
        if record.topic not in self.topics:
            return
        self._count += 1
        heapq.heappush(self._waiting, (record.timestamp_ms, record.partition, self._count, record))

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        assert partition is None, "exact mode needs a source with partitions"
        return self.poll_remaining(max_requests) if len(self) >= max_requests else None

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        if not self._waiting:
            return None
        self.before_chunk()
        taken = [heapq.heappop(self._waiting)[3] for _ in range(min(max_requests, len(self)))]
        chunk = build_chunk(taken, self.decoder, self.clock.now_ms(), corrections=CORRECTIONS in self.topics)
        self._given |= chunk.after
        return chunk

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        assert not any(at.values()) and self._count == 0, "a local replay cannot seek back"

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """Does nothing: one worker has all partitions."""

    def bound(self, ends: Progress) -> None:
        """Does nothing: everything is read."""

    @property
    def ended(self) -> bool:
        return False

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        """Empty: there are no sessions."""
        return {}

    def positions(self) -> Progress:
        return dict(self._given)

    def lag(self) -> dict[Partition, PartitionLag]:
        return {}

    @property
    def num_lost(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing: the samples are in memory."""


class _Learner:
    """One model of a local replay: the samples that wait for it, its training loop and its rows."""

    def __init__(
        self,
        config: ReplayConfig,
        schema: Schema,
        registry: Registry,
        store: FileStore,
        file: str,
        outputs: Outputs,
        before_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        programs, clock = program_settings(config), SystemClock()
        settings = LoopConfig(**programs.worker)
        self.decoder = Decoder(schema, registry)
        self.samples = SampleQueue(self.decoder, clock, settings.trained_topics, before_chunk)
        self.shards = _shards(config, schema, store)
        client = Client(
            schema, [InMemoryTransport(ShardRpcHandler(shard).handle) for shard in self.shards], worker=0
        )
        client.set_incarnation(1)
        set_numerics(settings)
        model = with_model_settings(load_model_config(file), programs.model)
        dependencies = LoopDependencies(
            source=self.samples, rows=ShardRows(client), outputs=outputs, clock=clock
        )
        try:
            self.loop = TrainLoop(settings, schema, model, dependencies)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}" if file and file not in str(error) else str(error)) from None
        self.streaming = (
            StreamingEvaluation(schema, self.decoder, self.loop.scores)
            if config.streaming_window_ms
            else None
        )

    def train(self) -> bool:
        """Train as many complete batches as are waiting. Returns whether there was one."""
        before = self.loop.num_steps
        while len(self.samples) and self.loop.step():
            pass
        return self.loop.num_steps > before

    def evaluate_and_train(self, window: Window) -> None:
        """Evaluate a window unless nothing is trained yet, then train all of it."""
        assert self.streaming
        if trained := self.loop.counts.requests:
            self.streaming.evaluate(window, trained)
        for record in window.records:
            self.samples.put(record)
        self.train()
        self.finish()

    def finish(self) -> None:
        """Train the samples that are left, which are less than a batch."""
        while self.loop.finish():
            pass

    def streaming_report(self) -> Report | None:
        return self.streaming.report() if self.streaming else None

    def summary(self) -> TrainingSummary:
        rows: Counter[str] = Counter()
        for shard in self.shards:
            rows.update(shard.stats()["rows"])
        return TrainingSummary(
            steps=self.loop.num_steps,
            non_finite=self.loop.counts.non_finite,
            corrections=self.loop.counts.corrections,
            rehearsed=self.loop.counts.rehearsed,
            model=dataclasses.asdict(self.loop.model_config),
            dense_parameters=sum(p.numel() for p in self.loop.model.parameters()),
            rows=dict(rows),
        )


class _MetricsOnly:
    """The `Outputs` of a model whose predictions are only counted."""

    def __init__(self, metrics: PredictionMetrics) -> None:
        self.metrics = metrics

    def prediction(self, prediction: Prediction) -> None:
        self.metrics.add(Record(PREDICTIONS, 0, 0, prediction.time_ms, NO_KEY, prediction.value))

    def dead_letter(self, letter: pb.DeadLetter) -> None:
        """Does nothing: the training summary counts these requests."""

    def flush(self) -> None:
        """Does nothing: predictions are counted as they come."""


class _LocalReplay:
    """Connects the parts of a local replay, and is the `Outputs` of the first model's training loop."""

    def __init__(
        self, config: ReplayConfig, schema: Schema, store: Path, registry: Registry, stop: Stop
    ) -> None:
        self.schema, self.stop = schema, stop
        self.measure_from_ms = config.measure_from_ms
        self.topics = LocalTopics(schema, config.measure_from_ms, registry)
        self.accounts = self.topics.accounts
        self.served = (
            AsServedScorer(
                schema,
                Decoder(schema, {schema.fingerprint: schema}.get),
                lambda batch: self.first.loop.scores(batch),
            )
            if config.as_served
            else None
        )
        self.joiner = LocalJoin(config, schema, self.topics)
        length_ms = config.streaming_window_ms
        self.windows = SampleWindows(length_ms, config.window_ms) if length_ms else None
        before_chunk = self.served.score if self.served else lambda: None
        folder = FileStore(store / "0")
        self.first = _Learner(config, schema, registry, folder, config.first_model, self, before_chunk)
        self.others: list[tuple[_Learner, OtherModel]] = []
        for n, file in enumerate(config.model[1:], start=1):
            paired = self.topics.statistics.paired.with_other_model()
            metrics = PredictionMetrics(schema.tasks, config.measure_from_ms, schema.labels, paired)
            learner = _Learner(
                config, schema, registry, FileStore(store / str(n)), file, _MetricsOnly(metrics)
            )
            other = OtherModel(file=file, metrics=metrics, paired=paired, training=TrainingSummary())
            self.others.append((learner, other))

    def run(self, records: Iterable[Record], progress: ReplayProgress) -> Outcome:
        for record in records:
            self._check_stop()
            if wire.kind_of(record.value) == wire.SAMPLE:
                sample = self.topics.write(SAMPLES, record.key or NO_KEY, record.value, record.timestamp_ms)
                self._put([sample], progress)
            else:
                placed = self.topics.append(record)
                if self.served:
                    self.served.add(placed)
                self._put(self.joiner.process(placed), progress)
            self._train(progress)
        self._check_stop()  # the records of a stopped replay end early
        self._put(self.joiner.end_of_input(), progress)
        if self.windows:
            self._train_windows(self.windows.take_remaining(), progress)
        self._train(progress)
        for learner in self._learners():
            learner.finish()
        self._show_progress(progress)
        for learner, other in self.others:
            other.training, other.streaming = learner.summary(), learner.streaming_report()
        return Outcome(
            accounts=self.accounts,
            statistics=self.topics.statistics,
            untrained=self.accounts.untrained_below(self.accounts.sample_ends),
            training=self.first.summary(),
            served=self.served.report(self.measure_from_ms) if self.served else None,
            streaming=self.first.streaming_report(),
            others=tuple(other for _, other in self.others),
        )

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise UnavailableError("stopped before the end of the log; no report was written")

    def _learners(self) -> list[_Learner]:
        return [self.first, *(learner for learner, _ in self.others)]

    def _train(self, progress: ReplayProgress) -> None:
        if self.first.train():
            self._show_progress(progress)
        for learner, _ in self.others:
            learner.train()

    def _put(self, records: Iterable[Record], progress: ReplayProgress) -> None:
        for record in records:
            if self.served:
                self.served.add(record)
            if self.windows:
                if record.topic in self.first.samples.topics:
                    self._train_windows(self.windows.add(record), progress)
                continue
            for learner in self._learners():
                learner.samples.put(record)

    def _train_windows(self, windows: Iterable[Window], progress: ReplayProgress) -> None:
        for window in windows:
            self._check_stop()
            for learner in self._learners():
                learner.evaluate_and_train(window)
            self._show_progress(progress)

    def _show_progress(self, progress: ReplayProgress) -> None:
        progress.update(joined=self.accounts.sums().samples, trained=self.first.loop.counts.requests)

    def prediction(self, prediction: Prediction) -> None:
        key = prediction.sample_id.to_bytes(8, "little")
        self.topics.write(PREDICTIONS, key, prediction.value, prediction.time_ms)

    def dead_letter(self, letter: pb.DeadLetter) -> None:
        self.topics.write(DEAD_LETTERS, NO_KEY, wire.encode(wire.DEAD_LETTER, letter), 0)

    def flush(self) -> None:
        """Does nothing: each output is counted when it is written."""


def _shards(config: ReplayConfig, schema: Schema, store: FileStore) -> list[Shard]:
    """New shards in incarnation 1, which neither commit nor publish."""
    shards = []
    for index in range(config.num_shards):
        identity = ShardIdentity(
            schema=schema, index=index, num_shards=config.num_shards, seed=config.seed, publishing=False
        )
        shard = Shard(
            identity,
            Segments(MemoryKeyValueStore(), shapes_of(identity.schema), identity.num_buckets),
            store,
            SystemClock(),
        )
        shard.restore(1, "")
        shards.append(shard)
    return shards


_MAX_SCORED_AT_ONCE = 256  # requests


class _ScoredList:
    """The scores and labels of a request: 8 bytes per item and task."""

    __slots__ = ("label_nT", "row_of", "score_nT", "time_ms", "weight")

    def __init__(self, impression: pb.Impression, num_tasks: int) -> None:
        self.time_ms, self.weight = impression.header.time_ms, impression.weight or 1.0
        self.row_of = {item: n for n, item in enumerate(dict.fromkeys(impression.item_ids))}
        self.score_nT = np.full((len(self.row_of), num_tasks), np.nan, np.float32)
        self.label_nT: np.ndarray | None = None


class AsServedScorer:
    """Scores each request with the weights of its own time, as serving would have.

    Call `add` with every record in time order, and `score` before weights change. All requests stay in
    memory.
    """

    def __init__(self, schema: Schema, decoder: Decoder, scores: Callable[[Batch], np.ndarray]) -> None:
        """`scores`: probabilities [B, T] with the current weights."""
        self.tasks, self.decoder, self.scores = schema.tasks, decoder, scores
        self._declared_T = schema.labels
        self._shown: dict[int, _ScoredList] = {}
        self._waiting: list[Record] = []

    def add(self, record: Record) -> None:
        """Add a record of any topic. Only the first page of a request is scored; unreadable records are
        ignored."""
        kind = wire.kind_of(record.value)
        if record.topic == IMPRESSIONS and kind == wire.IMPRESSION:
            self._add_impression(record)
        elif record.topic in (SAMPLES, CORRECTIONS):
            self._set_labels(record)

    def score(self) -> None:
        """Score the impressions added since the last call."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        batch, _ = self.decoder.decode(waiting)
        score_BT, ends_R = self.scores(batch), np.cumsum(batch.num_candidates_R)
        for r, id_ in enumerate(batch.sample_id_R.view(np.uint64).tolist()):
            shown, start = self._shown[id_], int(ends_R[r] - batch.num_candidates_R[r])
            items = batch.item_B[start : ends_R[r]].view(np.uint64).tolist()
            for n, item in reversed([*enumerate(items)]):  # of a repeated item the first counts
                shown.score_nT[shown.row_of[item]] = score_BT[start + n]

    def report(self, measure_from_ms: int) -> Report:
        """`overall`, `measured` and `by_day`, like the `metrics` of a report, with the current labels."""
        metrics = DailyMetrics(self.tasks, measure_from_ms=measure_from_ms)
        known = [s for s in self._shown.values() if s.label_nT is not None and not np.isnan(s.score_nT).any()]
        for start in range(0, len(known), _MAX_SCORED_AT_ONCE):
            part = known[start : start + _MAX_SCORED_AT_ONCE]
            label_BT = np.concatenate([s.label_nT for s in part if s.label_nT is not None])
            index_B = np.repeat(np.arange(len(part)), [len(s.score_nT) for s in part])
            time_ms_R = np.array([s.time_ms for s in part], np.int64)
            score_BT = np.concatenate([s.score_nT for s in part])
            weight_R = np.array([s.weight for s in part])
            weight_BT = np.ones_like(label_BT) * weight_R[index_B][:, None]
            columns = (score_BT, label_BT, weight_BT, index_B, time_ms_R)
            metrics.update(ScoredBatch(*columns, self._declared_T, weight_R))
        return metrics.report()

    def _add_impression(self, record: Record) -> None:
        message = pb.Impression.FromString(record.value[2:])
        id_ = sample_id(record.key or NO_KEY, message.header.request_id)
        if id_ in self._shown:
            return
        self._shown[id_] = _ScoredList(message, len(self.tasks))
        sample = sample_of(record, message, len(self.tasks))
        self._waiting.append(record._replace(topic=SAMPLES, value=wire.encode(wire.SAMPLE, sample)))
        if len(self._waiting) >= _MAX_SCORED_AT_ONCE:
            self.score()

    def _set_labels(self, record: Record) -> None:
        message = pb.Sample.FromString(record.value[2:])
        shown = self._shown.get(sample_id(record.key or NO_KEY, message.header.request_id))
        if shown is None:
            return
        if shown.label_nT is None:
            shown.label_nT = np.zeros_like(shown.score_nT)
        label_nT = np.array(message.labels, np.float32).reshape(-1, len(self.tasks))
        for item, label_T in zip(message.item_ids, label_nT, strict=True):
            if item in shown.row_of:
                shown.label_nT[shown.row_of[item]] = label_T

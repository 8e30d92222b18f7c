"""The training loop of a worker. It turns samples (joined requests) into updates of the model, chunk by
chunk:

    poll     read a chunk from the source
    claim    leave out duplicates, and find the embedding rows that the rest needs
    pull     read these rows from the shards
    train    score, compute gradients, update the dense weights, push the rows' gradients

Every candidate is scored before its labels are used (progressive validation). The feed (feed.py) decides
which thread calls the first three steps, and how far ahead of `train`. The loop knows nothing of commits: a
worker calls `step`, and may take a snapshot between two calls. A chunk that is claimed but not trained is in
no snapshot.

Letters: R requests, B candidates, T tasks, U unique rows of a stack, D width of a stack.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from roostream.errors import ConfigError
from roostream.models.config import ModelConfig
from roostream.models.inputs import INPUT_NAMES, build_inputs, changed_inputs, input_names_tensor
from roostream.models.model import Targets
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from trainer import corrections
from trainer.batch_source import BatchSource
from trainer.chunks import (
    Chunk,
    ChunkPart,
    ClaimedChunk,
    PreparedChunk,
    PulledPart,
    Rejected,
    annotate_errors,
    build_part,
    chunk_freshness,
)
from trainer.config import LoopConfig
from trainer.dead_letter_quarantine import DeadLetterQuarantine, NotFiniteError
from trainer.dense_part import dense_checkpoint
from trainer.dense_part.dense_step import DenseTrainer, gradients_of
from trainer.device.numerics import forward_logits
from trainer.device.staging import open_staging
from trainer.expansion import Expansion, check_expandable, warn_of_dropped
from trainer.feed import ChunkRequest, Feed, LoopSteps, SerialFeed
from trainer.monitoring.progressive_metrics import Report
from trainer.monitoring.shadow import ShadowModel
from trainer.monitoring.slices import build_slicers
from trainer.partitions import PartitionSnapshot, PartitionStates, rows_by_partition
from trainer.pipeline.stage_timer import StageTimer
from trainer.predictions import Outputs, dead_letter, encode_predictions, encode_unscored
from trainer.rows import PushTimes, Rows, empty_lookup, push_times
from trainer.saved_batch import SavedBatches
from trainer.selection.decision import FROZEN, UnscoredRequests
from trainer.selection.outcomes import OutcomeCounter, RequestCounts
from trainer.selection.selection import Selection
from trainer.watermark import TrainingWatermark

log = logging.getLogger("roostream.worker")

_POLL_S = 0.1
_RECENT = "watermark.recent_ms"  # name of a tensor in snapshots


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopDependencies:
    """The objects that a training loop uses."""

    source: BatchSource
    rows: Rows
    outputs: Outputs
    clock: Clock
    feed: Callable[[LoopSteps], Feed] = SerialFeed
    shadow: ShadowModel | None = None
    saved: SavedBatches | None = None  # where the batch is saved at which training fails
    stages: StageTimer | None = None  # None = the loop makes its own
    on_freshness: Callable[[str, float], None] = lambda stage, ms: None  # called for each trained request
    on_scored: Callable[[ChunkPart], None] = lambda part: None  # called after the scores are published


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that training has changed outside the shards, copied between two chunks: what all workers
    share, and what belongs to this worker's partitions."""

    shared: dict[str, np.ndarray]  # weights and optimizer state (dense_part/dense_checkpoint.py)
    step: int
    watermark_ms: int
    partitions: dict[Partition, PartitionSnapshot]

    @property
    def progress(self) -> Progress:
        return {partition: at.offset for partition, at in self.partitions.items()}


class TrainLoop:
    """One worker's training loop. **If a step raises**, rows, weights and progress are no longer consistent:
    call `restore` or `reset` before the next step, or exit."""

    def __init__(
        self, config: LoopConfig, schema: Schema, model_config: ModelConfig, dependencies: LoopDependencies
    ) -> None:
        self.config, self.schema, self.model_config = config, schema, model_config
        self.source, self.rows, self.outputs = dependencies.source, dependencies.rows, dependencies.outputs
        self.clock = dependencies.clock
        self.on_freshness = dependencies.on_freshness
        self.on_scored = dependencies.on_scored
        # The learning rate follows the stream's settings, even while `config` is that of a session over
        # history.
        self._rate_after = config.rate_after
        self.counts, self.outcomes = RequestCounts(), OutcomeCounter()
        self.stages = dependencies.stages or StageTimer(dependencies.clock)
        self.selection = Selection(config, schema)
        self.expansion: Expansion | None = None
        if config.expand == "impressions":
            check_expandable(schema, model_config)
            self.expansion = Expansion(config.batch_impressions, schema)
        self._slicers = build_slicers(schema, config.slices)
        self.shadow, self.saved = dependencies.shadow, dependencies.saved
        self.staging = open_staging(config.device)
        # Requests that all workers have taken, divided by their number; None: this worker trains alone.
        self.requests_per_worker: int | None = None
        self._build()
        self.feed = dependencies.feed(self)

    def step(self) -> bool:
        """Take the next chunk, score it and train on it. False: no chunk is due yet; call again. Raises
        UnavailableError: a shard is unavailable or fenced this worker (FencedError)."""
        return self._train(self.feed.next_claimed(_POLL_S))

    def finish(self) -> bool:
        """At the end of the input, train on the remaining partial chunks, then on impressions that wait.

        Exact mode trains only full chunks."""
        if self._train(self.feed.next_remaining()):
            return True
        self._push_deferred()
        waiting = self.expansion.take_waiting() if self.expansion and not self.config.exact else None
        if waiting is not None:
            self._train_impressions(waiting)
        return waiting is not None

    def scores(self, batch: Batch) -> np.ndarray:
        """Probabilities [B, T] with the current weights and rows. Nothing is counted or changed. Raises
        UnavailableError: as `step`."""
        with torch.no_grad():
            inputs = self.pull_part(build_part(batch, trains=False)).ready()
            logits_BT = forward_logits(self.dense_trainer.scorer, inputs, self.config)
        return np.asarray(torch.sigmoid(logits_BT).cpu().numpy())

    def report(self) -> Report:
        """Metrics of all predictions that were made before training on their labels, since the beginning."""
        return self.partitions.metrics().report()

    @property
    def watermark_ms(self) -> int:
        """Event time up to which rows are trained. Any thread."""
        return self.watermark.watermark_ms

    def snapshot(self) -> Snapshot:
        """Copy the state between two chunks. Raises UnavailableError: an earlier push has failed."""
        self.feed.drain()
        self.rows.save()
        shared = dense_checkpoint.snapshot(self.model, self.optimizer)
        shared |= {_RECENT: self.watermark.recent_ms, INPUT_NAMES: input_names_tensor(self.schema)}
        return Snapshot(
            shared=shared | self.selection.state(),
            step=self.num_steps,
            watermark_ms=self.watermark_ms,
            partitions=self._partition_snapshots(),
        )

    def _partition_snapshots(self) -> dict[Partition, PartitionSnapshot]:
        """The first partition also gets the worker's state of selection and expansion."""
        snapshots = self.partitions.snapshot()
        worker_state = self.selection.rehearsal_state()
        if self.expansion:
            worker_state = worker_state | self.expansion.state()
        if worker_state and self.partitions.progress:
            first = min(self.partitions.progress)
            tensors = snapshots[first].tensors | worker_state
            snapshots[first] = dataclasses.replace(snapshots[first], tensors=tensors)
        return snapshots

    def restore(self, at: Snapshot, *, same_schema: bool = True) -> None:
        """Restore a snapshot and continue from its offsets, for the partitions of this source. Claimed chunks
        are dropped. Weights with one column for each feature start again from their initial values if the
        features have changed, in the schema or its transforms. Raises OtherVersionError: a weight is
        missing or has another shape; the next restore repairs the state."""
        self.feed.reset()
        self._build()
        changed = changed_inputs(at.shared, self.schema)
        fresh = (
            dense_checkpoint.weights_of_inputs(self.schema, self.model_config, changed)
            if changed
            else frozenset[str]()
        )
        same_inputs = not changed if changed is not None else same_schema
        dense_checkpoint.restore(at.shared, self.model, self.optimizer, same_schema=same_inputs, fresh=fresh)
        self.selection.load(at.shared)
        own = {name: value for part in at.partitions.values() for name, value in part.tensors.items()}
        self.selection.load_rehearsal(own)
        if self.expansion is not None:
            self.expansion.load(own)
        else:
            warn_of_dropped(own, "expand = 'off'")
        # Serving cannot use a commit of other features. A step more asks for a new commit, even if there is
        # nothing to train.
        self.num_steps = at.step if same_schema and same_inputs else at.step + 1
        recent_ms = at.shared.get(_RECENT, np.array([at.watermark_ms])).tolist()
        self.watermark = TrainingWatermark(at.watermark_ms, recent_ms)
        epochs = {p: part.leader_epoch for p, part in at.partitions.items() if part.leader_epoch >= 0}
        self._seek(at.progress, epochs)
        self.partitions.load(at.partitions)

    def validate(self, *, workers: int) -> None:
        """Raise ConfigError if these settings need a single worker, and there are several."""
        self.selection.validate(workers=workers)
        if self.expansion is not None and workers > 1:
            raise ConfigError(
                f"expand: expected off with {workers} workers, got 'impressions'; train with one"
            )

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """Train these partitions of `session` or the stream from now on. `restore` or `reset` must follow."""
        self.feed.reset()
        self.source.assign(numbers, session)

    def reset(self) -> None:
        """Return to the untrained state, at the beginning of the source."""
        self.feed.reset()
        self._build()
        self._seek({})

    def _build(self) -> None:
        self.dense_trainer = DenseTrainer(
            self.config, self.schema, self.model_config, self._rate_after, self.stages
        )
        self.model, self.optimizer = self.dense_trainer.model, self.dense_trainer.optimizer
        self.num_steps, self.watermark, self.requests_per_worker = 0, TrainingWatermark(), None
        self.quarantine = DeadLetterQuarantine(self._publish_dead_letter)
        self.selection.reset()
        if self.expansion is not None:
            self.expansion.load({})
        self.outcomes.discard_chunk()
        self._start_partitions(self.source.positions())

    def _seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        assigned = self.source.positions().keys()
        wanted = {partition: offset for partition, offset in at.items() if partition in assigned}
        self.source.seek(wanted, leader_epochs)
        self._start_partitions(self.source.positions())

    def _start_partitions(self, at: Progress) -> None:
        self.partitions = PartitionStates(
            at, self.schema.labels, self.config.dedupe_horizon_ms, self._slicers
        )

    # One chunk

    def next_request(self, num_chunks: int = 0, max_requests: int = 0) -> ChunkRequest | None:
        """See `LoopSteps`."""
        taken = self.partitions.num_requests if self.requests_per_worker is None else self.requests_per_worker
        size = self.config.batch_after(taken)
        if self.config.batch_after(taken + max_requests) != size:
            return None
        partition = self.partitions.in_turn(num_chunks) if self.config.exact else None
        return ChunkRequest(self.selection.chunk_size(size), partition)

    def poll(self, request: ChunkRequest, timeout_s: float) -> Chunk | None:
        """Read the next chunk. None: no chunk is due after `timeout_s`."""
        with self.stages("wait_data"):
            return self.source.poll(request.max_requests, timeout_s, request.partition)

    def poll_remaining(self, request: ChunkRequest) -> Chunk | None:
        """Read a partial chunk at the end of the input. Always None in exact mode."""
        return None if self.config.exact else self.source.poll_remaining(request.max_requests)

    def claim(self, chunk: Chunk) -> ClaimedChunk:
        """Claim the chunk's new requests; duplicates in later chunks are left out from now on. A claim is in
        no snapshot until it is trained."""
        with annotate_errors("claim", chunk):
            new_R = self.partitions.claim(chunk.batch)
            batch = chunk.batch if new_R.all() else chunk.batch.take_requests(np.flatnonzero(new_R))
            batch = corrections.without_unchanged_corrections(batch, self.config)
            parts, unscored = self.selection.split(batch, self.num_steps)
            return ClaimedChunk(chunk=chunk, new_R=new_R, parts=parts, unscored=unscored)

    def pull(self, claimed: ClaimedChunk, rows: Rows | None = None) -> PreparedChunk:
        """Pull the rows of its first part from `rows`, or from the loop's rows. Changes nothing in the loop.
        Raises UnavailableError: as `step`."""
        first = self.pull_part(claimed.parts[0], rows) if claimed.parts else None
        return PreparedChunk(claimed=claimed, first=first)

    def train(self, prepared: PreparedChunk) -> None:
        """Score, learn and push all parts, and count the chunk as trained. Raises UnavailableError: as
        `step`."""
        self.num_steps += 1
        claimed, chunk = prepared.claimed, prepared.claimed.chunk
        self.quarantine.begin(chunk)
        self.watermark.add(chunk.close_ms_R)
        waiting = deque(claimed.parts)
        pulled = prepared.first
        while waiting:
            part = waiting.popleft()
            halves = self._learn(pulled or self.pull_part(part))
            waiting.extendleft(reversed(halves))
            pulled = None
        self.settle(claimed)

    def settle(self, claimed: ClaimedChunk) -> None:
        """Record that all parts are trained: the next snapshot contains the chunk's offsets and ids. Raises
        NotFiniteError: the model's state is corrupt."""
        self.counts.non_finite += self.quarantine.settle()
        if claimed.unscored:
            self._record_unscored(claimed.unscored)
        self.selection.on_trained(self.num_steps, claimed, self.rows)
        if any(not part.trains and part.choice is None for part in claimed.parts):
            self._push_deferred()  # all further requests are frozen
        self.outcomes.commit_chunk(claimed.num_requests)
        self.counts.duplicates += int((~claimed.new_R).sum())
        chunk = claimed.chunk
        self.partitions.settle(chunk.batch, claimed.new_R, chunk.after, chunk.leader_epochs)
        for stage, ms in chunk_freshness(claimed.chunk, claimed.new_R, self.clock.now_ms()):
            self.on_freshness(stage, ms)

    def _train(self, claimed: ClaimedChunk | None) -> bool:
        if claimed is None:
            return False
        started_s = self.clock.monotonic_s()
        with annotate_errors("training", claimed.chunk):
            self.train(self.feed.prepare(claimed))
        self.feed.mark_trained()
        self.counts.busy_s += self.clock.monotonic_s() - started_s
        return True

    def pull_part(self, part: ChunkPart, rows: Rows | None = None) -> PulledPart:
        """Pull the rows of a part from `rows`, or from the loop's rows. Changes nothing in the loop. Raises
        UnavailableError: as `step`."""
        with self.stages("pull"):
            rows_by_stack = (rows or self.rows).pull(part.lookup)
        device = None if self.staging else self.config.device
        inputs = build_inputs(
            part.batch, part.lookup, rows_by_stack, device, train=part.trains, floats=part.floats
        )
        if self.staging is None:
            return PulledPart(part=part, inputs=inputs)
        return PulledPart(part=part, **self.staging.stage(inputs)._asdict())

    def _learn(self, pulled: PulledPart) -> Sequence[ChunkPart]:
        """Score, learn and push. A part with a non-finite result is split into halves, which are returned for
        training, down to the single request that causes it. That request is quarantined; all others are
        counted and trained."""
        part, trains = pulled.part, pulled.part.has_weight
        if self.expansion is not None and part.trains:
            return self._learn_expanded(pulled, self.expansion)
        logits = self.dense_trainer.forward(pulled)
        if logits is None or (
            trains and not self.dense_trainer.train_step(pulled, logits.trained_BT, self.targets(part))
        ):
            return self.split_non_finite(part)
        self.record_scores(pulled, logits.scored_BT)
        if trains:
            self.push(pulled)
            self._rehearse(part.batch)
        return ()

    def _learn_expanded(self, pulled: PulledPart, expansion: Expansion) -> Sequence[ChunkPart]:
        """Score the requests of a part as `_learn`; train the batches of impressions that are now full."""
        scored_BT = self.dense_trainer.score(pulled)
        if scored_BT is None:
            return self.split_non_finite(pulled.part)
        self.record_scores(pulled, scored_BT)
        for impressions in expansion.add(pulled.part.batch):
            self._train_impressions(impressions)
        return ()

    def _train_impressions(self, impressions: ChunkPart) -> None:
        """Learn and push. Impressions with a non-finite result are left out, alone. Raises NotFiniteError:
        the dense weights are not finite."""
        parts = deque([impressions])
        while parts:
            part = parts.popleft()
            if not part.has_weight:
                continue
            pulled = self.pull_part(part)
            if self.dense_trainer.train_unscored(pulled, self.targets(part)):
                self.push(pulled)
            elif part.batch.num_requests > 1 or not self.dense_trainer.is_finite():
                parts.extendleft(reversed(self.split_non_finite(part)))
            else:
                self.counts.non_finite += 1
                log.warning(
                    "an impression of the request at offset %d is left out: its gradients are not finite",
                    part.batch.offset_R[0],
                )

    def _rehearse(self, new: Batch) -> None:
        """Train on an earlier batch again, if rehearsal is configured."""
        rehearsal = self.selection.rehearsal
        if rehearsal is None:
            return
        part = rehearsal.draw(self.optimizer.num_steps)
        rehearsal.keep(new)
        if part is None:
            return
        pulled = self.pull_part(part)
        if self.dense_trainer.train_unscored(pulled, self.targets(part), is_new=False):
            # Without an engagement time: the batch contains no new engagement.
            times = PushTimes(step=self.num_steps, time_ms=self.watermark.push_time_ms)
            with self.stages("push"):
                self.rows.push(part.lookup, gradients_of(pulled.inputs), times)
            self.counts.rehearsed += part.batch.num_requests

    def split_non_finite(self, part: ChunkPart) -> Sequence[ChunkPart]:
        """Cut a part whose result is not finite into two halves, in order, to find the request that causes
        it. A part of one request is set aside instead (quarantined), and nothing is returned.

        Raises:
            NotFiniteError: the dense weights themselves are not finite.
        """
        batch, n = part.batch, part.batch.num_requests
        if not self.dense_trainer.is_finite():
            raise NotFiniteError(
                "expected finite dense weights, got non-finite ones: all members must be restored"
            )
        if n > 1:
            halves = (np.arange(n // 2), np.arange(n // 2, n))
            return [part.take(row_M) for row_M in halves]
        ((partition, _),) = rows_by_partition(batch).items()
        if not batch.correction_R[0]:
            self.outcomes.add_non_finite()
        self.quarantine.suspect(partition, int(batch.offset_R[0]))
        return ()

    def _publish_dead_letter(self, rejected: Rejected) -> None:
        self.counts.dead_letters += 1
        self.outputs.dead_letter(dead_letter(rejected, self.schema.limits.max_record_bytes))

    def record_scores(self, pulled: PulledPart, logits_BT: torch.Tensor) -> None:
        """Publish and count scores, which were computed before the labels were used. Corrections are left
        out, because their samples were scored already."""
        self.quarantine.clear()
        part, score_BT = pulled.part, torch.sigmoid(logits_BT.detach()).cpu().numpy()
        shadow_BT = self.shadow.scores(pulled.inputs, self.num_steps) if self.shadow else None
        sample_R = ~part.batch.correction_R
        self.counts.corrections += int((~sample_R).sum())
        if not sample_R.any():
            return
        if not sample_R.all():
            sample_B = sample_R[part.batch.request_index_B]
            part = part.take(np.flatnonzero(sample_R))
            score_BT, shadow_BT = score_BT[sample_B], None if shadow_BT is None else shadow_BT[sample_B]
        batch, disposition_R = part.batch, part.disposition_R
        importance_R = part.choice.metric_weight_R if part.choice else None
        self.partitions.count(batch, score_BT, self.watermark_ms, shadow_BT, importance_R)
        self.on_scored(part)
        for prediction in encode_predictions(batch, score_BT, self.num_steps, disposition_R, part.choice):
            self.outputs.prediction(prediction)
        self.outcomes.add(disposition_R)
        self.counts.frozen += int((disposition_R == FROZEN).sum())
        self.counts.requests += batch.num_requests
        self.counts.candidates += batch.num_candidates

    def _record_unscored(self, unscored: UnscoredRequests) -> None:
        """Publish predictions without scores; the labels are not used."""
        for prediction in encode_unscored(unscored, self.num_steps):
            self.outputs.prediction(prediction)
        self.outcomes.add(unscored.reason_R[unscored.row_M])
        self.counts.requests += len(unscored.row_M)

    def targets(self, part: ChunkPart, total_T: torch.Tensor | None = None) -> Targets:
        """Labels and weights of a part, as the loss needs them. `total_T`, float32 [T]: the sum of weights of
        each task over the parts of all workers, by which the loss divides; None = over this part."""
        targets = corrections.build_targets(part.batch, self.config)
        if total_T is not None:
            targets = targets._replace(total_T=total_T.to(targets.weight_BT))
        return self.selection.weight_targets(targets, part)

    def push(self, pulled: PulledPart | None, clip_row_norm: float = 0.0) -> None:
        """Push the gradients of a part. None: this worker has none in a step in which other workers push.
        `clip_row_norm`: limit for the norm of each row's gradient sum over all workers."""
        if pulled is None:
            times = PushTimes(
                step=self.num_steps, time_ms=self.watermark.push_time_ms, clip_row_norm=clip_row_norm
            )
            return self.rows.push(empty_lookup(self.schema), {}, times)
        times = push_times(
            pulled.part.batch,
            step=self.num_steps,
            time_ms=self.watermark.push_time_ms,
            clip_row_norm=clip_row_norm,
        )
        with self.stages("push"):
            gradients = gradients_of(pulled.inputs)
            self.rows.push(*self.selection.gradients_to_push(pulled, gradients, self.watermark_ms), times)

    def _push_deferred(self) -> None:
        """Push gradients that deferral still holds back, because training ends."""
        if waiting := self.selection.flush_deferred():
            self.rows.push(*waiting, PushTimes(step=self.num_steps, time_ms=self.watermark.push_time_ms))

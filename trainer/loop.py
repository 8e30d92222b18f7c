"""Samples to updates, in four acts: poll → claim (dedupe, lookup) → pull (rows) → train (score, learn, push, settle).

Every candidate is scored before its labels are used (progressive validation). The loop knows nothing of commits: a worker
calls `step`, and between two steps nothing is in flight. Who calls the first three acts, and how far ahead of `train`, is the
feed's (feed.py); what is claimed and not trained is in no snapshot.

Letters: R requests, B candidates, T tasks, U unique rows of a stack, D width of a stack.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from roostream.models.config import ModelConfig
from roostream.models.inputs import build_inputs
from roostream.models.model import Targets
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from trainer import corrections
from trainer.batch_source import BatchSource, Chunk, Rejected, annotate_errors
from trainer.config import LoopConfig
from trainer.dead_letter_quarantine import DeadLetterQuarantine, NotFiniteError
from trainer.dense_part import dense_checkpoint
from trainer.dense_part.dense_step import DenseTrainer, gradients_of
from trainer.device.numerics import forward_logits
from trainer.device.staging import open_staging
from trainer.feed import ChunkPart, Claimed, Feed, LoopSteps, Prepared, Pulled, SerialFeed, Wanted, part_of
from trainer.monitoring.freshness import chunk_freshness
from trainer.monitoring.progressive_metrics import Report
from trainer.monitoring.shadow import ShadowModel
from trainer.monitoring.slices import build_slicers
from trainer.partitions import PartitionSnapshot, PartitionStates, rows_by_partition
from trainer.pipeline.stage_timer import StageTimer
from trainer.predictions import Outputs, dead_letter, predictions_of, unscored_of
from trainer.rows import PushTimes, Rows, no_rows, push_times
from trainer.saved_batch import SavedBatches
from trainer.selection.decision import FROZEN, UnscoredRequests
from trainer.selection.outcomes import OutcomeCounter, RequestCounts
from trainer.selection.selection import Selection
from trainer.watermark import TrainingWatermark

log = logging.getLogger("roostream.worker")

_POLL_S = 0.1
_RECENT = "watermark.recent_ms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopDependencies:
    """What a loop is connected to."""

    source: BatchSource
    rows: Rows
    outputs: Outputs
    clock: Clock
    feed: Callable[[LoopSteps], Feed] = SerialFeed
    shadow: ShadowModel | None = None
    saved: SavedBatches | None = None  # takes the batch at which training ends
    stages: StageTimer | None = None  # None = of the loop alone
    on_freshness: Callable[[str, float], None] = lambda stage, ms: None
    on_scored: Callable[[ChunkPart], None] = lambda part: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that training has changed outside the shards, copied at one moment between two chunks: what all workers
    share, and what this one alone knows."""

    shared: dict[str, np.ndarray]  # weights and optimizer state (dense.py)
    step: int
    watermark_ms: int
    own: dict[Partition, PartitionSnapshot]

    @property
    def progress(self) -> Progress:
        return {partition: cut.offset for partition, cut in self.own.items()}


class TrainLoop:
    """One worker's training. **If an act raises**, rows, weights and progress no longer belong together: `restore` or
    `reset` before the next one, or exit."""

    def __init__(
        self, config: LoopConfig, schema: Schema, model_config: ModelConfig, wiring: LoopDependencies
    ) -> None:
        self.config, self.schema, self.model_config = config, schema, model_config
        self.source, self.rows, self.outputs = wiring.source, wiring.rows, wiring.outputs
        self.clock, self.on_freshness, self.on_scored = wiring.clock, wiring.on_freshness, wiring.on_scored
        self._rate_after = (
            config.rate_after
        )  # by the stream's batches, also while `config` is that of another phase
        self.counts, self.outcomes, self.stages = (
            RequestCounts(),
            OutcomeCounter(),
            wiring.stages or StageTimer(wiring.clock),
        )
        self.selection = Selection(config, schema)
        self._slicers, self.shadow, self.saved = (
            build_slicers(schema, config.slices),
            wiring.shadow,
            wiring.saved,
        )
        self.staging = open_staging(config.device)
        self.share: int | None = None  # of the requests that all workers have taken; None: this one is alone
        self._build()
        self.feed = wiring.feed(self)

    def step(self) -> bool:
        """Take the next chunk, score it and train on it. False: none is due yet; call again.

        Raises:
            UnavailableError: a shard is away or fenced this worker (FencedError).
        """
        return self._train(self.feed.claimed(_POLL_S))

    def finish(self) -> bool:
        """Train on what waits for a full chunk, at the end of the input; not in exact mode, which takes whole chunks only."""
        went_on = self._train(self.feed.rest())
        if not went_on:
            self._push_waiting()
        return went_on

    def scores(self, batch: Batch) -> np.ndarray:
        """Probabilities [B, T] by the weights and rows of now. Nothing is counted or changed.

        Raises:
            UnavailableError: as `step`.
        """
        with torch.no_grad():
            inputs = self.pull_part(part_of(batch, trains=False)).ready()
            logits_BT = forward_logits(self.descent.scorer, inputs, self.config)
        return np.asarray(torch.sigmoid(logits_BT).cpu().numpy())

    def report(self) -> Report:
        """Progressive metrics of everything since the beginning."""
        return self.own.metrics().report()

    @property
    def watermark_ms(self) -> int:
        """Event time up to which rows are trained; any thread."""
        return self.time.watermark_ms

    def snapshot(self) -> Snapshot:
        """Between two chunks.

        Raises:
            UnavailableError: a push that was given before has failed.
        """
        self.feed.drain()
        return Snapshot(
            shared=dense_checkpoint.snapshot(self.model, self.optimizer)
            | {_RECENT: self.time.recent_ms}
            | self.selection.state(),
            step=self.num_steps,
            watermark_ms=self.watermark_ms,
            own=self._own_cut(),
        )

    def _own_cut(self) -> dict[Partition, PartitionSnapshot]:
        """Of what is kept beside the partitions the first one has all."""
        cuts, kept = self.own.cut(), self.selection.rehearsal_state()
        if kept and self.own.progress:
            first = min(self.own.progress)
            cuts[first] = dataclasses.replace(cuts[first], tensors=cuts[first].tensors | kept)
        return cuts

    def restore(self, at: Snapshot, *, same_schema: bool = True) -> None:
        """Become what `snapshot` saw, and go on from its offsets; of `own`, what is of this source's partitions. What was
        claimed is void.

        Raises:
            CheckpointError: a weight is missing or of another shape; nothing was changed that the next restore doesn't mend.
        """
        self.feed.forget()
        self._build()
        dense_checkpoint.restore(at.shared, self.model, self.optimizer, same_schema=same_schema)
        self.selection.load(at.shared)
        self.selection.load_rehearsal(
            {name: value for cut in at.own.values() for name, value in cut.tensors.items()}
        )
        self.num_steps = at.step
        self.time = TrainingWatermark(
            at.watermark_ms, at.shared.get(_RECENT, np.array([at.watermark_ms])).tolist()
        )
        self._seek(at.progress)
        self.own.load(at.own)

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """These partitions, of `session` or the stream, are this worker's own from now on; `restore` or `reset` must follow."""
        self.feed.forget()
        self.source.assign(numbers, session)

    def reset(self) -> None:
        """Become untrained, at the beginning of the source."""
        self.feed.forget()
        self._build()
        self._seek({})

    def _build(self) -> None:
        self.descent = DenseTrainer(
            self.config, self.schema, self.model_config, self._rate_after, self.stages
        )
        self.model, self.optimizer = self.descent.model, self.descent.optimizer
        self.num_steps, self.time, self.share = 0, TrainingWatermark(), None
        self.burial = DeadLetterQuarantine(self._bury)
        self.selection.reset()
        self.outcomes.begin()
        self._own_at(self.source.positions())

    def _seek(self, at: Progress) -> None:
        mine = self.source.positions().keys()
        self.source.seek({partition: offset for partition, offset in at.items() if partition in mine})
        self._own_at(self.source.positions())

    def _own_at(self, at: Progress) -> None:
        self.own = PartitionStates(at, self.schema.tasks, self.config.dedupe_horizon_ms, self._slicers)

    # One chunk

    def wanted(self, num_chunks: int = 0, max_requests: int = 0) -> Wanted | None:
        """What the next chunk is when so many more are trained; None where that isn't known: it depends on the requests
        taken."""
        taken = self.own.num_requests if self.share is None else self.share
        size = self.config.batch_after(taken)
        if self.config.batch_after(taken + max_requests) != size:
            return None
        return Wanted(
            self.selection.chunk_size(size), self.own.in_turn(num_chunks) if self.config.exact else None
        )

    def poll(self, wanted: Wanted, timeout_s: float) -> Chunk | None:
        """The next chunk; None where none is due after `timeout_s`."""
        with self.stages("wait_data"):
            return self.source.poll(wanted.max_requests, timeout_s, wanted.partition)

    def rest(self, wanted: Wanted) -> Chunk | None:
        """What waits for a full chunk; None in exact mode, which takes whole chunks only."""
        return None if self.config.exact else self.source.rest(wanted.max_requests)

    def claim(self, chunk: Chunk) -> Claimed:
        """Leave out what was seen before. Nothing of it is in a snapshot until it is trained; what comes again in a chunk
        claimed after it is left out all the same."""
        with annotate_errors("claim", chunk):
            new_R = self.own.claim(chunk.batch)
            batch = chunk.batch if new_R.all() else chunk.batch.take_requests(np.flatnonzero(new_R))
            batch = corrections.without_unchanged_corrections(batch, self.config)
            parts, unscored = self.selection.split(batch, self.num_steps)
            return Claimed(chunk=chunk, new_R=new_R, parts=parts, unscored=unscored)

    def pull(self, claimed: Claimed, rows: Rows | None = None) -> Prepared:
        """The rows of its first part, as they are now in `rows`, or in the loop's own. Changes nothing of the loop's.

        Raises:
            UnavailableError: as `step`.
        """
        first = self.pull_part(claimed.parts[0], rows) if claimed.parts else None
        return Prepared(claimed=claimed, first=first)

    def train(self, prepared: Prepared) -> None:
        """Score, learn, push, and count the chunk as trained.

        Raises:
            UnavailableError: as `step`.
        """
        self.num_steps += 1
        claimed, chunk = prepared.claimed, prepared.claimed.chunk
        self.burial.begin(chunk)
        self.time.add(chunk.close_ms_R)
        waiting = deque(claimed.parts)
        pulled = prepared.first
        while waiting:
            part = waiting.popleft()
            halves = self._learn(pulled or self.pull_part(part))
            waiting.extendleft(reversed(halves))
            pulled = None
        self.settle(claimed)

    def settle(self, claimed: Claimed) -> None:
        """It is trained whole: its offsets and ids are in the next cut. NotFiniteError: nothing of it could be."""
        self.counts.non_finite += self.burial.settle()
        if claimed.unscored:
            self._tell_unscored(claimed.unscored)
        self.selection.on_trained(self.num_steps, claimed, self.rows)
        if any(not part.trains and part.choice is None for part in claimed.parts):
            self._push_waiting()  # frozen from here on
        self.outcomes.settle(claimed.num_requests)
        self.own.settle(claimed.chunk.batch, claimed.new_R, claimed.chunk.after)
        for stage, ms in chunk_freshness(claimed.chunk, claimed.new_R, self.clock.now_ms()):
            self.on_freshness(stage, ms)

    def _train(self, claimed: Claimed | None) -> bool:
        if claimed is None:
            return False
        started_s = self.clock.monotonic_s()
        with annotate_errors("training", claimed.chunk):
            self.train(self.feed.pulled(claimed))
        self.feed.trained()
        self.counts.busy_s += self.clock.monotonic_s() - started_s
        return True

    def pull_part(self, part: ChunkPart, rows: Rows | None = None) -> Pulled:
        """With its rows, as they are now in `rows`, or in the loop's own. Changes nothing of the loop's.

        Raises:
            UnavailableError: as `step`.
        """
        with self.stages("pull"):
            rows_by_stack = (rows or self.rows).pull(part.lookup)
        device = None if self.staging else self.config.device
        inputs = build_inputs(part.batch, part.lookup, rows_by_stack, device, train=part.trains)
        if self.staging is None:
            return Pulled(part=part, inputs=inputs)
        return Pulled(part=part, **self.staging.stage(inputs)._asdict())

    def _learn(self, pulled: Pulled) -> Sequence[ChunkPart]:
        """Score, learn and push. What gives a number that isn't finite is done in halves, which are returned, down to the
        request that gives it: that one is dead, and all others are counted and trained."""
        part, trains = pulled.part, pulled.part.has_weight
        logits = self.descent.forward(pulled)
        if logits is None or (
            trains and not self.descent.train_step(pulled, logits.trained_BT, self.targets_of(part))
        ):
            return self.halves(part)
        self.tell(pulled, logits.scored_BT)
        if trains:
            self.push(pulled)
            self._rehearse(part.batch)
        return ()

    def _rehearse(self, new: Batch) -> None:
        """One of the batches before it once more, where that is asked for."""
        rehearsal = self.selection.rehearsal
        if rehearsal is None:
            return
        part = rehearsal.draw(self.optimizer.num_steps)
        rehearsal.keep(new)
        if part is None:
            return
        pulled = self.pull_part(part)
        if self.descent.rehearse_step(pulled, self.targets_of(part)):
            times = PushTimes(step=self.num_steps, time_ms=self.watermark_ms)  # it is no news
            with self.stages("push"):
                self.rows.push(part.lookup, gradients_of(pulled.inputs), times)
            self.counts.rehearsed += part.batch.num_requests

    def halves(self, part: ChunkPart) -> Sequence[ChunkPart]:
        """In their order; none of a single request, which is dead. NotFiniteError: it can't be its fault."""
        batch, n = part.batch, part.batch.num_requests
        if not self.descent.is_finite():
            raise NotFiniteError("the dense weights are not finite: they must be restored")
        if n > 1:
            halves = (np.arange(n // 2), np.arange(n // 2, n))
            return [part.take(row_M) for row_M in halves]
        ((partition, _),) = rows_by_partition(batch).items()
        if not batch.correction_R[0]:
            self.outcomes.die()
        self.burial.suspect(partition, int(batch.offset_R[0]))
        return ()

    def _bury(self, rejected: Rejected) -> None:
        self.counts.dead_letters += 1
        self.outputs.dead_letter(dead_letter(rejected, self.schema.limits.max_record_bytes))

    def tell(self, pulled: Pulled, logits_BT: torch.Tensor) -> None:
        """What the model says before it has seen these labels; of a correction's request it has said it."""
        self.burial.clear()
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
        self.own.count(
            batch,
            score_BT,
            self.watermark_ms,
            shadow_BT,
            part.choice.metric_weight_R if part.choice else None,
        )
        self.on_scored(part)
        for prediction in predictions_of(batch, score_BT, self.num_steps, disposition_R, part.choice):
            self.outputs.prediction(prediction)
        self.outcomes.tell(disposition_R)
        self.counts.frozen += int((disposition_R == FROZEN).sum())
        self.counts.requests += batch.num_requests
        self.counts.candidates += batch.num_candidates

    def _tell_unscored(self, unscored: UnscoredRequests) -> None:
        """Their labels are used for nothing."""
        for prediction in unscored_of(unscored, self.num_steps):
            self.outputs.prediction(prediction)
        self.outcomes.tell(unscored.reason_R[unscored.row_M])
        self.counts.requests += len(unscored.row_M)

    def targets_of(self, part: ChunkPart, total_T: torch.Tensor | None = None) -> Targets:
        """What is to be learned of it. `total_T` [T]: the weights of all that several workers train with it; None = its own."""
        targets = corrections.targets_of(part.batch, self.config)
        if total_T is not None:
            targets = targets._replace(total_T=total_T.to(targets.weight_BT))
        return self.selection.weight_targets(targets, part)

    def push(self, pulled: Pulled | None, clip_row_norm: float = 0.0) -> None:
        """None: this worker has nothing for a step to which others push. `clip_row_norm`: of each row's sum over all workers."""
        if pulled is None:
            times = PushTimes(step=self.num_steps, time_ms=self.watermark_ms, clip_row_norm=clip_row_norm)
            return self.rows.push(no_rows(self.schema), {}, times)
        times = push_times(
            pulled.part.batch, step=self.num_steps, time_ms=self.watermark_ms, clip_row_norm=clip_row_norm
        )
        with self.stages("push"):
            self.rows.push(
                *self.selection.gradients_to_push(pulled, gradients_of(pulled.inputs), self.watermark_ms),
                times,
            )

    def _push_waiting(self) -> None:
        """Training ends here: no gradient may wait any longer."""
        if waiting := self.selection.flush_deferred():
            self.rows.push(*waiting, PushTimes(step=self.num_steps, time_ms=self.watermark_ms))

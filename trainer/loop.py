"""Samples to updates, read from top to bottom: poll → decode → dedupe → pull → score → learn → push.

Every candidate is scored before its labels are used (progressive validation). The loop knows nothing of commits: a worker
calls `step`, and between two steps nothing is in flight.

Letters: R requests, B candidates, T tasks, U unique rows of a stack, D width of a stack.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from models.build import build_model
from models.config import ModelConfig
from models.inputs import Inputs, build_inputs
from models.model import Targets
from roo import roo_pb2 as pb
from roo.batch import Batch
from roo.decode import Decoder, Reject
from roo.lookup import Lookup, build_lookup
from roo.schema import Schema
from roo.wire import Record
from runtime.clock import Clock
from trainer import dense
from trainer.adam import Adam
from trainer.config import LoopConfig
from trainer.dedupe import Dedupe
from trainer.metrics import Metrics
from trainer.predictions import dead_letter, predictions_of
from trainer.source import Source

log = logging.getLogger("roostream.worker")

_POLL_S = 0.1
_SANE_MS = 3_600_000


class Rows(Protocol):
    """What the loop needs of `param_server.client.Client`."""

    def pull(self, lookup: Lookup) -> dict[str, np.ndarray]: ...

    def push(
        self,
        lookup: Lookup,
        gradients: Mapping[str, np.ndarray],
        *,
        step: int,
        time_ms: int,
        oldest_engagement_ms: int,
        oldest_close_ms: int,
    ) -> None: ...


@dataclasses.dataclass
class Counts:
    """Since this process started."""

    requests: int = 0
    candidates: int = 0
    frozen: int = 0  # scored, not trained
    non_finite: int = 0  # batches skipped
    dead_letters: int = 0
    busy_s: float = 0.0  # in steps that cut a batch
    waiting_s: float = 0.0  # of it: for rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that training has changed outside the shards, copied at one moment between two batches."""

    tensors: dict[str, np.ndarray]
    step: int
    watermark_ms: int
    offsets: dict[int, int]  # partition → next offset to train


class TrainLoop:
    """One worker's training. **If a step raises**, rows, weights and offsets no longer belong together: `restore` or `reset`
    before the next one, or exit."""

    def __init__(
        self,
        config: LoopConfig,
        schema: Schema,
        model_config: ModelConfig,
        source: Source,
        client: Rows,
        predictions: Callable[[pb.Prediction], None],
        dead_letters: Callable[[pb.DeadLetter], None],
        clock: Clock,
        *,
        registry: Callable[[int], Schema | None] | None = None,
        on_freshness: Callable[[str, float], None] = lambda stage, ms: None,
    ) -> None:
        self.config, self.schema, self.model_config, self.source, self.client = config, schema, model_config, source, client
        self.predictions, self.dead_letters, self.clock, self.on_freshness = predictions, dead_letters, clock, on_freshness
        mine = {schema.fingerprint: schema}
        self.decoder = Decoder(schema, registry or mine.get)
        self.counts = Counts()
        self._build()

    def step(self) -> bool:
        """Cut the next batch, score it and train on it. False: no batch is due yet; call again.

        Raises:
            UnavailableError: a shard is away or fenced this worker (FencedError).
        """
        records = self._next_records()
        if records:
            self._train(records)
        return bool(records)

    def finish(self) -> bool:
        """Train on what waits for a full batch, at the end of the input; not in exact mode, which takes whole batches only."""
        records = [] if self.config.exact else self._take_pending(self.config.batch_requests)
        if records:
            self._train(records)
        return bool(records)

    def snapshot(self) -> Snapshot:
        ids, close_ms = self.dedupe.arrays()
        tensors = dense.take(self.model, self.optimizer) | {"dedupe.id": ids, "dedupe.close_ms": close_ms}
        tensors |= {f"metrics.{name}": value.copy() for name, value in self.metrics.state().items()}
        return Snapshot(tensors=tensors, step=self.num_steps, watermark_ms=self.watermark_ms, offsets=dict(self.offsets))

    def restore(self, at: Snapshot, *, same_schema: bool = True) -> None:
        """Become what `snapshot` saw, and go on from its offsets.

        Raises:
            CheckpointError: a weight is missing or of another shape; nothing was changed that the next restore doesn't mend.
        """
        self._build()
        dense.put(at.tensors, self.model, self.optimizer, same_schema=same_schema)
        self.dedupe.load(at.tensors["dedupe.id"], at.tensors["dedupe.close_ms"])
        self.metrics.load({k.removeprefix("metrics."): v for k, v in at.tensors.items() if k.startswith("metrics.")})
        self.num_steps, self.watermark_ms = at.step, at.watermark_ms
        self._seek(at.offsets)

    def reset(self) -> None:
        """Become untrained, at the beginning of the source."""
        self._build()
        self._seek({})

    def _build(self) -> None:
        self.model = build_model(self.schema, self.model_config, self.config.seed).to(self.config.device)
        self.optimizer = Adam(self.model.named_parameters(), learning_rate=self.config.learning_rate)
        self.dedupe = Dedupe(self.config.dedupe_horizon_ms)
        self.metrics = Metrics(self.schema.tasks)
        self.num_steps = self.watermark_ms = 0
        self.offsets: dict[int, int] = self.source.positions()
        self._pending: list[Record] = []
        self._pending_since_s = 0.0

    def _seek(self, offsets: Mapping[int, int]) -> None:
        self.source.seek(offsets)
        self.offsets = self.source.positions()

    # One batch

    def _next_records(self) -> list[Record]:
        """A whole batch, or in live mode what there is when its first record has waited long enough."""
        wanted = self.config.batch_requests
        partition = None
        if self.config.exact:
            partitions = sorted(self.offsets)
            partition = partitions[self.num_steps % len(partitions)]
        before = len(self._pending)
        self._pending += self.source.poll(wanted - before, self._poll_s(), partition)
        now_s = self.clock.monotonic_s()
        if self._pending and not before:
            self._pending_since_s = now_s
        waited = (now_s - self._pending_since_s) * 1000 >= self.config.max_batch_wait_ms
        if len(self._pending) == wanted or (self._pending and waited and not self.config.exact):
            return self._take_pending(wanted)
        return []

    def _poll_s(self) -> float:
        if not self._pending or self.config.exact:
            return _POLL_S
        left_s = self.config.max_batch_wait_ms / 1000 - (self.clock.monotonic_s() - self._pending_since_s)
        return min(max(left_s, 0.0), _POLL_S)

    def _take_pending(self, wanted: int) -> list[Record]:
        taken, self._pending = self._pending[:wanted], self._pending[wanted:]
        return taken

    def _train(self, records: Sequence[Record]) -> None:
        started_s, read_ms = self.clock.monotonic_s(), self.clock.now_ms()
        self.num_steps += 1
        batch, rejects = self.decoder.decode(records)
        for reject in rejects:
            self._reject(records[reject.index], reject)
        new_R = self.dedupe.take_new(batch.sample_id_R, batch.close_ms_R)
        if not new_R.all():
            batch = batch.take_requests(np.flatnonzero(new_R))
        for part, trains in self._split(batch):
            self._learn(part, trains)
        for record in records:
            self.offsets[record.partition] = record.offset + 1
        self.counts.busy_s += self.clock.monotonic_s() - started_s
        self._note_freshness(batch, read_ms)

    def _split(self, batch: Batch) -> list[tuple[Batch, bool]]:
        """(part, is it trained): requests from `freeze_at_ms` on are only scored."""
        if batch.num_requests == 0:
            return []
        frozen_R = batch.time_ms_R >= self.config.freeze_at_ms
        if not self.config.freeze_at_ms or not frozen_R.any():
            return [(batch, True)]
        self.counts.frozen += int(frozen_R.sum())
        if frozen_R.all():
            return [(batch, False)]
        return [(batch.take_requests(np.flatnonzero(~frozen_R)), True), (batch.take_requests(np.flatnonzero(frozen_R)), False)]

    def _learn(self, batch: Batch, trains: bool) -> None:
        lookup = build_lookup(batch)
        asked_s = self.clock.monotonic_s()
        rows = self.client.pull(lookup)
        self.counts.waiting_s += self.clock.monotonic_s() - asked_s
        inputs = build_inputs(batch, lookup, rows, self.config.device, train=trains)
        with torch.set_grad_enabled(trains):
            logits_BT = self.model(inputs)
        self._score(batch, torch.sigmoid(logits_BT.detach()).cpu().numpy())
        self.watermark_ms = max(self.watermark_ms, int(batch.close_ms_R.max()))
        if trains and batch.weight_BT.any() and self._descend(batch, inputs, logits_BT):
            self._push(batch, lookup, inputs)

    def _score(self, batch: Batch, score_BT: np.ndarray) -> None:
        """What the model says before it has seen these labels."""
        self.metrics.update(score_BT, batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R)
        for prediction in predictions_of(batch, score_BT, self.num_steps):
            self.predictions(prediction)
        self.counts.requests += batch.num_requests
        self.counts.candidates += batch.num_candidates

    def _descend(self, batch: Batch, inputs: Inputs, logits_BT: torch.Tensor) -> bool:
        """Gradients, and the dense step. False: they aren't finite; the batch is skipped, its offsets move on."""
        self.optimizer.zero_grad()
        device = self.config.device
        targets = Targets(torch.from_numpy(batch.label_BT).to(device), torch.from_numpy(batch.weight_BT).to(device))
        value = self.model.loss(inputs, logits_BT, targets)
        value.backward()  # type: ignore[no-untyped-call]
        gradients = [t.grad for t in (*inputs.rows.values(), *self.model.parameters()) if t.grad is not None]
        if not (torch.isfinite(value) and all(torch.isfinite(g).all() for g in gradients)):
            self.counts.non_finite += 1
            log.error(
                "step %d: loss %s with gradients that aren't all finite; its %d requests are skipped and training goes on",
                self.num_steps,
                float(value.detach()),
                batch.num_requests,
            )
            return False
        self.optimizer.step()
        return True

    def _push(self, batch: Batch, lookup: Lookup, inputs: Inputs) -> None:
        gradients = {
            stack: (torch.zeros_like(rows_UD) if rows_UD.grad is None else rows_UD.grad).detach().cpu().numpy()
            for stack, rows_UD in inputs.rows.items()
        }
        engaged_ms = batch.oldest_engagement_ms_R[batch.oldest_engagement_ms_R > 0]
        self.client.push(
            lookup,
            gradients,
            step=self.num_steps,
            time_ms=self.watermark_ms,
            oldest_engagement_ms=int(engaged_ms.min()) if len(engaged_ms) else 0,
            oldest_close_ms=int(batch.close_ms_R.min()),
        )

    def _reject(self, record: Record, reject: Reject) -> None:
        self.counts.dead_letters += 1
        self.dead_letters(dead_letter(record, reject.reason, reject.error, self.schema.limits.max_record_bytes))

    def _note_freshness(self, batch: Batch, read_ms: int) -> None:
        """Of the batch's oldest request; a replay of old data has no meaningful times between event and wall."""
        if batch.num_requests == 0:
            return
        engaged_R = batch.oldest_engagement_ms_R > 0
        if engaged_R.any():
            waits_ms = batch.close_ms_R[engaged_R] - batch.oldest_engagement_ms_R[engaged_R]
            self.on_freshness("engagement_to_close", float(waits_ms.max()))
        to_readable_ms = read_ms - int(batch.close_ms_R.min())
        if 0 <= to_readable_ms < _SANE_MS:
            self.on_freshness("close_to_readable", float(to_readable_ms))
            self.on_freshness("readable_to_trained", float(self.clock.now_ms() - read_ms))


def exact_numerics(config: LoopConfig) -> None:
    """Process-wide: what bit-equal repetition needs. Call once at start where `config.exact`."""
    if config.exact:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


def metrics_summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a metrics report that status and manifests carry."""
    names = ("requests", "candidates", "base_rate", "ne", "auc", "request_auc", "mrr", "ndcg@10", "calibration")
    tasks = {task: {k: values.get(k) for k in names if k in values} for task, values in report.get("tasks", {}).items()}
    return {**{k: report.get(k) for k in names}, "tasks": tasks}

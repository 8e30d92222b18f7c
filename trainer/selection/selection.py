"""Data selection for the training loop: splits each chunk into parts that are trained, only scored, or
skipped, keeps the state of the policies, and chooses which gradients are pushed.

    claim ──► dedupe ──► split ──► [skipped, scored] [trained] [frozen]     unscored
                         by id and labels; slipstream: by rows              reported when the chunk ends

Skipped requests that are scored come first, so they are scored with the weights from before their chunk. A
chunk is always one range of the input; with `refill` it is a longer one.

Letters: R requests, B candidates, T tasks, M some of the requests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from roostream.errors import ConfigError
from roostream.models.model import Targets
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup
from trainer.chunks import ChunkPart, ClaimedChunk, PulledPart, build_part, split_frozen
from trainer.config import LoopConfig
from trainer.rows import Rows
from trainer.selection.decision import Decision, SelectionWeights, UnscoredRequests, decide
from trainer.selection.deferral import Deferral, num_deferred
from trainer.selection.rehearsal import Rehearsal
from trainer.selection.slipstream_policy import SlipstreamPolicy

Tensors = Mapping[str, np.ndarray]
log = logging.getLogger("roostream.worker")

_MAX_REQUESTS = 1 << 16  # limit of a chunk, however many requests are skipped
_NUM_AVERAGED = 10  # chunks over which the share of kept requests is averaged
Outgoing = tuple[Lookup, Mapping[str, torch.Tensor]]


class Selection:
    """Selection of one training loop, in its thread. With policy off and no deferral it does nothing and
    keeps no state."""

    def __init__(self, config: LoopConfig, schema: Schema) -> None:
        self.config, self.schema = config.selection, schema
        self._seed, self._freeze_at_ms = config.seed, config.freeze_at_ms
        self._deduplicated = config.deduplicate
        self._warned_about_control = False  # once a process
        self.slipstream: SlipstreamPolicy | None = None
        self.deferral: Deferral | None = None
        self.rehearsal: Rehearsal | None = None
        if self.config.policy == "slipstream":
            self.slipstream = SlipstreamPolicy(self.config.slipstream, schema, config.seed)
        if config.deferral.is_on:
            self.deferral = Deferral(config.deferral, schema)
        if config.rehearsal.is_on:
            self.rehearsal = Rehearsal(config.rehearsal, schema, config.seed, deduplicated=config.deduplicate)
        self.reset()

    def reset(self) -> None:
        """Forget all state: the loop starts again or is restored."""
        self._num_ahead = self._num_judged = self._num_skipped = self._num_probed = 0
        self._weights = self._num_weighed = 0.0
        self._kept_share, self._num_chunks = 1.0, 0
        for part in (self.slipstream, self.deferral, self.rehearsal):
            if part is not None:
                part.load({})

    # Requests

    def chunk_size(self, size: int) -> int:
        """Requests to read for a chunk of which about `size` are trained, if batches are refilled."""
        if not self.config.refill:
            return size
        return max(size, min(math.ceil(size / max(self._kept_share, self.config.min_kept)), _MAX_REQUESTS))

    def split(self, batch: Batch, num_steps: int) -> tuple[tuple[ChunkPart, ...], UnscoredRequests | None]:
        """Parts of the new requests of a chunk, and those that are not scored.

        `num_steps`: steps of the loop so far. Frozen requests are not judged. Skipped corrections are not
        reported.
        """
        if not self.config.is_on:
            return split_frozen(batch, self._freeze_at_ms, deduplicated=self._deduplicated), None
        if self.slipstream and not self._warned_about_control:
            self._warned_about_control = True
            log.warning(
                "selection.policy: 'slipstream' was not better than dropping as many requests at random "
                "where measured; train the same log also with policy = 'random', at the keep that gives the "
                "same skip_share"
            )
        self._num_ahead += 1
        frozen_R = batch.time_ms_R >= (self._freeze_at_ms or math.inf)
        judged = _taken(batch, ~frozen_R)
        decision = self._decide(judged, num_steps + self._num_ahead)
        scored_R = ~decision.kept_R & ~judged.correction_R
        unscored_R = scored_R & self._is_not_scored(decision)
        parts = [
            self._part(judged, decision, scored_R & ~unscored_R, trains=False),
            self._part(judged, decision, decision.kept_R, trains=True),
        ]
        if frozen_R.any():
            frozen = _taken(batch, frozen_R)
            parts.append(build_part(frozen, trains=False, deduplicated=self._deduplicated))
        unscored = UnscoredRequests(judged, np.flatnonzero(unscored_R), decision.reason_R)
        return tuple(part for part in parts if part is not None), unscored if unscored_R.any() else None

    def _decide(self, judged: Batch, step: int) -> Decision:
        stale_R = self.slipstream.stale(judged, step) if self.slipstream else None
        decision = decide(judged, self.config, self._seed, stale_R)
        self._num_judged += judged.num_requests
        self._num_skipped += int((~decision.kept_R).sum())
        if judged.num_requests:
            self._num_chunks += 1
            num_averaged = min(self._num_chunks, _NUM_AVERAGED)
            self._kept_share += (decision.kept_R.mean() - self._kept_share) / num_averaged
        return decision

    def _part(
        self, judged: Batch, decision: Decision, row_R: np.ndarray, *, trains: bool
    ) -> ChunkPart | None:
        if not row_R.any():
            return None
        metric_weight_M = self._represented(decision, row_R, trains=trains)
        if trains and (decision.weight_R[row_R] == 1).all() and (metric_weight_M == 1).all():
            return build_part(_taken(judged, row_R), trains=True, deduplicated=self._deduplicated)
        self._num_probed += 0 if trains else len(metric_weight_M)
        choice = SelectionWeights(decision.reason_R[row_R], decision.weight_R[row_R], metric_weight_M)
        return build_part(
            _taken(judged, row_R), trains=trains, deduplicated=self._deduplicated, choice=choice
        )

    def _is_not_scored(self, decision: Decision) -> np.ndarray:
        """bool [R]: not scored if it is skipped."""
        if self.config.score == "probe":
            return ~decision.probe_R
        return np.full(len(decision.kept_R), self.config.score == "kept")

    def _represented(self, decision: Decision, row_R: np.ndarray, *, trains: bool) -> np.ndarray:
        """float32 [M]: number of requests that each one represents in metrics."""
        if trains and self.config.score == "kept":
            return decision.stands_for_R[row_R]
        each = 1.0 if trains or self.config.score == "all" else 1 / self.config.probe
        return np.full(int(row_R.sum()), each, np.float32)

    def weight_targets(self, targets: Targets, part: ChunkPart) -> Targets:
        """Apply the weights of the part's requests. The divisor of the loss stays that of unweighted
        candidates (roostream/models/loss.py)."""
        if part.choice is None:
            return targets
        weight_B = torch.from_numpy(part.choice.train_weight_R[part.batch.request_index_B]).to(
            targets.weight_BT.device
        )
        total_T = targets.weight_BT.sum(dim=0) if targets.total_T is None else targets.total_T
        return targets._replace(weight_BT=targets.weight_BT * weight_B[:, None], total_T=total_T)

    # Steps

    def on_trained(self, step: int, claimed: ClaimedChunk, rows: Rows) -> None:
        """The oldest split chunk is trained and pushed.

        Raises:
            UnavailableError: as `rows.pull`.
        """
        if not self.config.is_on:
            return
        self._num_ahead -= 1
        for part in claimed.parts:
            if part.trains:
                num = part.batch.num_requests
                self._weights += num if part.choice is None else float(part.choice.train_weight_R.sum())
                self._num_weighed += num
        if self.slipstream:
            batches = [(part.batch, part.lookup) for part in claimed.parts if part.trains]
            self.slipstream.on_trained(
                step, batches, lambda lookup: {s: x.cpu().numpy() for s, x in rows.pull(lookup).items()}
            )

    def gradients_to_push(
        self, pulled: PulledPart, gradients: Mapping[str, torch.Tensor], now_ms: int
    ) -> Outgoing:
        """(lookup, gradients) to push now for a part."""
        if self.deferral is None:
            return pulled.part.lookup, gradients
        rows = {stack: _host(pulled.inputs.rows[stack]) for stack in gradients}
        on_host = {stack: _host(gradient_UD) for stack, gradient_UD in gradients.items()}
        pushed = self.deferral.take(pulled.part.lookup, rows, on_host, now_ms)
        return pushed.lookup, {stack: torch.from_numpy(sum_UD) for stack, sum_UD in pushed.gradients.items()}

    def flush_deferred(self) -> Outgoing | None:
        """All deferred gradients, to be pushed now; None: there are none."""
        pushed = self.deferral.flush() if self.deferral else None
        if pushed is None:
            return None
        return pushed.lookup, {stack: torch.from_numpy(x_UD) for stack, x_UD in pushed.gradients.items()}

    # Phases

    def validate(self, *, workers: int) -> None:
        """Raise ConfigError if several workers share what needs the visits of all rows."""
        if workers == 1:
            return
        wrong = ""
        if self.slipstream:
            others = f"off, negatives or random with {workers} workers"
            wrong = f"selection.policy: expected {others}, got 'slipstream'"
        elif self.deferral:
            share = self.deferral.config.share
            wrong = f"deferral.share: expected 0 with {workers} workers, got {share:g}"
        elif self.rehearsal:
            batches = self.rehearsal.config.batches
            wrong = f"rehearsal.batches: expected 0 with {workers} workers, got {batches}"
        if wrong:
            raise ConfigError(f"{wrong}; train with one")

    def begin_phase(self, *, finite: bool, handed_over: bool) -> None:
        """What is trained from now on is finite (history), or a stream. `handed_over`: history came before
        it.

        Raises:
            ConfigError: slipstream without history.
        """
        if self.slipstream is None or finite:
            return
        if not handed_over:
            raise ConfigError(
                "selection.policy: expected off, negatives or random for a stream, got 'slipstream', which "
                "judges rows once; choose another policy, or train history first with initial_workers = 1"
            )
        self.slipstream.end()

    def state(self) -> dict[str, np.ndarray]:
        """Tensors of a commit; {} while off."""
        return {
            name: x
            for part in (self.slipstream, self.deferral)
            if part is not None
            for name, x in part.state().items()
        }

    def rehearsal_state(self) -> dict[str, np.ndarray]:
        """Tensors of the worker's own part of a commit, for `load_rehearsal`; {} while off."""
        return self.rehearsal.state() if self.rehearsal else {}

    def load_rehearsal(self, tensors: Tensors) -> None:
        if self.rehearsal:
            self.rehearsal.load(tensors)

    def load(self, tensors: Tensors) -> None:
        """Load a `state`, or parts of it; the rest starts again."""
        for part in (self.slipstream, self.deferral):
            if part is not None:
                part.load(tensors)
        kept = self.deferral.num_waiting if self.deferral else 0
        if (dropped := num_deferred(tensors) - kept) > 0:
            log.warning(
                "the deferred gradients of %d rows in the commit are not trained: deferral is off now, or "
                "their tables are gone or have another width",
                dropped,
            )

    def report(self) -> dict[str, Any]:
        """For metrics and heartbeats: shares since the loop started or was restored; {} while off."""
        out: dict[str, Any] = dict(self.deferral.report()) if self.deferral else {}
        out |= self.rehearsal.report() if self.rehearsal else {}
        if not self.config.is_on:
            return out
        share = self._num_skipped / self._num_judged if self._num_judged else None
        mean = self._weights / self._num_weighed if self._num_weighed else None
        out |= {"skip_share": share, "probed": self._num_probed, "train_weight_mean": mean}
        if self.slipstream:
            out |= {f"slipstream_{name}": value for name, value in self.slipstream.report().items()}
        return out


def _taken(batch: Batch, row_R: np.ndarray) -> Batch:
    return batch if row_R.all() else batch.take_requests(np.flatnonzero(row_R))


def _host(x_UD: torch.Tensor) -> np.ndarray:
    return x_UD.detach().cpu().numpy()

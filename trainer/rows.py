"""The loop's interface to embedding rows: pull rows and push gradients as tensors, wherever the rows are
held.

Letters: U unique rows of a stack, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from param_server.client import Client
from roostream.runtime.bucket_map import BucketMap
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, StackLookup
from trainer.corrections import record_due_ms


class PushTimes(NamedTuple):
    """Times and limits that shards record with a push."""

    step: int
    time_ms: int  # event time that stamps the rows (`TrainingWatermark.push_time_ms`)
    oldest_engagement_ms: int = 0  # of the batch; 0 = none
    oldest_close_ms: int = 0
    clip_row_norm: float = 0.0  # several workers: limit for the norm of each row's gradient sum; 0 = none


def push_times(batch: Batch, *, step: int, time_ms: int, clip_row_norm: float = 0.0) -> PushTimes:
    """Times of a push with the gradients of these requests."""
    engaged_ms = batch.oldest_engagement_ms_R[batch.oldest_engagement_ms_R > 0]
    return PushTimes(
        step=step,
        time_ms=time_ms,
        oldest_engagement_ms=int(engaged_ms.min()) if len(engaged_ms) else 0,
        oldest_close_ms=int(record_due_ms(batch).min()),
        clip_row_norm=clip_row_norm,
    )


class Rows(Protocol):
    """Rows of all stacks: on parameter servers, behind a cache, or in modules on the device."""

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """The rows were restored, and `workers` workers all push at each step. `owners`: shard of each
        bucket; None = bucket mod shards. No push may be in flight."""

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        """Stack → float32 [U, D], aligned with `lookup`, on any device. The loop does not modify them. May
        run beside `push`. Raises UnavailableError: a shard is unavailable, or was restored (FencedError)."""

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """Apply `gradients` (stack → float32 [U, D], finite); other stacks stay unchanged. Several workers
        all push at the same steps, possibly nothing, and the call returns when their sum is applied. Raises
        UnavailableError: as `pull`; some rows may have changed: all members must be restored."""

    def save(self) -> None:
        """A commit is cut: what was pushed must be at the shards. Several workers all call it after the same
        step. Raises UnavailableError: as `pull`."""


class PhasedRows:
    """`Rows` that the workers hold themselves in the initial phase, and that shards hold in the stream. The
    workers' rows are at the shards after every commit, so nothing moves at the switch."""

    def __init__(self, held: Rows, at_shards: Rows, is_initial: Callable[[], bool]) -> None:
        """`is_initial`: whether the incarnation trains history; asked when its first rows are pulled."""
        self.held, self.at_shards, self.is_initial = held, at_shards, is_initial
        self._used: Rows | None = None

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self._used = None
        self.held.set_incarnation(incarnation, workers, owners)
        self.at_shards.set_incarnation(incarnation, workers, owners)

    def _now(self) -> Rows:
        if self._used is None:
            self._used = self.held if self.is_initial() else self.at_shards
        return self._used

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return self._now().pull(lookup)

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        self._now().push(lookup, gradients, times)

    def save(self) -> None:
        if self._used is not None:
            self._used.save()


def clip_rows(gradients: Mapping[str, Tensor], max_norm: float) -> bool:
    """Scale each row's gradient (stack → float32 [U, D]) down to a Euclidean norm of `max_norm`, in place, so
    that no accumulator grows by more than its square. False: a square is not finite; nothing was changed."""
    norms = {
        stack: torch.linalg.vector_norm(gradient_UD, dim=1, keepdim=True)
        for stack, gradient_UD in gradients.items()
    }
    if not all(bool(torch.isfinite(norm_U1).all()) for norm_U1 in norms.values()):
        return False
    for stack, norm_U1 in norms.items():
        if bool((norm_U1 > max_norm).any()):
            gradients[stack].mul_((max_norm / norm_U1).clamp_max(1.0))
    return True


def largest_norm(gradients: Mapping[str, Tensor]) -> float:
    """Largest norm of a row of `gradients` (stack → [U, D]). 0 without rows; NaN or infinite if a square is
    not finite."""
    norms = [
        torch.linalg.vector_norm(gradient_UD, dim=1).max()
        for gradient_UD in gradients.values()
        if len(gradient_UD)
    ]
    return float(torch.stack(norms).max()) if norms else 0.0


def empty_lookup(schema: Schema) -> Lookup:
    """The lookup of a batch without requests."""
    return Lookup({s: StackLookup(np.zeros(0, np.uint32), np.zeros(0, np.int64), {}) for s in schema.stacks})


class ShardRows:
    """`Rows` of the shards behind `client`, on the host."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.client.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {stack: torch.from_numpy(rows_UD) for stack, rows_UD in self.client.pull(lookup).items()}

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        on_host = {stack: gradient_UD.detach().cpu().numpy() for stack, gradient_UD in gradients.items()}
        self.client.push(lookup, on_host, **times._asdict())

    def save(self) -> None:
        """Every push that returned is at the shards."""

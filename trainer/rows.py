"""Where the loop gets rows and brings gradients: tensors on this side, whatever holds them on the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from param_server.client import Client
from roostream.runtime.bucket_map import BucketMap
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, StackLookup
from trainer.corrections import due_ms_of

if TYPE_CHECKING:
    from param_server.row_exchange import RowExchange


class PushTimes(NamedTuple):
    """What shards note of a push."""

    step: int
    time_ms: int  # event-time watermark: it stamps the rows
    oldest_engagement_ms: int = 0  # of the batch; 0 = no engagement
    oldest_close_ms: int = 0
    clip_row_norm: float = (
        0.0  # with several workers: each row's sum is brought to this norm at most; 0 = as it is
    )


def push_times(batch: Batch, *, step: int, time_ms: int, clip_row_norm: float = 0.0) -> PushTimes:
    """Of a push of what these requests gave."""
    engaged_ms = batch.oldest_engagement_ms_R[batch.oldest_engagement_ms_R > 0]
    return PushTimes(
        step=step,
        time_ms=time_ms,
        oldest_engagement_ms=int(engaged_ms.min()) if len(engaged_ms) else 0,
        oldest_close_ms=int(due_ms_of(batch).min()),
        clip_row_norm=clip_row_norm,
    )


class Rows(Protocol):
    """Rows of all stacks: the parameter servers, a cache before them, or modules that hold them on the device."""

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        """The rows were restored, so many workers push at each step, all of them, and buckets lie as `owners` says (None = bucket
        mod shards). No push may be under way."""

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        """Stack → float32 [U, D], aligned with `lookup`, on any device. The loop doesn't write to them. May run beside `push`.

        Raises:
            UnavailableError: a shard is away, or was restored (FencedError).
        """

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """Apply `gradients` (stack → float32 [U, D], finite); stacks that aren't named keep their rows. With several workers all
        push at the same steps, also nothing, and return when the sum of all is applied.

        Raises:
            UnavailableError: as `pull`; some rows may have changed: everyone must be restored.
        """


def clip_rows(gradients: Mapping[str, Tensor], most: float) -> bool:
    """Scale each row's gradient (stack → float32 [U, D]) down to a Euclidean norm of `most`, in place, so that no accumulator
    grows by more than its square. False: a square isn't finite; nothing was changed."""
    norms = {
        stack: torch.linalg.vector_norm(gradient_UD, dim=1, keepdim=True)
        for stack, gradient_UD in gradients.items()
    }
    if not all(bool(torch.isfinite(norm_U1).all()) for norm_U1 in norms.values()):
        return False
    for stack, norm_U1 in norms.items():
        if bool((norm_U1 > most).any()):
            gradients[stack].mul_((most / norm_U1).clamp_max(1.0))
    return True


def largest_norm(gradients: Mapping[str, Tensor]) -> float:
    """Of a row of `gradients` (stack → [U, D]): 0 of none, NaN or infinite where a square isn't finite."""
    norms = [
        torch.linalg.vector_norm(gradient_UD, dim=1).max()
        for gradient_UD in gradients.values()
        if len(gradient_UD)
    ]
    return float(torch.stack(norms).max()) if norms else 0.0


def no_rows(schema: Schema) -> Lookup:
    """What a batch without requests looks up."""
    return Lookup({s: StackLookup(np.zeros(0, np.uint32), np.zeros(0, np.int64), {}) for s in schema.stacks})


class ShardRows:
    """See `Rows`: those of the shards behind `client`, on the host, or of the workers' own."""

    def __init__(self, client: Client | RowExchange) -> None:
        self.client = client

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.client.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {stack: torch.from_numpy(rows_UD) for stack, rows_UD in self.client.pull(lookup).items()}

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        on_host = {stack: gradient_UD.detach().cpu().numpy() for stack, gradient_UD in gradients.items()}
        self.client.push(lookup, on_host, **times._asdict())

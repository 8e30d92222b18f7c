"""A chunk on its way from the source to training, and who carries it there.

    poll ──► Chunk ──► claim ──► Claimed ──► pull ──► Prepared ──► train
              records    dedupe, parts,       rows of the
              decoded    lookups              first part

The loop has the acts; a `Feed` calls the first three, here in the loop's thread (`SerialFeed`), or ahead of it in others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from roostream.models.inputs import Inputs
from roostream.runtime.kafka.topics import Partition
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, build_lookup
from trainer.batch_source import Chunk
from trainer.device.staging import DeviceCopy
from trainer.rows import Rows
from trainer.selection.decision import FROZEN, TRAINED, SelectionWeights, UnscoredRequests


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPart:
    """Requests of a chunk that are treated alike, and the rows that they need."""

    batch: Batch
    trains: bool  # or is it only scored?
    lookup: Lookup
    choice: SelectionWeights | None = (
        None  # what selection says of its requests; None: all are trained, or frozen, and count once
    )

    @property
    def has_weight(self) -> bool:
        """Whether training on it changes anything."""
        return self.trains and bool(self.batch.weight_BT.any())

    @property
    def disposition_R(self) -> np.ndarray:
        """uint8: what becomes of each request (decision.py)."""
        of_all = TRAINED if self.trains else FROZEN
        return (
            np.full(self.batch.num_requests, of_all, np.uint8)
            if self.choice is None
            else self.choice.reason_R
        )

    def take(self, row_M: np.ndarray) -> ChunkPart:
        """The requests `row_M` (int64 [M]) of it."""
        choice = None if self.choice is None else SelectionWeights(*(of_R[row_M] for of_R in self.choice))
        return part_of(self.batch.take_requests(row_M), trains=self.trains, choice=choice)


def part_of(
    batch: Batch, *, trains: bool, deduplicated: bool = False, choice: SelectionWeights | None = None
) -> ChunkPart:
    return ChunkPart(
        batch=batch, trains=trains, lookup=build_lookup(batch, deduplicated=deduplicated), choice=choice
    )


def split_at(batch: Batch, freeze_at_ms: int, *, deduplicated: bool = False) -> tuple[ChunkPart, ...]:
    """Requests from `freeze_at_ms` on (0 = never) are only scored, behind the others; none where there is no request."""
    frozen_R = batch.time_ms_R >= freeze_at_ms if freeze_at_ms else np.zeros(batch.num_requests, np.bool_)
    if not batch.num_requests:
        return ()
    if frozen_R.all() or not frozen_R.any():
        return (part_of(batch, trains=not frozen_R.any(), deduplicated=deduplicated),)
    trained, scored = (batch.take_requests(np.flatnonzero(of_R)) for of_R in (~frozen_R, frozen_R))
    return part_of(trained, trains=True, deduplicated=deduplicated), part_of(
        scored, trains=False, deduplicated=deduplicated
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Claimed:
    """A chunk, and what of it wasn't trained or claimed before. `train` it, in the order of `claim`, or `restore` the loop."""

    chunk: Chunk
    new_R: np.ndarray  # bool, of the chunk's requests
    parts: tuple[ChunkPart, ...]  # later ones must see what earlier ones change; none where nothing is new
    unscored: UnscoredRequests | None = None  # what isn't even looked at; None = nothing

    @property
    def num_requests(self) -> int:
        """New ones; a correction is no request of its own."""
        return int((self.new_R & ~self.chunk.batch.correction_R).sum())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pulled:
    """A part with its rows."""

    part: ChunkPart
    inputs: Inputs
    copied: DeviceCopy | None = None  # to the device; None: they were put where they are

    def ready(self) -> Inputs:
        """The inputs, for what the calling thread computes from now on."""
        if self.copied is not None:
            self.copied.wait_on_compute_stream()
        return self.inputs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A claimed chunk with the rows of its first part; those of later parts are pulled when their turn comes."""

    claimed: Claimed
    first: Pulled | None


class Wanted(NamedTuple):
    """What a source is asked for."""

    max_requests: int
    partition: Partition | None  # None: any


class LoopSteps(Protocol):
    """What a feed does with the loop (`TrainLoop`). All in the loop's thread, but for `poll` and `rest` of what was `wanted`, and
    `pull`, which change nothing of the loop's and may run in others, beside `train`."""

    def wanted(self, num_chunks: int = 0, max_requests: int = 0) -> Wanted | None:
        """What the chunk is that comes behind those already trained and `num_chunks` more, of `max_requests` together. None:
        it depends on what comes of those; of none of them it is known."""

    def poll(self, wanted: Wanted, timeout_s: float) -> Chunk | None: ...

    def rest(self, wanted: Wanted) -> Chunk | None: ...

    def claim(self, chunk: Chunk) -> Claimed: ...

    def pull(self, claimed: Claimed, rows: Rows | None = None) -> Prepared:
        """`rows`: where from; None = the loop's own."""


class Feed(Protocol):
    """What gives `train` its chunks, in the order of the source. The loop's thread calls it, for each chunk `claimed` or `rest`,
    then `pulled`, then `trained`; the next chunk may be `claimed` before `pulled` or `trained` of the one before it.

    An error that is of a chunk says of which offsets in its notes, whatever it was raised by."""

    max_staleness: int
    """The most pushes that came between a pull and the training of what was pulled, since the start."""
    num_shared: int
    """Rows so far that one of these pushes changed: they were trained from a value that was older."""

    def claimed(self, timeout_s: float) -> Claimed | None:
        """The next chunk, which nothing will be trained before but what was given already. None: none is due after
        `timeout_s`.

        Raises:
            UnavailableError: the source, or a push that was given before.
        """

    def rest(self) -> Claimed | None:
        """At the end of the input: as `claimed`, also a chunk that isn't full."""

    def pulled(self, claimed: Claimed) -> Prepared:
        """The oldest chunk given that isn't trained, with rows. Every chunk before it is trained.

        Raises:
            UnavailableError: a shard is away or fenced this worker (FencedError).
        """

    def trained(self) -> None:
        """The oldest chunk given is trained, and its gradients are given to the rows."""

    def drain(self) -> None:
        """A cut: when it returns, every push is acknowledged, no pull is under way, and no rows are kept that were pulled before.
        Chunks on their way stay there.

        Raises:
            UnavailableError: a push failed: there can be no cut.
        """

    def pause(self) -> None:
        """When it returns nothing is being read, so whoever asks the source is answered; what was read stays, and `claimed` reads
        on."""

    def forget(self) -> None:
        """The loop is being restored: what is on its way is void, and none of it will be given. The loop seeks behind this,
        so no thread may touch source or loop when it returns, until `claimed` is called again."""

    def close(self) -> None:
        """Ends the feed's threads, if it has any. Idempotent."""


class SerialFeed:
    """See `Feed`. One act after the other, in the loop's thread: rows are as after the chunk before."""

    max_staleness = num_shared = 0

    def __init__(self, acts: LoopSteps) -> None:
        self.acts = acts
        self._num_ahead = 0  # given and not trained

    def claimed(self, timeout_s: float) -> Claimed | None:
        return self._claim(lambda wanted: self.acts.poll(wanted, timeout_s))

    def rest(self) -> Claimed | None:
        return self._claim(self.acts.rest)

    def pulled(self, claimed: Claimed) -> Prepared:
        return self.acts.pull(claimed)

    def trained(self) -> None:
        self._num_ahead -= 1

    def drain(self) -> None:
        """Nothing is on its way."""

    def pause(self) -> None:
        """Nothing is read but in a call."""

    def forget(self) -> None:
        self._num_ahead = 0

    def close(self) -> None:
        """There are no threads."""

    def _claim(self, take: Callable[[Wanted], Chunk | None]) -> Claimed | None:
        wanted = self.acts.wanted(self._num_ahead)
        chunk = None if wanted is None else take(wanted)
        self._num_ahead += chunk is not None
        return None if chunk is None else self.acts.claim(chunk)

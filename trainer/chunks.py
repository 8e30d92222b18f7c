"""A chunk of samples on its way from the source to training.

    poll ──► Chunk ──► claim ──► ClaimedChunk ──► pull ──► PreparedChunk ──► train
              records    deduplicated, split        rows of the
              decoded    into parts, lookups        first part

Letters: R requests of a batch, M of these, chosen."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from roostream.models.inputs import Inputs
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, build_lookup
from roostream.wire.records import Record
from trainer.device.staging import DeviceCopy
from trainer.selection.decision import FROZEN, TRAINED, SelectionWeights, UnscoredRequests


class Rejected(NamedTuple):
    """A record that cannot be trained on, with what its dead letter needs."""

    partition: Partition
    offset: int
    reason: str  # one of roostream.wire.records.REASONS
    error: str
    raw: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """Consecutive requests and rejected records of the input. Progress moves to `after` once all of it is
    trained."""

    batch: Batch  # R requests, in training order
    rejects: Sequence[Rejected]
    after: Progress  # next offset behind this chunk, for each of its partitions
    read_ms: int  # wall time at which its records were read, before decoding
    records: Sequence[Record] = ()  # the undecoded records, if known
    # Kafka's leader epochs of the records before `after`, as far as they are known
    leader_epochs: Mapping[Partition, int] = dataclasses.field(default_factory=dict)

    def raw_of(self, partition: Partition, offset: int) -> bytes:
        """The record at this offset; empty if unknown."""
        values = [r.value for r in self.records if (r.topic, r.partition, r.offset) == (*partition, offset)]
        return values[0] or b"" if values else b""

    @property
    def close_ms_R(self) -> np.ndarray:
        """Close times of its samples, without corrections."""
        return self.batch.close_ms_R[~self.batch.correction_R]

    @property
    def offsets(self) -> str:
        """Its offset ranges, for error messages: "samples-0 12..19, samples-1 3..3"."""
        known = [(r.topic, r.partition, r.offset) for r in self.records]
        known = known or [(*r.partition, r.offset) for r in self.rejects]
        first = {
            p: min((offset for *q, offset in known if tuple(q) == p), default=after - 1)
            for p, after in self.after.items()
        }
        return ", ".join(
            f"{topic}-{n} {first[topic, n]}..{after - 1}" for (topic, n), after in sorted(self.after.items())
        )


@contextlib.contextmanager
def annotate_errors(what: str, chunk: Chunk) -> Iterator[None]:
    """Add the chunk's offsets to the notes of errors raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the {what} of {chunk.offsets}")
        raise


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPart:
    """Requests of a chunk that are treated alike, and the rows that they need."""

    batch: Batch
    trains: bool  # False: its requests are only scored
    lookup: Lookup
    # Selection's decisions; None: all trained, or all frozen, with weight 1
    choice: SelectionWeights | None = None
    # Floats of impressions after transforms, of requests and of candidates; None: computed from the batch
    floats: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def has_weight(self) -> bool:
        """Whether training on it changes anything."""
        return self.trains and bool(self.batch.weight_BT.any())

    @property
    def disposition_R(self) -> np.ndarray:
        """uint8: what happens to each request (selection/decision.py)."""
        if self.choice is not None:
            return self.choice.reason_R
        return np.full(self.batch.num_requests, TRAINED if self.trains else FROZEN, np.uint8)

    def take(self, row_M: np.ndarray) -> ChunkPart:
        """The part's requests `row_M` (int64 [M])."""
        choice = (
            None if self.choice is None else SelectionWeights(*(column_R[row_M] for column_R in self.choice))
        )
        part = build_part(self.batch.take_requests(row_M), trains=self.trains, choice=choice)
        if self.floats is None:
            return part
        return dataclasses.replace(part, floats=(self.floats[0][row_M], self.floats[1][row_M]))


def build_part(
    batch: Batch, *, trains: bool, deduplicated: bool = False, choice: SelectionWeights | None = None
) -> ChunkPart:
    """A part of a chunk, with the lookup of its rows."""
    return ChunkPart(
        batch=batch, trains=trains, lookup=build_lookup(batch, deduplicated=deduplicated), choice=choice
    )


def split_frozen(batch: Batch, freeze_at_ms: int, *, deduplicated: bool = False) -> tuple[ChunkPart, ...]:
    """Split off the requests from `freeze_at_ms` on (0 = never), which are only scored, after the others.
    Empty parts are left out."""
    frozen_R = batch.time_ms_R >= freeze_at_ms if freeze_at_ms else np.zeros(batch.num_requests, np.bool_)
    if not batch.num_requests:
        return ()
    if frozen_R.all() or not frozen_R.any():
        return (build_part(batch, trains=not frozen_R.any(), deduplicated=deduplicated),)
    trained, scored = (batch.take_requests(np.flatnonzero(of_R)) for of_R in (~frozen_R, frozen_R))
    return (
        build_part(trained, trains=True, deduplicated=deduplicated),
        build_part(scored, trains=False, deduplicated=deduplicated),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClaimedChunk:
    """A chunk whose new requests are claimed for training. Chunks are trained in the order of their claims,
    unless the loop is restored."""

    chunk: Chunk
    new_R: np.ndarray  # bool: requests of the chunk that were not trained or claimed before
    parts: tuple[ChunkPart, ...]  # later parts must see the updates of earlier ones; empty if nothing is new
    unscored: UnscoredRequests | None = None  # requests that are not even scored

    @property
    def num_requests(self) -> int:
        """Number of new requests. A correction does not count as a request."""
        return int((self.new_R & ~self.chunk.batch.correction_R).sum())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PulledPart:
    """A part with its rows."""

    part: ChunkPart
    inputs: Inputs
    copied: DeviceCopy | None = None  # the pending copy to the device; None: the inputs are in place

    def ready(self) -> Inputs:
        """The inputs, for computations that the calling thread starts from now on."""
        if self.copied is not None:
            self.copied.wait_on_compute_stream()
        return self.inputs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PreparedChunk:
    """A claimed chunk with the rows of its first part.

    Rows of later parts are pulled when those are trained."""

    claimed: ClaimedChunk
    first: PulledPart | None


_SANE_MS = 3_600_000


def chunk_freshness(chunk: Chunk, new_R: np.ndarray, now_ms: int) -> Iterator[tuple[str, float]]:
    """(stage, ms) of a chunk that is trained by `now_ms`. Waits of replayed old data are not reported."""
    new_R = new_R & ~chunk.batch.correction_R
    if not new_R.any():
        return
    close_ms_R, engaged_ms_R = chunk.batch.close_ms_R[new_R], chunk.batch.oldest_engagement_ms_R[new_R]
    if (engaged_ms_R > 0).any():
        join_waits_ms = (close_ms_R - engaged_ms_R)[engaged_ms_R > 0]
        yield "engagement_to_close", float(join_waits_ms.max())
    to_readable_ms = chunk.read_ms - int(close_ms_R.min())
    if 0 <= to_readable_ms < _SANE_MS:
        yield "close_to_readable", float(to_readable_ms)
        yield "readable_to_trained", float(max(now_ms - chunk.read_ms, 0))

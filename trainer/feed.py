"""A chunk on its way from the source to training, and who carries it there.

    poll ──► Chunk ──► claim ──► Claimed ──► pull ──► Prepared ──► train
              records    dedupe, parts,       rows of the
              decoded    lookups              first part

The loop has the acts; a `Feed` calls the first three, here in the loop's thread (`SerialFeed`), or ahead of it in others.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from models.inputs import Inputs
from roo.batch import Batch
from roo.lookup import Lookup
from trainer.batches import Chunk


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkPart:
    """Requests of a chunk that are treated alike, and the rows that they need."""

    batch: Batch
    trains: bool  # or is it only scored?
    lookup: Lookup


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Claimed:
    """A chunk, and what of it wasn't trained or claimed before. `train` it, in the order of `claim`, or `restore` the loop."""

    chunk: Chunk
    new_R: np.ndarray  # bool, of the chunk's requests
    parts: tuple[ChunkPart, ...]  # later ones must see what earlier ones change; none where nothing is new


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pulled:
    """A part with its rows."""

    part: ChunkPart
    inputs: Inputs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A claimed chunk with the rows of its first part; those of later parts are pulled when their turn comes."""

    claimed: Claimed
    first: Pulled | None


class Acts(Protocol):
    """What a feed does with the loop (`TrainLoop`). `poll`, `rest` and `claim` belong to one thread, in the order of the
    source; `pull` may run in another one, beside `train`."""

    def poll(self, timeout_s: float) -> Chunk | None: ...

    def rest(self) -> Chunk | None: ...

    def claim(self, chunk: Chunk) -> Claimed: ...

    def pull(self, claimed: Claimed) -> Prepared: ...


class Feed(Protocol):
    """What gives `train` its chunks, in the order of the source. The loop's thread calls it, for each chunk `claimed` or `rest`,
    then `pulled`."""

    def claimed(self, timeout_s: float) -> Claimed | None:
        """The next chunk, which nothing will be trained before but what was given already. None: none is due after
        `timeout_s`."""

    def rest(self) -> Claimed | None:
        """At the end of the input: as `claimed`, also a chunk that isn't full."""

    def pulled(self, claimed: Claimed) -> Prepared:
        """What the last call of `claimed` or `rest` gave, with rows.

        Raises:
            UnavailableError: a shard is away or fenced this worker (FencedError).
        """

    def forget(self) -> None:
        """The loop is being restored: what is on its way is void, and none of it will be given. The loop seeks behind this,
        so no thread may touch source or loop when it returns, until `claimed` is called again."""


class SerialFeed:
    """See `Feed`. One act after the other, in the loop's thread: rows are as after the chunk before."""

    def __init__(self, acts: Acts) -> None:
        self.acts = acts

    def claimed(self, timeout_s: float) -> Claimed | None:
        return self._claim(self.acts.poll(timeout_s))

    def rest(self) -> Claimed | None:
        return self._claim(self.acts.rest())

    def pulled(self, claimed: Claimed) -> Prepared:
        return self.acts.pull(claimed)

    def forget(self) -> None:
        """Nothing is on its way."""

    def _claim(self, chunk: Chunk | None) -> Claimed | None:
        return None if chunk is None else self.acts.claim(chunk)

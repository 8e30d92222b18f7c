"""Brings chunks from the source to the training loop: poll, claim, pull.

The loop implements the steps. A `Feed` calls them, either one after the other (`SerialFeed`) or ahead of
training in other threads (pipeline/pipelined_feed.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from roostream.runtime.kafka.topics import Partition
from trainer.chunks import Chunk, ClaimedChunk, PreparedChunk
from trainer.rows import Rows


class ChunkRequest(NamedTuple):
    """A request to the source for a chunk."""

    max_requests: int
    partition: Partition | None  # None: any


class LoopSteps(Protocol):
    """The steps of `TrainLoop` that a feed calls. All run in the loop's thread, except `poll` and `rest` for
    a `next_request`, and `pull`. Those change nothing in the loop and may run in other threads, beside
    training."""

    def next_request(self, num_chunks: int = 0, max_requests: int = 0) -> ChunkRequest | None:
        """The request for the chunk after `num_chunks` more chunks with `max_requests` requests in total.
        None: it depends on the content of those chunks. With no such chunks it is always known."""

    def poll(self, request: ChunkRequest, timeout_s: float) -> Chunk | None: ...

    def rest(self, request: ChunkRequest) -> Chunk | None: ...

    def claim(self, chunk: Chunk) -> ClaimedChunk: ...

    def pull(self, claimed: ClaimedChunk, rows: Rows | None = None) -> PreparedChunk:
        """`rows`: where to pull from; None = the loop's rows."""


class Feed(Protocol):
    """Chunks for training, in the order of the source. The loop's thread calls `next_claimed` or `rest`, then
    `prepare`, then `mark_trained` for each chunk. The next chunk may be claimed before the last one is
    prepared or trained. An error that concerns a chunk names the chunk's offsets in its notes."""

    max_staleness: int
    """Largest number of pushes between a pull and the training of its rows, since the start."""
    num_shared: int
    """Number of rows that were trained from an older value, because one of these pushes changed them."""

    def next_claimed(self, timeout_s: float) -> ClaimedChunk | None:
        """Claim the next chunk. None: no chunk is due after `timeout_s`. Raises UnavailableError: the source
        is unavailable, or an earlier push failed."""

    def rest(self) -> ClaimedChunk | None:
        """As `next_claimed` at the end of the input; also returns partial chunks."""

    def prepare(self, claimed: ClaimedChunk) -> PreparedChunk:
        """Pull rows for the oldest claimed chunk that is not trained. All chunks before it are trained.
        Raises UnavailableError: a shard is unavailable or fenced this worker (FencedError)."""

    def mark_trained(self) -> None:
        """The oldest claimed chunk is trained, and its gradients were pushed."""

    def drain(self) -> None:
        """For a cut: wait until every push is acknowledged and no pull is in flight, and drop rows that were
        pulled ahead. Chunks that were read ahead stay. Raises UnavailableError: a push failed, so there can
        be no cut."""

    def pause(self) -> None:
        """Stop reading, so that the caller may use the source. Chunks that were read stay; `next_claimed`
        resumes reading."""

    def reset(self) -> None:
        """The loop is being restored: drop all chunks. No thread touches the source or the loop until
        `next_claimed` is called again, so that the loop can seek."""

    def close(self) -> None:
        """End the feed's threads. Idempotent."""


class SerialFeed:
    """A `Feed` that runs one step after the other in the loop's thread. Rows are as after the last chunk."""

    max_staleness = num_shared = 0

    def __init__(self, steps: LoopSteps) -> None:
        self.steps = steps
        self._num_ahead = 0  # chunks claimed and not trained

    def next_claimed(self, timeout_s: float) -> ClaimedChunk | None:
        return self._claim(lambda request: self.steps.poll(request, timeout_s))

    def rest(self) -> ClaimedChunk | None:
        return self._claim(self.steps.rest)

    def prepare(self, claimed: ClaimedChunk) -> PreparedChunk:
        return self.steps.pull(claimed)

    def mark_trained(self) -> None:
        self._num_ahead -= 1

    def drain(self) -> None:
        """Nothing is in flight."""

    def pause(self) -> None:
        """Reading happens only inside a call."""

    def reset(self) -> None:
        self._num_ahead = 0

    def close(self) -> None:
        """There are no threads."""

    def _claim(self, take: Callable[[ChunkRequest], Chunk | None]) -> ClaimedChunk | None:
        request = self.steps.next_request(self._num_ahead)
        chunk = None if request is None else take(request)
        self._num_ahead += chunk is not None
        return None if chunk is None else self.steps.claim(chunk)

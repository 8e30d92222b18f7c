"""Brings chunks from the source to the training loop: poll, claim, pull. The loop implements these steps. A
`Feed` calls them: one after the other (`SerialFeed`), or ahead of training in other threads:

    thread                source              rows (staleness ≥ 1)     the loop               push
                          poll, decode ─────► pull ──────────────────► claim, train ────────► push
    works on chunk        i + 2               i + 1                    i                      i - 1

All decisions are made in the loop's thread between two chunks: the size of the next chunk, which requests are
new, what is due. The other threads compute values from values. So what is trained does not depend on which
thread was faster.

**Staleness** is the number of pushes between a pull and the training of its rows. With 0, the loop's thread
pulls rows after every push is acknowledged: bit-equal to the serial loop. With k, a pull may start while k
pushes before its chunk's training are still outstanding (the Ads paper, §V: one step, no loss of quality).
Rows that turn out to be older are pulled again.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.kafka.topics import Partition
from roostream.wire.lookup import Lookup
from trainer.batch_source import BatchSource, ForwardingSource
from trainer.chunks import Chunk, ClaimedChunk, PreparedChunk
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import PushTimes, Rows

_POLL_S = 0.05
_PAUSE_S = 0.001  # after an empty poll, because an in-memory source returns at once
T = TypeVar("T")


class ChunkRequest(NamedTuple):
    """A request to the source for a chunk."""

    max_requests: int
    partition: Partition | None  # None: any


class LoopSteps(Protocol):
    """The steps of `TrainLoop` that a feed calls. All run in the loop's thread, except `poll` and
    `poll_remaining` for a `next_request`, and `pull`. Those change nothing in the loop and may run in other
    threads, beside training."""

    def next_request(self, num_chunks: int = 0, max_requests: int = 0) -> ChunkRequest | None:
        """The request for the chunk after `num_chunks` more chunks with `max_requests` requests in total.
        None: it depends on the content of those chunks. With no such chunks it is always known."""

    def poll(self, request: ChunkRequest, timeout_s: float) -> Chunk | None:
        """Read the next chunk. None: no chunk is due after `timeout_s`."""

    def poll_remaining(self, request: ChunkRequest) -> Chunk | None:
        """Read the next chunk at the end of the input; it may be smaller than requested."""

    def claim(self, chunk: Chunk) -> ClaimedChunk:
        """Decide which requests of the chunk are trained; duplicates of earlier chunks are left out."""

    def pull(self, claimed: ClaimedChunk, rows: Rows | None = None) -> PreparedChunk:
        """Pull the embedding rows of the chunk's first part. `rows`: where to pull from; None = the
        loop's."""


class Feed(Protocol):
    """Chunks for training, in the order of the source. The loop's thread calls `next_claimed` or
    `next_remaining`, then `prepare`, then `mark_trained` for each chunk. The next chunk may be claimed before
    the last one is prepared or trained. An error that concerns a chunk names the chunk's offsets in its
    notes."""

    max_staleness: int
    """Largest number of pushes between a pull and the training of its rows, since the start."""
    num_shared: int
    """Number of rows that were trained from an older value, because one of these pushes changed them."""

    def next_claimed(self, timeout_s: float) -> ClaimedChunk | None:
        """Claim the next chunk. None: no chunk is due after `timeout_s`. Raises UnavailableError: the source
        is unavailable, or an earlier push failed."""

    def next_remaining(self) -> ClaimedChunk | None:
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

    def next_remaining(self) -> ClaimedChunk | None:
        return self._claim(self.steps.poll_remaining)

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


class SourceThread(ForwardingSource):
    """A `BatchSource` that uses the handles of another one from one thread only. `submit` runs a function in
    that thread. Calls that read wait for it. `bound` and what reports progress use no handle and do not
    wait."""

    def __init__(self, open_source: Callable[[], BatchSource]) -> None:
        """`open_source` is called in the thread. If it raises, no thread is left behind."""
        self._closed = False
        self._executor = ThreadPoolExecutor(1, "source")
        self._ident = self._executor.submit(threading.get_ident).result()
        try:
            self.source = self.run(open_source)
        except BaseException:
            self._executor.shutdown()
            raise

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """Run `do` in the thread, in the order of calls."""
        return self._executor.submit(do)

    def run(self, do: Callable[[], T]) -> T:
        return do() if threading.get_ident() == self._ident else self.submit(do).result()

    def close(self) -> None:
        """Close the source and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            super().close()
            self._executor.shutdown()


class AsyncRows:
    """`Rows` whose pushes return at once.

    A pull from here sees every push that was queued before it; a pull from `rows` sees the acknowledged
    pushes. `changed` is notified of every acknowledgment and failure.

    **If a push fails**, no later push is made, and every later call raises the same error, until `forget`."""

    def __init__(self, rows: Rows, stages: StageTimer) -> None:
        self.rows, self.stages = rows, stages
        self.changed = threading.Condition()
        self.pushing = ""  # offsets of the chunk in training, for the notes of a failed push
        self.num_queued = self.num_acknowledged = 0
        self._executor = ThreadPoolExecutor(1, "push")
        self._in_flight: deque[Lookup] = deque()
        self._error: BaseException | None = None

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.forget()
        self.rows.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        self.wait()
        return self.rows.pull(lookup)

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        """Queue a push. `gradients` may not be changed until it is made."""
        with self.changed:
            self._check()
            self.num_queued += 1
            self._in_flight.append(lookup)
        self._executor.submit(self._push, lookup, gradients, times, self.pushing)

    def save(self) -> None:
        self.wait()
        self.rows.save()

    def wait(self, max_in_flight: int = 0) -> None:
        """Wait until at most `max_in_flight` pushes are unacknowledged. Raises UnavailableError: a push
        failed; its note names the offsets."""
        with self.stages("push"), self.changed:
            self.changed.wait_for(lambda: self._error is not None or len(self._in_flight) <= max_in_flight)
            self._check()

    def check(self) -> None:
        """Raise the error of a failed push."""
        with self.changed:
            self._check()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def in_flight(self) -> list[Lookup]:
        """Unacknowledged pushes, oldest first. Hold `changed`."""
        return list(self._in_flight)

    def forget(self) -> None:
        """The rows are being restored: drop queued pushes. No push is in flight when this returns."""
        with self.changed:
            self._error = self._error or RuntimeError("queued pushes are being dropped")
        self._executor.submit(lambda: None).result()
        with self.changed:
            self._in_flight.clear()
            self._error, self.num_acknowledged = None, self.num_queued

    def close(self) -> None:
        """End the thread and drop queued pushes. Idempotent."""
        self._executor.shutdown(cancel_futures=True)

    def _push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes, chunks: str) -> None:
        if self._error is not None:
            return
        try:
            with self.stages("push"):
                self.rows.push(lookup, gradients, times)
        except BaseException as error:
            error.add_note(f"in the push of {chunks}")
            with self.changed:
                self._error = self._error or error
                self.changed.notify_all()
            return
        with self.changed:
            self._in_flight.popleft()
            self.num_acknowledged += 1
            self.changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


@dataclasses.dataclass(frozen=True, eq=False)
class _PendingRead:
    request: ChunkRequest
    chunk: Future[Chunk | None]  # None: reading was stopped before the chunk was full


@dataclasses.dataclass(frozen=True, eq=False)
class _EarlyPull:
    """Rows that were pulled ahead."""

    prepared: PreparedChunk
    num_acknowledged: int  # number of pushes when the pull began
    num_shared: int  # number of its rows that an outstanding push changes too


@dataclasses.dataclass(eq=False)
class _ClaimedItem:
    """A chunk that is claimed and not trained."""

    claimed: ClaimedChunk
    request: ChunkRequest
    number: int  # number of chunks claimed before it
    early: Future[_EarlyPull | None] | None = None
    void: bool = False  # do not use its early rows


class PipelinedFeed:
    """A `Feed`. Created, called and closed by the loop's thread. Memory: `read_ahead` decoded chunks, and
    rows for `staleness` of them and the one in training."""

    def __init__(
        self,
        steps: LoopSteps,
        source: SourceThread,
        rows: AsyncRows,
        *,
        staleness: int,
        read_ahead: int,
        stages: StageTimer,
    ) -> None:
        """`source` and `rows`: those of the loop that implements `steps`."""
        self.steps, self.source, self.rows, self.stages = steps, source, rows, stages
        self.staleness, self.read_ahead = staleness, read_ahead
        self.max_staleness = self.num_shared = 0  # since the start: see `Feed`
        self._reads: deque[_PendingRead] = deque()
        self._ahead: deque[_ClaimedItem] = deque()  # claimed, not given
        self._given: deque[_ClaimedItem] = deque()  # given, not trained
        self._num_claimed = self._num_trained = self._num_empty_polls = 0
        self._halt = threading.Event()
        self._puller = ThreadPoolExecutor(1, "pull")

    def next_claimed(self, timeout_s: float) -> ClaimedChunk | None:
        self.rows.check()
        self._look_ahead()
        if not self._ahead and self._reads:
            self._wait_for_chunk()
            self._look_ahead()
        return self._give()

    def next_remaining(self) -> ClaimedChunk | None:
        self.rows.check()
        self._look_ahead()
        if not self._ahead:
            self._stop_reading()
            self._claim_what_is_read()
        if not self._ahead and (request := self._next_request()) is not None:
            with self.stages("wait_data"):
                chunk = self.source.submit(lambda: self.steps.poll_remaining(request)).result()
            if chunk is not None:
                self._claim(chunk, request)
        return self._give()

    def prepare(self, claimed: ClaimedChunk) -> PreparedChunk:
        item = self._given[0]
        assert item.claimed is claimed, "expected the oldest claimed chunk that is not trained"
        self.rows.pushing = claimed.chunk.offsets
        early = self._take_early(item)
        if early is not None:
            return early.prepared
        self.rows.wait()
        return self.steps.pull(claimed)

    def mark_trained(self) -> None:
        with self.rows.changed:
            self._given.popleft()
            self._num_trained += 1
            self.rows.changed.notify_all()
        self._look_ahead()

    def drain(self) -> None:
        self.rows.wait()
        self._void()

    def pause(self) -> None:
        self._stop_reading()

    def reset(self) -> None:
        self._stop_reading()
        self._void()
        self.rows.forget()
        self._reads.clear()
        self._ahead.clear()
        self._given.clear()
        self._num_claimed = self._num_trained = 0

    def close(self) -> None:
        """Stop reading, then pulling, then pushing. The caller closes the source. Idempotent."""
        self._stop_reading()
        self._void()
        self._puller.shutdown()
        self.rows.close()

    # In the loop's thread

    def _look_ahead(self) -> None:
        """Claim chunks that were read, and request more."""
        self._claim_what_is_read()
        while len(self._reads) < self.read_ahead and (request := self._next_request()) is not None:
            read = _PendingRead(request, self.source.submit(functools.partial(self._read, request)))
            read.chunk.add_done_callback(self._notify)
            self._reads.append(read)

    def _claim_what_is_read(self) -> None:
        while self._reads and self._reads[0].chunk.done() and len(self._ahead) < max(self.staleness, 1):
            chunk = self._reads[0].chunk.result()
            read = self._reads.popleft()
            if chunk is not None:
                self._claim(chunk, read.request)

    def _next_request(self) -> ChunkRequest | None:
        """None: it depends on the content of chunks that are not trained."""
        requests = [item.request for item in (*self._given, *self._ahead)]
        requests += [read.request for read in self._reads]
        return self.steps.next_request(len(requests), sum(request.max_requests for request in requests))

    def _claim(self, chunk: Chunk, request: ChunkRequest) -> None:
        item = _ClaimedItem(self.steps.claim(chunk), request, self._num_claimed)
        self._num_claimed += 1
        if self.staleness and item.claimed.parts:
            item.early = self._puller.submit(self._pull_early, item, [*self._given, *self._ahead])
        self._ahead.append(item)

    def _give(self) -> ClaimedChunk | None:
        if not self._ahead:
            return None
        self._given.append(self._ahead.popleft())
        self._look_ahead()
        return self._given[-1].claimed

    def _wait_for_chunk(self) -> None:
        """Wait for the next chunk, or until a poll that starts from now on is empty."""
        chunk, changed = self._reads[0].chunk, self.rows.changed
        enough_polls = self._num_empty_polls + 2
        with self.stages("wait_data"), changed:
            changed.wait_for(lambda: chunk.done() or self._num_empty_polls >= enough_polls)

    def _take_early(self, item: _ClaimedItem) -> _EarlyPull | None:
        """Rows that were pulled ahead. None: there are none, or they are too old."""
        if item.early is None:
            return None
        with self.stages("pull"):
            early = item.early.result()
        self.rows.check()
        if early is None:
            return None
        staleness = self.rows.num_queued - early.num_acknowledged
        if staleness > self.staleness:
            return None
        self.max_staleness = max(self.max_staleness, staleness)
        self.num_shared += early.num_shared if staleness else 0
        return early

    def _stop_reading(self) -> None:
        """Stop reading; chunks that were read stay."""
        self._halt.set()
        for read in self._reads:
            read.chunk.exception()
        self._reads = deque(r for r in self._reads if r.chunk.exception() or r.chunk.result() is not None)
        self._halt.clear()

    def _void(self) -> None:
        """Drop rows that were pulled ahead. No pull is in flight afterwards."""
        with self.rows.changed:
            for item in (*self._given, *self._ahead):
                item.void = True
            self.rows.changed.notify_all()
        for item in (*self._given, *self._ahead):
            if item.early is not None:
                item.early.exception()
                item.early = None

    def _notify(self, _: object) -> None:
        with self.rows.changed:
            self.rows.changed.notify_all()

    # In the source's thread

    def _read(self, request: ChunkRequest) -> Chunk | None:
        """Poll the source until it returns a chunk. Returns None if reading was stopped. If a poll fails,
        later reads stop too."""
        while not self._halt.is_set():
            try:
                chunk = self.steps.poll(request, _POLL_S)
            except BaseException as error:
                positions = sorted(self.source.positions().items())
                at = ", ".join(f"{topic}-{n} {offset}" for (topic, n), offset in positions)
                error.add_note(f"while reading from {at}")
                self._halt.set()
                raise
            if chunk is not None:
                return chunk
            self._num_empty_polls += 1
            self._notify(None)
            self._halt.wait(_PAUSE_S)
        return None

    # In the puller's thread

    def _pull_early(self, item: _ClaimedItem, before: Sequence[_ClaimedItem]) -> _EarlyPull | None:
        """`before`: chunks that were not trained when the item was claimed."""
        rows = self.rows
        with rows.changed:
            rows.changed.wait_for(
                lambda: item.void or rows.failed or self._num_outstanding(item) <= self.staleness
            )
            if item.void or rows.failed:
                return None
            num_acknowledged, outstanding = rows.num_acknowledged, rows.in_flight()
            untrained = [b for b in before if b.number >= self._num_trained]
            outstanding += [part.lookup for b in untrained for part in b.claimed.parts]
        prepared = self.steps.pull(item.claimed, rows.rows)
        return _EarlyPull(prepared, num_acknowledged, num_shared(item.claimed.parts[0].lookup, outstanding))

    def _num_outstanding(self, item: _ClaimedItem) -> int:
        """Unacknowledged pushes before its training, if each chunk is pushed once. Holds `changed`."""
        return len(self.rows.in_flight()) + item.number - self._num_trained


class FeedConnections(NamedTuple):
    """Source, rows and feed of a loop whose feed runs ahead."""

    source: BatchSource
    rows: Rows
    feed: Callable[[LoopSteps], Feed]


def connect_feed(
    open_source: Callable[[], BatchSource], rows: Rows, stages: StageTimer, *, staleness: int, read_ahead: int
) -> FeedConnections:
    """Connect a loop with a pipelined feed; `read_ahead` 0: everything runs in one thread. Close the loop's
    feed, then the source. Raises RoostreamError: as `open_source`; no thread is left behind."""
    if not read_ahead:
        return FeedConnections(open_source(), rows, SerialFeed)
    source = SourceThread(open_source)
    late = AsyncRows(rows, stages)
    options = {"staleness": staleness, "read_ahead": read_ahead}
    return FeedConnections(
        source, late, lambda steps: PipelinedFeed(steps, source, late, stages=stages, **options)
    )


def num_shared(lookup: Lookup, others: Sequence[Lookup]) -> int:
    """Number of rows of `lookup` that are also in any of `others`."""
    shared = 0
    for stack, rows in lookup.stacks.items():
        table_V = np.concatenate([rows.table_U[:0], *(other.stacks[stack].table_U for other in others)])
        id_V = np.concatenate([rows.id_U[:0], *(other.stacks[stack].id_U for other in others)])
        for table in np.unique(rows.table_U):
            shared += int(np.isin(rows.id_U[rows.table_U == table], id_V[table_V == table]).sum())
    return shared

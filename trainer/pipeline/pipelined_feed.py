"""Chunks are read, decoded and given their rows while others are trained and pushed.

    in the thread of      source              rows (staleness ≥ 1)     the loop               push
                          poll, decode ─────► pull ──────────────────► claim, train ────────► push
    works at chunk        i + 2               i + 1                    i                      i - 1

What decides anything is done in the loop's thread, between two chunks: how large the next chunk is, what of it is new, what is
due. The other threads are given values and give values back; so what is trained doesn't depend on who was faster.

**Staleness** is how many pushes come between a pull and the training of what was pulled. 0: rows are pulled when every push is
acknowledged, by the loop's thread, as in the serial loop: equal in every bit. k: a pull may be made while k pushes before its
chunk's training are still to come (the Ads paper, §V: one step, no loss of quality); what turns out to be older is pulled again.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from roostream.wire.lookup import Lookup
from trainer.batch_source import BatchSource, Chunk
from trainer.feed import Claimed, Feed, LoopSteps, Prepared, SerialFeed, Wanted
from trainer.pipeline.async_rows import AsyncRows
from trainer.pipeline.source_thread import SourceThread
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import Rows

_POLL_S = 0.05
_PAUSE_S = 0.001  # after a poll that gave nothing: a source in memory gives nothing at once


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    wanted: Wanted
    chunk: Future[Chunk | None]  # None: reading was stopped before it was full


@dataclasses.dataclass(frozen=True, eq=False)
class _Early:
    """Rows pulled ahead."""

    prepared: Prepared
    num_acknowledged: int  # pushes, when the pull began
    num_shared: int  # of its rows that a push still to come has too


@dataclasses.dataclass(eq=False)
class _Ahead:
    """A chunk that is claimed and not trained."""

    claimed: Claimed
    wanted: Wanted
    number: int  # chunks claimed before it
    early: Future[_Early | None] | None = None
    void: bool = False  # its early rows


class PipelinedFeed:
    """See `Feed`. Made, called and closed by the loop's thread. Memory: `read_ahead` chunks decoded, `staleness` of them and the
    one in training with rows."""

    def __init__(
        self,
        acts: LoopSteps,
        source: SourceThread,
        rows: AsyncRows,
        *,
        staleness: int,
        read_ahead: int,
        stages: StageTimer,
    ) -> None:
        """`source` and `rows`: those of the loop that has the acts."""
        self.acts, self.source, self.rows, self.stages = acts, source, rows, stages
        self.staleness, self.read_ahead = staleness, read_ahead
        self.max_staleness = self.num_shared = 0  # since the start: see `Feed`
        self._asked: deque[_Asked] = deque()
        self._ahead: deque[_Ahead] = deque()  # claimed, not given
        self._given: deque[_Ahead] = deque()  # given, not trained
        self._num_claimed = self._num_trained = self._num_empty_polls = 0
        self._halt = threading.Event()
        self._puller = ThreadPoolExecutor(1, "pull")

    def claimed(self, timeout_s: float) -> Claimed | None:
        self.rows.check()
        self._look_ahead()
        if not self._ahead and self._asked:
            self._wait_for_chunk()
            self._look_ahead()
        return self._give()

    def rest(self) -> Claimed | None:
        self.rows.check()
        self._look_ahead()
        if not self._ahead:
            self._stop_reading()
            self._claim_what_is_read()
        if not self._ahead and (wanted := self._wanted()) is not None:
            with self.stages("wait_data"):
                chunk = self.source.submit(lambda: self.acts.rest(wanted)).result()
            if chunk is not None:
                self._claim(chunk, wanted)
        return self._give()

    def pulled(self, claimed: Claimed) -> Prepared:
        item = self._given[0]
        assert item.claimed is claimed, "expected the oldest chunk that isn't trained"
        self.rows.pushing = claimed.chunk.offsets
        early = self._early_of(item)
        if early is not None:
            return early.prepared
        self.rows.wait()
        return self.acts.pull(claimed)

    def trained(self) -> None:
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

    def forget(self) -> None:
        self._stop_reading()
        self._void()
        self.rows.forget()
        self._asked.clear()
        self._ahead.clear()
        self._given.clear()
        self._num_claimed = self._num_trained = 0

    def close(self) -> None:
        """Stops reading, then pulling, then pushing; the source is closed by who opened it. Idempotent."""
        self._stop_reading()
        self._void()
        self._puller.shutdown()
        self.rows.close()

    # In the loop's thread

    def _look_ahead(self) -> None:
        """Claim what is read, ask for more."""
        self._claim_what_is_read()
        while len(self._asked) < self.read_ahead and (wanted := self._wanted()) is not None:
            asked = _Asked(wanted, self.source.submit(functools.partial(self._read, wanted)))
            asked.chunk.add_done_callback(self._notify)
            self._asked.append(asked)

    def _claim_what_is_read(self) -> None:
        while self._asked and self._asked[0].chunk.done() and len(self._ahead) < max(self.staleness, 1):
            chunk = self._asked[0].chunk.result()
            asked = self._asked.popleft()
            if chunk is not None:
                self._claim(chunk, asked.wanted)

    def _wanted(self) -> Wanted | None:
        """None: it depends on what comes of chunks that aren't trained."""
        items = [item.wanted for item in (*self._given, *self._ahead)] + [
            asked.wanted for asked in self._asked
        ]
        return self.acts.wanted(len(items), sum(wanted.max_requests for wanted in items))

    def _claim(self, chunk: Chunk, wanted: Wanted) -> None:
        item = _Ahead(self.acts.claim(chunk), wanted, self._num_claimed)
        self._num_claimed += 1
        if self.staleness and item.claimed.parts:
            item.early = self._puller.submit(self._pull_early, item, [*self._given, *self._ahead])
        self._ahead.append(item)

    def _give(self) -> Claimed | None:
        if not self._ahead:
            return None
        self._given.append(self._ahead.popleft())
        self._look_ahead()
        return self._given[-1].claimed

    def _wait_for_chunk(self) -> None:
        """Until the next chunk is there, or a poll that began from now on gave nothing."""
        asked, changed = self._asked[0].chunk, self.rows.changed
        most = self._num_empty_polls + 2
        with self.stages("wait_data"), changed:
            changed.wait_for(lambda: asked.done() or self._num_empty_polls >= most)

    def _early_of(self, item: _Ahead) -> _Early | None:
        """None: there are no rows pulled ahead, or they are too old."""
        if item.early is None:
            return None
        with self.stages("pull"):
            early = item.early.result()
        self.rows.check()
        if early is None:
            return None
        staleness = self.rows.num_given - early.num_acknowledged
        if staleness > self.staleness:
            return None
        self.max_staleness = max(self.max_staleness, staleness)
        self.num_shared += early.num_shared if staleness else 0
        return early

    def _stop_reading(self) -> None:
        """What is read is kept."""
        self._halt.set()
        for asked in self._asked:
            asked.chunk.exception()
        self._asked = deque(a for a in self._asked if a.chunk.exception() or a.chunk.result() is not None)
        self._halt.clear()

    def _void(self) -> None:
        """Rows that were pulled ahead are not used; no pull is under way."""
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

    def _read(self, wanted: Wanted) -> Chunk | None:
        """None: it was stopped. What fails stops those that were asked behind it."""
        while not self._halt.is_set():
            try:
                chunk = self.acts.poll(wanted, _POLL_S)
            except BaseException as error:
                at = (
                    f"{topic}-{n} {offset}" for (topic, n), offset in sorted(self.source.positions().items())
                )
                error.add_note(f"in the reading from {', '.join(at)} on")
                self._halt.set()
                raise
            if chunk is not None:
                return chunk
            self._num_empty_polls += 1
            self._notify(None)
            self._halt.wait(_PAUSE_S)
        return None

    # In the puller's thread

    def _pull_early(self, item: _Ahead, before: Sequence[_Ahead]) -> _Early | None:
        """`before`: what wasn't trained when the item was claimed."""
        rows = self.rows
        with rows.changed:
            rows.changed.wait_for(lambda: item.void or rows.failed or self._to_come(item) <= self.staleness)
            if item.void or rows.failed:
                return None
            num_acknowledged, to_come = rows.num_acknowledged, rows.under_way()
            to_come += [
                part.lookup for b in before if b.number >= self._num_trained for part in b.claimed.parts
            ]
        prepared = self.acts.pull(item.claimed, rows.beside)
        return _Early(prepared, num_acknowledged, num_shared(item.claimed.parts[0].lookup, to_come))

    def _to_come(self, item: _Ahead) -> int:
        """Pushes before its training that aren't acknowledged, if each chunk is pushed at once. Holding `changed`."""
        return len(self.rows.under_way()) + item.number - self._num_trained


class FeedConnections(NamedTuple):
    """What a loop is wired to, so that its feed can run ahead."""

    source: BatchSource
    rows: Rows
    feed: Callable[[LoopSteps], Feed]


def connected(
    open_source: Callable[[], BatchSource], rows: Rows, stages: StageTimer, *, staleness: int, read_ahead: int
) -> FeedConnections:
    """`read_ahead` 0: everything in one thread. Close the loop's feed, then the source.

    Raises:
        RoostreamError: as `open_source`; no thread is left.
    """
    if not read_ahead:
        return FeedConnections(open_source(), rows, SerialFeed)
    source = SourceThread(open_source)
    late = AsyncRows(rows, stages)
    options = {"staleness": staleness, "read_ahead": read_ahead}
    return FeedConnections(
        source, late, lambda acts: PipelinedFeed(acts, source, late, stages=stages, **options)
    )


def num_shared(mine: Lookup, others: Sequence[Lookup]) -> int:
    """Rows of `mine` that are in any of `others`."""
    shared = 0
    for stack, of_stack in mine.stacks.items():
        table_V = np.concatenate([of_stack.table_U[:0], *(other.stacks[stack].table_U for other in others)])
        id_V = np.concatenate([of_stack.id_U[:0], *(other.stacks[stack].id_U for other in others)])
        for table in np.unique(of_stack.table_U):
            shared += int(np.isin(of_stack.id_U[of_stack.table_U == table], id_V[table_V == table]).sum())
    return shared

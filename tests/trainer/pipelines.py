"""A training loop that reads, pulls and pushes in background threads, over records in memory and one fake
shard. The order of the threads can be random and reproducible."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from roostream.errors import UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.kafka.topics import Partition
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.loops import Built, build
from trainer.chunks import Chunk
from trainer.feed import AsyncRows, PipelinedFeed, SourceThread
from trainer.loop import LoopDependencies
from trainer.pipeline.stage_timer import StageTimer
from trainer.record_source import RecordSource
from trainer.rows import PushTimes, Rows


@dataclasses.dataclass
class PipelinedLoop:
    built: Built
    feed: PipelinedFeed
    rows: ScheduledRows
    scheduler: ThreadScheduler


@contextlib.contextmanager
def pipelined(
    records: Sequence[Record],
    *,
    staleness: int = 0,
    read_ahead: int = 2,
    seed: int | None = None,
    **settings: Any,
) -> Iterator[PipelinedLoop]:
    """Open a pipelined loop. With a `seed` a `ThreadScheduler` orders its threads; without, they run
    freely."""
    scheduler = ThreadScheduler(seed or 0)
    scheduler.unordered = seed is None
    parts: list[Any] = []

    def rewire(dependencies: LoopDependencies) -> LoopDependencies:
        stages = StageTimer(dependencies.clock)
        rows = ScheduledRows(dependencies.rows, scheduler)
        async_rows = AsyncRows(rows, stages)

        def open_source() -> ScheduledSource:
            original: Any = dependencies.source
            source = ScheduledSource(
                original.consumer,
                Decoder(samples.schema(), {}.get),
                dependencies.clock,
                max_wait_ms=original.max_wait_ms,
            )
            source.scheduler = scheduler
            return source

        source = SourceThread(open_source)
        parts.extend((source, rows))

        def feed(acts: Any) -> PipelinedFeed:
            parts.append(
                PipelinedFeed(
                    acts, source, async_rows, staleness=staleness, read_ahead=read_ahead, stages=stages
                )
            )
            return parts[-1]

        return dataclasses.replace(dependencies, source=source, rows=async_rows, feed=feed, stages=stages)

    built = build(records, rewire=rewire, **settings)
    source, rows, feed = parts
    try:
        yield PipelinedLoop(built, feed, rows, scheduler)
    finally:
        scheduler.close()
        feed.close()
        source.close()


# Threads in a random order, without real waits


_MAX_YIELDS = 20


class ThreadScheduler:
    """Lets waiting threads continue one by one, in random order.

    `wait_for_turn(where)` returns when the scheduler picks the caller; `where` names the stage. One stage at
    a time is slow: it continues only if no other thread waits. `fail_next(where)` makes the next caller of
    this stage raise. While `unordered` is true, nobody waits.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.unordered = False
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, threading.Event]] = []
        self._failing: list[str] = []
        self._thread = threading.Thread(target=self._schedule, name="scheduler", daemon=True)
        self._thread.start()

    def wait_for_turn(self, where: str) -> None:
        if not self.unordered:
            turn = threading.Event()
            with self._changed:
                self._waiting.append((where, turn))
                self._changed.notify_all()
            turn.wait()
        if where in self._failing:
            self._failing.remove(where)
            raise UnavailableError(f"{where} failed")

    def fail_next(self, where: str) -> None:
        self._failing.append(where)

    def close(self) -> None:
        with self._changed:
            self.unordered = True
            self._changed.notify_all()
        self._thread.join()

    def _schedule(self) -> None:
        slow = ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.unordered)
                if self.unordered and not self._waiting:
                    return
            for _ in range(self.random.randrange(_MAX_YIELDS)):
                os.sched_yield()
            with self._changed:
                if self.random.random() < 0.2:
                    slow = self.random.choice(["poll", "pull", "push", "train", ""])
                choice = [w for w in self._waiting if w[0] != slow] or self._waiting
                chosen = self.random.choice(choice)
                self._waiting.remove(chosen)
            chosen[1].set()


class ScheduledRows:
    """`Rows` that wait for the scheduler. `staleness`: for each push, the number of other pushes since the
    pull of its rows."""

    def __init__(self, rows: Rows, scheduler: ThreadScheduler) -> None:
        self.rows, self.scheduler = rows, scheduler
        self.num_pushed = 0
        self.staleness: list[int] = []
        self._pulled_at: dict[int, tuple[int, Lookup]] = {}

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.rows.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        self.scheduler.wait_for_turn("pull")
        self._pulled_at[id(lookup)] = self.num_pushed, lookup
        pulled = self.rows.pull(lookup)
        self.scheduler.wait_for_turn("pull")
        return pulled

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        self.scheduler.wait_for_turn("push")
        self.staleness.append(self.num_pushed - self._pulled_at[id(lookup)][0])
        self.rows.push(lookup, gradients, times)
        self.num_pushed += 1
        self.scheduler.wait_for_turn("push")

    def save(self) -> None:
        self.rows.save()


class ScheduledSource(RecordSource):
    """A source that waits for the scheduler, and checks that only one thread uses it."""

    scheduler: ThreadScheduler
    thread: int | None = None

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "a second thread called poll"
        self.scheduler.wait_for_turn("poll")
        return super().poll(max_requests, timeout_s, partition)

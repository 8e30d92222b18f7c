"""A training loop of which reading, pulling and pushing have threads, over records in memory and one fake
shard."""

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
class Piped:
    built: Built
    feed: PipelinedFeed
    rows: PacedRows
    pace: Pace


@contextlib.contextmanager
def pipelined(
    records: Sequence[Record],
    *,
    staleness: int = 0,
    read_ahead: int = 2,
    seed: int | None = None,
    **settings: Any,
) -> Iterator[Piped]:
    """Without a `seed` every thread goes at its own pace."""
    pace = Pace(seed or 0)
    pace.free = seed is None
    made: list[Any] = []

    def rewire(dependencies: LoopDependencies) -> LoopDependencies:
        stages = StageTimer(dependencies.clock)
        rows = PacedRows(dependencies.rows, pace)
        late = AsyncRows(rows, stages)

        def open_source() -> PacedBatches:
            old: Any = dependencies.source
            source = PacedBatches(
                old.consumer,
                Decoder(samples.schema(), {}.get),
                dependencies.clock,
                max_wait_ms=old.max_wait_ms,
            )
            source.pace = pace
            return source

        source = SourceThread(open_source)
        made.extend((source, rows))

        def feed(acts: Any) -> PipelinedFeed:
            made.append(
                PipelinedFeed(acts, source, late, staleness=staleness, read_ahead=read_ahead, stages=stages)
            )
            return made[-1]

        return dataclasses.replace(dependencies, source=source, rows=late, feed=feed, stages=stages)

    built = build(records, rewire=rewire, **settings)
    source, rows, feed = made
    try:
        yield Piped(built, feed, rows, pace)
    finally:
        pace.close()
        feed.close()
        source.close()


# Threads that go on in a drawn order, without any time passing


_YIELDS = 20


class Pace:
    """`here(where)` returns when its turn has come. Now and then another place becomes the slow one, which
    goes on only when nobody else waits. `fail_next(where)`: the next one there raises. `free`: everybody goes
    on at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.free = False
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, threading.Event]] = []
        self._failing: list[str] = []
        self._thread = threading.Thread(target=self._conduct, name="pace", daemon=True)
        self._thread.start()

    def here(self, where: str) -> None:
        if not self.free:
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
            self.free = True
            self._changed.notify_all()
        self._thread.join()

    def _conduct(self) -> None:
        slow = ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.free)
                if self.free and not self._waiting:
                    return
            for _ in range(self.random.randrange(_YIELDS)):
                os.sched_yield()
            with self._changed:
                if self.random.random() < 0.2:
                    slow = self.random.choice(["poll", "pull", "push", "train", ""])
                choice = [w for w in self._waiting if w[0] != slow] or self._waiting
                goes_on = self.random.choice(choice)
                self._waiting.remove(goes_on)
            goes_on[1].set()


class PacedRows:
    """`Rows` at a pace, which notes of every push how many pushes were made between its rows' pull and it."""

    def __init__(self, rows: Rows, pace: Pace) -> None:
        self.rows, self.pace = rows, pace
        self.num_pushed = 0
        self.staleness: list[int] = []
        self._pulled_at: dict[int, tuple[int, Lookup]] = {}

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.rows.set_incarnation(incarnation, workers, owners)

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        self.pace.here("pull")
        self._pulled_at[id(lookup)] = self.num_pushed, lookup
        pulled = self.rows.pull(lookup)
        self.pace.here("pull")
        return pulled

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        self.pace.here("push")
        self.staleness.append(self.num_pushed - self._pulled_at[id(lookup)][0])
        self.rows.push(lookup, gradients, times)
        self.num_pushed += 1
        self.pace.here("push")

    def save(self) -> None:
        self.rows.save()


class PacedBatches(RecordSource):
    """A source at a pace; `thread`: the one that has called it, and no other may."""

    pace: Pace
    thread: int | None = None

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "one thread"
        self.pace.here("poll")
        return super().poll(max_requests, timeout_s, partition)

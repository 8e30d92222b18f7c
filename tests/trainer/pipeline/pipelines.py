"""A training loop of which reading, pulling and pushing have threads, over records in memory and one fake
shard."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.loops import Built, build
from tests.trainer.pipeline.thread_pacing import Pace, PacedBatches, PacedRows
from trainer.loop import LoopDependencies
from trainer.pipeline.async_rows import AsyncRows
from trainer.pipeline.pipelined_feed import PipelinedFeed
from trainer.pipeline.source_thread import SourceThread
from trainer.pipeline.stage_timer import StageTimer


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

    def rewire(wiring: LoopDependencies) -> LoopDependencies:
        stages = StageTimer(wiring.clock)
        rows = PacedRows(wiring.rows, pace)
        late = AsyncRows(rows, stages)

        def open_source() -> PacedBatches:
            old: Any = wiring.source
            source = PacedBatches(
                old.consumer, Decoder(samples.schema(), {}.get), wiring.clock, max_wait_ms=old.max_wait_ms
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

        return dataclasses.replace(wiring, source=source, rows=late, feed=feed, stages=stages)

    built = build(records, rewire=rewire, **settings)
    source, rows, feed = made
    try:
        yield Piped(built, feed, rows, pace)
    finally:
        pace.close()
        feed.close()
        source.close()

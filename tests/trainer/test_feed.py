"""The pipelined feed: reading, pulling and pushing run beside training. Without staleness, the results equal
those of a serial loop bit for bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roostream.errors import UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.wire.lookup import Lookup, StackLookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.fake_shard import Row
from tests.trainer.loops import Built, build
from tests.trainer.pipelines import PipelinedLoop, pipelined
from trainer.chunks import Chunk
from trainer.feed import AsyncRows, SourceThread, num_shared
from trainer.loop import Snapshot
from trainer.pipeline.stage_timer import BESIDE, LOOP, STAGES, StageTimer
from trainer.rows import PushTimes

N40 = samples.records(list(range(1, 41)))
RAMP = {"first_batch_requests": 1, "batch_growth_requests": 3, "batch_requests": 4}


def state(built: Built) -> dict[str, Any]:
    """Everything that training has changed."""
    snapshot = built.loop.snapshot()
    of_partitions = {
        f"{p} {name}": value for p, cut in snapshot.partitions.items() for name, value in cut.tensors.items()
    }
    bits = {name: value.tobytes() for name, value in (snapshot.shared | of_partitions).items()}
    return {
        **bits,
        **built.shard.bits(),
        "step": snapshot.step,
        "watermark": snapshot.watermark_ms,
        "progress": snapshot.progress,
    }


def mixed(seed: int, count: int = 60) -> list[Record]:
    """Sample records with some duplicates and a few undecodable ones."""
    draw = random.Random(seed)
    numbers = list(range(1, count + 1))
    for _ in range(count // 6):
        numbers.insert(draw.randrange(len(numbers)), draw.choice(numbers))
    records = samples.records(numbers)
    return [r._replace(value=b"\x03") if draw.random() < 0.05 else r for r in records]


@pytest.mark.parametrize(
    ("sizes", "exact"),
    [({}, False), (RAMP, True), ({"batch_requests": 3, "freeze_at_ms": samples.T0 + 30_000}, False)],
)
def test_without_staleness_the_state_is_bit_equal_to_the_serial_loop(
    sizes: dict[str, int], exact: bool
) -> None:
    records = mixed(3)
    serial = build(records, exact=exact, **sizes).train_all()
    with pipelined(records, exact=exact, **sizes) as pipeline:
        assert state(pipeline.built.train_all()) == state(serial)
        assert [p.SerializeToString() for p in pipeline.built.predicted] == [
            p.SerializeToString() for p in serial.predicted
        ]
        assert [x.offset for x in pipeline.built.letters] == [x.offset for x in serial.letters]
        assert pipeline.feed.max_staleness == pipeline.feed.num_shared == 0 and set(
            pipeline.rows.staleness
        ) == {0}


class RandomRun:
    """A random run of a pipelined loop: steps, snapshots, failures and restores, until everything is
    trained."""

    def __init__(self, pipeline: PipelinedLoop, seed: int) -> None:
        self.pipeline, self.built, self.draw = pipeline, pipeline.built, random.Random(seed)
        self.failures = 6
        self.checkpoint: tuple[Snapshot, dict[tuple[int, int], Row]] = self._take_checkpoint()

    def to_the_end(self) -> RandomRun:
        while self._advance():
            pass
        return self

    def _advance(self) -> bool:
        built, chance = self.built, self.draw.random()
        try:
            if chance < 0.2:
                self.checkpoint = self._take_checkpoint()
            elif chance < 0.3 and self.failures:
                self.failures -= 1
                self.pipeline.scheduler.fail_next(self.draw.choice(["poll", "pull", "push"]))
            self.pipeline.scheduler.wait_for_turn("train")
            if built.loop.step() or built.loop.finish():
                return True
            built.loop.feed.drain()  # the last push can still fail
            return False
        except UnavailableError:
            self._restore()
            return True

    def _take_checkpoint(self) -> tuple[Snapshot, dict[tuple[int, int], Row]]:
        snapshot = self.built.loop.snapshot()
        return snapshot, {k: row.copy() for k, row in self.built.shard.rows.items()}

    def _restore(self) -> None:
        snapshot, rows = self.checkpoint
        self.built.loop.feed.reset()
        self.built.shard.rows = {k: row.copy() for k, row in rows.items()}
        self.built.loop.restore(snapshot)


@settings(max_examples=5)
@given(st.integers(1, 1 << 30), st.booleans(), st.integers(1, 3))
def test_cuts_failures_and_restores_give_the_state_of_the_serial_loop(
    seed: int, exact: bool, read_ahead: int
) -> None:
    records, sizes = mixed(seed, 24), RAMP if seed % 2 else {"batch_requests": 3}
    serial = build(records, exact=exact, **sizes).train_all()
    with pipelined(records, seed=seed, exact=exact, read_ahead=read_ahead, **sizes) as pipeline:
        RandomRun(pipeline, seed).to_the_end()
        assert state(pipeline.built) == state(serial)
        assert set(pipeline.rows.staleness) == {0}


@settings(max_examples=5)
@given(st.integers(1, 1 << 30), st.integers(1, 3))
def test_staleness_stays_within_its_limit_and_samples_apply_once(seed: int, staleness: int) -> None:
    records = mixed(seed, 24)
    serial = build(records, batch_requests=3).train_all()
    with pipelined(records, seed=seed, staleness=staleness, batch_requests=3) as pipeline:
        RandomRun(pipeline, seed).to_the_end()
        assert pipeline.built.pushes() == serial.pushes() and pipeline.built.offsets() == serial.offsets()
        assert max(pipeline.rows.staleness) <= pipeline.feed.max_staleness <= staleness


def test_stale_rows_of_early_pulls_are_counted() -> None:
    """The second chunk is pulled before the first chunk is pushed. Item rows that are in both chunks are
    stale."""
    with pipelined(N40[:8], staleness=1) as pipeline:
        may_push, pulled = threading.Event(), threading.Semaphore(0)
        rows = pipeline.rows.rows
        push, pull = rows.push, rows.pull

        def delayed_push(*arguments: Any) -> None:
            assert may_push.wait(30)
            push(*arguments)

        def counted_pull(lookup: Lookup) -> dict[str, Tensor]:
            pulled_rows = pull(lookup)
            pulled.release()
            return pulled_rows

        rows.push, rows.pull = delayed_push, counted_pull  # type: ignore[method-assign]
        assert pipeline.built.loop.step()
        assert pulled.acquire(timeout=30) and pulled.acquire(timeout=30), "both chunks must be pulled"
        may_push.set()
        assert pipeline.built.loop.step()
        pipeline.feed.drain()
        items = [{int(i) for p in pipeline.built.predicted[at : at + 4] for i in p.item_ids} for at in (0, 4)]
        assert pipeline.feed.max_staleness == 1 and pipeline.feed.num_shared == len(items[0] & items[1]) > 0


@pytest.mark.parametrize(("where", "staleness"), [("poll", 0), ("pull", 1), ("push", 0)])
def test_errors_name_the_offsets_of_their_chunk(where: str, staleness: int) -> None:
    with pipelined(N40, staleness=staleness, read_ahead=1) as pipeline:
        loop = pipeline.built.loop
        assert loop.step()
        pipeline.feed.drain()
        pipeline.scheduler.fail_next(where)
        with pytest.raises(UnavailableError, match=f"{where} failed") as raised:
            for _ in range(5):
                loop.step()
        notes = " ".join(raised.value.__notes__)
        assert "samples-0 " in notes and "samples-1 " in notes and (".." in notes or where == "poll")


def test_a_background_failure_persists_until_a_restore() -> None:
    with pipelined(N40, read_ahead=1) as pipeline:
        loop, at = pipeline.built.loop, pipeline.built.loop.snapshot()
        pipeline.scheduler.fail_next("poll")
        for _ in range(3):
            with pytest.raises(UnavailableError, match="poll failed"):
                for _ in range(5):
                    loop.step()
        loop.restore(at)
        assert pipeline.built.train_all().pushes().keys() == set(range(1, 41))


def test_a_failed_push_refuses_the_cut_until_a_restore() -> None:
    with pipelined(N40) as pipeline:
        built = pipeline.built
        at = built.loop.snapshot()
        pipeline.scheduler.fail_next("push")
        assert built.loop.step(), "the push runs after the step returns"
        with pytest.raises(UnavailableError, match="push failed") as raised:
            built.loop.snapshot()
        assert raised.value.__notes__ == ["in the push of samples-0 0..1, samples-1 0..1"]
        built.loop.restore(at)
        assert built.train_all().pushes() == dict.fromkeys(range(1, 41), 1)


def test_a_cut_drains_pushes_and_keeps_chunks_read_ahead() -> None:
    with pipelined(N40, staleness=2) as pipeline:
        assert pipeline.built.loop.step()
        at = pipeline.built.loop.snapshot()
        assert sum(at.progress.values()) == 4
        assert sum(cut.dedupe.num_ids for cut in at.partitions.values()) == 4
        assert pipeline.rows.num_pushed == 1
        assert pipeline.built.train_all().pushes() == dict.fromkeys(range(1, 41), 1)


def test_partial_chunks_are_trained_after_the_maximum_wait() -> None:
    with pipelined(N40[:3], max_batch_wait_ms=500) as pipeline:
        assert not pipeline.built.loop.step(), "only three of the four requests of a batch are there"
        pipeline.built.clock.advance(0.6)
        assert pipeline.built.loop.step() and pipeline.built.loop.counts.requests == 3
        assert not pipeline.built.loop.step()


def test_no_thread_is_left_after_failures() -> None:
    before = set(threading.enumerate())
    for error in (UnavailableError("away"), KeyboardInterrupt()):
        with pytest.raises(type(error)), pipelined(N40, staleness=1) as pipeline:
            assert pipeline.built.loop.step()
            raise error
    with pipelined(N40, staleness=1) as pipeline:
        pipeline.scheduler.fail_next("push")
        with pytest.raises(UnavailableError):
            pipeline.built.train_all()
        pipeline.feed.close()
        pipeline.feed.close()
    assert set(threading.enumerate()) <= before


# `AsyncRows` pushes in the background and in order. After a failed push it pushes nothing more.


class GatedRows:
    """`Rows` whose pushes wait for a permit. Pushes of `refused_steps` fail."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.pushed: list[int] = []
        self.refused_steps: set[int] = set()
        self.incarnation = 0

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.incarnation = incarnation

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {"s": torch.tensor([float(len(self.pushed))])}

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        assert self.permits.acquire(timeout=30)
        if times.step in self.refused_steps:
            raise UnavailableError(f"step {times.step} is refused")
        self.pushed.append(times.step)

    def save(self) -> None: ...


def lookup(*ids: int, table: int = 1) -> Lookup:
    return Lookup({"s": StackLookup(np.full(len(ids), table, np.uint32), np.array(ids, np.int64), {})})


@pytest.fixture
def async_rows() -> Iterator[AsyncRows]:
    gated = GatedRows()
    rows = AsyncRows(gated, StageTimer(FakeClock()))
    yield rows
    gated.permits.release(100)
    rows.close()
    rows.close()


def push(async_rows: AsyncRows, *steps: int) -> GatedRows:
    for step in steps:
        async_rows.pushing = f"samples-0 {step}..{step}"
        async_rows.push(lookup(step), {}, PushTimes(step, 0))
    assert isinstance(async_rows.rows, GatedRows)
    return async_rows.rows


def test_a_push_returns_at_once_and_later_pulls_see_it(async_rows: AsyncRows) -> None:
    gated = push(async_rows, 1, 2, 3)
    assert (
        async_rows.num_queued == 3 and async_rows.num_acknowledged == 0 and len(async_rows.in_flight()) == 3
    )
    assert float(async_rows.rows.pull(lookup())["s"]) == 0
    gated.permits.release(2)
    async_rows.wait(max_in_flight=1)
    assert gated.pushed == [1, 2]
    gated.permits.release()
    assert float(async_rows.pull(lookup())["s"]) == 3 and gated.pushed == [1, 2, 3]


def test_after_a_failed_push_nothing_is_pushed_until_forget(async_rows: AsyncRows) -> None:
    gated = push(async_rows, 1, 2, 3)
    gated.refused_steps = {2}
    gated.permits.release(3)
    for call in (
        async_rows.wait,
        async_rows.check,
        lambda: push(async_rows, 4),
        lambda: async_rows.pull(lookup()),
    ):
        async_rows.stages("push")
        with pytest.raises(UnavailableError, match="step 2 is refused") as raised:
            async_rows.wait()
            call()
        assert raised.value.__notes__ == ["in the push of samples-0 2..2"]
    assert gated.pushed == [1] and async_rows.failed
    async_rows.set_incarnation(7)
    assert not async_rows.failed and gated.incarnation == 7 and not async_rows.in_flight()
    push(async_rows, 5)
    gated.permits.release()
    async_rows.wait()
    assert gated.pushed == [1, 5]


def test_forgotten_pushes_are_not_made(async_rows: AsyncRows) -> None:
    gated = push(async_rows, 1, 2, 3)
    forgetting = threading.Thread(target=async_rows.forget)
    forgetting.start()
    gated.permits.release()
    forgetting.join(30)
    gated.permits.release(5)
    async_rows.wait()
    assert gated.pushed in ([], [1]), "only the running push may be completed"


def test_shared_rows_are_counted_by_table_and_id() -> None:
    mine = Lookup({"s": StackLookup(np.array([1, 1, 2], np.uint32), np.array([5, 6, 5], np.int64), {})})
    assert num_shared(mine, []) == 0
    assert num_shared(mine, [lookup(5, 7)]) == 1
    assert num_shared(mine, [lookup(5, table=2), lookup(6, 5)]) == 3
    assert num_shared(mine, [lookup(6), lookup(6)]) == 1


# `SourceThread` uses its source from one thread only


class RecordingSource:
    """A source that records the threads that open, call and close it."""

    num_lost = 3

    def __init__(self) -> None:
        self.calls = [("open", threading.get_ident())]

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self._record("poll")

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        return self._record("poll_remaining")

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        self._record("seek")

    def positions(self) -> Progress:
        return {("samples", 0): 7}

    def lag(self) -> dict[Partition, PartitionLag]:
        return {}

    def close(self) -> None:
        self._record("close")

    def _record(self, what: str) -> None:
        self.calls.append((what, threading.get_ident()))


def test_the_source_is_used_from_one_thread() -> None:
    source = SourceThread(RecordingSource)
    recording = source.source
    assert isinstance(recording, RecordingSource)
    source.seek({})
    assert source.submit(lambda: source.poll(1, 0.0)).result() is None, (
        "a call from the thread itself must not deadlock"
    )
    source.poll_remaining(1)
    source.close()
    source.close()
    assert [what for what, _ in recording.calls] == ["open", "seek", "poll", "poll_remaining", "close"]
    (thread,) = {ident for _, ident in recording.calls}
    assert thread != threading.get_ident()


def test_reading_progress_does_not_wait_for_a_poll() -> None:
    source, busy = SourceThread(RecordingSource), threading.Event()
    reading = source.submit(busy.wait)
    assert source.positions() == {("samples", 0): 7} and source.lag() == {} and source.num_lost == 3
    busy.set()
    assert reading.result()
    source.close()


def test_a_source_that_fails_to_open_leaves_no_thread() -> None:
    before = threading.active_count()

    def fail_to_open() -> RecordingSource:
        raise UnavailableError("Kafka is away")

    with pytest.raises(UnavailableError, match="Kafka is away"):
        SourceThread(fail_to_open)
    assert threading.active_count() == before


# `StageTimer`: the seconds of all stages add up to the seconds of their thread


def test_the_time_of_a_nested_stage_is_not_counted_for_the_outer_one() -> None:
    clock = FakeClock()
    stages = StageTimer(clock)
    with stages("wait_data"):
        clock.advance(1)
        with stages("decode"):
            clock.advance(10)
        clock.advance(2)
    clock.advance(100)
    assert (stages.of_loop("wait_data"), stages.of_loop("decode"), stages.of_loop(*STAGES)) == (3, 10, 13)


def test_the_loop_s_thread_is_timed_separately_from_others() -> None:
    clock = FakeClock()
    stages = StageTimer(clock)

    def push() -> None:
        with stages("push"):
            clock.advance(5)

    with stages("forward"):
        thread = threading.Thread(target=push)
        thread.start()
        thread.join()
    assert stages.seconds()["push", BESIDE] == 5 and stages.seconds()["push", LOOP] == 0
    assert stages.of_loop("forward") == 5, "the two threads overlap"

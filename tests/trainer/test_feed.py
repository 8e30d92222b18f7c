"""What is read, pulled and pushed beside training is trained as if one thing had been done after the
other."""

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
from tests.trainer.pipelines import Piped, pipelined
from trainer.chunks import Chunk
from trainer.feed import AsyncRows, SourceThread, num_shared
from trainer.loop import Snapshot
from trainer.pipeline.stage_timer import BESIDE, LOOP, STAGES, StageTimer
from trainer.rows import PushTimes

N40 = samples.records(list(range(1, 41)))
RAMP = {"first_batch_requests": 1, "batch_growth_requests": 3, "batch_requests": 4}


def state(built: Built) -> dict[str, Any]:
    """Everything that training has changed."""
    at = built.loop.snapshot()
    own = {f"{p} {name}": value for p, cut in at.partitions.items() for name, value in cut.tensors.items()}
    bits = {name: value.tobytes() for name, value in (at.shared | own).items()}
    return {
        **bits,
        **built.shard.bits(),
        "step": at.step,
        "watermark": at.watermark_ms,
        "progress": at.progress,
    }


def mixed(seed: int, count: int = 60) -> list[Record]:
    """Samples, some of them twice, and a few that can't be read."""
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
    with pipelined(records, exact=exact, **sizes) as piped:
        assert state(piped.built.train_all()) == state(serial)
        assert [p.SerializeToString() for p in piped.built.predicted] == [
            p.SerializeToString() for p in serial.predicted
        ]
        assert [x.offset for x in piped.built.letters] == [x.offset for x in serial.letters]
        assert piped.feed.max_staleness == piped.feed.num_shared == 0 and set(piped.rows.staleness) == {0}


class Run:
    """One drawn run: steps, cuts, failures and restores, until everything is trained."""

    def __init__(self, piped: Piped, seed: int) -> None:
        self.piped, self.built, self.draw = piped, piped.built, random.Random(seed)
        self.failures = 6
        self.cut: tuple[Snapshot, dict[tuple[int, int], Row]] = self._taken()

    def to_the_end(self) -> Run:
        while self._advance():
            pass
        return self

    def _advance(self) -> bool:
        built, chance = self.built, self.draw.random()
        try:
            if chance < 0.2:
                self.cut = self._taken()
            elif chance < 0.3 and self.failures:
                self.failures -= 1
                self.piped.pace.fail_next(self.draw.choice(["poll", "pull", "push"]))
            self.piped.pace.here("train")
            if built.loop.step() or built.loop.finish():
                return True
            built.loop.feed.drain()  # the last push can still fail
            return False
        except UnavailableError:
            self._restore()
            return True

    def _taken(self) -> tuple[Snapshot, dict[tuple[int, int], Row]]:
        at = self.built.loop.snapshot()
        return at, {k: row.copy() for k, row in self.built.shard.rows.items()}

    def _restore(self) -> None:
        at, rows = self.cut
        self.built.loop.feed.reset()
        self.built.shard.rows = {k: row.copy() for k, row in rows.items()}
        self.built.loop.restore(at)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 1 << 30), st.booleans(), st.integers(1, 3))
def test_cuts_failures_and_restores_give_the_state_of_the_serial_loop(
    seed: int, exact: bool, read_ahead: int
) -> None:
    records, sizes = mixed(seed, 24), RAMP if seed % 2 else {"batch_requests": 3}
    serial = build(records, exact=exact, **sizes).train_all()
    with pipelined(records, seed=seed, exact=exact, read_ahead=read_ahead, **sizes) as piped:
        Run(piped, seed).to_the_end()
        assert state(piped.built) == state(serial)
        assert set(piped.rows.staleness) == {0}


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 1 << 30), st.integers(1, 3))
def test_staleness_stays_within_its_limit_and_samples_apply_once(seed: int, staleness: int) -> None:
    records = mixed(seed, 24)
    serial = build(records, batch_requests=3).train_all()
    with pipelined(records, seed=seed, staleness=staleness, batch_requests=3) as piped:
        Run(piped, seed).to_the_end()
        assert piped.built.pushes() == serial.pushes() and piped.built.offsets() == serial.offsets()
        assert max(piped.rows.staleness) <= piped.feed.max_staleness <= staleness


def test_stale_rows_of_early_pulls_are_counted() -> None:
    """The second chunk is pulled while the first one's push is held back: the item rows that both have are
    older."""
    with pipelined(N40[:8], staleness=1) as piped:
        held, pulled = threading.Event(), threading.Semaphore(0)
        rows = piped.rows.rows
        push, pull = rows.push, rows.pull

        def late(*given: Any) -> None:
            assert held.wait(30)
            push(*given)

        def noted(lookup: Lookup) -> dict[str, Tensor]:
            found = pull(lookup)
            pulled.release()
            return found

        rows.push, rows.pull = late, noted  # type: ignore[method-assign]
        assert piped.built.loop.step()
        assert pulled.acquire(timeout=30) and pulled.acquire(timeout=30), "the rows of both chunks"
        held.set()
        assert piped.built.loop.step()
        piped.feed.drain()
        items = [{int(i) for p in piped.built.predicted[at : at + 4] for i in p.item_ids} for at in (0, 4)]
        assert piped.feed.max_staleness == 1 and piped.feed.num_shared == len(items[0] & items[1]) > 0


@pytest.mark.parametrize(("where", "staleness"), [("poll", 0), ("pull", 1), ("push", 0)])
def test_errors_name_the_offsets_of_their_chunk(where: str, staleness: int) -> None:
    with pipelined(N40, staleness=staleness, read_ahead=1) as piped:
        loop = piped.built.loop
        assert loop.step()
        piped.feed.drain()
        piped.pace.fail_next(where)
        with pytest.raises(UnavailableError, match=f"{where} failed") as raised:
            for _ in range(5):
                loop.step()
        told = " ".join(raised.value.__notes__)
        assert "samples-0 " in told and "samples-1 " in told and (".." in told or where == "poll")


def test_a_background_failure_persists_until_a_restore() -> None:
    with pipelined(N40, read_ahead=1) as piped:
        loop, at = piped.built.loop, piped.built.loop.snapshot()
        piped.pace.fail_next("poll")
        for _ in range(3):
            with pytest.raises(UnavailableError, match="poll failed"):
                for _ in range(5):
                    loop.step()
        loop.restore(at)
        assert piped.built.train_all().pushes().keys() == set(range(1, 41))


def test_a_failed_push_refuses_the_cut_until_a_restore() -> None:
    with pipelined(N40) as piped:
        built = piped.built
        at = built.loop.snapshot()
        piped.pace.fail_next("push")
        assert built.loop.step(), "the push is made later"
        with pytest.raises(UnavailableError, match="push failed") as raised:
            built.loop.snapshot()
        assert raised.value.__notes__ == ["in the push of samples-0 0..1, samples-1 0..1"]
        built.loop.restore(at)
        assert built.train_all().pushes() == dict.fromkeys(range(1, 41), 1)


def test_a_cut_drains_pushes_and_keeps_chunks_read_ahead() -> None:
    with pipelined(N40, staleness=2) as piped:
        assert piped.built.loop.step()
        at = piped.built.loop.snapshot()
        assert sum(at.progress.values()) == 4
        assert sum(cut.dedupe.num_ids for cut in at.partitions.values()) == 4
        assert piped.rows.num_pushed == 1
        assert piped.built.train_all().pushes() == dict.fromkeys(range(1, 41), 1)


def test_partial_chunks_are_trained_after_the_maximum_wait() -> None:
    with pipelined(N40[:3], max_batch_wait_ms=500) as piped:
        assert not piped.built.loop.step(), "three of four requests"
        piped.built.clock.advance(0.6)
        assert piped.built.loop.step() and piped.built.loop.counts.requests == 3
        assert not piped.built.loop.step()


def test_no_thread_is_left_after_failures() -> None:
    before = set(threading.enumerate())
    for error in (UnavailableError("away"), KeyboardInterrupt()):
        with pytest.raises(type(error)), pipelined(N40, staleness=1) as piped:
            assert piped.built.loop.step()
            raise error
    with pipelined(N40, staleness=1) as piped:
        piped.pace.fail_next("push")
        with pytest.raises(UnavailableError):
            piped.built.train_all()
        piped.feed.close()
        piped.feed.close()
    assert set(threading.enumerate()) <= before


# Pushes are made behind the loop, in their order, and nothing is made behind one that failed


class Held:
    """`Rows` whose pushes wait until they are let through; `refuses` those of these steps."""

    def __init__(self) -> None:
        self.through = threading.Semaphore(0)
        self.pushed: list[int] = []
        self.refuses: set[int] = set()
        self.incarnation = 0

    def set_incarnation(self, incarnation: int, workers: int = 1, owners: BucketMap | None = None) -> None:
        self.incarnation = incarnation

    def pull(self, lookup: Lookup) -> dict[str, Tensor]:
        return {"s": torch.tensor([float(len(self.pushed))])}

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        assert self.through.acquire(timeout=30)
        if times.step in self.refuses:
            raise UnavailableError(f"step {times.step} is refused")
        self.pushed.append(times.step)

    def save(self) -> None: ...


def lookup(*ids: int, table: int = 1) -> Lookup:
    return Lookup({"s": StackLookup(np.full(len(ids), table, np.uint32), np.array(ids, np.int64), {})})


@pytest.fixture
def late() -> Iterator[AsyncRows]:
    held = Held()
    rows = AsyncRows(held, StageTimer(FakeClock()))
    yield rows
    held.through.release(100)
    rows.close()
    rows.close()


def push(late: AsyncRows, *steps: int) -> Held:
    for step in steps:
        late.pushing = f"samples-0 {step}..{step}"
        late.push(lookup(step), {}, PushTimes(step, 0))
    assert isinstance(late.rows, Held)
    return late.rows


def test_a_push_returns_at_once_and_later_pulls_see_it(late: AsyncRows) -> None:
    held = push(late, 1, 2, 3)
    assert late.num_queued == 3 and late.num_acknowledged == 0 and len(late.in_flight()) == 3
    assert float(late.rows.pull(lookup())["s"]) == 0
    held.through.release(2)
    late.wait(max_in_flight=1)
    assert held.pushed == [1, 2]
    held.through.release()
    assert float(late.pull(lookup())["s"]) == 3 and held.pushed == [1, 2, 3]


def test_after_a_failed_push_nothing_is_pushed_until_forget(late: AsyncRows) -> None:
    held = push(late, 1, 2, 3)
    held.refuses = {2}
    held.through.release(3)
    for call in (late.wait, late.check, lambda: push(late, 4), lambda: late.pull(lookup())):
        late.stages("push")
        with pytest.raises(UnavailableError, match="step 2 is refused") as raised:
            late.wait()
            call()
        assert raised.value.__notes__ == ["in the push of samples-0 2..2"]
    assert held.pushed == [1] and late.failed
    late.set_incarnation(7)
    assert not late.failed and held.incarnation == 7 and not late.in_flight()
    push(late, 5)
    held.through.release()
    late.wait()
    assert held.pushed == [1, 5]


def test_forgotten_pushes_are_not_made(late: AsyncRows) -> None:
    held = push(late, 1, 2, 3)
    forgetting = threading.Thread(target=late.forget)
    forgetting.start()
    held.through.release()
    forgetting.join(30)
    held.through.release(5)
    late.wait()
    assert held.pushed in ([], [1]), "at most the one that was under way"


def test_shared_rows_are_counted_by_table_and_id() -> None:
    mine = Lookup({"s": StackLookup(np.array([1, 1, 2], np.uint32), np.array([5, 6, 5], np.int64), {})})
    assert num_shared(mine, []) == 0
    assert num_shared(mine, [lookup(5, 7)]) == 1
    assert num_shared(mine, [lookup(5, table=2), lookup(6, 5)]) == 3
    assert num_shared(mine, [lookup(6), lookup(6)]) == 1


# A source is asked in one thread, whoever asks


class Noting:
    """A source that notes from which threads it is opened, called and closed."""

    num_lost = 3

    def __init__(self) -> None:
        self.calls = [("open", threading.get_ident())]

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self._note("poll")

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        return self._note("poll_remaining")

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        self._note("seek")

    def positions(self) -> Progress:
        return {("samples", 0): 7}

    def lag(self) -> dict[Partition, PartitionLag]:
        return {}

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        self.calls.append((what, threading.get_ident()))


def test_the_source_is_used_from_one_thread() -> None:
    source = SourceThread(Noting)
    noting = source.source
    assert isinstance(noting, Noting)
    source.seek({})
    assert source.submit(lambda: source.poll(1, 0.0)).result() is None, "from within it too"
    source.poll_remaining(1)
    source.close()
    source.close()
    assert [what for what, _ in noting.calls] == ["open", "seek", "poll", "poll_remaining", "close"]
    (thread,) = {ident for _, ident in noting.calls}
    assert thread != threading.get_ident()


def test_reading_progress_does_not_wait_for_a_poll() -> None:
    source, busy = SourceThread(Noting), threading.Event()
    reading = source.submit(busy.wait)
    assert source.positions() == {("samples", 0): 7} and source.lag() == {} and source.num_lost == 3
    busy.set()
    assert reading.result()
    source.close()


def test_a_source_that_fails_to_open_leaves_no_thread() -> None:
    before = threading.active_count()

    def away() -> Noting:
        raise UnavailableError("Kafka is away")

    with pytest.raises(UnavailableError, match="Kafka is away"):
        SourceThread(away)
    assert threading.active_count() == before


# The seconds of each stage add up to those of its thread


def test_a_stage_within_another_interrupts_it() -> None:
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
    assert stages.of_loop("forward") == 5, "both at once"

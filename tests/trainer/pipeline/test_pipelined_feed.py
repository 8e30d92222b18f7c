"""What is read, pulled and pushed beside training is trained as if one thing had been done after the
other."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roostream.errors import UnavailableError
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.fake_shard import Row
from tests.trainer.loops import Built, build
from tests.trainer.pipeline.pipelines import Piped, pipelined
from trainer.loop import Snapshot

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


@settings(max_examples=8, deadline=None)
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


@settings(max_examples=8, deadline=None)
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

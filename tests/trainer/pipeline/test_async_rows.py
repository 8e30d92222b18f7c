"""Pushes are made behind the loop, in their order, and nothing is made behind one that failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from roostream.errors import UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import FakeClock
from roostream.wire.lookup import Lookup, StackLookup
from trainer.pipeline.async_rows import AsyncRows
from trainer.pipeline.pipelined_feed import num_shared
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import PushTimes


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

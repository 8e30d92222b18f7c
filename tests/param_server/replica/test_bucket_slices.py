"""A bucket that is too large for one answer is read in slices, while it changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from param_server.replica.replica import Replica
from param_server.server import ShardRpcHandler
from roostream.errors import UnavailableError, WireError
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.ids import bucket_of
from roostream.wire import records as wire
from tests.param_server.reader_support import Loop
from tests.param_server.shard_support import ADAGRAD, ITEM, begun, lookup_of, small_schema, table_id

BUCKET = 5
IDS = [id_ for id_ in range(6000) if bucket_of(id_, table_id(ITEM), 64) == BUCKET][:60]
OTHERS = [id_ for id_ in range(200) if id_ not in IDS]


class Reading:
    """A replica over a shard whose answers hold a few rows only; `before_scan` runs before each answer."""

    def __init__(self, seed: int = 0) -> None:
        self.loop, self.random = Loop(begun()), random.Random(seed)
        self.replica, self.at = Replica(small_schema(), 0), [0] * len(self.loop.topic.values)
        self.before_scan: Callable[[int], None] = lambda number: None
        self.num_scans = self.num_slices = 0
        handler = ShardRpcHandler(self.loop.shard, max_scan_bytes=8 * (4 * 4 + 20))

        def handle(method: str, header: Any, arrays: Sequence[np.ndarray]) -> Any:
            if method == "scan":
                self.before_scan(self.num_scans)
                self.num_scans += 1
                self.num_slices += "num_slices" in header
            return handler.handle(method, header, arrays)

        self.transport = InMemoryTransport(handle)

    def change(self) -> None:
        self.loop.push(*sorted(self.random.sample(IDS, 20)))
        if self.random.random() < 0.6:
            self.loop.turn()

    def bootstrap(self) -> None:
        self.at = [len(values) for values in self.loop.topic.values]
        self.replica.bootstrap([self.transport])

    def read_one(self) -> bool:
        for partition, values in enumerate(self.loop.topic.values):
            if self.at[partition] < len(values):
                self.replica.apply(wire.decode(values[self.at[partition]])[1])  # type: ignore[arg-type]
                self.at[partition] += 1
                return True
        return False

    def rows(self) -> np.ndarray:
        return self.replica.gather(lookup_of({ITEM: IDS}))[ADAGRAD]


def test_a_large_bucket_is_read_in_slices_and_equals_its_shard() -> None:
    reading = Reading()
    reading.loop.push(*IDS, *OTHERS)
    reading.loop.turn()
    reading.bootstrap()
    assert reading.num_slices >= 8 and reading.replica.num_rows == len(IDS) + len(OTHERS)
    assert np.array_equal(reading.rows(), reading.loop.rows(*IDS))
    assert reading.replica.version(ADAGRAD, BUCKET) == (1, 1) and not reading.replica.stale


@pytest.mark.parametrize("seed", range(6))
def test_g4_no_row_goes_back_while_a_bucket_is_read_in_slices(seed: int) -> None:
    """Rows fall with every push, because all gradients are positive."""
    reading = Reading(seed)
    reading.loop.push(*IDS)
    for _ in range(3):
        reading.change()
    reading.before_scan = lambda number: reading.change()
    reading.bootstrap()
    assert reading.num_slices >= 8
    reading.before_scan = lambda number: None
    for _ in range(5):
        reading.change()
    reading.loop.turn()
    before = reading.rows()
    while reading.read_one():
        after = reading.rows()
        assert (after <= before).all()
        before = after
    assert np.array_equal(before, reading.loop.rows(*IDS)) and not reading.replica.stale


@pytest.mark.parametrize("fails_at", [2, 5, 9])
def test_a_failure_between_two_slices_leaves_rows_that_deltas_do_not_take_back(fails_at: int) -> None:
    reading = Reading(1)
    reading.loop.push(*IDS)
    reading.loop.turn()

    def fail(number: int) -> None:
        reading.change()
        if number == fails_at:
            raise UnavailableError("away")

    reading.before_scan = fail
    with pytest.raises(UnavailableError):
        reading.bootstrap()
    reading.before_scan = lambda number: None
    reading.loop.turn()
    before = reading.rows()
    while reading.read_one():
        assert (reading.rows() <= before).all()
        before = reading.rows()
    reading.bootstrap()
    assert np.array_equal(reading.rows(), reading.loop.rows(*IDS))


def test_a_stale_bucket_is_repaired_in_slices() -> None:
    reading = Reading()
    reading.loop.push(*IDS)
    reading.loop.turn()
    reading.bootstrap()
    reading.loop.push(*IDS[:7])
    reading.loop.turn()
    reading.replica.mark_stale(BUCKET)
    before = reading.num_slices
    reading.replica.repair([reading.transport])
    assert reading.num_slices > before and not reading.replica.stale
    assert np.array_equal(reading.rows(), reading.loop.rows(*IDS))


def test_invalid_slices_are_refused() -> None:
    handler = ShardRpcHandler(begun())
    asked = {"stack": ADAGRAD, "cursor": BUCKET, "limit": 1, "slice": 0}
    for num_slices in (0, -1, 1 << 21):
        with pytest.raises(WireError, match="slices"):
            handler.handle("scan", {**asked, "num_slices": num_slices}, [])
    with pytest.raises(UnavailableError, match="does not own"):
        handler.handle("scan", {**asked, "cursor": 64, "num_slices": 2}, [])

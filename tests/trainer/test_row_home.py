"""Where workers that hold rows load and store them: in their own shard, or in the shards of a stack."""

from __future__ import annotations

import numpy as np
import pytest

from param_server.client import Client
from param_server.embedding_table import Keys
from param_server.row_block import RowBlock
from param_server.server import Shard, ShardRpcHandler
from roostream.errors import FencedError, RoostreamError, WireError
from roostream.runtime.rpc.transport import InMemoryTransport
from tests.param_server.shard_support import ADAGRAD, ITEM, USER, keys, small_schema, started_shard
from trainer.row_home import OwnShard, RowHome, StackShards

NUM_BUCKETS = 64


def stack_home(shards: list[Shard], worker: int, workers: int) -> StackShards:
    transports = [InMemoryTransport(ShardRpcHandler(shard).handle) for shard in shards]
    home = StackShards(Client(small_schema(), transports, worker=worker, num_buckets=NUM_BUCKETS), 7)
    home.set_incarnation(1, worker, workers, None)
    return home


def block(found: Keys, first: float) -> RowBlock:
    count = len(found)
    rows_LD = first + np.arange(count * 4, dtype=np.float32).reshape(count, 4)
    return RowBlock(
        keys=found,
        unpublished_K=np.zeros(count, np.uint8),
        stamp_ms_L=np.arange(count),
        rows_LD=rows_LD,
        state_LA=rows_LD + 0.5,
    )


def loaded(homes: list[RowHome]) -> dict[tuple[int, int], bytes]:
    out = {}
    for home in homes:
        for kept in home.load(ADAGRAD):
            assert len(kept.keys), "an empty piece would end the load"
            for table, id_, record in zip(kept.keys.table_U, kept.keys.id_U, kept.records_MF, strict=True):
                assert (int(table), int(id_)) not in out, "only one worker may load a row"
                out[int(table), int(id_)] = record.tobytes()
    return out


def expected(given: RowBlock) -> dict[tuple[int, int], bytes]:
    records = np.concatenate([given.rows_LD, given.state_LA], axis=1)
    return {
        (int(table), int(id_)): record.tobytes()
        for table, id_, record in zip(given.keys.table_U, given.keys.id_U, records, strict=True)
    }


@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (3, 2), (2, 3)])
def test_rows_of_a_stack_are_stored_and_loaded_with_any_number_of_shards_and_workers(
    shards: int, workers: int
) -> None:
    stack = [started_shard(index=n, num_shards=shards) for n in range(shards)]
    homes: list[RowHome] = [stack_home(stack, worker, workers) for worker in range(workers)]
    assert loaded(homes) == {}
    given = block(keys(ITEM, *range(-20, 200)), 0.0)
    homes[0].store(ADAGRAD, given)
    assert loaded(homes) == expected(given)
    again = block(keys(ITEM, *range(100)), 1000.0)
    homes[-1].store(ADAGRAD, again)
    assert loaded(homes) == {**expected(given), **expected(again)}
    requested = keys(ITEM, 5, 5000, -20)
    assert homes[0].contains(ADAGRAD, requested).tolist() == [True, False, True]
    assert not homes[0].contains(ADAGRAD, keys(USER, 5)).any()


def test_the_own_shard_returns_the_stored_rows() -> None:
    home = OwnShard(started_shard())
    home.set_incarnation(1, 0, 1, None)
    given = block(keys(ITEM, *range(50)), 2.0)
    home.store(ADAGRAD, given)
    assert loaded([home]) == expected(given)
    assert home.contains(ADAGRAD, keys(ITEM, 1, 99)).tolist() == [True, False]


@pytest.mark.parametrize("own", [True, False])
def test_rows_of_an_older_incarnation_do_not_enter_a_restored_shard(own: bool) -> None:
    """The controller restores shards and workers at once: a worker may still store rows of a commit whose
    other worker was lost, and would train their samples again."""
    shard = started_shard()
    home: RowHome = OwnShard(shard) if own else stack_home([shard], 0, 1)
    home.set_incarnation(1, 0, 1, None)
    home.store(ADAGRAD, block(keys(ITEM, *range(50)), 2.0))
    shard.restore(2, "")
    late = block(keys(ITEM, *range(50, 100)), 2.0)
    with pytest.raises(FencedError):
        home.store(ADAGRAD, late)
    with pytest.raises(FencedError):
        home.contains(ADAGRAD, late.keys)
    with pytest.raises(FencedError):
        next(home.load(ADAGRAD), None)
    home.set_incarnation(2, 0, 1, None)
    assert loaded([home]) == {}


def test_a_write_that_is_sent_twice_is_applied_once() -> None:
    """The second copy could arrive after a later write of the same row, and would undo it."""
    shard = started_shard()
    call = ShardRpcHandler(shard).handle
    given = block(keys(ITEM, 1), 3.0)
    arrays = [given.keys.table_U, given.keys.id_U, given.stamp_ms_L, given.rows_LD, given.state_LA]
    header = {"incarnation": 1, "worker": 0, "sequence": 1, "stacks": [ADAGRAD]}
    assert call("overwrite", header, arrays)[0] == {"applied": True}
    assert call("overwrite", header, arrays)[0] == {"applied": False}
    with pytest.raises(FencedError):
        call("overwrite", {**header, "sequence": 3}, arrays)
    with pytest.raises(FencedError):
        call("overwrite", {**header, "incarnation": 2, "sequence": 2}, arrays)


def test_arguments_that_do_not_fit_are_refused() -> None:
    call = ShardRpcHandler(started_shard()).handle
    given = block(keys(ITEM, 1, 2), 3.0)
    arrays = [given.keys.table_U, given.keys.id_U, given.stamp_ms_L, given.rows_LD[:, :3], given.state_LA]
    with pytest.raises(WireError):
        call("overwrite", {"incarnation": 1, "worker": 0, "sequence": 1, "stacks": [ADAGRAD]}, arrays)
    for buckets in ([64], [-1], ["0"], 3):
        with pytest.raises(RoostreamError):
            call("records", {"incarnation": 1, "stack": ADAGRAD, "buckets": buckets, "start": 0}, [])
    with pytest.raises(WireError):
        call("records", {"incarnation": 1, "stack": ADAGRAD, "buckets": [0], "start": -1}, [])

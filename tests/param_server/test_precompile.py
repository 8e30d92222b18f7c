"""`precompile` compiles every kernel that a shard, its publisher and a replica use."""

from __future__ import annotations

from numba.core.registry import CPUDispatcher

from param_server import initial_rows, kernels, rules
from param_server.precompile import precompile
from tests.param_server.shard_support import (
    ITEM,
    TOPIC,
    Follower,
    PublishLoop,
    commit,
    small_schema,
    started_shard,
)
from tests.trainer.memory_store import MemoryStore

MODULES = (initial_rows, kernels, rules)


def signatures() -> dict[str, int]:
    """Kernel → number of compiled signatures."""
    found = {
        f"{m.__name__}.{name}": k
        for m in MODULES
        for name, k in vars(m).items()
        if isinstance(k, CPUDispatcher)
    }
    return {name: len(kernel.nopython_signatures) for name, kernel in found.items()}


def test_nothing_is_compiled_after_precompile() -> None:
    precompile()
    before = signatures()
    store = MemoryStore()
    loop = PublishLoop(started_shard(schema=small_schema(expire_after_ms=10), store=store, num_shards=1))
    for step in range(3):
        loop.push(*range(300), time_ms=step)
        loop.push(*range(30), table=TOPIC, time_ms=step)
        loop.turn()
        name = commit(loop.shard, store, step + 1, watermark_ms=100 * step)
    follower = Follower(loop.topic)
    follower.catch_up(loop.shard)
    loop.push(1, 2, 3, table=ITEM)
    loop.turn()
    follower.catch_up(loop.shard)
    loop.shard.restore(2, name)
    loop.turn()
    follower.catch_up(loop.shard)
    assert follower.rows(TOPIC, 1).shape == (1, 3)
    assert signatures() == before and before

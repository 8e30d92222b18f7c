"""Compiles all kernels of a shard into numba's cache, by pushing, publishing and freezing a small table."""

from __future__ import annotations

import numpy as np

from param_server import kernels, row_block
from param_server.embedding_table import Keys
from param_server.eviction import ExpiryPolicy
from param_server.gradient_barrier import sum_pushes
from param_server.initial_rows import initial_rows
from param_server.outbox import run_to_end
from param_server.table import GradientPush, StackTable
from roostream.runtime.bucket_map import BucketMap
from roostream.schema.schema import Table
from roostream.schema.update_rules import RULES


def precompile() -> None:
    """Takes seconds if nothing is cached, else a fraction of one."""
    for rule in RULES.values():
        _exercise(
            StackTable(
                "warm",
                [Table(name="warm", dim=2, rule=rule(), expire_after_ms=1)],
                seed=1,
                num_buckets=4,
                eviction=ExpiryPolicy,
            )
        )
    keys = _keys(3)
    owner_B = BucketMap.modulo(4, 2).owner_B
    kernels.split_by_shard(keys.table_U, keys.id_U, owner_B, 2, np.empty(3, np.int64), np.empty(3, np.int64))
    kernels.first_foreign(keys.table_U, keys.id_U, owner_B, 0)
    kernels.buckets(keys.table_U, keys.id_U, 4)
    initial_rows(1, keys.table_U, keys.id_U, 2, 0.1)


def _keys(num_keys: int) -> Keys:
    return Keys(
        np.full(num_keys, Table(name="warm", dim=2).id, np.uint32), np.arange(num_keys, dtype=np.int64)
    )


def _exercise(table: StackTable) -> None:
    keys = _keys(300)
    gradient_UD = np.ones((300, 2), np.float32)
    push = GradientPush(0, 0, 10, 1, 2, [(table, keys, gradient_UD)])
    sum_pushes([push, push])
    table.check_keys(keys)
    table.check_gradient(keys, gradient_UD)
    table.reserve(len(keys))
    kernels.limit(gradient_UD, np.float32(0.5), np.empty_like(gradient_UD))
    table.outbox.note_change(table.push(keys, gradient_UD, 10), 1, 2, 3)
    table.embeddings.gather(_keys(301))
    outbox = table.outbox
    for planned in outbox.number(outbox.plan(*run_to_end(outbox.collect()))):
        outbox.copy(planned, 100.0)
    run_to_end(outbox.settle(True))
    table.outbox.settled_after(0, *table.embeddings.rows_by_bucket([0]))
    table.track_accumulators(table.state_NA)
    table.num_changed()
    run_to_end(table.evict(table.due_rows(1000)[:1]))
    frozen = table.freeze(*table.gone_keys(outbox.tombstones()), [0])
    table.push(_keys(300), gradient_UD, 10)
    frozen.set_rows(*run_to_end(table.mark(frozen)))
    changes = run_to_end(table.copy_frozen(frozen, np.arange(len(frozen.row_M))))
    run_to_end(table.unfreeze(frozen))
    stored = row_block.decode(row_block.encode(changes, b"warm"), b"warm", 2, table.state_width)
    table.put(stored)
    table.clear_changes()

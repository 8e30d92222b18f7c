"""Which rows a shard holds and what they begin with."""

from __future__ import annotations

import dataclasses

from param_server.table import StackTable
from roo.schema import Schema
from runtime.topics import NUM_BUCKETS, PARTITIONS, ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """Which rows are this shard's, and what they begin with; the same as long as its data live."""

    schema: Schema
    index: int = 0
    num_shards: int = 1
    num_buckets: int = NUM_BUCKETS
    num_partitions: int = PARTITIONS[ROWS]
    seed: int = 0
    publishing: bool = True
    max_publish_norm: float = 100.0

    @property
    def buckets(self) -> range:
        return range(self.index, self.num_buckets, self.num_shards)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Stack → (width, accumulator width)."""
        return {name: (t.width, t.accumulator_width) for name, t in self.tables().items()}

    def tables(self) -> dict[str, StackTable]:
        return {
            name: StackTable(name, tables, seed=self.seed, num_buckets=self.num_buckets, publishing=self.publishing)
            for name, tables in self.schema.stacks.items()
        }

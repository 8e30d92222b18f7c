"""The parameter server's own shard in the simulator: its blobs outlive it, as a disk would."""

from __future__ import annotations

from typing import Any

from param_server.blobs import MemoryBlobs
from param_server.calls import Calls
from runtime.clock import Clock
from tests.param_server.shard_support import make_shard, state_of
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore


class RealShard:
    """The same surface as `FakeShard`."""

    def __init__(self, index: int, num_shards: int, store: MemoryStore, clock: Clock, disk: MemoryBlobs) -> None:
        identity: dict[str, Any] = {"schema": samples.schema(), "index": index, "num_shards": num_shards, "publishing": False}
        self.shard = make_shard(disk, store, clock, **identity)  # type: ignore[arg-type]
        self.handle, self.execute, self.report = Calls(self.shard).handle, self.shard.execute, self.shard.stats

    def bits(self) -> dict[str, bytes]:
        return {f"row {key}": value for key, value in state_of(self.shard).items()}

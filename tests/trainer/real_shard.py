"""The parameter server's real shard as a process of the simulator. Its key-value store survives the process,
as a disk would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from param_server.key_value_store import MemoryKeyValueStore
from param_server.server import ShardRpcHandler
from roostream.errors import TransportError, UnavailableError
from roostream.runtime.clock import Clock
from roostream.schema.schema import Schema
from tests.param_server.shard_support import make_shard, state_of
from tests.trainer.actors import wait_until
from tests.trainer.memory_store import MemoryStore


class _ActorCondition:
    """A condition variable for the shard's gradient barrier in the simulator, where only one thread runs at a
    time."""

    def __init__(self, process: RealShard, lock: threading.Lock, clock: Clock) -> None:
        self.process, self.lock, self.clock = process, lock, clock

    def wait_for(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        self.lock.release()
        try:
            wait_until(lambda: is_done() or self.process.is_dead, self.clock, "the other workers' push")
        except UnavailableError as error:
            if isinstance(error, TransportError):
                raise
            return False
        finally:
            self.lock.acquire()
        if self.process.is_dead:
            raise TransportError("the connection was closed")
        return True

    def notify_all(self) -> None:
        """Do nothing: waiting actors poll."""


class RealShard:
    """A real shard with the interface of `FakeShard`."""

    def __init__(
        self,
        index: int,
        num_shards: int,
        store: MemoryStore,
        clock: Clock,
        disk: MemoryKeyValueStore,
        schema: Schema,
        *,
        uploads: bool = False,
    ) -> None:
        identity: dict[str, Any] = {"schema": schema, "index": index, "num_shards": num_shards}
        self.shard = make_shard(  # type: ignore[arg-type]
            disk, store, clock, **identity, publishing=False, uploads=uploads
        )
        self.handle = ShardRpcHandler(self.shard).handle
        self.execute, self.report = self.shard.execute, self.shard.stats
        self.is_dead = False
        self.shard.barrier.changed = _ActorCondition(self, self.shard.barrier.lock, clock)  # type: ignore[assignment]

    def die(self) -> None:
        """End the process. Callers that wait for an answer get an error."""
        self.is_dead = True

    def bits(self) -> dict[str, bytes]:
        return {f"row {key}": value for key, value in state_of(self.shard).items()}

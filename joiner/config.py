"""Settings of the joiner, the same for both engines."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from joiner.rules import Rules
from roostream.runtime.deployment import Deployment
from roostream.runtime.kafka.topics import MAX_SKEW_MS
from roostream.schema.settings import setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinerConfig(Rules, Deployment):
    """`roostream joiner --config FILE`: the rules of the join, and the engine that runs it."""

    needs: ClassVar[tuple[str, ...]] = ()  # a replay in one process needs none; programs call `require`

    home: str = setting("", "directory of the local engine's snapshots")
    engine: Literal["flink", "local"] = setting("flink", "flink: a job on a cluster · local: in this process")
    flink: str = setting("", "REST address of the Flink cluster, http://host:port")
    restore: str = setting(
        "",
        "savepoint or checkpoint from which a new Flink job continues, or a folder with `checkpoints` and "
        "`savepoints`, of which the newest one is taken; empty = none",
    )
    submits: bool = setting(
        True,
        "start a job if the cluster has none; false = wait for a job that another program starts, such as "
        "Flink's operator",
    )
    lateness_ms: int = setting(
        2_000, "maximum disorder within a partition: watermark = newest time - lateness - 1 ms", ge=0
    )
    idleness_ms: int = setting(
        0, "local engine: a partition silent for this long no longer holds back the watermark; 0 = off", ge=0
    )
    checkpoint_interval_ms: int = setting(
        5_000, "time between Flink checkpoints, or snapshots of the local engine", ge=100
    )
    delivery: Literal["at_least_once", "exactly_once"] = setting(
        "at_least_once",
        "guarantee of the Flink job; exactly_once writes in transactions, which consumers see after a "
        "checkpoint",
    )
    transaction_timeout_ms: int = setting(
        900_000,
        "exactly_once: a longer outage of Kafka or Flink loses written outputs; at most the broker's "
        "transaction.max.timeout.ms (15 min unless it was changed)",
        ge=10_000,
    )
    state_backend: Literal["heap", "rocksdb"] = setting(
        "heap",
        "where the Flink job keeps its state: heap · rocksdb: on the task managers' disks, with incremental "
        "checkpoints, for state that exceeds their memory",
    )
    parallelism: int = setting(1, "parallelism of the Flink operator; one task slot each", ge=1)
    restart_attempts: int = setting(0, "restarts of a failed Flink job before it ends; 0 = no limit", ge=0)
    read_ahead_ms: int = setting(
        0,
        "a partition is read at most this far ahead of the slowest, and one event moves its time at most "
        "this far; 0 = 6 x the longest window, at least 1 min",
        ge=0,
    )
    producer_timeout_ms: int = setting(
        30_000,
        "a producer whose last heartbeat is this old no longer holds back its partition's event time",
        ge=0,
    )
    replay: bool = setting(False, "join old events as fast as they can be read: no idleness")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "flink" and self.flink and not self.flink.startswith(("http://", "https://")):
            raise setting_error("flink", "http://host:port", self.flink)
        if self.idleness_ms and self.engine == "flink" and not self.replay:
            # FLINK-40093: Flink 2.3.0 never resumes a partition that becomes idle while alignment pauses it.
            text = "0 with the flink engine; let every producer send heartbeats to its partitions instead"
            raise setting_error("idleness_ms", text, self.idleness_ms)
        if self.delivery == "exactly_once" and self.engine != "flink":
            text = "at_least_once with the local engine, which has no transactions"
            raise setting_error("delivery", text, self.delivery)
        if self.delivery == "exactly_once" and self.transaction_timeout_ms < 2 * self.checkpoint_interval_ms:
            text = f"at least two checkpoints ({2 * self.checkpoint_interval_ms} ms)"
            raise setting_error("transaction_timeout_ms", text, self.transaction_timeout_ms)

    @property
    def rules(self) -> Rules:
        """The part of the settings that decides what joins with what."""
        return self

    @property
    def max_drift_ms(self) -> int:
        """How far a partition may be read ahead of the slowest, and the largest step of event time by a
        single event."""
        return self.read_ahead_ms or max(6 * self.longest_window_ms, MAX_SKEW_MS)

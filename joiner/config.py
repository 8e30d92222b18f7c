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
    """`roostream joiner --config FILE`: the rules of the join, and how it is run."""

    needs: ClassVar[tuple[str, ...]] = ()  # a replay in one process needs none; a program asks with `require`

    home: str = setting("", "directory of the local engine's snapshots")
    engine: Literal["flink", "local"] = setting("flink", "flink: a job on a cluster · local: in this process")
    flink: str = setting("", "REST address of the Flink cluster, http://host:port")
    restore: str = setting("", "savepoint or checkpoint that a new Flink job goes on from; empty = none")

    submits: bool = setting(
        True,
        "start a job where the cluster has none; false = something else does, such as Flink's operator: it is waited for",
    )

    lateness_ms: int = setting(
        2_000, "bound of disorder within a partition: watermark = newest time - lateness - 1 ms", ge=0
    )
    idleness_ms: int = setting(
        0, "a partition silent for this long no longer holds the watermark; 0 = off (replays)", ge=0
    )
    checkpoint_interval_ms: int = setting(
        5_000, "between Flink checkpoints, or the local engine's snapshots", ge=100
    )
    delivery: Literal["at_least_once", "exactly_once"] = setting(
        "at_least_once",
        "of the Flink job; exactly_once: nothing is written twice, in transactions that readers see after a checkpoint",
    )
    transaction_timeout_ms: int = setting(
        600_000,
        "exactly_once: the longest outage that loses nothing; at most the broker's transaction.max.timeout.ms",
        ge=10_000,
    )
    parallelism: int = setting(1, "of the Flink operator; one slot each", ge=1)
    restart_attempts: int = setting(
        0, "restarts of a failed Flink job before it is given up; 0 = no limit", ge=0
    )
    read_ahead_ms: int = setting(
        0,
        "a partition is read at most this far ahead of the slowest, and no single event moves its time further; "
        "0 = 6 x the longest window, and no less than topics accept of the future (1 min)",
        ge=0,
    )
    producer_timeout_ms: int = setting(
        30_000,
        "of several producers, one whose heartbeats are this old no longer holds its partition's time",
        ge=0,
    )
    replay: bool = setting(False, "old event times, as fast as they can be read: no idleness")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine == "flink" and self.flink and not self.flink.startswith(("http://", "https://")):
            raise setting_error("flink", "http://host:port", self.flink)
        if self.delivery == "exactly_once" and self.engine != "flink":
            raise setting_error(
                "delivery", "at_least_once with the local engine, which has no transactions", self.delivery
            )
        if self.delivery == "exactly_once" and self.transaction_timeout_ms < 2 * self.checkpoint_interval_ms:
            raise setting_error(
                "transaction_timeout_ms",
                f"at least two checkpoints ({2 * self.checkpoint_interval_ms} ms)",
                self.transaction_timeout_ms,
            )

    @property
    def rules(self) -> Rules:
        """The part that decides what joins with what."""
        return self

    @property
    def max_drift_ms(self) -> int:
        """How far one partition may be read ahead of the slowest, and the largest step of event time that one event can make."""
        return self.read_ahead_ms or max(6 * self.longest_window_ms, MAX_SKEW_MS)

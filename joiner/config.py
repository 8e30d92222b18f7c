"""Settings of the joiner, the same for both engines."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from joiner.rules import Rules
from roo.config import parse_duration_ms, setting
from roo.errors import ConfigError, nearest

_LEAST = {
    "window_ms": 1,
    "window_jitter_ms": 0,
    "lateness_ms": 0,
    "orphan_timeout_ms": 0,
    "late_horizon_ms": 0,
    "linger_ms": 0,
    "engaged_threshold": 0,
    "engaged_min_wait_ms": 0,
    "correction_horizon_ms": 0,
    "idleness_ms": 0,
    "checkpoint_interval_ms": 100,
    "parallelism": 1,
    "max_open_requests": 1,
    "max_requests": 1,
    "max_orphans": 0,
    "max_engagements": 1,
    "restart_attempts": 0,
    "read_ahead_ms": 0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinerConfig:
    """`roostream joiner --config FILE`."""

    bootstrap: str = setting("127.0.0.1:9092", "Kafka, host:port")
    prefix: str = setting("", "of topic names")
    schema: str = setting("", "schema TOML; registered in the store at start")
    store: str = setting("", "checkpoint store: where schemas are looked up by fingerprint")
    home: str = setting("", "directory of the local engine's snapshots")
    metrics_port: int = setting(0, "0 = draw one")
    engine: Literal["flink", "local"] = setting("flink", "flink: a job on a cluster · local: in this process")
    flink: str = setting("", "REST address of the Flink cluster, http://host:port")
    restore: str = setting("", "savepoint or checkpoint that a new Flink job goes on from; empty = none")

    window_ms: int = setting(600_000, "a request closes this long after its time at the latest")
    surface_windows: dict[str, Any] = setting(factory=dict, help="windows of single surfaces: name = duration")
    window_jitter_ms: int = setting(0, "windows are shortened by a hash of the request, by up to this")
    lateness_ms: int = setting(2_000, "bound of disorder within a partition: watermark = newest time - lateness - 1 ms")
    orphan_timeout_ms: int = setting(0, "how long an engagement waits for its request and item; 0 = the longest window")
    late_horizon_ms: int = setting(0, "how long a closed request is remembered; 0 = 10 x the longest window")
    next_request: Literal["off", "session", "user"] = setting("off", "a later request of the same session (user) closes one")
    linger_ms: int = setting(0, "next_request: how long after that later request")
    engaged_threshold: int = setting(0, "that many distinct engagements close a request; 0 = off")
    terminal_actions: tuple[str, ...] = setting((), "an engagement with one of these actions closes its request")
    engaged_min_wait_ms: int = setting(0, "such a close comes no sooner than this after the request (calibration)")
    correction_horizon_ms: int = setting(0, "corrections carry features this long after the close; 0 = labels only")

    idleness_ms: int = setting(0, "a partition silent for this long no longer holds the watermark; 0 = off (replays)")
    checkpoint_interval_ms: int = setting(5_000, "between Flink checkpoints, or the local engine's snapshots")
    parallelism: int = setting(1, "of the Flink operator; one slot each")
    restart_attempts: int = setting(0, "restarts of a failed Flink job before it is given up; 0 = no limit")
    read_ahead_ms: int = setting(0, "a partition is read at most this far ahead of the slowest; 0 = 6 x the longest window")
    max_open_requests: int = setting(64, "open requests a user; more are dead letters (overflow)")
    max_requests: int = setting(4096, "requests a user, closed ones that are still remembered included")
    max_orphans: int = setting(256, "engagements of a user that wait for their request or item")
    max_engagements: int = setting(10_000, "distinct engagements a request")
    replay: bool = setting(False, "old event times, as fast as they can be read: no idleness")

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"key {name!r}: expected at least {least}, got {getattr(self, name)}")
        if self.engine == "flink" and self.flink and not self.flink.startswith(("http://", "https://")):
            raise ConfigError(f"key 'flink': expected http://host:port, got {self.flink!r}")
        for surface, window in self.surface_windows.items():
            if parse_duration_ms(window) < 1:
                raise ConfigError(f"key 'surface_windows.{surface}': expected at least 1 ms, got {window!r}")
        if self.window_jitter_ms >= self.rules.shortest_window_ms:
            raise ConfigError(
                f"key 'window_jitter_ms': expected less than the shortest window ({self.rules.shortest_window_ms} ms), "
                f"got {self.window_jitter_ms}"
            )
        if self.rules.late_horizon_ms < self.rules.longest_window_ms:
            raise ConfigError(
                f"key 'late_horizon_ms': expected at least the longest window ({self.rules.longest_window_ms} ms), "
                f"got {self.late_horizon_ms}"
            )
        if self.correction_horizon_ms > self.rules.late_horizon_ms:
            raise ConfigError(
                f"key 'correction_horizon_ms': expected at most the late horizon ({self.rules.late_horizon_ms} ms), "
                f"got {self.correction_horizon_ms}"
            )

    @property
    def rules(self) -> Rules:
        """The part that decides what joins with what, with its derived defaults."""
        surfaces = {name: parse_duration_ms(window) for name, window in self.surface_windows.items()}
        longest_ms = max([self.window_ms, *surfaces.values()])
        return Rules(
            window_ms=self.window_ms,
            surface_windows=surfaces,
            window_jitter_ms=self.window_jitter_ms,
            orphan_timeout_ms=self.orphan_timeout_ms or longest_ms,
            late_horizon_ms=self.late_horizon_ms or 10 * longest_ms,
            next_request=self.next_request,
            linger_ms=self.linger_ms,
            engaged_threshold=self.engaged_threshold,
            terminal_actions=frozenset(self.terminal_actions),
            engaged_min_wait_ms=self.engaged_min_wait_ms,
            correction_horizon_ms=self.correction_horizon_ms,
            max_open_requests=self.max_open_requests,
            max_requests=self.max_requests,
            max_orphans=self.max_orphans,
            max_engagements=self.max_engagements,
        )

    @property
    def drift_ms(self) -> int:
        """How far one partition may be read ahead of the slowest."""
        return self.read_ahead_ms or 6 * self.rules.longest_window_ms

    def require(self, *names: str) -> None:
        """Raises ConfigError if one of these keys is empty."""
        for name in names:
            if not getattr(self, name):
                known = ", ".join(names)
                raise ConfigError(f"engine {self.engine!r} needs the keys {known}; {name!r} is empty{nearest(name, ())}")

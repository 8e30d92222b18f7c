"""Settings of serving."""

from __future__ import annotations

import dataclasses
import ipaddress
from pathlib import Path

from roo.config import setting
from roo.errors import ConfigError
from runtime.rpc import parse_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """`roostream serving`: scores requests, logs them, takes engagements."""

    listen: str = setting("127.0.0.1:8080", "host:port of the HTTP interface; port 0 = draw one")
    insecure: bool = setting(False, "listen on an address that others reach, although nothing asks who they are")
    schema: Path = setting(help="schema TOML")
    model: str = setting("", "model TOML for the model before the first commit; '' = defaults")
    store: Path = setting(help="checkpoint store: manifests and dense versions are followed here")
    shards: tuple[str, ...] = setting((), "host:port of every shard, in order; rows are bootstrapped from them")
    bootstrap: str = setting(help="Kafka, host:port")
    prefix: str = setting("", "prefix of topic names")
    redis: str = setting("", "redis://host:port/0 that features are hydrated from; '' = off")
    home: Path = setting(help="directory of the feature log; one a process")
    seed: int = setting(0, "of initial weights and rows; the trainer's")
    exploration: float = setting(0.0, "probability that a slot of the answer is drawn at random (serving/explore.py)")
    order_task: str = setting("", "label that the order is by; '' = the first")
    heartbeat_ms: int = setting(1000, "how often a heartbeat is written to every partition of both event topics")
    max_in_flight: int = setting(64, "requests in work at once; more are answered 429")
    deadline_ms: int = setting(1000, "a request that isn't scored by then is answered 504 and not logged")
    max_body_bytes: int = setting(1 << 20, "size of a request's body, also inflated")
    log_bytes: int = setting(256 << 20, "size of the feature log; when it is full, requests are answered 503")
    segment_bytes: int = setting(8 << 20, "size of one of its files")
    drain_ms: int = setting(10_000, "at a stop: time for requests in flight, and again for the log to reach Kafka")

    def __post_init__(self) -> None:
        host, _ = parse_address(self.listen)
        if not (self.insecure or host == "localhost" or _is_loopback(host)):
            raise ConfigError(
                f"expected listen on a loopback address, got {self.listen!r}; to let others reach it, set insecure = true"
            )
        for name, low, high in (
            ("exploration", 0.0, 1.0),
            ("heartbeat_ms", 10, 60_000),
            ("max_in_flight", 1, 100_000),
            ("deadline_ms", 1, 600_000),
            ("max_body_bytes", 1024, 1 << 30),
            ("segment_bytes", 1 << 20, 1 << 30),
            ("log_bytes", 2 * self.segment_bytes, 1 << 40),
            ("drain_ms", 0, 600_000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"expected {name} in {low}..{high}, got {getattr(self, name)}")
        for address in (*self.bootstrap.split(","), *self.shards):
            parse_address(address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

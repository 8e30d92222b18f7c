"""Settings of the feature updater."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from roo.config import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """`roostream features`: keeps histories and counters in Redis from the event topics."""

    bootstrap: str = setting(help="Kafka, host:port")
    prefix: str = setting("", "prefix of topic names, and of Redis keys")
    schema: Path = setting(help="schema TOML")
    redis: str = setting(help="redis://host:port/0")
    metrics_port: int = setting(0, "port of /metrics; 0 = draw one")

"""What the routes work with, built once a process by `serving.main` (or a test)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor

from roo.schema import Schema
from serving.config import ServingConfig
from serving.feature_log.log import FeatureLog
from serving.metrics import ServingMetrics
from serving.rank import RankService
from serving.stamps import Stamps


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """`waiting_for` says what this process still lacks; empty = ready."""

    config: ServingConfig
    schema: Schema
    service: RankService
    log: FeatureLog
    stamps: Stamps
    metrics: ServingMetrics
    executor: Executor  # one thread: scoring
    waiting_for: Callable[[], list[str]]

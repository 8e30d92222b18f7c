"""What the HTTP routes of a serving process work with. `serving.build` makes one; nothing here starts or owns
a thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from roostream.runtime.tls import TlsContext
from roostream.schema.schema import Schema
from serving.access.bearer_keys import Keyring
from serving.config import ServingConfig
from serving.feature_log.log import FeatureLog
from serving.heartbeat import InflightWatermark
from serving.metrics import ServingMetrics
from serving.rank import RankService
from serving.retrieval.item_vectors import ItemVectorUpdater
from serving.versions.recent_requests import RecentRequests


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServingContext:
    """What the HTTP routes of a serving process use."""

    config: ServingConfig
    schema: Schema
    service: RankService
    log: FeatureLog
    watermark: InflightWatermark
    metrics: ServingMetrics
    executor: Executor  # the one scoring thread
    waiting_for: Callable[[], list[str]]  # what the process still waits for; empty = ready
    row_metrics: Callable[[], Mapping[str, float | None]] = dict  # metric name → value
    # Since the rows were known to be current; None = never.
    rows_age_s: Callable[[], float | None] = lambda: None
    keys: Keyring | None = None  # None = requests need no key
    tls: TlsContext | None = None
    items: ItemVectorUpdater | None = None  # None = no retrieval
    recent: RecentRequests = dataclasses.field(default_factory=RecentRequests)

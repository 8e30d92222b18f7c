"""A schema with every kind of feature, and a serving process inside the test: real code, with fake rows and
online features instead of shards and Redis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from roostream.models.config import RankerConfig
from roostream.runtime.clock import Clock, FakeClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from serving.config import ServingConfig
from serving.context import ServingContext
from serving.feature_log.log import FeatureLog
from serving.heartbeat import InflightWatermark
from serving.http.app import HttpInterface
from serving.metrics import ServingMetrics
from serving.rank import Hydration, OrderPolicy, RankService
from serving.scorer import RowReader, build_version, first_version
from serving.versions.loaded_versions import LoadedVersions

SCHEMA: Schema = schema_from_dict(
    {
        "tables": {"item": {"dim": 4}, "topic": {"dim": 4}, "user": {"dim": 2}},
        "ro": [
            {"name": "hour", "online": "hour_of_day"},
            {"name": "mood"},
            {"name": "user", "kind": "ids", "table": "user"},
            {"name": "likes", "kind": "weighted_ids", "table": "topic"},
            {
                "name": "history",
                "kind": "sequence",
                "table": "item",
                "max_len": 5,
                "columns": {"action": "ids", "time": "time_ms"},
                "online": "history",
            },
            {"name": "num_candidates", "online": "num_candidates"},
        ],
        "nro": [
            {"name": "item", "kind": "ids", "table": "item"},
            {"name": "topics", "kind": "ids", "table": "topic"},
            {"name": "age_h"},
            {"name": "clicks", "online": "clicks_1h"},
            {"name": "place", "online": "position"},
        ],
        "label": [{"name": "click", "action": "click"}, {"name": "dwell", "action": "read", "fold": "sum"}],
        "limits": {"max_candidates": 20, "max_list": 10, "max_record_bytes": 4096},
    }
)
MODEL = RankerConfig(
    request_layers=(8,), history_width=4, width=8, list_heads=2, deep_layers=(8,), task_layers=(4,)
)
NOW_MS = 1_700_000_000_000

HISTORY = {"item": [8, 3], "action": [1, 1], "time": [NOW_MS - 9000, NOW_MS - 60_000]}
BODY: dict[str, Any] = {
    "request_id": "r-1",
    "user_id": 17,
    "session_id": 4,
    "ro": {
        "hour": 13.0,
        "mood": 0.5,
        "user": [17],
        "likes": {"ids": [1, 2], "weights": [0.5, 2]},
        "history": HISTORY,
    },
    "candidates": [
        {"item_id": 8, "nro": {"topics": [1, 2], "age_h": 2.5, "clicks": 3}},
        {"item_id": "nine", "nro": {"topics": 7, "age_h": None, "clicks": 0}},
        {"item_id": 10, "nro": {"clicks": 1}},
    ],
}


def config_of(home: Path, **changes: Any) -> ServingConfig:
    defaults = {
        "schema": home / "schema.toml",
        "store": home / "store",
        "home": home,
        "bootstrap": "127.0.0.1:1",
    }
    return ServingConfig(
        **{
            **defaults,
            "max_log_bytes": 1 << 22,
            "log_segment_bytes": 1 << 20,
            "deadline_ms": 30_000,
            **changes,
        }
    )


@dataclasses.dataclass
class InProcessServing:
    """The parts of a serving process, without its background threads."""

    context: ServingContext
    waiting_for: list[str]

    @property
    def service(self) -> RankService:
        return self.context.service

    def records(self) -> list[Any]:
        """Return all records in the feature log."""
        return [entry.record for entry in self.context.log.read(self.context.log.cursor, 1 << 30)]

    def close(self) -> None:
        self.context.log.close()
        self.context.executor.shutdown()


def serve_random_weights(serving: InProcessServing, seed: int = 1) -> None:
    """Serve a version with random weights. The initial weights give every candidate the same score."""
    torch.manual_seed(seed)
    weights = {
        name: torch.randn_like(t) * 0.3
        for name, t in serving.service.versions.newest.model.state_dict().items()
    }
    serving.service.versions.install(build_version("1-9", SCHEMA, MODEL, 0, weights))


Client = Callable[..., tuple[TestClient, InProcessServing]]


def make_http_client(serving: InProcessServing) -> TestClient:
    """Return an HTTP client that calls the application in the test's thread. An exception becomes a 500."""
    app = HttpInterface(serving.context)
    return TestClient(app, follow_redirects=False, raise_server_exceptions=False)


def build_serving(
    home: Path,
    rows: RowReader,
    hydrator: Hydration | None = None,
    *,
    policy: OrderPolicy | None = None,
    clock: Clock | None = None,
    service: Callable[..., RankService] = RankService,
    **settings: Any,
) -> InProcessServing:
    waiting_for: list[str] = []
    context = ServingContext(
        config=config_of(home, **settings),
        schema=SCHEMA,
        service=service(SCHEMA, LoadedVersions(first_version(SCHEMA, MODEL, 0)), rows, hydrator, policy),
        log=FeatureLog.open(
            home / "log",
            max_bytes=settings.get("max_log_bytes", 1 << 22),
            segment_bytes=settings.get("log_segment_bytes", 1 << 20),
        ),
        watermark=InflightWatermark(clock or FakeClock(NOW_MS)),
        metrics=ServingMetrics(CollectorRegistry(), SCHEMA.tasks),
        executor=ThreadPoolExecutor(1),
        waiting_for=lambda: waiting_for,
    )
    context.service.stages, context.service.scores = context.metrics.stages, context.metrics.scores
    return InProcessServing(context, waiting_for)

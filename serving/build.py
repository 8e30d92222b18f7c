"""From settings to the objects of a serving process. Nothing here runs yet; what is opened, `Process.close` closes."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from roostream.errors import ConfigError, SetupError, UnavailableError, nearest
from roostream.models.build import load_model_config
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.manifest import Manifest
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.tls import TlsContext
from roostream.schema import registry as schema_registry
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from serving.access.key_file import Keyring
from serving.client.said import impression_of
from serving.config import ServingConfig
from serving.errors import REFUSALS
from serving.exports import ServingMetrics
from serving.feature_log.log import FeatureLog
from serving.feature_log.log_topics import LogTopics
from serving.feature_log.sender import LogSender
from serving.http.binary import parse_impression
from serving.http.examples import rank_example
from serving.http.parse import JsonParser
from serving.online_features.hydration import Hydrator
from serving.rank import Policy, RankService
from serving.retrieval.item_keeper import ItemKeeper
from serving.retrieval.opened import open_retrieval
from serving.rows.served_rows import ServedRows, open_rows
from serving.scorer import first_version
from serving.stamps import Stamps
from serving.versions.dense_follower import DenseFollower
from serving.versions.held import Versions
from serving.versions.quiet import PATIENCE_S, Quiet
from serving.versions.recent import RecentRequests, ScoredRequest
from serving.versions.shadow_scoring import ShadowScoring
from serving.versions.warm_up import WarmUp

log = logging.getLogger("roostream.serving")


_HELPS = {
    "ready": "1 once the rows are here",
    "log_backlog_records": "records that Kafka hasn't acknowledged",
    "log_backlog_bytes": "their bytes",
    "log_refused_records": "records that Kafka refused for what they are",
    "log_damaged_records": "records that were damaged on disk",
    "replica_rows": "rows in the replica",
    "replica_lag": "row deltas in the topic that weren't taken a moment ago",
    "replica_applied": "row deltas and barriers applied",
    "replica_refused": "records of the rows topic that couldn't be applied",
    "rows_current_at_ms": "when the rows were last known to be current: all of the topic applied, all shards there",
    "rows_asked": "rows that requests asked a cache for",
    "rows_missed": "of these, those that it lacked",
    "rows_unread": "of these, those that took their initial value, since their shard gave none in time or wasn't waited for",
    "rows_evicted": "keys that a cache forgot for others",
    "rows_without": "keys that a cache knows to have no row",
    "row_reads_failed": "calls of a shard for missing rows that failed",
    "replica_bootstraps": "times that all rows were read from the shards",
    "version_swaps": "dense versions installed",
    "versions_refused": "dense versions that were committed and can't be served",
    "shadow_scored": "requests that a shadow scored too",
    "shadow_dropped": "requests for which the shadow had no time",
    "shadow_failures": "requests that the shadow could not score",
    "interleaved": "requests whose list two versions made",
    "interleave_failures": "requests that the rival could not score",
    "interleave_requests": "of those, the ones with an engagement, by whose items had more of them",
}


_COUNTERS = (
    "versions_refused",
    "shadow_scored",
    "shadow_dropped",
    "shadow_failures",
    "interleaved",
    "interleave_failures",
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What the routes work with. `waiting_for` says what this process still lacks; empty = ready."""

    config: ServingConfig
    schema: Schema
    service: RankService
    log: FeatureLog
    stamps: Stamps
    metrics: ServingMetrics
    executor: Executor  # one thread: scoring
    waiting_for: Callable[[], list[str]]
    rows_numbers: Callable[[], Mapping[str, float | None]] = (
        dict  # what is known of the rows, by the names of metrics
    )
    keys: Keyring | None = None  # None = everybody may do everything
    tls: TlsContext | None = None
    items: ItemKeeper | None = None  # None = no retrieval
    rows_age_s: Callable[[], float | None] = lambda: None  # since they were known to be current; None = never


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Process:
    """All of a serving process; `serving.main` runs it."""

    parts: Parts
    sender: LogSender
    dense: DenseFollower
    rows: ServedRows
    recent: RecentRequests
    shadow: ShadowScoring
    quiet: Quiet
    clock: Clock
    producer: str  # what heartbeats call this process

    def close(self) -> None:
        """After the threads have ended."""
        self.sender.close()
        self.parts.log.close()
        self.rows.close()
        self.parts.executor.shutdown(wait=False, cancel_futures=True)


def build_process(
    config: ServingConfig,
    registry: CollectorRegistry = REGISTRY,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Process:
    """Waits for nobody: Kafka, Redis and shards may be away. One that `is_stopping` is not ready.

    Raises:
        ConfigError: schema, model or a setting is wrong.
        SetupError: home or store can't be used.
    """
    clock = SystemClock()
    schema = load_schema(config.schema)
    policy = Policy(task=_task(schema, config.order_task), exploration=config.exploration, seed=config.seed)
    first = first_version(
        schema, load_model_config(config.model), config.seed, as_trained=config.scoring == "modules"
    )
    versions = Versions(first, config.keep_versions, config.routing(), clock.now_ms)
    store = _open_store(config, schema)
    feature_log = FeatureLog.open(
        config.home / "log", max_bytes=config.log_bytes, segment_bytes=config.segment_bytes
    )
    metrics = ServingMetrics(registry, schema.tasks)
    rows = open_rows(config, schema, config.seed, clock)
    hydrator = Hydrator(config.redis_url, config.prefix, schema) if config.redis else None
    service = RankService(schema, versions, rows, hydrator, policy)
    service.stages, service.scores = metrics.stages, metrics.scores
    service.rows_ready, service.rows_complete = (lambda: rows.ready), (lambda: rows.complete)
    service.rows_wait = rows.waits
    quiet = Quiet(clock)
    items = open_retrieval(config, schema, service, quiet, clock, registry)
    parts = Parts(
        config=config,
        schema=schema,
        service=service,
        log=feature_log,
        stamps=Stamps(clock),
        metrics=metrics,
        executor=ThreadPoolExecutor(1, "scoring"),
        rows_age_s=rows.age_s,
        waiting_for=lambda: _waiting_for(rows, items, is_stopping()),
        rows_numbers=rows.numbers,
        keys=Keyring(Path(config.keys_file)) if config.keys_file else None,
        tls=TlsContext(config.tls) if config.tls else None,
        items=items,
    )

    versions.changed = lambda held: metrics.show_version(held.version.name, held.committed_ms)
    versions.changed(versions.served)
    recent = RecentRequests()
    shadow = ShadowScoring(versions, rows, policy.task, quiet)
    registry.register(shadow)

    def scored(request: ScoredRequest) -> None:
        recent.add(request)
        shadow.offer(request)

    service.scored = scored
    warm_up = WarmUp(recent, rows, lambda: versions.served.version, quiet, config.warm_up_requests)
    sender = LogSender(feature_log, lambda: LogTopics.open(config.broker, config.prefix))
    process = Process(
        parts=parts,
        sender=sender,
        dense=DenseFollower(
            store,
            schema,
            versions,
            config.seed,
            partial(_check_shape, config),
            warm_up,
            partial(quiet.wait, PATIENCE_S),
        ),
        recent=recent,
        shadow=shadow,
        quiet=quiet,
        rows=rows,
        clock=clock,
        producer=producer_of(config.home),
    )
    serving_exports(process).register(registry)
    return process


def _waiting_for(rows: ServedRows, items: ItemKeeper | None, is_stopping: bool) -> list[str]:
    waits = [rows.waiting_for] * (not rows.ready) + ["another process: this one stops"] * is_stopping
    return [*waits, items.waiting_for] if items is not None and items.waiting_for else waits


def producer_of(home: Path) -> str:
    """What heartbeats call this process: its log's name, since what is still in there comes with the next start of the same
    log, and until then the joiner waits for it (`producer_timeout_ms`)."""
    return f"serving-{socket.gethostname()}-{hash64(os.path.realpath(home)):016x}"


def warm(parts: Parts) -> None:
    """Score a made-up request in each form and forget it: kernels are loaded, or compiled, before the first real one."""
    schema = parts.schema
    fields: Any = rank_example(schema)
    in_json = JsonParser(schema).parse(msgspec.json.encode(fields))
    in_protobuf = parse_impression(schema, impression_of(fields, schema))
    for request in (in_json, in_protobuf):
        parts.service.rank(request, parts.stamps.clock.now_ms())


def _check_shape(config: ServingConfig, manifest: Manifest) -> None:
    """Raises ConfigError: rows are in other buckets, shards or partitions than this process was told."""
    manifests.check_shape(
        manifest,
        num_shards=len(config.shards) or manifest.num_shards,  # none: a process without rows
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
    )


def _open_store(config: ServingConfig, schema: Schema) -> CheckpointStore:
    store = open_store(config.store)
    try:
        schema_registry.register(store, schema)
    except UnavailableError as error:
        raise SetupError(f"checkpoint store {config.store} can't be used: {error}") from None
    return store


def _task(schema: Schema, name: str) -> int:
    if not name:
        return 0
    if name not in schema.tasks:
        raise ConfigError(
            f"expected order_task as one of {', '.join(schema.tasks)}, got {name!r}{nearest(name, schema.tasks)}"
        )
    return schema.tasks.index(name)


def serving_exports(process: Process) -> MetricsCollector:
    """What is read of the process when it is scraped."""
    log_, rows, sender = process.parts.log, process.rows, process.sender
    versions, credits = process.parts.service.versions, process.parts.service.credits
    shadow = process.shadow

    def read() -> dict[str, Any]:
        return {
            "ready": rows.ready,
            "log_backlog_records": log_.backlog_records,
            "log_backlog_bytes": log_.backlog_bytes,
            "log_refused_records": sender.num_refused,
            "log_damaged_records": sender.num_damaged,
            **rows.numbers(),
            "version_swaps": versions.num_swaps,
            "versions_refused": {reason: versions.num_refused[reason] for reason in REFUSALS},
            "shadow_scored": shadow.num_scored,
            "shadow_dropped": shadow.num_dropped,
            "shadow_failures": shadow.num_failed,
            "interleaved": credits.num_drafted,
            "interleave_failures": credits.num_failed,
            "interleave_requests": credits.outcomes(),
        }

    labels = {"versions_refused": "reason", "interleave_requests": "outcome"}
    return MetricsCollector("serving", read, labels, helps=_HELPS, counters=_COUNTERS)

"""Constructs the objects of a serving process from its settings. Starts nothing; `ServingProcess.close`
closes what is opened."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from roostream.errors import ConfigError, nearest
from roostream.models.build import load_model_config
from roostream.runtime import manifest as manifests
from roostream.runtime.address import expand_addresses
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.manifest import Manifest
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.tls import TlsContext
from roostream.schema.ids import hash64
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from serving.access.bearer_keys import Keyring
from serving.client.messages import encode_impression
from serving.config import RetrievalSettings, ServingConfig
from serving.context import ServingContext
from serving.errors import REFUSAL_REASONS
from serving.examples import rank_example
from serving.feature_log.log import FeatureLog
from serving.feature_log.sender import KafkaSink, LogSender
from serving.heartbeat import InflightWatermark
from serving.metrics import METRICS, ServingMetrics
from serving.online_features.hydration import Hydrator
from serving.rank import OrderPolicy, RankService
from serving.rank_json import JsonParser
from serving.rank_protobuf import parse_impression
from serving.retrieval.item_vectors import ItemVectorUpdater
from serving.retrieval.retriever import RecallSampler, Retriever
from serving.rows.served_rows import FollowedRows, open_rows
from serving.scorer import first_version
from serving.versions.idle_gate import MAX_IDLE_WAIT_S, IdleGate
from serving.versions.loaded_versions import LoadedVersions
from serving.versions.recent_requests import RecentRequests, ScoredRequest
from serving.versions.shadow_scoring import ShadowScoring
from serving.versions.version_follower import VersionFollower, WarmUp

log = logging.getLogger("roostream.serving")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServingProcess:
    """Everything that `serving.main` runs."""

    context: ServingContext
    sender: LogSender
    version_follower: VersionFollower
    rows: FollowedRows
    recent: RecentRequests
    shadow: ShadowScoring
    idle_gate: IdleGate
    clock: Clock
    producer: str  # the name of this process in heartbeats

    def close(self) -> None:
        """Call after the threads have ended."""
        self.sender.close()
        self.context.log.close()
        self.rows.close()
        self.context.executor.shutdown(wait=False, cancel_futures=True)


def build_process(
    config: ServingConfig,
    store: CheckpointStore,
    registry: CollectorRegistry = REGISTRY,
    tls: TlsContext | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> ServingProcess:
    """Build a process without waiting for Kafka, Redis or shards. It follows the commits in `store`, and
    reports itself as not ready once `is_stopping`.

    Raises:
        ConfigError: the schema, the model or a setting is wrong.
        SetupError: the home directory cannot be used.
    """
    clock = SystemClock()
    schema = load_schema(config.schema)
    policy = OrderPolicy(
        task=_order_task(schema, config.order_task), exploration=config.exploration, seed=config.seed
    )
    first = first_version(
        schema, load_model_config(config.model), config.seed, as_trained=config.scoring == "modules"
    )
    versions = LoadedVersions(first, config.keep_versions, config.routing(), clock.now_ms)
    feature_log = FeatureLog.open(
        config.home / "log", max_bytes=config.max_log_bytes, segment_bytes=config.log_segment_bytes
    )
    metrics = ServingMetrics(registry, schema.tasks)
    rows = open_rows(config, schema, config.seed, clock)
    hydrator = Hydrator(config.redis_url, config.prefix, schema) if config.redis else None
    service = RankService(schema, versions, rows, hydrator, policy)
    service.stages, service.scores = metrics.stages, metrics.scores
    service.rows_ready, service.rows_complete = (lambda: rows.ready), (lambda: rows.complete)
    service.row_reads_wait = rows.waits
    idle_gate = IdleGate(clock)
    items, recent = open_retrieval(config, schema, service, idle_gate, clock, registry), RecentRequests()
    context = ServingContext(
        config=config,
        schema=schema,
        service=service,
        log=feature_log,
        watermark=InflightWatermark(clock),
        metrics=metrics,
        executor=ThreadPoolExecutor(1, "scoring"),
        waiting_for=lambda: _waiting_for(rows, process.version_follower, items, is_stopping()),
        row_metrics=rows.metrics,
        rows_age_s=rows.age_s,
        keys=Keyring(Path(config.keys_file)) if config.keys_file else None,
        tls=tls,
        items=items,
        recent=recent,
    )
    versions.on_change = lambda loaded: metrics.show_version(loaded.version.name, loaded.committed_ms)
    versions.on_change(versions.served)
    shadow = ShadowScoring(versions, rows, policy.task, idle_gate)
    registry.register(shadow)

    def on_scored(request: ScoredRequest) -> None:
        recent.add(request)
        shadow.offer(request)

    service.on_scored = on_scored
    warm_up = WarmUp(recent, rows, lambda: versions.served.version, idle_gate, config.warm_up_requests)
    process = ServingProcess(
        context=context,
        sender=LogSender(
            feature_log,
            lambda: KafkaSink.open(config.broker, config.prefix),
            on_future_time=context.watermark.follow_clock,
        ),
        version_follower=VersionFollower(
            store,
            schema,
            versions,
            config.seed,
            partial(_check_shape, config),
            warm_up,
            partial(idle_gate.wait, MAX_IDLE_WAIT_S),
        ),
        rows=rows,
        recent=recent,
        shadow=shadow,
        idle_gate=idle_gate,
        clock=clock,
        producer=producer_name(config.home),
    )
    registry.register(process_metrics(process))
    return process


def open_retrieval(
    settings: RetrievalSettings,
    schema: Schema,
    service: RankService,
    idle_gate: IdleGate,
    clock: Clock,
    registry: CollectorRegistry,
) -> ItemVectorUpdater | None:
    """Return None without a catalogue. Raises ConfigError: the package of the index is not installed."""
    if not settings.items:
        return None
    retriever = Retriever(schema, service.rows, service.hydrator, RecallSampler(clock))
    retriever.rows_ready = lambda: service.rows_ready()
    updater = ItemVectorUpdater(
        schema, settings, retriever, lambda: service.versions.served.version, service.rows, idle_gate, clock
    )
    registry.register(MetricsCollector(updater.metrics, METRICS))
    return updater


def precompile(context: ServingContext) -> None:
    """Score one example request from JSON and from protobuf, without logging it, so that kernels are compiled
    and loaded."""
    schema = context.schema
    fields: Any = rank_example(schema)
    from_json = schema.derived(JsonParser).parse(msgspec.json.encode(fields))
    from_protobuf = parse_impression(schema, encode_impression(fields, schema))
    for request in (from_json, from_protobuf):
        context.service.rank(request, context.watermark.clock.now_ms())


def producer_name(home: Path) -> str:
    """The name of this process in heartbeats.

    It is derived from the feature log: records that are left in the log are sent when a process opens the
    same log again, and the joiner waits for that producer until `producer_timeout_ms`.
    """
    return f"serving-{socket.gethostname()}-{hash64(os.path.realpath(home)):016x}"


def process_metrics(process: ServingProcess) -> MetricsCollector:
    """Metrics that are read from the process when they are scraped."""
    feature_log, rows, sender, shadow = process.context.log, process.rows, process.sender, process.shadow
    service = process.context.service
    versions, interleaving = service.versions, service.interleaving_stats

    def read() -> dict[str, Any]:
        return {
            "roostream_serving_ready": rows.ready,
            "roostream_serving_log_backlog_records": feature_log.backlog_records,
            "roostream_serving_log_backlog_bytes": feature_log.backlog_bytes,
            "roostream_serving_log_refused_records_total": sender.num_refused,
            "roostream_serving_log_damaged_records_total": sender.num_damaged,
            **rows.metrics(),
            "roostream_serving_version_swaps_total": versions.num_swaps,
            "roostream_serving_versions_refused_total": {
                reason: versions.num_refused[reason] for reason in REFUSAL_REASONS
            },
            "roostream_serving_shadow_scored_total": shadow.num_scored,
            "roostream_serving_shadow_dropped_total": shadow.num_dropped,
            "roostream_serving_shadow_failures_total": shadow.num_failed,
            "roostream_serving_interleaved_total": interleaving.num_lists,
            "roostream_serving_interleave_failures_total": interleaving.num_failed,
            "roostream_serving_interleave_requests": interleaving.outcomes(),
        }

    return MetricsCollector(read, METRICS)


def _waiting_for(
    rows: FollowedRows, versions: VersionFollower, items: ItemVectorUpdater | None, is_stopping: bool
) -> list[str]:
    reasons = [] if rows.ready else [rows.waiting_for]
    if versions.waiting_for:
        reasons.append(versions.waiting_for)
    if is_stopping:
        reasons.append("another process: this one is stopping")
    if items is not None and items.waiting_for:
        reasons.append(items.waiting_for)
    return reasons


def _check_shape(config: ServingConfig, manifest: Manifest) -> None:
    """Raises ConfigError: the commit has other buckets, shards, partitions or another seed than the
    settings."""
    manifests.check_shape(
        manifest,
        # a process without rows has no shards
        num_shards=len(expand_addresses(config.shards)) or manifest.num_shards,
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
    )


def _order_task(schema: Schema, name: str) -> int:
    if not name:
        return 0
    if name not in schema.tasks:
        expected = ", ".join(schema.tasks)
        raise ConfigError(
            f"expected order_task as one of {expected}, got {name!r}{nearest(name, schema.tasks)}"
        )
    return schema.tasks.index(name)

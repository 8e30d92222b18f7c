"""The controller's process: opens what the controller needs, serves its calls, and ends in order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Any

from roostream.errors import UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.address import parse_address
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.health import Health
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Progress, all_partitions
from roostream.runtime.metrics_collector import MetricsCollector, one_of
from roostream.runtime.program import Stop
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.work_unit import WorkUnit
from roostream.schema.registry import open_registry, register
from roostream.schema.schema_file import load_schema
from trainer.config import ControllerConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.idle import BacklogProbe, IdleDetector, IdleHoldWatcher, IdleRule
from trainer.control.kept_leases import LeaseRecorder
from trainer.control.phases import historical_range
from trainer.control.reader_master import ReaderMaster
from trainer.control.scrape_targets import ScrapeTargets
from trainer.control.status_page import StatusPage, files
from trainer.control.stream_handover import WarehouseHistory
from trainer.control.types import PERMANENT, TRANSIENT, CoordinatorConfig, State
from trainer.deployment_identity import DeploymentIdentity, kafka_identity

log = logging.getLogger("roostream.controller")

_CLOSING_S = 8.0  # after SIGTERM, for a last commit; below roostream.runtime.program.STOP_S
_SHOWN = (
    *("incarnation", "seq", "committed_at_ms", "commit_ms", "paused_ms", "commits", "aborts", "rollbacks"),
    *("workers", "wanted_workers"),
)
_LABELS = {
    "readers": "what",
    "state": "state",
    "device_seconds": "spent_on",
    "held": "kind",
    "commit_phase_ms": "phase",
}
_COUNTERS = ("device_seconds",)


def control(config: ControllerConfig, stop: Stop) -> None:
    """Until `stop` is set or it is preempted, and what is trained is committed.

    Raises:
        RoostreamError: a newer controller exists, or what is committed belongs to other settings; says which.
    """
    health = Health(config.stalled_after_ms / 1000)
    schema = load_schema(config.schema)
    pages = files()
    at = metrics_server.serve(config, health, pages=pages)
    log.info("the page of this controller is at %s://%s:%d/", config.scheme, config.metrics_host, at)
    host, port = parse_address(config.listen)
    store, clock = open_store(config.store), SystemClock()
    Backoff(what="the checkpoint store").until(lambda: register(store, schema), (UnavailableError,), stop)
    kafka = kafka_identity(config.broker, config.prefix, config.partitions, stop)
    identity = DeploymentIdentity(
        schema=schema,
        registry=open_registry(store),
        kafka=kafka,
        num_shards=config.num_shards,
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
    )
    table = WarehouseHistory(config, kafka["topics"], clock) if config.warehouse else None
    coordinator = Coordinator(facts_of(config, identity), clock.monotonic_s())
    controller = Controller(
        coordinator,
        store,
        clock,
        check=identity.check,
        history=lambda committed: history_of(config, committed),
        open_session=table.newest if table else lambda: None,
        keep_commits=config.keep_commits,
    )
    neighbours = ScrapeTargets(config.neighbour_urls, clock, workers=controller.worker_metrics_addresses)
    page = StatusPage(controller, neighbours, interval_ms=config.commit_interval_ms)
    pages |= page.answers()

    master = ReaderMaster(controller.session_now, schema, clock, config.readers)
    controller.readers, controller.freshness = master.status, neighbours.freshness
    kept = LeaseRecorder(master, store, clock)

    def turned() -> None:
        claims = f"it waits: {controller.outage}" if controller.outage else "it claims an incarnation"
        health.turned("" if controller.coordinator.incarnation else claims)
        page.observe()
        kept.turned()

    server = RpcServer(master.beside(controller.handle), host, port, keys=config.link_credentials())
    server.start()
    log.info("controller on %s", server.address)
    threading.Thread(target=neighbours.run, args=(stop,), name="neighbours", daemon=True).start()
    watching = _watch_idleness(config, controller, clock, stop)
    if table:
        table.watch(controller, lambda: oldest_of(config), stop)
    try:
        MetricsCollector(
            "controller", lambda: _gauges(controller.status()), _LABELS, counters=_COUNTERS
        ).register()
        controller.run(stop, turned, _CLOSING_S)
    finally:
        kept.turned(last=True)
        server.stop()
        watching.join(_CLOSING_S)


def facts_of(config: ControllerConfig, identity: DeploymentIdentity) -> CoordinatorConfig:
    """What this controller's commits state, and its times."""
    return CoordinatorConfig(
        schema=f"{identity.schema.fingerprint:016x}",
        seed=config.seed,
        num_shards=config.num_shards,
        num_workers=config.num_workers,
        initial_workers=config.initial_workers,
        from_table=bool(config.warehouse),
        unit_records=config.unit_records,
        num_buckets=identity.num_buckets,
        num_partitions=identity.num_partitions,
        kafka=identity.kafka,
        commit_interval_s=config.commit_interval_ms / 1000,
        holds_idle=config.idle_hold_ms > 0,
    )


def _watch_idleness(
    config: ControllerConfig, controller: Controller, clock: Clock, stop: Stop
) -> threading.Thread:
    """Until `stop`; of a deployment that never releases workers nobody watches."""
    rule = IdleRule(
        hold_s=config.idle_hold_ms / 1000,
        min_records=config.idle_release_records,
        max_wait_s=config.idle_release_ms / 1000,
        min_held_s=config.idle_min_ms / 1000,
    )

    def watch() -> None:
        partitions = all_partitions((SAMPLES, CORRECTIONS), config.partitions)
        reading = ConsumerOptions(partitions=partitions, prefix=config.prefix)
        with contextlib.closing(
            KafkaConsumer.open(config.broker, f"{config.prefix}controller", reading)
        ) as reader:
            IdleHoldWatcher(controller, BacklogProbe(reader), IdleDetector(rule), clock).run(stop)

    thread = threading.Thread(target=watch if rule.hold_s else lambda: None, name="idleness", daemon=True)
    thread.start()
    return thread


def history_of(config: ControllerConfig, committed: Mapping[int, int]) -> tuple[WorkUnit, ...]:
    """What is to be trained before the stream, as it is now.

    Raises:
        UnavailableError: Kafka is away.
    """
    reading = ConsumerOptions(partitions=all_partitions((SAMPLES,), config.partitions), prefix=config.prefix)
    reader = KafkaConsumer.open(config.broker, f"{config.prefix}controller", reading)
    try:
        found = {number: at for (_, number), at in reader.bounds(*reading.partitions).items()}
    finally:
        reader.close()
    return tuple(historical_range(found, committed, config.export))


def oldest_of(config: ControllerConfig) -> Progress:
    """Offsets of the oldest samples that Kafka has. UnavailableError: it is away."""
    reading = ConsumerOptions(partitions=all_partitions((SAMPLES,), config.partitions), prefix=config.prefix)
    with contextlib.closing(
        KafkaConsumer.open(config.broker, f"{config.prefix}controller", reading)
    ) as reader:
        return {partition: oldest for partition, (oldest, _) in reader.bounds(*reading.partitions).items()}


def _gauges(status: dict[str, Any]) -> dict[str, Any]:
    kinds = {hold["kind"] for hold in status["holds"]}
    own = {
        "device_seconds": status["device_s"],
        "held": {kind: int(kind in kinds) for kind in (PERMANENT, TRANSIENT)},
    }
    own["commit_phase_ms"] = status["phases_ms"]
    own["history_left_records"] = (status["initial"] or {"left": 0})["left"]
    if readers := status["readers"]:
        own |= {
            "readers": {what: readers[what] for what in ("wanted", "there")},
            "splits_wanted": readers["splits_wanted"],
        }
        own["leases_expired"] = readers["leases_expired"]
    return {**{name: status[name] for name in _SHOWN}, **own, "state": one_of(status["state"], tuple(State))}

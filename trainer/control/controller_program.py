"""The controller's process: opens what the controller needs, serves its calls, and shuts down in order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY

from roostream.runtime import metrics_server
from roostream.runtime.address import parse_address
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topic_watch import TopicWatch
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress, all_partitions
from roostream.runtime.metrics_collector import MetricsCollector, one_of
from roostream.runtime.program import Stop
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.runtime.thread_group import ThreadGroup
from roostream.runtime.work_unit import WorkUnit
from roostream.schema.schema_file import load_schema
from trainer.config import ControllerConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.idle import BacklogProbe, IdleDetector, IdleHoldWatcher, IdleRule
from trainer.control.phases import historical_range
from trainer.control.reader_master import LeaseRecorder, ReaderMaster
from trainer.control.scrape_targets import ScrapeTargets
from trainer.control.status_page import StatusPage, static_files
from trainer.control.stream_handover import WarehouseHistory
from trainer.control.types import PERMANENT, TRANSIENT, CoordinatorConfig, State
from trainer.deployment_identity import DeploymentIdentity
from trainer.metrics import CONTROLLER

log = logging.getLogger("roostream.controller")

_CLOSING_S = 8.0  # for a last commit after SIGTERM; less than roostream.runtime.program.STOP_S


def run_until_stopped(config: ControllerConfig, stop: Stop) -> None:
    """Run until `stop` is set or the controller is preempted, and what is trained is committed. Raises
    RoostreamError: a newer controller exists, or the committed state belongs to other settings; the message
    says which."""
    health = Health(config.stalled_after_ms / 1000)
    schema = load_schema(config.schema)
    pages = static_files()
    port_of_page = metrics_server.serve(config, health, pages=pages)
    log.info("status page: %s://%s:%d/", config.scheme, config.metrics_host, port_of_page)

    store, clock = open_checkpoint_store(config.store), SystemClock()
    identity = DeploymentIdentity.connect(config, schema, store, config.num_shards, stop, health)
    warehouse = WarehouseHistory(config, identity.kafka["topics"], clock)
    controller = Controller(
        Coordinator(coordinator_config(config, identity), clock.monotonic_s()),
        store,
        clock,
        check=identity.check,
        history=lambda committed: history_units(config, committed),
        open_session=warehouse.newest if config.warehouse else lambda: None,
        retention=config.retention,
    )
    targets = ScrapeTargets(config.scrape_urls, clock, workers=controller.worker_metrics_addresses)
    page = StatusPage(controller, targets, interval_ms=config.commit_interval_ms)
    pages |= page.responses()
    master = ReaderMaster(controller.session_now, schema, clock, config.readers)
    controller.readers, controller.freshness = master.status, targets.freshness
    watch = TopicWatch(lambda: clients.admin(config.broker), config.prefix, config.partitions)
    controller.topic_problems = watch.problems
    leases = LeaseRecorder(master, store, clock)

    def on_turn() -> None:
        waiting = f"waiting: {controller.outage}" if controller.outage else "claiming an incarnation"
        health.turned("" if controller.coordinator.incarnation else waiting)
        page.observe()
        leases.save_if_due()

    host, port = parse_address(config.listen)
    server = RpcServer(master.extend(controller.handle), host, port, credentials=config.link_credentials())
    server.start()
    log.info("controller listens on %s", server.address)
    threads = ThreadGroup(stop)
    threads.start("scrape", targets.run, stop)
    threads.start("topic-watch", watch.run, stop)
    if config.idle_hold_ms:
        threads.start("idle-watcher", watch_for_idle, config, controller, clock, stop)
    # Also without the setting, which may have been removed while a session is trained.
    handover = warehouse.handover(controller, lambda: oldest_samples(config))
    threads.start("handover", handover.run, stop)
    try:
        REGISTRY.register(MetricsCollector(lambda: _metrics(controller.status()), CONTROLLER))
        controller.run(stop, on_turn, _CLOSING_S)
    finally:
        leases.save_if_due(last=True)
        server.stop()
        threads.join(_CLOSING_S)
    threads.check()


def coordinator_config(config: ControllerConfig, identity: DeploymentIdentity) -> CoordinatorConfig:
    """The coordinator's settings, from those of the controller."""
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
        keep_commits=config.keep_commits,
        lost_after_s=config.lost_after_ms / 1000,
        follow_workers=config.follow_workers,
        holds_idle=config.idle_hold_ms > 0,
    )


def history_units(config: ControllerConfig, committed: Mapping[int, int]) -> tuple[WorkUnit, ...]:
    """Units to train before the stream, as of now. Raises UnavailableError: Kafka is unavailable."""
    bounds = {number: bound for (_, number), bound in _sample_bounds(config).items()}
    return tuple(historical_range(bounds, committed, config.export))


def oldest_samples(config: ControllerConfig) -> Progress:
    """Offsets of Kafka's oldest samples. Raises UnavailableError: Kafka is unavailable."""
    return {partition: oldest for partition, (oldest, _) in _sample_bounds(config).items()}


def _sample_bounds(config: ControllerConfig) -> Mapping[Partition, tuple[int, int]]:
    with contextlib.closing(_open_consumer(config, (SAMPLES,))) as consumer:
        return consumer.bounds(*all_partitions((SAMPLES,), config.partitions))


def _open_consumer(config: ControllerConfig, topics: tuple[str, ...]) -> KafkaConsumer:
    options = ConsumerOptions(partitions=all_partitions(topics, config.partitions), prefix=config.prefix)
    return KafkaConsumer.open(config.broker, f"{config.prefix}controller", options)


def watch_for_idle(config: ControllerConfig, controller: Controller, clock: Clock, stop: Stop) -> None:
    """Release workers while there is nothing to read, until `stop`. Raises RoostreamError: Kafka refuses the
    consumer; without this thread nothing would end a hold."""
    rule = IdleRule(
        hold_s=config.idle_hold_ms / 1000,
        min_records=config.idle_release_records,
        max_wait_s=config.idle_release_ms / 1000,
        min_held_s=config.idle_min_ms / 1000,
    )
    with contextlib.closing(_open_consumer(config, (SAMPLES, CORRECTIONS))) as consumer:
        IdleHoldWatcher(controller, BacklogProbe(consumer), IdleDetector(rule), clock).run(stop)


def _metrics(status: dict[str, Any]) -> dict[str, Any]:
    """Metrics of `trainer.metrics.CONTROLLER`."""
    held = {hold["kind"] for hold in status["holds"]}
    shown: dict[str, Any] = {
        "roostream_controller_incarnation": status["incarnation"],
        "roostream_controller_seq": status["seq"],
        "roostream_controller_state": one_of(status["state"], tuple(State)),
        "roostream_controller_committed_timestamp_seconds": _seconds(status["committed_at_ms"]),
        "roostream_controller_uncommitted_timestamp_seconds": _seconds(status["uncommitted_at_ms"]),
        "roostream_controller_commit_seconds": _seconds(status["commit_ms"]),
        "roostream_controller_commit_phase_seconds": {
            phase: ms / 1000 for phase, ms in status["phases_ms"].items()
        },
        "roostream_controller_paused_seconds": _seconds(status["paused_ms"]),
        "roostream_controller_commits_total": status["commits"],
        "roostream_controller_aborts_total": status["aborts"],
        "roostream_controller_rollbacks_total": status["rollbacks"],
        "roostream_controller_workers": status["workers"],
        "roostream_controller_wanted_workers": status["wanted_workers"],
        "roostream_controller_device_seconds_total": status["device_s"],
        "roostream_controller_held": {kind: int(kind in held) for kind in (PERMANENT, TRANSIENT)},
        "roostream_controller_topic_problems": len(status["topic_problems"]),
        "roostream_controller_history_left_records": (status["initial"] or {"left": 0})["left"],
    }
    if readers := status["readers"]:
        shown["roostream_controller_readers"] = {state: readers[state] for state in ("wanted", "there")}
        shown["roostream_controller_splits_wanted"] = readers["splits_wanted"]
        shown["roostream_controller_leases_expired_total"] = readers["leases_expired"]
    return shown


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000

"""A worker's process: opens what the loop needs, trains until told otherwise, and ends in order."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from param_server.client import Client
from param_server.placement.profiles import Profiler, ProfileRecorder
from roostream.errors import ConfigError, HeldError, UnavailableError
from roostream.models.build import load_model_config
from roostream.runtime import metrics_server
from roostream.runtime.address import expand_addresses, reachable_address
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.health import Health
from roostream.runtime.histograms import freshness_histogram
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import Partition, all_partitions
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.program import Stop
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.thread_group import StopBudget
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Registry, Schema
from roostream.schema.schema_file import load_schema
from roostream.warehouse.readers.remote_rows import READING_COUNTERS, ReadersLink, RemoteSessionOpener
from roostream.wire.decode import Decoder
from trainer.batch_source import BatchSource
from trainer.config import WorkerConfig
from trainer.deployment_identity import DeploymentIdentity, kafka_identity
from trainer.device.numerics import set_numerics
from trainer.feed import ChunkPart
from trainer.loop import LoopDependencies, TrainLoop
from trainer.monitoring.caught_up import CaughtUpLimits
from trainer.monitoring.drift import DriftDetector
from trainer.monitoring.shadow import ShadowModel, load_shadow_model
from trainer.pipeline.pipelined_feed import connected
from trainer.pipeline.stage_timer import StageTimer
from trainer.predictions import KafkaOutputs
from trainer.process_group import TorchRendezvous
from trainer.record_source import RecordSource
from trainer.rows import ShardRows
from trainer.saved_batch import SavedBatches
from trainer.sessions.phased_source import PhasedSource
from trainer.worker import Worker
from trainer.worker_monitor import LABELS, Monitor

log = logging.getLogger("roostream.worker")

STOP_S = 8.0  # for everything after SIGTERM, below roostream.runtime.program.STOP_S: a commit that has not come by then won't
_CLOSING_S = 3.0  # of it, kept for what comes behind the last commit
_MIN_CLOSING_S = 1.5  # where the last commit has begun
_RESEND_S = 1.0  # to a shard that doesn't answer; longer outages are the controller's to mend


def work(config: WorkerConfig, stop: Stop) -> None:
    """Until `stop` is set.

    Raises:
        RoostreamError: a setting is wrong, what is committed belongs to other settings, or the controller is away for longer
            than `controller_timeout_ms` while training: the supervisor starts the worker again.
    """
    config.check_device()
    set_numerics(config)
    health = Health(config.stalled_after_ms / 1000)
    seen_at = reachable_address(config.metrics_host, metrics_server.serve(config, health), config.controller)
    if seen_at and config.tls:
        seen_at = f"https://{seen_at}"
    schema, model_config = load_schema(config.schema), load_model_config(config.model)
    store, clock = open_store(config.store), SystemClock()
    Backoff(what="the checkpoint store").until(lambda: register(store, schema), (UnavailableError,), stop)
    identity = _identity(config, schema, open_registry(store), stop)
    ending = StopBudget(stop, STOP_S)
    with contextlib.ExitStack() as opened:
        stages, keys = StageTimer(clock), config.link_credentials()
        read_by = by_programs(config, keys, clock, lambda: worker.incarnation)
        shards = [SocketTransport(address, keys=keys) for address in expand_addresses(config.shards)]
        for transport in shards:
            opened.callback(transport.close)
        client = Client(
            schema, shards, worker=config.index, num_buckets=config.buckets, resend_for_s=_RESEND_S, stop=stop
        )
        opened.callback(client.close)
        source, rows, feed = connected(
            lambda: phased(config, Decoder(schema, identity.registry), schema, clock, stages, read_by),
            ShardRows(client),
            stages,
            staleness=config.staleness,
            read_ahead=config.read_ahead,
        )
        opened.callback(source.close)
        outputs = KafkaOutputs(
            lambda: clients.producer(config.broker),
            config.prefix,
            clock,
            lambda: ending.left_s() < _CLOSING_S,
        )
        drift, counted = (
            DriftDetector(schema),
            ProfileRecorder(Profiler(config.profile_share, config.seed), store, clock),
        )
        wiring = LoopDependencies(
            source=source,
            rows=rows,
            outputs=outputs,
            clock=clock,
            feed=feed,
            stages=stages,
            on_freshness=freshness_histogram().observe,
            shadow=open_shadow(config, store, schema),
            saved=SavedBatches(Path(config.home)) if config.home else None,
            on_scored=lambda part: _look(part, drift, counted, loop.num_steps),
        )
        loop = TrainLoop(config, schema, model_config, wiring)
        opened.callback(loop.feed.close)
        team = TorchRendezvous(config.meet, device=config.device, timeout_s=config.reduce_timeout_ms / 1000)
        opened.callback(team.close)
        worker = Worker(loop, outputs, store, identity, config.index, team)
        worker.on_write = counted.save
        monitor = Monitor(
            worker,
            clock,
            CaughtUpLimits(lag_ms=config.caught_up_lag_ms, hold_s=config.caught_up_hold_ms / 1000),
            drift,
        )
        MetricsCollector("worker", monitor.gauges, LABELS).register()
        left = threading.Event()  # beats go on while the last commit is waited for
        report = partial(_report, monitor, seen_at)
        member = _member(config, keys, worker, report, left, ending)
        opened.callback(lambda: member.join(min(ending.left_s(), _CLOSING_S)))
        opened.callback(worker.close)
        opened.callback(left.set)
        member.start()
        train(worker, monitor, member, health, ending, config.controller_timeout_ms / 1000)


def _look(part: ChunkPart, drift: DriftDetector, counted: ProfileRecorder, step: int) -> None:
    """What is scored, as it is scored."""
    drift.look(part.batch, part.lookup)
    counted.look(step, part.batch, part.lookup)


def _identity(config: WorkerConfig, schema: Schema, registry: Registry, stop: Stop) -> DeploymentIdentity:
    return DeploymentIdentity(
        schema=schema,
        registry=registry,
        kafka=kafka_identity(config.broker, config.prefix, config.partitions, stop),
        num_shards=len(expand_addresses(config.shards)),
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
    )


def _report(monitor: Monitor, seen_at: str) -> dict[str, Any]:
    return {**monitor.report(), "seen_at": seen_at}


def _member(
    config: WorkerConfig,
    keys: LinkCredentials,
    worker: Worker,
    report: Callable[[], dict[str, Any]],
    left: threading.Event,
    ending: StopBudget,
) -> ControllerAgent:
    def dial() -> SocketTransport:
        return SocketTransport(config.controller, keys=keys)

    return ControllerAgent(
        dial, "worker", config.index, worker.submit, report, left, hear=worker.hear, ending=ending
    )


def open_shadow(config: WorkerConfig, store: CheckpointStore, schema: Schema) -> ShadowModel | None:
    """The frozen copy to score beside; None where none is asked for."""
    return (
        load_shadow_model(store, config.shadow, schema, config.device, config.shadow_every)
        if config.shadow
        else None
    )


def open_source(config: WorkerConfig, decoder: Decoder, clock: Clock, stages: StageTimer) -> RecordSource:
    """All partitions of what is trained, until it is told which are this worker's own; `seek` must follow."""

    def open_reader(partitions: tuple[Partition, ...]) -> KafkaConsumer:
        reading = ConsumerOptions(
            partitions=partitions,
            prefix=config.prefix,
            merge_by_time=True,
            track_end_offsets=True,
            skip_lost_records=config.skip_lost,
        )
        return KafkaConsumer.open(config.broker, f"{config.prefix}worker-{config.index}", reading)

    reader = open_reader(all_partitions(config.trained_topics, config.partitions))
    wait_ms = config.max_batch_wait_ms
    return RecordSource(reader, decoder, clock, max_wait_ms=wait_ms, stages=stages, reopen=open_reader)


def by_programs(
    config: WorkerConfig, keys: LinkCredentials, clock: Clock, incarnation: Callable[[], int]
) -> RemoteSessionOpener | None:
    """Who reads sessions for this worker, and its metrics; None: itself."""
    if config.readers.by == "worker":
        return None
    link = ReadersLink(
        controller=lambda: SocketTransport(config.controller, keys=keys),
        dial=lambda address: SocketTransport(address, keys=keys),
        worker=config.index,
        incarnation=incarnation,
    )
    made = RemoteSessionOpener(link, config.readers, clock)
    MetricsCollector("worker_reading", made.shown, {}, counters=READING_COUNTERS).register()
    return made


def phased(
    config: WorkerConfig,
    decoder: Decoder,
    schema: Schema,
    clock: Clock,
    stages: StageTimer,
    read_by: RemoteSessionOpener | None = None,
) -> PhasedSource:
    """The stream, or a session of a warehouse where the controller says so."""

    def opened(told: TableInput) -> BatchSource:
        try:
            from trainer.sessions.table_source import local_rows, open_session
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"expected {error.name} to read {told.table}; pip install 'roostream[warehouse]'"
            ) from None
        partitions = all_partitions(config.trained_topics, config.partitions)
        return open_session(
            told, schema, partitions, config.dedupe_horizon_ms, clock, stages, read_by or local_rows
        )

    return PhasedSource(open_source(config, decoder, clock, stages), opened)


def train(
    worker: Worker,
    monitor: Monitor,
    member: ControllerAgent,
    health: Health,
    ending: StopBudget,
    controller_timeout_s: float,
) -> None:
    """Batches and commands in turn. When asked to stop: no more batches, and a last commit if one comes soon enough.

    Raises:
        UnavailableError: no controller answers. HeldError: training is held, or will be as soon as the controller hears what this
            worker refused for good; nothing is committed that was not before.
    """
    while True:
        worker.serve_inbox()
        if worker.refusal is not None:
            raise HeldError(f"training can't go on with this worker: {worker.refusal}")
        worker.turn()
        monitor.observe(held=member.hold)
        if member.hold:
            raise HeldError(f"training is held: {member.hold}")
        health.turned(
            worker.broken or ("" if worker.incarnation else "it waits for the controller to restore it")
        )
        if worker.training and member.silent_s > controller_timeout_s:
            raise UnavailableError(
                f"the controller has not answered for {member.silent_s:.0f} s: training stops, since nothing is committed"
            )
        if ending.stop.is_set():
            worker.leaving = True
            min_s = _MIN_CLOSING_S if worker.is_cut else _CLOSING_S
            if worker.can_leave() or ending.left_s() < min_s:
                log.info("leaving at step %d, committed at %d", worker.loop.num_steps, worker.committed_step)
                return

"""The worker's process: opens what training needs, trains until it is stopped, and shuts down in order."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY

from param_server.client import Client
from param_server.placement.profiles import Profiler, ProfileRecorder
from roostream.errors import ConfigError, HeldError, RoostreamError, UnavailableError, needs_extra
from roostream.models.build import load_model_config
from roostream.runtime import metrics_server
from roostream.runtime.address import expand_addresses, reachable_address
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.health import Health
from roostream.runtime.histograms import freshness_histogram
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import Partition, all_partitions
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.program import Stop
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.runtime.thread_group import StopBudget
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.warehouse.readers.remote_rows import ReadersLink, RemoteSessionOpener
from roostream.wire.decode import Decoder
from trainer.batch_source import BatchSource
from trainer.chunks import ChunkPart
from trainer.config import WorkerConfig
from trainer.deployment_identity import DeploymentIdentity
from trainer.device.numerics import set_numerics
from trainer.feed import connect_feed
from trainer.loop import LoopDependencies, TrainLoop
from trainer.metrics import WORKER, WORKER_READING, WORKER_ROWS
from trainer.monitoring.caught_up import CaughtUpLimits
from trainer.monitoring.drift import DriftDetector
from trainer.monitoring.shadow import load_shadow_model
from trainer.pipeline.stage_timer import StageTimer
from trainer.predictions import KafkaOutputs
from trainer.process_group import DualRendezvous, TorchRendezvous
from trainer.record_source import RecordSource
from trainer.row_home import StackShards
from trainer.rows import PhasedRows, Rows, ShardRows
from trainer.saved_batch import SavedBatches
from trainer.sessions.session_source import PhasedSource, local_rows, open_session
from trainer.worker import Worker
from trainer.worker_monitor import Monitor

if TYPE_CHECKING:
    from trainer.torchrec_plan import TablePlacement
    from trainer.torchrec_rows import TorchRecRows

log = logging.getLogger("roostream.worker")

# For everything after SIGTERM; less than roostream.runtime.program.STOP_S. A commit that has not come by then
# will not come.
STOP_S = 8.0
_CLOSING_S = 3.0  # part of it, reserved for what follows the last commit
_MIN_CLOSING_S = 1.5  # the reserve once the last commit has begun
_LOOK_FOR_RELEASE_S = 0.2
_HOLD_IS_KNOWN_S = 60.0  # without a hold by then, it was released before this worker heard of it
_RESEND_S = 1.0  # to a shard that does not answer; the controller handles longer outages


def run_until_stopped(config: WorkerConfig, stop: Stop) -> None:
    """Run until `stop` is set. Raises RoostreamError: a setting is wrong, the committed state belongs to
    other settings, or the controller is unavailable for longer than `controller_timeout_ms` during training.
    The supervisor restarts the worker."""
    config.check_device()
    set_numerics(config)
    health = Health(config.stalled_after_ms / 1000)
    metrics_port = metrics_server.serve(config, health)
    metrics_address = reachable_address(config.metrics_host, metrics_port, config.controller)
    if metrics_address and config.tls_certificate:
        metrics_address = f"https://{metrics_address}"

    schema, model_config = load_schema(config.schema), load_model_config(config.model)
    store, clock = open_checkpoint_store(config.store), SystemClock()
    addresses = expand_addresses(config.shards)
    identity = DeploymentIdentity.connect(config, schema, store, len(addresses), stop, health)
    budget = StopBudget(stop, STOP_S)
    with contextlib.ExitStack() as opened:
        # Rows
        credentials, stages = config.link_credentials(), StageTimer(clock)
        shards = [
            opened.enter_context(contextlib.closing(SocketTransport(address, credentials=credentials)))
            for address in addresses
        ]
        client = Client(
            schema, shards, worker=config.index, num_buckets=config.buckets, resend_for_s=_RESEND_S, stop=stop
        )
        opened.callback(client.close)

        # Samples
        decoder = Decoder(schema, identity.registry)
        session_opener = remote_session_opener(config, credentials, clock, lambda: worker.incarnation)
        held = (
            held_rows(config, schema, client, store, clock, lambda: worker.note_progress())
            if config.initial_rows == "torchrec"
            else None
        )
        at_shards = ShardRows(client)
        rows: Rows = PhasedRows(held, at_shards, lambda: worker.read_bounds.is_initial) if held else at_shards
        source, rows, feed = connect_feed(
            lambda: open_source(config, decoder, schema, clock, stages, session_opener),
            rows,
            stages,
            staleness=config.staleness,
            read_ahead=config.read_ahead,
        )
        opened.callback(source.close)

        # The loop
        outputs = KafkaOutputs(
            lambda: clients.producer(config.broker),
            config.prefix,
            clock,
            is_urgent=lambda: budget.left_s() < _CLOSING_S,
        )
        drift = DriftDetector(schema)
        profiles = ProfileRecorder(
            Profiler(config.profile_share if config.index == 0 else 0.0, config.seed), store, clock
        )

        def on_scored(part: ChunkPart) -> None:
            drift.observe(part.batch, part.lookup)
            if worker.read_bounds.is_initial or config.profile_stream:
                profiles.observe(loop.num_steps, part.batch, part.lookup)
            if held and worker.read_bounds.is_initial:
                held.note_batch(part.batch)

        shadow = None
        if config.shadow:
            shadow = load_shadow_model(store, config.shadow, schema, config.device, config.shadow_every)
        dependencies = LoopDependencies(
            source=source,
            rows=rows,
            outputs=outputs,
            clock=clock,
            feed=feed,
            stages=stages,
            on_freshness=freshness_histogram().observe,
            shadow=shadow,
            saved=SavedBatches(Path(config.home)) if config.home else None,
            on_scored=on_scored,
        )
        loop = TrainLoop(config, schema, model_config, dependencies)
        opened.callback(loop.feed.close)

        # The worker around it, and its reports
        rendezvous = TorchRendezvous(
            config.rendezvous_address, device=config.device, timeout_s=config.reduce_timeout_ms / 1000
        )
        opened.callback(rendezvous.close)
        worker = Worker(
            loop,
            outputs,
            store,
            identity,
            config.index,
            DualRendezvous(rendezvous, held) if held else rendezvous,
        )
        worker.on_write, worker.check_shards, worker.on_progress = (
            profiles.save,
            client.check_order,
            health.turned,
        )
        patience = CaughtUpLimits(lag_ms=config.caught_up_lag_ms, hold_s=config.caught_up_hold_ms / 1000)
        monitor = Monitor(worker, clock, patience, drift)
        REGISTRY.register(MetricsCollector(monitor.metrics, WORKER))

        def report() -> dict[str, Any]:
            return {**monitor.report(), "seen_at": metrics_address}

        left = threading.Event()  # beats continue while the last commit is awaited
        agent = ControllerAgent(
            lambda: SocketTransport(config.controller, credentials=credentials),
            "worker",
            config.index,
            worker.submit,
            report,
            left,
            on_received=worker.hear,
            stop_budget=budget,
        )
        opened.callback(lambda: agent.join(min(budget.left_s(), _CLOSING_S)))
        opened.callback(worker.close)
        opened.callback(left.set)
        agent.start()
        try:
            train(worker, monitor, agent, health, budget, config.controller_timeout_ms / 1000)
        except HeldError as held:
            if not config.wait_on_hold:
                raise
            wait_for_release(held, agent, health, stop)


def wait_for_release(held: HeldError, agent: ControllerAgent, health: Health, stop: Stop) -> None:
    """Wait until the hold is over, or `stop` is set. Meanwhile the program is ready, so that a roll-out that
    repairs the cause goes on.

    Raises:
        UnavailableError: the hold is over. A new process trains on.
    """
    log.error("%s; this process waits for the end of the hold (wait_on_hold)", held)
    was_held, waited_s = False, 0.0
    while not stop.wait(_LOOK_FOR_RELEASE_S):
        agent.check()
        health.turned()
        was_held, waited_s = was_held or bool(agent.hold), waited_s + _LOOK_FOR_RELEASE_S
        if not agent.hold and (was_held or waited_s > _HOLD_IS_KNOWN_S):
            raise UnavailableError("the hold is over; a new process trains on")


def train(
    worker: Worker,
    monitor: Monitor,
    agent: ControllerAgent,
    health: Health,
    budget: StopBudget,
    controller_timeout_s: float,
) -> None:
    """Alternate between commands and batches. When asked to stop: no more batches, and a last commit if it
    comes in time.

    Raises:
        UnavailableError: no controller answers.
        ConfigError: another process has this worker's index.
        HeldError: training is on hold, or will be once the controller hears why this worker cannot use the
            commit.
    """
    while True:
        worker.serve_inbox()
        if worker.refusal is not None:
            raise HeldError(f"training cannot continue with this worker: {worker.refusal}")
        worker.turn()
        monitor.observe(held=agent.hold)
        agent.check()
        if agent.hold:
            raise HeldError(f"training is on hold: {agent.hold}")
        is_restored = worker.incarnation or agent.standby
        waiting = "" if is_restored else "waiting for the controller to restore this worker"
        health.turned(agent.refused or worker.broken or waiting)
        if worker.training and agent.silent_s > controller_timeout_s:
            raise UnavailableError(
                f"the controller has not answered for {agent.silent_s:.0f} s; "
                "training stops, because nothing is committed"
            )
        if budget.stop.is_set():
            worker.leaving = True
            min_s = _MIN_CLOSING_S if worker.is_cut else _CLOSING_S
            if worker.can_leave() or budget.left_s() < min_s:
                log.info("leaving at step %d, committed at %d", worker.loop.num_steps, worker.committed_step)
                return


def held_rows(
    config: WorkerConfig,
    schema: Schema,
    client: Client,
    store: CheckpointStore,
    clock: Clock,
    on_progress: Callable[[], None],
) -> TorchRecRows:
    """Rows that this worker and the others hold in the initial phase. `on_progress`: as for `TorchRecRows`.
    Raises ConfigError: TorchRec is not installed, or the placement file is none. SchemaError: a table that
    TorchRec cannot hold, or not where the placement says."""
    try:
        from trainer.torchrec_rows import TorchRecRows, check_tables, read_placement
    except ImportError as error:
        raise ConfigError(
            f"initial_rows = torchrec needs {error.name}; pip install 'roostream[torchrec]'"
        ) from None
    given = config.initial_placement
    check_tables(schema, {} if given == "planner" else read_placement(given, schema, MAX_WORKERS))
    placement_of = functools.partial(initial_placement, config, schema, store, clock)
    held = TorchRecRows(schema, StackShards(client, config.seed), placement_of, config.device, on_progress)

    def metrics() -> dict[str, Any]:
        return {
            "roostream_worker_exchanged_bytes_total": held.sent_bytes,
            "roostream_worker_impression_bytes_total": held.impression_bytes,
        }

    REGISTRY.register(MetricsCollector(metrics, WORKER_ROWS))
    return held


def initial_placement(
    config: WorkerConfig, schema: Schema, store: CheckpointStore, clock: Clock, workers: int
) -> dict[str, TablePlacement]:
    """Table → where `workers` workers hold it. Empty, so that every table is spread by rows, if the file is
    for more workers or the store does not answer: then training is slower, but goes on."""
    from trainer.torchrec_rows import planned_placement

    try:
        return planned_placement(
            config.initial_placement,
            schema,
            workers,
            store,
            batch=config.in_phase(initial=True).batch_requests,
            now_ms=clock.now_ms(),
        )
    except RoostreamError as error:
        log.error("every table is spread by rows over %d workers: %s", workers, error)
        return {}


def open_source(
    config: WorkerConfig,
    decoder: Decoder,
    schema: Schema,
    clock: Clock,
    stages: StageTimer,
    session_opener: RemoteSessionOpener | None = None,
) -> PhasedSource:
    """Open the stream, which the controller may replace with a warehouse session. All partitions are open
    until the controller assigns some; `seek` must follow."""

    def open_consumer(partitions: tuple[Partition, ...]) -> KafkaConsumer:
        options = ConsumerOptions(
            partitions=partitions,
            prefix=config.prefix,
            merge_by_time=True,
            track_end_offsets=True,
            skip_lost_records=config.skip_lost,
        )
        return KafkaConsumer.open(config.broker, f"{config.prefix}worker-{config.index}", options)

    partitions = all_partitions(config.trained_topics, config.partitions)

    def open_table(session: TableInput) -> BatchSource:
        open_rows = session_opener or local_rows
        horizon_ms = config.dedupe_horizon_ms
        with needs_extra(f"the warehouse {session.table}", "warehouse"):
            return open_session(session, schema, partitions, horizon_ms, clock, stages, open_rows)

    stream = RecordSource(
        open_consumer(partitions),
        decoder,
        clock,
        max_wait_ms=config.max_batch_wait_ms,
        stages=stages,
        reopen=open_consumer,
    )
    return PhasedSource(stream, open_table)


def remote_session_opener(
    config: WorkerConfig, credentials: LinkCredentials, clock: Clock, incarnation: Callable[[], int]
) -> RemoteSessionOpener | None:
    """Reads sessions through `reader` programs. None: the worker reads them itself."""
    if config.readers.by == "worker":
        return None
    link = ReadersLink(
        controller=lambda: SocketTransport(config.controller, credentials=credentials),
        dial=lambda address: SocketTransport(address, credentials=credentials),
        worker=config.index,
        incarnation=incarnation,
    )
    opener = RemoteSessionOpener(link, config.readers, clock)
    REGISTRY.register(MetricsCollector(opener.metrics, WORKER_READING))
    return opener

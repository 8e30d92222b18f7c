"""`roostream joiner --config FILE`: runs the local engine in this process, or submits and watches the Flink
job."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prometheus_client import REGISTRY

from joiner.config import JoinerConfig
from joiner.flink_client import FetchOffsets, committed_by_joiner, has_committed, run_flink
from joiner.metrics import JoinerMetrics
from joiner.outputs import OUTPUTS
from roostream.errors import ConfigError, UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.clock import SystemClock
from roostream.runtime.flink_rest import JOB_NAME
from roostream.runtime.health import Health
from roostream.runtime.kafka.clients import wait_for_topics
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import EVENTS
from roostream.runtime.program import Stop
from roostream.runtime.store_identity import open_checkpoint_store, wait_for_store
from roostream.runtime.thread_group import StopBudget
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema

_STOP_S = 10.0  # for the last outputs after SIGTERM; less than roostream.runtime.program.STOP_S


def run_until_stopped(config: JoinerConfig, stop: Stop) -> None:
    """When `stop` is set, the local engine writes a last snapshot; a Flink job keeps running."""
    config.require("bootstrap", "schema", "store", "home" if config.engine == "local" else "flink")
    schema, store = load_schema(config.schema), open_checkpoint_store(config.store)
    health = Health(config.stalled_after_ms / 1000)
    metrics_server.serve(config, health)
    wait_for_store(lambda: register(store, schema), stop, health=health)
    check_engine(config, lambda: committed_by_joiner(config), stop)
    metrics = JoinerMetrics(REGISTRY)
    if config.engine == "local":
        run_local(config, schema, metrics, health, stop)
    else:
        run_flink(config, metrics, health, stop)


def check_engine(config: JoinerConfig, connect: Callable[[], FetchOffsets], stop: threading.Event) -> None:
    """Check that the state of the join is not lost, and not that of the other engine, so that this engine
    would join all events again. `connect` opens the function that returns what the joiner has committed to
    Kafka, as both engines do after each checkpoint; it is retried while Kafka is away.

    Raises:
        ConfigError: the state is that of the local engine.
        UnavailableError: the local engine has no snapshot, but a joiner has committed; or `stop` was set.
    """
    from joiner.local_runner import SnapshotStore

    if config.home and SnapshotStore(open_store(config.home)).names():
        if config.engine == "flink":
            raise ConfigError(
                f"expected engine = 'local', whose snapshots are in {config.home}, got 'flink', which would "
                "join all events again; set it back, or delete the snapshots if that is wanted"
            )
    elif config.engine == "local" and has_committed(connect(), stop):
        raise UnavailableError(
            f"expected a snapshot in {config.home}, because a joiner has committed its offsets to Kafka, got "
            "none: make the folder's files available again, set engine = 'flink' if that was a Flink job, or "
            f"delete the consumer group {config.prefix}{JOB_NAME} in Kafka to join all events again"
        )


def run_local(
    config: JoinerConfig, schema: Schema, metrics: JoinerMetrics, health: Health, stop: Stop
) -> None:
    """Kafka → Kafka in this process until `stop` is set."""
    from joiner.local_engine import LocalEngine
    from joiner.local_runner import KafkaSink, LocalRunner, SnapshotStore, offset_committer

    wait_for_topics(config.broker, config.prefix, OUTPUTS, config.partitions, stop)
    topics = wait_for_topics(config.broker, config.prefix, EVENTS, config.partitions, stop)
    registry = open_registry(open_checkpoint_store(config.store), own=schema)
    engine = LocalEngine(config, schema, registry, topics)
    options = ConsumerOptions(
        partitions=engine.partitions, prefix=config.prefix, skip_lost_records=config.skip_lost
    )
    consumer = KafkaConsumer.open(config.broker, f"{config.prefix}{JOB_NAME}", options)
    budget = StopBudget(stop, _STOP_S)
    sink = KafkaSink(config.broker, config.prefix, gives_up=lambda: not budget.left_s())
    snapshots = SnapshotStore(open_store(config.home))
    try:
        LocalRunner(
            config,
            engine,
            consumer,
            sink,
            snapshots,
            commit_offsets=offset_committer(config.broker, f"{config.prefix}{JOB_NAME}", options),
            clock=SystemClock(),
            metrics=metrics,
            health=health,
        ).run(stop)
    finally:
        consumer.close()

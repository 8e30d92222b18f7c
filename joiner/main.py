"""`roostream joiner --config FILE`: the local engine in this process, or the Flink job submitted and watched."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from prometheus_client import REGISTRY

from joiner.config import JoinerConfig
from joiner.envelope import OUTPUTS
from joiner.meters import Meters
from joiner.submit import submit
from roostream.errors import UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.clock import SystemClock
from roostream.runtime.flink_rest import ENDED, JOB_NAME, FlinkRest
from roostream.runtime.health import Health
from roostream.runtime.kafka.clients import consumer, wait_for_topics
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions
from roostream.runtime.kafka.retention_loss import RetentionLossCounter, committed_offsets
from roostream.runtime.kafka.topics import EVENTS, all_partitions
from roostream.runtime.program import Stop
from roostream.runtime.program import run as run_program
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema

log = logging.getLogger("roostream.joiner")
WATCH_S = 1.0
_LOOK_EVERY_S = 10.0  # at what retention has taken
_KEPT = "brings the job back"
_RESUBMITTED = "no high availability is active, the job is submitted again from its newest checkpoint"
_RECOVERY_S = 60.0  # within this a job manager that came back with high availability knows its jobs again
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class FlinkJob:
    """A job of a cluster; `losses`: of its own reading of Kafka, of which it tells nobody."""

    rest: FlinkRest
    id: str
    losses: RetentionLossCounter | None = None


def run(config: JoinerConfig) -> int:
    """Exit code: see roostream.runtime.program.run. A signal stops the local engine after a last snapshot; a Flink job runs on."""
    return run_program("joiner", lambda stop: _body(config, stop), config.log_format)


def _body(config: JoinerConfig, stop: Stop) -> None:
    config.require("bootstrap", "schema", "store", "home" if config.engine == "local" else "flink")
    schema = register(open_store(config.store), load_schema(config.schema))
    health = Health(config.stalled_after_ms / 1000)
    metrics_server.serve(config, health)
    meters = Meters(REGISTRY)
    if config.engine == "local":
        run_local(config, schema, meters, health, stop)
    else:
        run_flink(config, meters, health, stop)


def run_local(config: JoinerConfig, schema: Schema, meters: Meters, health: Health, stop: Stop) -> None:
    """Kafka → Kafka in this process until `stop` is set."""
    from joiner.local_engine import LocalEngine
    from joiner.local_kafka import KafkaSink
    from joiner.local_pump import Pump, Snapshots
    from roostream.runtime.kafka.kafka_consumer import KafkaConsumer

    wait_for_topics(config.broker, config.prefix, (*EVENTS, *OUTPUTS), config.partitions, stop)
    engine = LocalEngine(config, schema, open_registry(open_store(config.store)))
    reading = ConsumerOptions(
        partitions=engine.partitions, prefix=config.prefix, skip_lost_records=config.skip_lost
    )
    source = KafkaConsumer.open(config.broker, f"{config.prefix}roostream-joiner", reading)
    sink = KafkaSink(config.broker, config.prefix)
    snapshots = Snapshots(open_store(config.home))
    try:
        Pump(config, engine, source, sink, snapshots, clock=SystemClock(), meters=meters, health=health).run(
            stop
        )
    finally:
        source.close()


def run_flink(config: JoinerConfig, meters: Meters, health: Health, stop: Stop) -> None:
    """Adopt the cluster's joiner job, submit one, or wait for it where somebody else submits; then watch it until `stop` is set,
    and leave it running.

    Raises:
        UnavailableError: the job failed for good, was cancelled, or is unknown to a restarted job manager. Starting again
            submits it anew, from the key `restore`.
    """
    rest = FlinkRest(config.flink)
    found = ask(rest, rest.live_job, stop) if config.submits else wait_for_job(rest, health, stop)
    if found:
        log.info("the job is there already (%s); watching it", found["state"])
        job = str(found["jid"])
    else:
        wait_for_topics(config.broker, config.prefix, (*EVENTS, *OUTPUTS), config.partitions, stop)
        job = submit(config, stop)
    log.info("job %s: %s/#/job/%s/overview", job, rest.url, job)
    kept = ask(rest, rest.high_availability, stop)
    log.info(
        "if the job manager dies: %s", f"its high availability ({kept}) {_KEPT}" if kept else _RESUBMITTED
    )
    watch(FlinkJob(rest, job, _losses(config)), meters, health, stop, patience_s=_RECOVERY_S if kept else 0.0)


def wait_for_job(rest: FlinkRest, health: Health, stop: Stop) -> dict[str, Any]:
    """The job that somebody else submits. Raises UnavailableError when `stop` is set first."""
    said = False
    while not stop.is_set():
        with health.waiting(f"Flink at {rest.url}"):
            found = ask(rest, rest.live_job, stop)
        if found:
            return found
        if not said:
            log.info(
                "no job runs at %s yet, and this program submits none (submits = false): waiting", rest.url
            )
            said = True
        health.turned("no job runs yet")
        stop.wait(WATCH_S)
    raise UnavailableError("stopped while waiting for the job")


def _losses(config: JoinerConfig) -> RetentionLossCounter | None:
    """Of the group that the job's sources commit to with each checkpoint."""
    if not config.bootstrap:
        return None
    reading = ConsumerOptions(partitions=all_partitions(EVENTS, config.partitions), prefix=config.prefix)
    return RetentionLossCounter(
        partial(committed_offsets, consumer(config.broker, f"{config.prefix}{JOB_NAME}"), reading), "the join"
    )


def watch(watched: FlinkJob, meters: Meters, health: Health, stop: Stop, *, patience_s: float = 0.0) -> None:
    """Export the job's state and losses and say when they change, until `stop` is set; for `patience_s` a job may be unknown.
    Raises as `run_flink`."""
    rest, job, losses = watched.rest, watched.id, watched.losses
    said, unknown_since_s, look_at_s = "", 0.0, 0.0
    while not stop.is_set():
        with health.waiting(f"Flink at {rest.url}"):
            state = ask(rest, lambda: rest.state(job), stop)
        unknown_since_s = (unknown_since_s or time.monotonic()) if state == "UNKNOWN" else 0.0
        if unknown_since_s and time.monotonic() - unknown_since_s < patience_s:
            health.turned("the job manager does not know the job yet")
            stop.wait(WATCH_S)
            continue
        if state in (*ENDED, "UNKNOWN"):
            meters.running.set(0)
            why = (
                "the job manager does not know it"
                if state == "UNKNOWN"
                else f"it is {state}: {rest.failure(job)}"
            )
            raise UnavailableError(
                f"job {job} no longer runs ({why}); start the joiner again to go on from a checkpoint"
            )
        if state != said:
            log.info(
                "the job is %s%s",
                state,
                f" ({rest.failure(job)})" if state in ("RESTARTING", "FAILING") else "",
            )
            said = state
        with health.waiting(f"Flink at {rest.url}"):
            meters.job(state == "RUNNING", ask(rest, lambda: rest.gauges(job), stop))
        if losses is not None and time.monotonic() >= look_at_s:
            losses.update()
            meters.lost.set(losses.num_lost)
            look_at_s = time.monotonic() + _LOOK_EVERY_S
        health.turned("" if state == "RUNNING" else f"the job is {state}")
        stop.wait(WATCH_S)


def ask(rest: FlinkRest, question: Callable[[], T], stop: Stop) -> T:
    """The job manager's answer, however long it is away. Raises UnavailableError only when `stop` is set meanwhile."""
    return Backoff(what=f"Flink at {rest.url}").until(question, (UnavailableError,), stop)

"""A worker's process: opens what the loop needs, trains until told otherwise, and ends in order."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from models.build import load_model_config
from param_server.client import Client
from roo.decode import Decoder
from roo.errors import UnavailableError
from roo.schema_file import load_schema
from roo.schema_registry import open_registry, register
from runtime import metrics
from runtime.checkpoint_store import open_store
from runtime.clock import Clock, SystemClock
from runtime.exports import Exports
from runtime.health import Health
from runtime.kafka import clients
from runtime.kafka.reader import KafkaReader
from runtime.kafka.reading import Reading
from runtime.kafka.topics import SAMPLES
from runtime.member import Member
from runtime.program import Stop
from runtime.rpc_client import SocketTransport
from trainer.config import WorkerConfig
from trainer.identity import Identity, kafka_identity
from trainer.loop import TrainLoop, Wiring, set_numerics
from trainer.monitor import LABELS, Monitor
from trainer.predictions import KafkaOutputs
from trainer.record_batches import RecordBatches
from trainer.rows import ShardRows
from trainer.worker import Worker

log = logging.getLogger("roostream.worker")

_LAST_COMMIT_S = 5.0
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
    metrics.serve(config, health)
    schema, model_config = load_schema(config.schema), load_model_config(config.model)
    store, clock = open_store(config.store), SystemClock()
    register(store, schema)
    identity = Identity(
        schema=schema,
        registry=open_registry(store),
        kafka=kafka_identity(config.broker, config.prefix, config.partitions, stop),
        num_shards=len(config.shards),
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
    )
    with contextlib.ExitStack() as opened:
        source = open_source(config, Decoder(schema, identity.registry), clock)
        opened.callback(source.close)
        shards = [SocketTransport(address) for address in config.shards]
        for transport in shards:
            opened.callback(transport.close)
        client = Client(schema, shards, worker=config.index, num_buckets=config.buckets, resend_for_s=_RESEND_S, stop=stop)
        opened.callback(client.close)
        wiring = Wiring(
            source=source,
            rows=ShardRows(client),
            outputs=KafkaOutputs(clients.producer(config.broker), config.prefix, clock),
            clock=clock,
            on_freshness=metrics.freshness().observe,
        )
        worker = Worker(TrainLoop(config, schema, model_config, wiring), store, identity, config.index)
        monitor = Monitor(worker, clock, bound_ms=config.caught_up_lag_ms)
        Exports("worker", monitor.gauges, LABELS).register()
        left = threading.Event()  # beats go on while the last commit is waited for
        member = Member(lambda: SocketTransport(config.controller), "worker", config.index, worker.submit, monitor.report, left)
        opened.callback(member.join)
        opened.callback(worker.close)
        opened.callback(left.set)
        member.start()
        train(worker, monitor, member, health, stop, config.controller_timeout_ms / 1000)


def open_source(config: WorkerConfig, decoder: Decoder, clock: Clock) -> RecordBatches:
    """All partitions of the samples; `seek` must follow."""
    reading = Reading(
        partitions=tuple((SAMPLES, p) for p in range(config.partitions)),
        prefix=config.prefix,
        merged=True,
        follows_ends=True,
    )
    reader = KafkaReader.open(config.broker, f"{config.prefix}worker-{config.index}", reading)
    return RecordBatches(reader, decoder, clock, max_wait_ms=config.max_batch_wait_ms)


def train(worker: Worker, monitor: Monitor, member: Member, health: Health, stop: Stop, controller_timeout_s: float) -> None:
    """Batches and commands in turn; when asked to stop, a last commit first, if one comes soon enough.

    Raises:
        UnavailableError: no controller answers.
    """
    leave_by_s = 0.0
    while True:
        worker.serve_inbox()
        worker.turn()
        monitor.observe()
        health.turned(worker.broken or ("" if worker.incarnation else "it waits for the controller to restore it"))
        if worker.training and member.silent_s > controller_timeout_s:
            raise UnavailableError(
                f"the controller has not answered for {member.silent_s:.0f} s: training stops, since nothing is committed"
            )
        if stop.is_set():
            leave_by_s = leave_by_s or time.monotonic() + _LAST_COMMIT_S
            worker.leaving = True
            if worker.can_leave() or time.monotonic() > leave_by_s:
                log.info("leaving at step %d, committed at %d", worker.loop.num_steps, worker.committed_step)
                return

"""`roostream shard`: rows behind a port, led by the controller and followed by replicas through the topic
`rows`.

Start: 1 schema, health probes, kernels, segments  2 listen  3 metrics  4 publish  5 connect to the controller, which restores the rows
Stop:  1 the controller agent, once training is committed or there is no controller (a running command may finish)
       2 running calls  3 the publisher  4 segments
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import REGISTRY

from param_server.config import ShardConfig, ShardIdentity
from param_server.eviction import ExpiryPolicy
from param_server.key_value_store import KeyValueStore, RocksDbStore
from param_server.precompile import precompile
from param_server.publish import Publisher
from param_server.rows_topic import KafkaRows
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.runtime import metrics_server, program
from roostream.runtime.address import parse_address
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.clock import SystemClock
from roostream.runtime.controller_agent import Command, ControllerAgent, check_command_schema
from roostream.runtime.health import Health
from roostream.runtime.histograms import StageHistogram
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import ROWS
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Handler, Header
from roostream.runtime.thread_group import StopBudget, ThreadGroup
from roostream.schema.schema_file import load_schema

log = logging.getLogger("roostream.shard")

STOP_S = 8.0  # for the last commit after SIGTERM; less than roostream.runtime.program.STOP_S
_CLOSING_S = 2.0  # of it, or of a preemption notice, kept for closing
_JOIN_S = 5.0
_TURN_S = 0.5

METRICS = {
    "rows": ("rows", "rows in memory"),
    "incarnation": ("incarnation", "incarnation in which calls are answered"),
    "committed_seq": ("committed_seq", "number of the last commit"),
    "segments": ("segments", "segments of the last commit"),
    "bytes": ("bytes", "memory of the rows"),
    "changed_rows": ("dirty", "rows changed since the last freeze"),
    "expiry_skipped_rows": ("spared", "rows that were due to expire and kept because of max_expired_share"),
    "unpublishable_rows": ("withheld", "rows not published: not finite, or longer than max_publish_norm"),
    "clipped_gradient_rows": (
        "limited",
        "gradient rows that were scaled down to what the rule's state can hold",
    ),
    "largest_accumulator": ("largest_accumulator", "largest accumulator of squares since the start"),
    "damaged_segment_parts": (
        "damaged",
        "damaged parts of committed segments; the next commit rewrites their rows",
    ),
    "found_damaged_segment_parts": ("damages", "parts of segments that were found damaged since the start"),
    "pulls": ("pulls", "pulls answered"),
    "pushes": ("pushes", "pushes applied"),
    "duplicate_pushes": ("repeats", "pushes that had been applied before"),
    "waiting_pushes": ("waiting", "pushes that wait for the other workers' pushes of their step"),
    "ready": ("ready", "1 = restored"),
}
"""Metric `roostream_shard_<name>` → its key in `Shard.stats`, and its help text."""
PUBLISHER_METRICS = {
    "published_at_ms": "when replicas last had everything",
    "published_keys": "keys sent in deltas",
    "republished_keys": "keys published again after a rollback",
}
_COUNTERS = (
    "expiry_skipped_rows",
    "unpublishable_rows",
    "clipped_gradient_rows",
    "found_damaged_segment_parts",
    "pulls",
    "pushes",
    "duplicate_pushes",
    "published_keys",
    "republished_keys",
)


def run(config: ShardConfig) -> int:
    """Run until SIGTERM; return the process's exit code (roostream/runtime/program.py)."""
    return program.run("shard", lambda stop: serve(config, stop), config.log_format)


def serve(config: ShardConfig, stop: threading.Event) -> None:
    """Run a shard until `stop` is set.

    Raises:
        ConfigError, SetupError: a setting, the schema, the port or the data directory cannot be used.
    """
    crew = ThreadGroup(stop)
    health, keys = Health(config.stalled_after_ms / 1000), config.link_credentials()
    with contextlib.ExitStack() as opened:  # closed in the reverse order
        segment_store = RocksDbStore(Path(config.home) / "segments")
        shard = build_shard(config, segment_store)  # 1
        at = metrics_server.serve(
            config, health
        )  # before kernels: the very first start compiles for a minute
        precompile()
        segment_store.open()
        opened.callback(segment_store.close)
        latency = StageHistogram("roostream_shard_call_seconds", "time to answer a call", registry=None)
        address = _listen(config, keys, shard, latency, opened)  # 2
        topic = KafkaRows(config.broker, config.prefix) if config.bootstrap else None
        publisher = (
            Publisher(shard, topic, shard.clock, interval_ms=config.publish_interval_ms) if topic else None
        )
        collector = shard_metrics(shard, publisher)
        opened.callback(collector.unregister)
        collector.register()
        opened.callback(REGISTRY.unregister, latency.histogram)
        REGISTRY.register(latency.histogram)  # 3
        if publisher and topic:
            opened.callback(topic.close)
            opened.callback(crew.join, _JOIN_S)
            crew.start(
                "topics", clients.check_topics, config.broker, config.prefix, (ROWS,), config.partitions, stop
            )
            crew.start("publisher", publisher.run, stop)  # 4
        ending, left = StopBudget(stop, STOP_S), threading.Event()
        member = _start_member(config, keys, shard, ending, left, opened)  # 5
        log.info(
            "shard %d of %d listens on %s, metrics on port %d", config.index, config.num_shards, address, at
        )
        while not (
            stop.wait(_TURN_S) or left.is_set()
        ):  # a deadlock in the shard stops the loop and fails the health probe
            health.turned("" if shard.stats()["ready"] else "waiting for the controller to restore it")
        member.leave(ending, _CLOSING_S)
    crew.check()


def build_shard(config: ShardConfig, segment_store: KeyValueStore) -> Shard:
    """A shard as configured; the store may be opened later, and nothing is restored yet."""
    identity = ShardIdentity(
        schema=load_schema(config.schema),
        index=config.index,
        num_shards=config.num_shards,
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
        publishing=bool(config.bootstrap),
        max_publish_norm=config.max_publish_norm,
    )
    segments = Segments(
        segment_store,
        shapes_of(identity.schema),
        identity.num_buckets,
        accepted=config.accept_lost_rows,
        keep=config.keep_commits,
    )
    eviction = functools.partial(ExpiryPolicy, max_share=config.max_expired_share)
    return Shard(identity, segments, open_store(config.store), SystemClock(), eviction=eviction)


def _listen(
    config: ShardConfig,
    keys: LinkCredentials,
    shard: Shard,
    latency: StageHistogram,
    opened: contextlib.ExitStack,
) -> str:
    host, port = parse_address(config.listen)
    server = RpcServer(timed(ShardRpcHandler(shard).handle, latency), host, port, keys=keys).start()

    def close() -> None:
        if cut_off := server.stop():
            log.warning("%d running calls were cut off", cut_off)

    opened.callback(close)
    opened.callback(shard.leave)
    return server.address


def _start_member(
    config: ShardConfig,
    keys: LinkCredentials,
    shard: Shard,
    ending: StopBudget,
    left: threading.Event,
    opened: contextlib.ExitStack,
) -> ControllerAgent:
    def dial() -> SocketTransport:
        return SocketTransport(config.controller, keys=keys)

    def execute(command: Command) -> dict[str, Any]:
        check_command_schema(command, shard.identity.schema.fingerprint)
        return shard.execute(command)

    member = ControllerAgent(dial, "shard", config.index, execute, shard.stats, left, stop_budget=ending)

    def close() -> None:
        ending.stop.set()
        left.set()
        if not member.join(_JOIN_S):
            log.warning("stopped during a command of the controller")

    opened.callback(close)
    return member.start()


def timed(handler: Handler, latency: StageHistogram) -> Handler:
    """`handler` with the time of each call observed under its method."""

    def handle(method: str, header: Header, arrays: list[np.ndarray]) -> tuple[Header, Sequence[np.ndarray]]:
        began_s = time.perf_counter()
        answer = handler(method, header, arrays)
        latency.observe(method, (time.perf_counter() - began_s) * 1000)
        return answer

    return handle


def shard_metrics(shard: Shard, publisher: Publisher | None) -> MetricsCollector:
    """The metrics `roostream_shard_<name>`; rows by stack."""

    def read() -> dict[str, Any]:
        stats = shard.stats()
        shown = {name: stats[key] for name, (key, _) in METRICS.items()}
        if publisher:
            shown |= {
                "published_at_ms": publisher.published_at_ms,
                "published_keys": publisher.num_keys,
                "republished_keys": publisher.num_republished,
            }
        return shown

    helps = {name: text for name, (_, text) in METRICS.items()} | PUBLISHER_METRICS
    labels = {"rows": "stack", "largest_accumulator": "stack"}
    return MetricsCollector("shard", read, labels, helps=helps, counters=_COUNTERS)

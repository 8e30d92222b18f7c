"""`roostream shard`: rows behind a port, led by the controller and followed by replicas through the topic
`rows`.

Start: 1 schema, health probes, kernels, segments  2 listen  3 metrics  4 publish
       5 connect to the controller, which restores the rows
Stop:  1 the controller agent, once training is committed or there is no controller; a running command may
         finish  2 running calls  3 the publisher  4 segments
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
from roostream.runtime import metrics_server
from roostream.runtime.address import parse_address
from roostream.runtime.clock import SystemClock
from roostream.runtime.controller_agent import Command, ControllerAgent, check_command_schema
from roostream.runtime.health import Health
from roostream.runtime.histograms import StageHistogram
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import ROWS
from roostream.runtime.metrics_collector import MetricSpec, exported
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Handler, Header
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.runtime.thread_group import StopBudget, ThreadGroup
from roostream.schema.schema_file import load_schema

log = logging.getLogger("roostream.shard")

STOP_S = 8.0  # for the last commit after SIGTERM; less than roostream.runtime.program.STOP_S
_CLOSING_S = 2.0  # of it, or of a preemption notice, kept for closing
_JOIN_S = 5.0
_TURN_S = 0.5

METRICS = {
    "roostream_shard_rows": MetricSpec("rows in memory", ("stack",)),
    "roostream_shard_incarnation": MetricSpec("incarnation in which calls are answered"),
    "roostream_shard_committed_seq": MetricSpec("number of the last commit"),
    "roostream_shard_segments": MetricSpec("segments of the last commit"),
    "roostream_shard_bytes": MetricSpec("memory of the rows"),
    "roostream_shard_changed_rows": MetricSpec("rows changed since the last freeze"),
    "roostream_shard_expiry_skipped_rows_total": MetricSpec("due rows kept because of max_expired_share"),
    "roostream_shard_unpublishable_rows_total": MetricSpec("rows not finite or longer than max_publish_norm"),
    "roostream_shard_clipped_gradient_rows_total": MetricSpec(
        "gradient rows that were scaled down to what the rule's state can hold"
    ),
    "roostream_shard_largest_accumulator": MetricSpec("largest sum of squares since the start", ("stack",)),
    "roostream_shard_damaged_segment_parts": MetricSpec(
        "damaged parts of committed segments; the next commit rewrites their rows"
    ),
    "roostream_shard_found_damaged_segment_parts_total": MetricSpec("segment parts that were found damaged"),
    "roostream_shard_sent_bytes_total": MetricSpec("bytes of segments copied to the checkpoint store"),
    "roostream_shard_fetched_bytes_total": MetricSpec("bytes of segments fetched from the checkpoint store"),
    "roostream_shard_pulls_total": MetricSpec("pulls answered"),
    "roostream_shard_pushes_total": MetricSpec("pushes applied"),
    "roostream_shard_duplicate_pushes_total": MetricSpec("pushes that had been applied before"),
    "roostream_shard_waiting_pushes": MetricSpec("pushes that wait for other workers' pushes of their step"),
    "roostream_shard_ready": MetricSpec("1 once rows are restored"),
    "roostream_shard_published_timestamp_seconds": MetricSpec("when replicas last had everything"),
    "roostream_shard_published_keys_total": MetricSpec("keys sent in deltas"),
    "roostream_shard_republished_keys_total": MetricSpec("keys published again after a rollback"),
}


def serve(config: ShardConfig, stop: threading.Event) -> None:
    """Run a shard until `stop` is set.

    Raises:
        ConfigError, SetupError: a setting, the schema, the port or the data directory cannot be used.
    """
    threads = ThreadGroup(stop)
    health, credentials = Health(config.stalled_after_ms / 1000), config.link_credentials()
    with contextlib.ExitStack() as opened:  # closed in the reverse order
        segment_store = RocksDbStore(Path(config.home) / "segments")
        shard = build_shard(config, segment_store)  # 1
        # Before kernels: the very first start compiles for a minute.
        at = metrics_server.serve(config, health)
        precompile()
        segment_store.open()
        opened.callback(segment_store.close)
        latency = StageHistogram("roostream_shard_call_seconds", "time to answer a call", registry=None)
        address = _listen(config, credentials, shard, latency, opened)  # 2
        topic = KafkaRows(config.broker, config.prefix) if config.bootstrap else None
        publisher = (
            Publisher(shard, topic, shard.clock, interval_ms=config.publish_interval_ms) if topic else None
        )
        opened.enter_context(exported(lambda: metrics_of(shard, publisher), METRICS))
        opened.callback(REGISTRY.unregister, latency.histogram)
        REGISTRY.register(latency.histogram)  # 3
        if publisher and topic:
            opened.callback(topic.close)
            opened.callback(threads.join, _JOIN_S)
            threads.start(
                "topics", clients.check_topics, config.broker, config.prefix, (ROWS,), config.partitions, stop
            )
            threads.start("publisher", publisher.run, stop)  # 4
        ending, left = StopBudget(stop, STOP_S), threading.Event()
        member = _start_member(config, credentials, shard, ending, left, opened)  # 5
        log.info(
            "shard %d of %d listens on %s, metrics on port %d", config.index, config.num_shards, address, at
        )
        while not (stop.wait(_TURN_S) or left.is_set()):
            member.check()
            if shard.answers(_TURN_S):  # else the loop does not turn: a deadlock fails the health probe
                waiting = "" if shard.ready else "waiting for the controller to restore it"
                health.turned(member.refused or waiting)
        member.leave(ending, _CLOSING_S)
        member.check()
    threads.check()


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
    return Shard(
        identity,
        segments,
        open_checkpoint_store(config.store),
        SystemClock(),
        eviction=eviction,
        uploads=config.uploads,
    )


def _listen(
    config: ShardConfig,
    credentials: LinkCredentials,
    shard: Shard,
    latency: StageHistogram,
    opened: contextlib.ExitStack,
) -> str:
    host, port = parse_address(config.listen)
    server = RpcServer(
        timed(ShardRpcHandler(shard).handle, latency), host, port, credentials=credentials
    ).start()

    def close() -> None:
        if cut_off := server.stop():
            log.warning("%d running calls were cut off", cut_off)

    opened.callback(close)
    opened.callback(shard.leave)
    return server.address


def _start_member(
    config: ShardConfig,
    credentials: LinkCredentials,
    shard: Shard,
    ending: StopBudget,
    left: threading.Event,
    opened: contextlib.ExitStack,
) -> ControllerAgent:
    def dial() -> SocketTransport:
        return SocketTransport(config.controller, credentials=credentials)

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


def metrics_of(shard: Shard, publisher: Publisher | None) -> dict[str, Any]:
    """Full metric name → value."""
    stats = shard.stats()
    metrics = {
        "roostream_shard_rows": stats["rows"],
        "roostream_shard_incarnation": stats["incarnation"],
        "roostream_shard_committed_seq": stats["committed_seq"],
        "roostream_shard_segments": stats["segments"],
        "roostream_shard_bytes": stats["bytes"],
        "roostream_shard_changed_rows": stats["dirty"],
        "roostream_shard_expiry_skipped_rows_total": stats["spared"],
        "roostream_shard_unpublishable_rows_total": stats["withheld"],
        "roostream_shard_clipped_gradient_rows_total": stats["limited"],
        "roostream_shard_largest_accumulator": stats["largest_accumulator"],
        "roostream_shard_damaged_segment_parts": stats["damaged"],
        "roostream_shard_found_damaged_segment_parts_total": stats["damages"],
        "roostream_shard_sent_bytes_total": stats["sent_bytes"],
        "roostream_shard_fetched_bytes_total": stats["fetched_bytes"],
        "roostream_shard_pulls_total": stats["pulls"],
        "roostream_shard_pushes_total": stats["pushes"],
        "roostream_shard_duplicate_pushes_total": stats["repeats"],
        "roostream_shard_waiting_pushes": stats["waiting"],
        "roostream_shard_ready": stats["ready"],
    }
    if publisher:
        metrics |= {
            "roostream_shard_published_timestamp_seconds": publisher.published_at_ms / 1000,
            "roostream_shard_published_keys_total": publisher.num_keys,
            "roostream_shard_republished_keys_total": publisher.num_republished,
        }
    return metrics

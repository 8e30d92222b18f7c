"""A shard process: rows behind a port, led by the controller, followed by readers of `rows`.

Start: 1 schema, probes, kernels, segments  2 listen  3 metrics  4 publish  5 dial the controller, whose RESTORE brings the rows
Stop:  1 the member, once what was trained is committed or there is no controller (a command in hand may end)  2 calls in hand
       3 the publisher  4 segments
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

STOP_S = (
    8.0  # for the last commit after SIGTERM, below roostream.runtime.program.STOP_S with what comes behind it
)
_CLOSING_S = 2.0  # of it, or of a notice, kept for that
_JOIN_S = 5.0
_TURN_S = 0.5

_HELPS = {
    "rows": "rows in memory",
    "incarnation": "incarnation in which calls are answered",
    "committed_seq": "number of the last commit",
    "segments": "segments of the last commit",
    "bytes": "memory of the rows",
    "dirty": "rows changed since the last freeze",
    "spared": "rows due to expire and kept, since they were more than max_expired_share",
    "withheld": "rows not published: not finite, or larger than max_publish_norm",
    "limited": "rows of gradients that were scaled down to what a rule's state can hold",
    "largest_accumulator": "largest accumulator of squares that was written or read back since the start",
    "damaged": "parts of the committed segments that are damaged now; the next commit writes their rows again",
    "damages": "parts of segments that were found damaged since the start",
    "pulls": "pulls answered",
    "pushes": "pushes applied",
    "repeats": "pushes that had been applied before",
    "waiting": "pushes that wait for the other workers' of their step",
    "ready": "1 = restored",
    "published_at_ms": "when readers last had everything",
    "published_keys": "keys sent in deltas",
    "republished_keys": "keys seen behind barriers",
}


def run(config: ShardConfig) -> int:
    """Until SIGTERM; the process's exit code (roostream/runtime/program.py)."""
    return program.run("shard", lambda stop: serve(config, stop), config.log_format)


def serve(config: ShardConfig, stop: threading.Event) -> None:
    """Run a shard until `stop` is set.

    Raises:
        ConfigError, SetupError: a setting, the schema, the port or the data directory can't be used.
    """
    crew = ThreadGroup(stop)
    health, keys = Health(config.stalled_after_ms / 1000), config.link_credentials()
    with contextlib.ExitStack() as opened:  # closed in the reverse order
        blobs = RocksDbStore(Path(config.home) / "segments")
        shard = build_shard(config, blobs)  # 1
        at = metrics_server.serve(
            config, health
        )  # before kernels, which the first start of all compiles for a minute
        precompile()
        blobs.open()
        opened.callback(blobs.close)
        latency = StageHistogram("roostream_shard_call_seconds", "time to answer a call", registry=None)
        address = _listen(config, keys, shard, latency, opened)  # 2
        topic = KafkaRows(config.broker, config.prefix) if config.bootstrap else None
        publisher = (
            Publisher(shard, topic, shard.clock, interval_ms=config.publish_interval_ms) if topic else None
        )
        exported = shard_exports(shard, publisher)
        opened.callback(exported.unregister)
        exported.register()
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
        while not (stop.wait(_TURN_S) or left.is_set()):  # a lock that nobody gives back stops the turns
            health.turned("" if shard.stats()["ready"] else "it waits for the controller to restore it")
        member.leave(ending, _CLOSING_S)
    crew.check()


def build_shard(config: ShardConfig, blobs: KeyValueStore) -> Shard:
    """A shard as configured, over blobs that may be opened later; nothing is restored yet."""
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
        blobs,
        shapes_of(identity.schema),
        identity.num_buckets,
        accepted=config.accept_lost_rows,
        keep=config.keep_commits,
    )
    residency = functools.partial(ExpiryPolicy, max_share=config.max_expired_share)
    return Shard(identity, segments, open_store(config.store), SystemClock(), residency=residency)


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
            log.warning("%d calls were cut off", cut_off)

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
            log.warning("stopped while a command of the controller was being done")

    opened.callback(close)
    return member.start()


def timed(handler: Handler, latency: StageHistogram) -> Handler:
    """`handler`, with the time of each call observed under its method."""

    def handle(method: str, header: Header, arrays: list[np.ndarray]) -> tuple[Header, Sequence[np.ndarray]]:
        began_s = time.perf_counter()
        answer = handler(method, header, arrays)
        latency.observe(method, (time.perf_counter() - began_s) * 1000)
        return answer

    return handle


def shard_exports(shard: Shard, publisher: Publisher | None) -> MetricsCollector:
    """`roostream_shard_<what>`; rows by stack."""

    def read() -> dict[str, Any]:
        stats = shard.stats()
        shown = {name: stats[name] for name in _HELPS if name in stats}
        if publisher:
            shown |= {
                "published_at_ms": publisher.published_at_ms,
                "published_keys": publisher.num_keys,
                "republished_keys": publisher.num_republished,
            }
        return shown

    return MetricsCollector("shard", read, {"rows": "stack", "largest_accumulator": "stack"}, helps=_HELPS)

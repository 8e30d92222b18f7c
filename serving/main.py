"""`roostream serving`: one process from start to end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from functools import partial

import torch

from runtime import metrics, program
from runtime.crew import Crew
from runtime.health import Health
from runtime.kafka import clients
from runtime.kafka.topics import EVENTS, ROWS
from serving import heartbeat, http_server
from serving.app import build_app
from serving.build import Process, build_process, warm
from serving.config import ServingConfig

log = logging.getLogger("roostream.serving")

# The scoring thread and the event loop share the interpreter: hand it over sooner than after the usual 5 ms.
SWITCH_INTERVAL_S = 0.0005
JOIN_S = 5.0


def run(config: ServingConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `runtime.program.run`."""
    return program.run("serving", lambda stop: serve(config, stop))


def serve(config: ServingConfig, stop: threading.Event) -> None:
    """Start, serve until `stop`, and end in this order:

    1 accept nothing more
    2 finish the requests in flight                    (drain_ms)
    3 heartbeats and followers end                     (JOIN_S each)
    4 what the log holds goes to Kafka                 (drain_ms; the rest is sent at the next start)
    5 close

    Raises:
        ConfigError, SetupError: a setting is wrong, or port, home or store can't be used. Kafka, Redis, shards and commits
            may be away: they are waited for while requests are answered.
    """
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    health = Health(config.stalled_after_ms / 1000)
    with contextlib.closing(http_server.bind(config.listen)) as bound:
        process = build_process(config)
        metrics.serve(config, health, process.parts.metrics.registry)
        halt, crew = threading.Event(), Crew(stop)
        process.dense.poll()
        warm(process.parts)
        _start_threads(crew, process, halt)
        http_server.run(build_app(process.parts), bound, stop, config.drain_ms, lambda: health.turned(_missing(process)))
    _end(process, crew, halt)
    crew.check()


def _missing(process: Process) -> str:
    return ", ".join(process.parts.waiting_for())


def _start_threads(crew: Crew, process: Process, halt: threading.Event) -> None:
    parts, config = process.parts, process.parts.config
    beat = partial(heartbeat.beat, parts.log, parts.stamps, process.producer, config.partitions)
    crew.start("heartbeat", heartbeat.run, beat, config.heartbeat_ms, process.clock, halt)
    topics = (*EVENTS, ROWS)
    crew.start("topics", clients.check_topics, config.broker, config.prefix, topics, config.partitions, halt)
    crew.start("log", process.sender.run, halt)
    crew.start("rows", process.rows.run, halt)
    crew.start("dense", process.dense.run, process.clock, halt)


def _end(process: Process, crew: Crew, halt: threading.Event) -> None:
    """Steps 3 to 5."""
    halt.set()
    process.parts.log.appended.set()
    late = crew.join(JOIN_S)
    if late:
        log.warning("threads that did not end in %g s: %s; the log is sent at the next start", JOIN_S, ", ".join(late))
        return
    left = process.sender.drain(process.parts.config.drain_ms / 1000, process.clock.monotonic_s)
    if left:
        log.warning("%d records of the log stay for the next start", left)
    process.close()

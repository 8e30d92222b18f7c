"""`roostream serving`: one process from start to end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from functools import partial

import torch

from roostream.runtime import metrics_server, program
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import EVENTS, ROWS
from roostream.runtime.thread_group import StopBudget, ThreadGroup
from serving import heartbeat
from serving.access.key_file import Keyring
from serving.admin import admin_server
from serving.admin.admin_token import AdminToken, read_token
from serving.admin.desk import ROOT, AdminDesk
from serving.build import Process, build_process, warm
from serving.config import ServingConfig
from serving.http import http_server
from serving.http.app import HttpInterface

log = logging.getLogger("roostream.serving")

# Scoring thread and event loop share the interpreter where a pass isn't made in the loop: hand it over sooner than after 5 ms.
SWITCH_INTERVAL_S = 0.0005
JOIN_S = 5.0
CLOSE_S = 4.0  # what is kept of a stop's time for closing, and for the interpreter to end


def run(config: ServingConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `roostream.runtime.program.run`."""
    return program.run("serving", lambda stop: serve(config, stop), config.log_format)


def serve(config: ServingConfig, stop: threading.Event) -> None:
    """Start, serve until `stop`, and end in this order:

    0 say so: not ready, and every answer is its connection's last              (drain_ms)
    1 accept nothing more (with reuse_port: from the beginning); nobody waits for the rest of a body
    2 finish the requests in flight
    3 heartbeats and followers end                     (JOIN_S)
    4 what the log holds goes to Kafka, while it takes something; the rest is sent at the next start
    5 close

    All of it within `stop_ms`, of which 0 to 2 get a half at most, and 4 what is left.

    Raises:
        ConfigError, SetupError: a setting is wrong, or port, home or store can't be used. Kafka, Redis, shards and commits
            may be away: they are waited for while requests are answered.
    """
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    health = Health(config.stalled_after_ms / 1000)
    with contextlib.ExitStack() as resources:
        bound = resources.enter_context(
            contextlib.closing(http_server.bind(config.listen, reuse_port=config.reuse_port))
        )
        process = build_process(config, is_stopping=stop.is_set)
        metrics_server.serve(config, health, process.parts.metrics.registry, tls=process.parts.tls)
        halt, crew = threading.Event(), ThreadGroup(stop)
        warm(process.parts)  # what that scored, the first version that is loaded is tried with
        process.dense.poll()
        process.recent.forget_slow()
        _start_threads(crew, process, halt)
        _start_admin(crew, process, halt, resources)
        budget = StopBudget(stop, config.stop_ms / 1000, process.clock)
        app = HttpInterface(process.parts)
        process.quiet.in_flight, app.gate.emptied = (lambda: app.gate.in_flight), process.quiet.came
        http_server.run(app, bound, budget, lambda: health.turned(_missing(process)))
    _end(process, crew, halt, budget)
    crew.check()


def _missing(process: Process) -> str:
    return ", ".join(process.parts.waiting_for())


def _start_threads(crew: ThreadGroup, process: Process, halt: threading.Event) -> None:
    parts, config = process.parts, process.parts.config
    beat = partial(heartbeat.beat, parts.log, parts.stamps, process.producer, config.partitions)
    crew.start("heartbeat", heartbeat.run, beat, config.heartbeat_ms, process.clock, halt)
    topics = (*EVENTS, ROWS)
    crew.start("topics", clients.check_topics, config.broker, config.prefix, topics, config.partitions, halt)
    crew.start("log", process.sender.run, halt)
    crew.start("rows", process.rows.run, halt)
    crew.start("dense", process.dense.run, process.clock, halt)
    crew.start("shadow", process.shadow.run, halt)
    if parts.items is not None:
        crew.start("items", parts.items.run, halt)
    if parts.keys is not None:
        crew.start("keys", parts.keys.run, halt)
    if parts.tls is not None:
        crew.start("tls", parts.tls.run, halt)


def _start_admin(
    crew: ThreadGroup, process: Process, halt: threading.Event, resources: contextlib.ExitStack
) -> None:
    """Raises ConfigError: its token can't be read; SetupError: its port is taken."""
    service, config = process.parts.service, process.parts.config
    if not config.admin_listen:
        return
    desk = AdminDesk(service.versions, process.recent, process.shadow, service.credits, process.clock.now_ms)
    app = admin_server.AdminInterface(desk, _admin_token(process))
    bound = resources.enter_context(contextlib.closing(http_server.bind(config.admin_listen, "admin_listen")))
    tls = process.parts.tls
    log.info("admin interface on http%s://%s:%d%s", "s" if tls else "", *bound.getsockname()[:2], ROOT)
    crew.start("admin", admin_server.run, app, bound, tls, halt)


def _admin_token(process: Process) -> AdminToken | Keyring:
    """The token's file, where there is one; else keys with scope admin."""
    file, keys = process.parts.config.admin_token_file, process.parts.keys
    return read_token(file) if file or keys is None else keys


def _end(process: Process, crew: ThreadGroup, halt: threading.Event, budget: StopBudget) -> None:
    """Steps 3 to 5."""
    halt.set()
    process.parts.log.appended.set()
    late = crew.join(min(JOIN_S, budget.left_s()))
    if late:
        log.warning(
            "threads that did not end in time: %s; the log is sent at the next start", ", ".join(late)
        )
        return
    left = process.sender.drain(max(budget.left_s() - CLOSE_S, 0.0), process.clock.monotonic_s)
    if left:
        log.warning("%d records of the log stay for the next start", left)
    process.close()

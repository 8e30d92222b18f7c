"""`roostream serving`: runs one serving process from start to stop."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from functools import partial

import torch

from roostream.runtime import metrics_server
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import EVENTS
from roostream.runtime.store_identity import open_checkpoint_store, wait_for_store
from roostream.runtime.thread_group import StopBudget, ThreadGroup
from roostream.runtime.tls import TlsContext
from roostream.schema.registry import register
from roostream.schema.schema_file import load_schema
from serving import admin, heartbeat
from serving.build import ServingProcess, build_process, precompile
from serving.config import ServingConfig
from serving.http import server as http_server
from serving.http.app import HttpInterface

log = logging.getLogger("roostream.serving")

# The scoring thread and the event loop share the interpreter; 5 ms, Python's default, would delay answers.
SWITCH_INTERVAL_S = 0.0005
JOIN_S = 5.0
CLOSE_S = 4.0  # reserved at the end of a stop for closing files and for the interpreter to exit


def serve(config: ServingConfig, stop: threading.Event) -> None:
    """Start, serve until `stop`, then stop in this order:

    0 report not ready and answer every request with `connection: close`, for at most `drain_ms`
    1 accept no more connections (with `reuse_port`: from step 0 on) and stop waiting for incomplete bodies
    2 finish the requests in flight
    3 stop heartbeats and followers, for at most JOIN_S
    4 send the feature log to Kafka, also if Kafka is unavailable at first; the next start with this home
      sends what is left
    5 close

    All of it takes at most `stop_ms`: steps 0 to 2 at most half of it, step 4 what is left.

    Raises:
        ConfigError, SetupError: a setting is wrong, or the port or home directory cannot be used.

    The checkpoint store is waited for: without it there is no model to score with, and processes that share
    the port would lose the requests that this one cannot answer. Kafka, Redis, shards and commits may be
    missing: requests are answered meanwhile.
    """
    torch.set_num_threads(config.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    health = Health(config.stalled_after_ms / 1000)
    schema, store = load_schema(config.schema), open_checkpoint_store(config.store)
    tls = TlsContext(config) if config.tls_certificate else None
    with contextlib.ExitStack() as resources:
        metrics_server.serve(config, health, tls=tls)
        wait_for_store(lambda: register(store, schema), stop, health=health)
        socket = http_server.bind(config.listen, reuse_port=config.reuse_port)
        resources.enter_context(contextlib.closing(socket))
        process = build_process(config, store, tls=tls, is_stopping=stop.is_set)
        context, versions = process.context, process.version_follower
        halt, threads = threading.Event(), ThreadGroup(stop)
        precompile(context)  # these requests also warm up the first version that is loaded
        versions.poll()
        process.recent.end_warm_up()
        _start_threads(threads, process, halt)
        _start_admin(threads, process, halt, resources)
        budget = StopBudget(stop, config.stop_ms / 1000, process.clock)
        app = HttpInterface(context)
        process.idle_gate.in_flight = lambda: app.gate.in_flight
        app.gate.on_idle = process.idle_gate.notify_idle
        http_server.run(app, socket, budget, lambda: health.turned(", ".join(context.waiting_for())))
    with health.waiting("Kafka, for the rest of the feature log"):
        stop_process(process, threads, halt, budget)
    threads.check()


def _start_threads(threads: ThreadGroup, process: ServingProcess, halt: threading.Event) -> None:
    context, config = process.context, process.context.config
    beat = partial(heartbeat.beat, context.log, context.watermark, process.producer, config.partitions)
    threads.start("heartbeat", heartbeat.run, beat, config.heartbeat_ms, process.clock, halt)
    threads.start(
        "topics", clients.check_topics, config.broker, config.prefix, EVENTS, config.partitions, halt
    )
    threads.start("log", process.sender.run, halt)
    threads.start("rows", process.rows.run, halt)
    threads.start("dense", process.version_follower.run, process.clock, halt)
    threads.start("shadow", process.shadow.run, halt)
    if context.items is not None:
        threads.start("items", context.items.run, halt)
    if context.keys is not None:
        threads.start("keys", context.keys.run, halt)
    if context.tls is not None:
        threads.start("tls", context.tls.run, halt)


def _start_admin(
    threads: ThreadGroup, process: ServingProcess, halt: threading.Event, resources: contextlib.ExitStack
) -> None:
    """Raises ConfigError: the token file cannot be read. Raises SetupError: the port is taken."""
    context = process.context
    service, config, tls = context.service, context.config, context.tls
    if not config.admin_listen:
        return
    admin_service = admin.AdminService(
        service.versions, process.recent, process.shadow, service.interleaving_stats, process.clock.now_ms
    )
    # Without a token file, bearer keys with the scope `admin` are accepted.
    token = (
        admin.read_token(config.admin_token_file)
        if config.admin_token_file or not context.keys
        else context.keys
    )
    app = admin.AdminInterface(admin_service, token)
    socket = resources.enter_context(
        contextlib.closing(http_server.bind(config.admin_listen, "admin_listen"))
    )
    log.info("admin interface on %s%s", http_server.url_of(socket, tls is not None), admin.ROOT)
    threads.start("admin", admin.run, app, socket, tls, halt)


def stop_process(
    process: ServingProcess, threads: ThreadGroup, halt: threading.Event, budget: StopBudget
) -> None:
    """Steps 3 to 5 of `serve`."""
    halt.set()
    process.context.log.appended.set()
    late = threads.join(min(JOIN_S, budget.left_s()))
    left, waited_s = process.context.log.backlog_records, 0.0
    if "log" not in late:  # other threads may wait for a peer that is away; the sender needs none of them
        waited_s = max(budget.left_s() - CLOSE_S, 0.0)
        left = process.sender.drain(waited_s, process.clock.monotonic_s)
    if left:
        log.warning(
            "Kafka did not take %d records of the feature log within %.0f s; they stay in %s. The next start "
            "with this home sends them; if the folder is deleted before, as with a pod, they are lost",
            left,
            waited_s,
            process.context.log.directory,
        )
    if late := threads.join(0.0):
        log.warning("threads %s did not end in time", ", ".join(late))
        return
    process.close()

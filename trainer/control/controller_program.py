"""The controller's process: opens what the controller needs, serves its calls, and ends in order."""

from __future__ import annotations

import logging
import threading
from typing import Any

from roo.errors import UnavailableError
from roo.schema_file import load_schema
from roo.schema_registry import open_registry, register
from runtime import metrics
from runtime.address import parse_address
from runtime.backoff import Backoff
from runtime.checkpoint_store import open_store
from runtime.clock import SystemClock
from runtime.exports import Exports, one_of
from runtime.health import Health
from runtime.program import Stop
from runtime.rpc_server import RpcServer
from trainer.config import ControllerConfig
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.neighbours import Neighbours
from trainer.control.page import StatusPage, files
from trainer.control.protocol import Facts, State
from trainer.identity import Identity, kafka_identity

log = logging.getLogger("roostream.controller")

_CLOSING_S = 8.0  # after SIGTERM, for a last commit; below runtime.program.STOP_S
_SHOWN = (
    *("incarnation", "seq", "commit_age_ms", "commit_ms", "paused_ms", "commits", "aborts", "rollbacks"),
    *("workers", "wanted_workers"),
)

_LABELS = {"state": "state", "device_s": "spent_on", "commit_phase_ms": "phase"}


def control(config: ControllerConfig, stop: Stop) -> None:
    """Until `stop` is set or it is preempted, and what is trained is committed.

    Raises:
        RoostreamError: a newer controller exists, or what is committed belongs to other settings; says which.
    """
    health = Health(config.stalled_after_ms / 1000)
    schema = load_schema(config.schema)
    pages = files()
    at = metrics.serve(config, health, pages=pages)
    log.info("the page of this controller is at http://%s:%d/", config.metrics_host, at)
    host, port = parse_address(config.listen)
    store, clock = open_store(config.store), SystemClock()
    Backoff(what="the checkpoint store").until(lambda: register(store, schema), (UnavailableError,), stop)
    kafka = kafka_identity(config.broker, config.prefix, config.partitions, stop)
    identity = Identity(
        schema=schema,
        registry=open_registry(store),
        kafka=kafka,
        num_shards=config.num_shards,
        num_buckets=config.buckets,
        num_partitions=config.partitions,
        seed=config.seed,
    )
    facts = Facts(
        schema=f"{schema.fingerprint:016x}",
        seed=config.seed,
        num_shards=config.num_shards,
        num_workers=config.num_workers,
        num_buckets=identity.num_buckets,
        num_partitions=identity.num_partitions,
        kafka=kafka,
        commit_interval_s=config.commit_interval_ms / 1000,
    )
    coordinator = Coordinator(facts, clock.monotonic_s())
    controller = Controller(coordinator, store, clock, check=identity.check, keep_commits=config.keep_commits)
    neighbours = Neighbours(config.neighbour_urls, clock, workers=controller.workers_seen_at)
    page = StatusPage(controller, neighbours, interval_ms=config.commit_interval_ms)
    pages |= page.answers()

    def turned() -> None:
        health.turned("" if controller.coordinator.incarnation else "it claims an incarnation")
        page.observe()

    server = RpcServer(controller.handle, host, port, insecure=config.insecure)
    server.start()
    log.info("controller on %s", server.address)
    threading.Thread(target=neighbours.run, args=(stop,), name="neighbours", daemon=True).start()
    try:
        Exports("controller", lambda: _gauges(controller.status()), _LABELS).register()
        controller.run(stop, turned, _CLOSING_S)
    finally:
        server.stop()


def _gauges(status: dict[str, Any]) -> dict[str, Any]:
    own = {"device_s": status["device_s"], "held": bool(status["holds"]), "commit_phase_ms": status["phases_ms"]}
    return {**{name: status[name] for name in _SHOWN}, **own, "state": one_of(status["state"], tuple(State))}

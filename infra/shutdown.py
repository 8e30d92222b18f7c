"""Ordered shutdown of a stack: time limits for each step, and a report of what was cut off.

1 simulated traffic      no new requests
2 serving                answers the requests in flight, writes its log to Kafka
3 the joiner's job       a savepoint, from which the next start continues
4 commit                 everything that was trained
5 worker, 6 controller, 7 shards, 8 features and auditor, 9 Redis, 10 Flink, 11 Kafka
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from infra.child import STOP_TIMEOUT_S, StopRank
from infra.flink_cluster import flink_url
from infra.home import Home
from infra.ports import Endpoints
from infra.supervisor import Supervisor
from roostream.errors import RoostreamError
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.rpc.client import SocketTransport

log = logging.getLogger("roostream.stack")
_SAVEPOINT_S = 30.0
_COMMIT_S = 15.0
MAX_SHUTDOWN_S = len(StopRank) * STOP_TIMEOUT_S + _SAVEPOINT_S + _COMMIT_S


@dataclasses.dataclass(kw_only=True)
class ShutdownReport:
    """What a shutdown cut off: programs killed after their time limit, and steps that failed."""

    killed: list[str] = dataclasses.field(default_factory=list)
    failed_steps: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_cut_off(self) -> int:
        return len(self.killed) + len(self.failed_steps)

    def __str__(self) -> str:
        if not self.num_cut_off:
            return "everything stopped in order, nothing was cut off"
        return f"stopped; cut off: {', '.join([*self.killed, *self.failed_steps])}"


def shut_down(supervisor: Supervisor, endpoints: Endpoints, home: Home) -> ShutdownReport:
    """Stop all programs of a stack in order. A step that fails is reported, and the next one follows."""
    report = ShutdownReport()
    supervisor.halting = True
    for rank in StopRank:
        if rank is StopRank.WORKER:
            if _is_ready(supervisor, "flink-jm"):
                _attempt("savepoint", report, lambda: _take_savepoint(endpoints.flink, home.root / "flink"))
            if _is_ready(supervisor, "controller") and _is_ready(supervisor, "worker"):
                _attempt("commit", report, lambda: _commit(endpoints.controller))
        names = [name for name, slot in list(supervisor.slots.items()) if slot.program.stop_rank is rank]
        if names:
            log.info("stopping %s", ", ".join(names))
            report.killed += supervisor.stop(names)
    return report


def _is_ready(supervisor: Supervisor, name: str) -> bool:
    slot = supervisor.slots.get(name)
    return slot is not None and slot.state == "ready"


def _attempt(what: str, report: ShutdownReport, step: Callable[[], None]) -> None:
    """Do a step; report it if it fails."""
    try:
        step()
    except RoostreamError as error:
        log.warning("the last %s failed (%s); the next start continues from the one before", what, error)
        report.failed_steps.append(what)


def _take_savepoint(url: str, flink: Path) -> None:
    flink_rest = FlinkRest(url)
    job = flink_rest.live_job()
    if job is not None:
        log.info("taking a savepoint of the joiner's job")
        flink_rest.stop_with_savepoint(job["jid"], flink_url(flink / "savepoints"), _SAVEPOINT_S)


def _commit(controller: str) -> None:
    log.info("committing what was trained")
    transport = SocketTransport(controller)
    try:
        transport.call("commit", {"timeout_s": _COMMIT_S}, timeout_s=_COMMIT_S + 5)
    finally:
        transport.close()

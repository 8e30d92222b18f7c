"""How a stack stops: a written order, a time limit for each step, and a count of what was cut off.

1 simulated traffic      no new requests
2 serving                answers what is in flight, brings its log to Kafka
3 the joiner's job       a savepoint, from which the next start goes on
4 commit                 what was trained until now
5 worker, 6 controller, 7 shards, 8 features and auditor, 9 Redis, 10 Flink, 11 Kafka
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from infra.child import GRACE_S, StopRank
from infra.home import Home
from infra.places import Endpoints
from infra.supervisor import Supervisor
from roostream.errors import RoostreamError
from roostream.runtime.flink_rest import FlinkRest
from roostream.runtime.rpc.client import SocketTransport

log = logging.getLogger("roostream.stack")
_SAVEPOINT_S = 30.0
_COMMIT_S = 15.0
MAX_S = len(StopRank) * GRACE_S + _SAVEPOINT_S + _COMMIT_S
"""No stop takes longer: one rank after the other, each as long as the slowest of its programs may take."""


@dataclasses.dataclass(kw_only=True)
class Stopped:
    """What a stop cut off: programs that were killed after their time limit, and steps that failed."""

    killed: list[str] = dataclasses.field(default_factory=list)
    missed: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_cut_off(self) -> int:
        return len(self.killed) + len(self.missed)

    def __str__(self) -> str:
        if not self.num_cut_off:
            return "everything stopped in order, nothing was cut off"
        return f"stopped; cut off: {', '.join([*self.killed, *self.missed])}"


def stop(supervisor: Supervisor, at: Endpoints, home: Home) -> Stopped:
    """End all programs of a stack, in order; never raises for a step that fails, the next one follows."""
    stopped = Stopped()
    supervisor.halting = True
    for rank in StopRank:
        if rank is StopRank.WORKER:
            _settle(supervisor, at, home, stopped)
        chosen = [name for name, slot in list(supervisor.slots.items()) if slot.program.stop_rank is rank]
        if chosen:
            log.info("stopping %s", ", ".join(chosen))
            stopped.killed += supervisor.stop(chosen)
    return stopped


def _settle(supervisor: Supervisor, at: Endpoints, home: Home, stopped: Stopped) -> None:
    """3 and 4: nothing new comes any more; what is joined and trained until now becomes what the next start goes on from."""
    if _ready(supervisor, "flink-jm"):
        _attempt("savepoint", stopped, lambda: _savepoint(at.flink, home.root / "flink"))
    if _ready(supervisor, "controller") and _ready(supervisor, "worker"):
        _attempt("commit", stopped, lambda: _commit(at.controller))


def _ready(supervisor: Supervisor, name: str) -> bool:
    slot = supervisor.slots.get(name)
    return slot is not None and slot.state == "ready"


def _attempt(what: str, stopped: Stopped, step: Callable[[], None]) -> None:
    try:
        step()
    except RoostreamError as error:
        log.warning("%s: %s; the next start goes on from the one before", what, error)
        stopped.missed.append(what)


def _savepoint(url: str, flink: Path) -> None:
    flink_rest = FlinkRest(url)
    job = flink_rest.live_job()
    if job is not None:
        log.info("taking a savepoint of the joiner's job")
        flink_rest.stop_with_savepoint(job["jid"], (flink / "savepoints").as_uri(), _SAVEPOINT_S)


def _commit(controller: str) -> None:
    log.info("committing what was trained")
    transport = SocketTransport(controller)
    try:
        transport.call("commit", {"timeout_s": _COMMIT_S}, timeout_s=_COMMIT_S + 5)
    finally:
        transport.close()

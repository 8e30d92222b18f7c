"""Keeps as many worker and reader programs running as the controller requests.

The controller stores the wanted numbers, also across restarts, but starts no program itself. A stack reads
its status every second, starts missing workers, and stops surplus ones once the controller trains without
them. So `roostream scale` talks to the controller only. A worker that a user stopped stays stopped.

Readers come and go with the session that is read and with the time workers wait for input
(docs/decisions/0073). Surplus readers deliver what they have read, end, and are removed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from infra.program_specs import READER, WORKER
from roostream.errors import RoostreamError
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.rpc.client import SocketTransport

log = logging.getLogger("roostream.stack")

_POLL_S = 1.0
_TIMEOUT_S = 1.0
_STATES_WITH_SESSION = ("running", "committing")  # in others the controller does not know yet what is read
_STOPPABLE = ("waiting", "starting", "ready")


class ProgramCopies(Protocol):
    """The copies of a program, by number. `infra.stack.Stack`, which cannot be imported here."""

    def copies(self, program: str) -> Mapping[int, str]:
        """Number → state of the copies that were started and not removed."""

    def start_copy(self, program: str, number: int) -> None: ...

    def stop_copy(self, program: str, number: int) -> None: ...

    def remove_copy(self, program: str, number: int) -> None:
        """Stop it and forget that it was started."""


class ScalingSteps(NamedTuple):
    """Indices of workers to start and to stop."""

    start: list[int]
    stop: list[int]


def worker_steps(
    wanted: int, training: int, state: str, workers: Mapping[int, str], stopped_by_scaling: set[int]
) -> ScalingSteps:
    """Which workers to start and stop, given the controller's wanted number, the size of its incarnation and
    its state.

    Workers that ended because training was on hold start again when the hold is over.
    """
    if 0 not in workers or workers[0] == "stopped":  # this stack does not train
        return ScalingSteps([], [])
    idle = {n for n, s in workers.items() if s == "held" or (n in stopped_by_scaling and s == "stopped")}
    start = [n for n in range(wanted) if (n not in workers or n in idle) and state != "held"]
    is_settled = wanted == training and state == "running"
    stop = [n for n, s in workers.items() if is_settled and n >= wanted and s in _STOPPABLE]
    return ScalingSteps(start, stop)


def reader_steps(wanted: int, state: str, readers: Mapping[int, str]) -> ScalingSteps:
    """The same for readers. None is stopped while the controller does not know what is read.

    A reader that a user stopped, or that died too often, stays down.
    """
    start = [n for n in range(wanted) if n not in readers]
    surplus = [n for n, s in readers.items() if n >= wanted and s in _STOPPABLE]
    return ScalingSteps(start, surplus if state in _STATES_WITH_SESSION else [])


class Scaling:
    """Polls the controller in a thread of its own until `close`."""

    def __init__(self, programs: ProgramCopies, controller: str) -> None:
        self.programs = programs
        self._stopped_workers: set[int] = set()
        self._has_readers = False  # readers were started at least once
        self._stop, self._log_rate_limit = threading.Event(), LogRateLimit()
        self._transport = SocketTransport(controller)
        self._thread = threading.Thread(target=self._run, name="scaling", daemon=True)

    def open(self) -> Scaling:
        self._thread.start()
        return self

    def close(self) -> None:
        """Call before the programs are stopped; nothing is started afterwards. Idempotent."""
        self._stop.set()
        self._transport.close()
        if self._thread.is_alive():
            self._thread.join()

    def apply(self, status: Mapping[str, Any]) -> ScalingSteps:
        """Start and stop programs as one status of the controller requires. Returns the steps for workers."""
        wanted, training = int(status.get("wanted_workers", 1)), int(status.get("workers", 1))
        workers = self.programs.copies(WORKER)
        steps = worker_steps(wanted, training, str(status.get("state")), workers, self._stopped_workers)
        for number in steps.start:
            log.info("starting worker %d: the controller wants workers 0 to %d", number, wanted - 1)
            self._stopped_workers.discard(number)
            self.programs.start_copy(WORKER, number)
        for number in steps.stop:
            log.info("stopping worker %d: the controller wants workers 0 to %d", number, wanted - 1)
            self._stopped_workers.add(number)
            self.programs.stop_copy(WORKER, number)
        self._apply_to_readers(status)
        return steps

    def _apply_to_readers(self, status: Mapping[str, Any]) -> None:
        """A stack that was started without readers never gets one."""
        readers = self.programs.copies(READER)
        self._has_readers = self._has_readers or bool(readers)
        readers_status = status.get("readers")
        if not readers_status or not self._has_readers:
            return
        wanted = int(readers_status["wanted"])
        steps = reader_steps(wanted, str(status.get("state")), readers)
        for number in steps.start:
            log.info("%d readers are wanted: starting reader %d", wanted, number)
            self.programs.start_copy(READER, number)
        for number in steps.stop:
            log.info("%d readers are wanted: removing reader %d", wanted, number)
            self.programs.remove_copy(READER, number)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            if not self.programs.copies(WORKER):
                continue
            try:
                self.apply(self._transport.call("status", {}, timeout_s=_TIMEOUT_S)[0])
            except RoostreamError as error:  # no controller, or the stack ends
                log.debug("the controller's status is unknown: %s", error)
            except Exception as error:  # scaling goes on when it works again
                text = "workers and readers cannot be scaled now (this is a defect of Roostream): %r"
                self._log_rate_limit.warning(log, "defect", text, error)

"""As many worker programs as the controller wants: who asks it for more (`roostream scale`) needs no way to the supervisor.

The controller keeps the wish, also over restarts; it starts no program. A stack reads the wish every second, starts workers that
are missing, and ends those above it once the controller trains without them. A worker that a person stopped stays stopped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from roo.errors import RoostreamError
from runtime.rpc_client import SocketTransport

log = logging.getLogger("roostream.stack")

_LOOK_S = 1.0
_TIMEOUT_S = 1.0


class Programs(Protocol):
    """What a stack lets this do with its workers, by number."""

    def workers(self) -> Mapping[int, str]:
        """Those that were ever started → state."""

    def start_worker(self, number: int) -> None: ...

    def stop_worker(self, number: int) -> None: ...


class ToFollow(NamedTuple):
    start: list[int]
    stop: list[int]


def steps(wanted: int, training: int, state: str, workers: Mapping[int, str], stopped_here: set[int]) -> ToFollow:
    """What brings the workers to what the controller tells: how many it wants, how many are its incarnation's, its state. Those
    that rest since training is held are started when it no longer is."""
    if 0 not in workers or workers[0] == "stopped":  # training isn't wanted at all
        return ToFollow([], [])
    resting = {n for n, its in workers.items() if its == "held" or (n in stopped_here and its == "stopped")}
    start = [n for n in range(wanted) if (n not in workers or n in resting) and state != "held"]
    settled = wanted == training and state == "running"
    stop = [n for n, its in workers.items() if settled and n >= wanted and its in ("waiting", "starting", "ready")]
    return ToFollow(start, stop)


class Scaling:
    """Follows the wish from a thread of its own until `close`."""

    def __init__(self, programs: Programs, controller: str) -> None:
        self.programs = programs
        self._stopped_here: set[int] = set()
        self._stop = threading.Event()
        self._transport = SocketTransport(controller)
        self._thread = threading.Thread(target=self._run, name="scaling", daemon=True)

    def open(self) -> Scaling:
        self._thread.start()
        return self

    def close(self) -> None:
        """Before the programs are stopped: nothing is started any more. Idempotent."""
        self._stop.set()
        self._transport.close()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, status: Mapping[str, Any]) -> ToFollow:
        """Do what one status of the controller asks for."""
        wanted, training = int(status.get("wanted_workers", 1)), int(status.get("workers", 1))
        todo = steps(wanted, training, str(status.get("state")), self.programs.workers(), self._stopped_here)
        for number in todo.start:
            log.info("%d workers are wanted: worker %d is started", wanted, number)
            self._stopped_here.discard(number)
            self.programs.start_worker(number)
        for number in todo.stop:
            log.info("%d workers are wanted: worker %d is stopped", wanted, number)
            self._stopped_here.add(number)
            self.programs.stop_worker(number)
        return todo

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if not self.programs.workers():
                continue
            try:
                self.look(self._transport.call("status", {}, timeout_s=_TIMEOUT_S)[0])
            except RoostreamError as error:  # no controller, or the stack ends
                log.debug("how many workers are wanted isn't known: %s", error)

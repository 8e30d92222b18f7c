"""As many worker and reader programs as the controller wants: who asks it for more (`roostream scale`) needs no way to the
supervisor.

The controller keeps the wish, also over restarts; it starts no program. A stack reads the wish every second, starts workers that
are missing, and ends those above it once the controller trains without them. A worker that a person stopped stays stopped.

Readers come and go with the session that is read, and while it is with what its workers wait for (docs/decisions/0084): those
that nobody wants end when they have given what they have, and are forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from infra.kinds import READER, WORKER
from roostream.errors import RoostreamError
from roostream.runtime.rpc.client import SocketTransport

log = logging.getLogger("roostream.stack")

_LOOK_S = 1.0
_TIMEOUT_S = 1.0
_KNOWS = ("running", "committing")


class Programs(Protocol):
    """What a stack lets this do with its copies of a kind, by number."""

    def copies(self, kind: str) -> Mapping[int, str]:
        """Those that were ever started and aren't forgotten → state."""

    def start_copy(self, kind: str, number: int) -> None: ...

    def stop_copy(self, kind: str, number: int) -> None: ...

    def release_copy(self, kind: str, number: int) -> None:
        """End it and forget it."""


class ToFollow(NamedTuple):
    start: list[int]
    stop: list[int]


def steps(
    wanted: int, training: int, state: str, workers: Mapping[int, str], stopped_here: set[int]
) -> ToFollow:
    """What brings the workers to what the controller tells: how many it wants, how many are its incarnation's, its state. Those
    that rest since training is held are started when it no longer is."""
    if 0 not in workers or workers[0] == "stopped":  # training isn't wanted at all
        return ToFollow([], [])
    resting = {n for n, its in workers.items() if its == "held" or (n in stopped_here and its == "stopped")}
    start = [n for n in range(wanted) if (n not in workers or n in resting) and state != "held"]
    settled = wanted == training and state == "running"
    stop = [
        n for n, its in workers.items() if settled and n >= wanted and its in ("waiting", "starting", "ready")
    ]
    return ToFollow(start, stop)


def reader_steps(wanted: int, state: str, readers: Mapping[int, str]) -> ToFollow:
    """The same of readers. A controller that isn't running doesn't know yet what is read: none is ended meanwhile. One that a
    person stopped, or that died too often, stays down."""
    start = [n for n in range(wanted) if n not in readers]
    over = [n for n, its in readers.items() if n >= wanted and its in ("waiting", "starting", "ready")]
    return ToFollow(start, over if state in _KNOWS else [])


class Scaling:
    """Follows the wish from a thread of its own until `close`."""

    def __init__(self, programs: Programs, controller: str) -> None:
        self.programs = programs
        self._stopped_here: set[int] = set()
        self._has_readers = False  # they were started once
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
        workers = self.programs.copies(WORKER)
        todo = steps(wanted, training, str(status.get("state")), workers, self._stopped_here)
        for number in todo.start:
            log.info("%d workers are wanted: worker %d is started", wanted, number)
            self._stopped_here.discard(number)
            self.programs.start_copy(WORKER, number)
        for number in todo.stop:
            log.info("%d workers are wanted: worker %d is stopped", wanted, number)
            self._stopped_here.add(number)
            self.programs.stop_copy(WORKER, number)
        self._look_at_readers(status)
        return todo

    def _look_at_readers(self, status: Mapping[str, Any]) -> None:
        """Of a stack that was started without readers none are."""
        readers = self.programs.copies(READER)
        self._has_readers = self._has_readers or bool(readers)
        told = status.get("readers")
        if not told or not self._has_readers:
            return
        todo = reader_steps(int(told["wanted"]), str(status.get("state")), readers)
        for number in todo.start:
            log.info("%d readers are wanted: reader %d is started", told["wanted"], number)
            self.programs.start_copy(READER, number)
        for number in todo.stop:
            log.info("%d readers are wanted: reader %d ends", told["wanted"], number)
            self.programs.release_copy(READER, number)

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            if not self.programs.copies(WORKER):
                continue
            try:
                self.look(self._transport.call("status", {}, timeout_s=_TIMEOUT_S)[0])
            except RoostreamError as error:  # no controller, or the stack ends
                log.debug("how many workers are wanted isn't known: %s", error)

"""A shard's or worker's side of the controller: it dials, beats, and does each command once (docs/protocols.md, "Controller").

    beat thread      dials the controller over and over; the call is held there until there is a command
    command thread   does commands, one after the other, in the order in which they came
    answer thread    sends a result as soon as it is there, since a beat may be held just then

A command is known by (incarnation, id). Given again, it is not done again: its result is sent again.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from roo.errors import CheckpointError, FencedError, RoostreamError
from runtime.backoff import Backoff
from runtime.clock import Clock, SystemClock
from runtime.crew import Crew
from runtime.transport import Transport

log = logging.getLogger("roostream.member")

Command: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]

_KEPT_RESULTS = 256
_CALL_TIMEOUT_S = 3.0
_LEAST_BETWEEN_S = 0.05


class Member:
    """`execute(command)` gives the result's fields, or raises; `report()` what goes along with each beat.

    `execute` runs in the command thread only. An error of it is told to the controller, which decides; an error that is
    not a RoostreamError is logged with its traceback as well, and told likewise.
    """

    def __init__(
        self,
        transport_factory: Callable[[], Transport],
        role: str,
        index: int,
        execute: Callable[[Command], Result],
        report: Callable[[], dict[str, Any]],
        stop: threading.Event,
        *,
        clock: Clock | None = None,
        session: int | None = None,
    ) -> None:
        self.transport_factory, self.role, self.index = transport_factory, role, index
        self.execute, self.report, self.stop, self.clock = execute, report, stop, clock or SystemClock()
        self.session = session if session is not None else random.SystemRandom().getrandbits(63)
        self.incarnation = 0  # of the last RESTORE that worked
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done: OrderedDict[tuple[int, int], Result | None] = OrderedDict()  # None: not done yet
        self._untold: dict[tuple[int, int], Result] = {}
        self._told = threading.Event()
        self._answered_s = self.clock.monotonic_s()
        self._crew = Crew(stop)

    @property
    def silent_s(self) -> float:
        """Since the controller last answered."""
        return self.clock.monotonic_s() - self._answered_s

    def start(self) -> Member:
        """Begin to beat; self. Ends with `stop`; then `join`."""
        self._crew.start("member-beat", self._beat_loop)
        self._crew.start("member-commands", self._command_loop)
        self._crew.start("member-answers", self._answer_loop)
        return self

    def join(self, timeout_s: float = 5.0) -> bool:
        """After `stop` was set: wait for the threads; False if a command is still being done."""
        self._commands.put(None)
        self._told.set()
        return not self._crew.join(timeout_s)

    def _beat_loop(self) -> None:
        transport, backoff = self.transport_factory(), Backoff(what="the controller", clock=self.clock)
        try:
            while not self.stop.is_set():
                began_s = self.clock.monotonic_s()
                is_news = backoff.until(lambda: self.beat(transport), (RoostreamError,), self.stop)
                if not is_news and self.clock.monotonic_s() - began_s < _LEAST_BETWEEN_S:
                    self.clock.sleep(_LEAST_BETWEEN_S, self.stop)  # a command in hand is given again at once: don't spin
        except RoostreamError:
            log.debug("stopped while waiting for the controller")
        finally:
            transport.close()

    def beat(self, transport: Transport) -> bool:
        """One call; True if it brought a command that was not known. What it told is told."""
        with self._lock:
            telling = dict(self._untold)
        header = {
            "role": self.role,
            "index": self.index,
            "session": self.session,
            "incarnation": self.incarnation,
            "results": list(telling.values()),
            "report": self.report(),
        }
        answer, _ = transport.call("beat", header, timeout_s=_CALL_TIMEOUT_S)
        self._answered_s = self.clock.monotonic_s()
        with self._lock:
            for key, result in telling.items():
                if self._untold.get(key) is result:
                    del self._untold[key]
        return sum([self._take(command) for command in answer.get("commands", ())]) > 0

    def _take(self, command: Command) -> bool:
        key = (int(command["incarnation"]), int(command["id"]))
        with self._lock:
            if key in self._done:
                result = self._done[key]
                if result is not None:
                    self._untold[key] = result
                return False
            self._done[key] = None
            while len(self._done) > _KEPT_RESULTS:
                self._done.popitem(last=False)
        self._commands.put(command)
        return True

    def _command_loop(self) -> None:
        while not self.stop.is_set():
            command = self._commands.get()
            if command is not None and not self.stop.is_set():
                self.run(command)

    def run(self, command: Command) -> None:
        """Do one command and remember its result."""
        incarnation, id_ = int(command["incarnation"]), int(command["id"])
        try:
            if incarnation < self.incarnation:
                raise FencedError(f"expected incarnation {self.incarnation} or later, got {incarnation}: the older one is over")
            result = {"ok": True, **self.execute(command)}
            if command.get("kind") == "restore":
                self.incarnation = incarnation
        except Exception as error:
            known = isinstance(error, RoostreamError)
            log.log(logging.WARNING if known else logging.ERROR, "%s: %s", command.get("kind"), error, exc_info=not known)
            text = str(error) if known else f"a defect of Roostream: {error!r}"
            result = {"ok": False, "error": text, "damaged": isinstance(error, CheckpointError)}
        with self._lock:
            self._done[incarnation, id_] = self._untold[incarnation, id_] = {"id": id_, **result}
        self._told.set()

    def _answer_loop(self) -> None:
        """Results don't wait for the beat that is held. A call that fails is left to the next beat."""
        transport = self.transport_factory()
        try:
            while not self.stop.is_set():
                self._told.wait(0.5)
                if self._told.is_set() and not self.stop.is_set():
                    self._told.clear()
                    try:
                        self.beat(transport)
                    except RoostreamError as error:
                        log.debug("a result could not be told yet: %s", error)
        finally:
            transport.close()

"""A shard's or worker's side of the controller: it dials, beats, and does each command once (docs/protocols.md, "Controller").

    beat thread      dials the controller over and over; the call is held there until there is a command
    command thread   does commands, one after the other, in the order of their ids
    answer thread    sends a result as soon as it is there, since a beat may be held just then; the last beat of all is its own

A command is known by (incarnation, id). Given again, it is not done again: its result is sent again. Two threads take answers,
so one may come late: the controller gives every command that it still wants with each answer, so a command below one that is
known was withdrawn, and is never begun. A command that hangs is given up by the controller, which claims another incarnation;
if it still hangs `STUCK_S` after that one's command came, the process ends, since nothing else ends a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError, UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.rpc.transport import Transport
from roostream.runtime.thread_group import StopBudget, ThreadGroup

log = logging.getLogger("roostream.member")

Command: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]

STUCK_S = 60.0

_KEPT_RESULTS = 256
_CALL_TIMEOUT_S = 3.0
_MIN_BETWEEN_S = 0.05


def error_result(error: Exception) -> Result:
    """How a command that failed is told. `damaged`: another manifest may do. `away`: something can't be read or written now,
    and trying again can help. `permanent`: it fails again however often it is tried."""
    text = str(error) if isinstance(error, RoostreamError) else f"a defect of Roostream: {error!r}"
    damaged, away = isinstance(error, CheckpointError), isinstance(error, UnavailableError)
    permanent = isinstance(error, ConfigError | MemoryError)
    return {"ok": False, "error": text, "damaged": damaged, "away": away, "permanent": permanent}


def check_command_schema(command: Command, fingerprint: int) -> None:
    """What a commit holds is by the schema that it names, so all whom a controller restores have the controller's. While programs
    are started again one after the other with another file, those that have theirs already wait for the rest.

    Raises:
        UnavailableError: it has another.
    """
    expected, own = str(command.get("schema", "")), f"{fingerprint:016x}"
    if expected and expected != own:
        raise UnavailableError(
            f"expected the controller's schema {expected}, got {own}; start whoever of the two has the older file again"
        )


def end_process(reason: str) -> None:
    """At once, without closing anything: what hangs would make that hang too. The supervisor starts it anew."""
    log.critical("%s; the process ends", reason)
    os._exit(1)


def _key(command: Command) -> tuple[int, int]:
    return int(command["incarnation"]), int(command["id"])


class ControllerAgent:
    """`execute(command)` gives the result's fields, or raises; `report()` what goes along with each beat.

    `execute` runs in the command thread only. An error of it is told to the controller, which decides; an error that is
    not a RoostreamError is logged with its traceback as well, and told likewise.
    """

    def __init__(  # noqa: PLR0913 (all by name)
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
        on_stuck: Callable[[str], None] | None = None,
        hear: Callable[[Command], None] = lambda command: None,
        ending: StopBudget | None = None,
    ) -> None:
        """`on_stuck(why)` is called by a beat thread when a command hangs for good; it ends the process unless given.
        `hear(command)` is called when a command comes, before those in front of it are done; it must not wait.
        `ending` is begun when the controller asks this member to leave."""
        self.transport_factory, self.role, self.index = transport_factory, role, index
        self.execute, self.report, self.stop, self.clock = execute, report, stop, clock or SystemClock()
        self.session = session if session is not None else random.SystemRandom().getrandbits(63)
        self.incarnation = 0  # of the last RESTORE that worked
        self.hold = ""  # why training is held and what ends that, as the controller last told
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done: OrderedDict[tuple[int, int], Result | None] = OrderedDict()  # None: not done yet
        self._newest = 0, 0  # the highest command known
        self._untold: dict[tuple[int, int], Result] = {}
        self._running: Command | None = None
        self._overdue_since_s: float | None = (
            None  # a command of a later incarnation waits behind the running one
        )
        self.on_stuck, self.hear, self.ending = on_stuck or end_process, hear, ending
        self._leaving = self._free = False
        self._reached = True  # the last call was answered
        self._told = threading.Event()
        self._answered_s = self.clock.monotonic_s()
        self._crew = ThreadGroup(stop)

    @property
    def silent_s(self) -> float:
        """Since the controller last answered."""
        return self.clock.monotonic_s() - self._answered_s

    def start(self) -> ControllerAgent:
        """Begin to beat; self. Ends with `stop`; then `join`."""
        self._crew.start("member-beat", self._beat_loop)
        self._crew.start("member-commands", self._command_loop)
        self._crew.start("member-answers", self._answer_loop)
        return self

    def leave(self, ending: StopBudget, min_s: float) -> bool:
        """Tell that this member goes, and wait until nothing that was trained is lost by it. False: no controller answers, or no
        more than `min_s` of `ending` is left."""
        self._leaving = True
        self._told.set()
        while self._reached and not self._free and ending.left_s() > min_s:
            self.clock.sleep(_MIN_BETWEEN_S)
        return self._free

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
                if not is_news and self.clock.monotonic_s() - began_s < _MIN_BETWEEN_S:
                    self.clock.sleep(
                        _MIN_BETWEEN_S, self.stop
                    )  # a command in hand is given again at once: don't spin
        except RoostreamError:
            log.debug("stopped while waiting for the controller")
        finally:
            transport.close()

    def beat(self, transport: Transport) -> bool:
        """One call; True if it brought a command that was not known. What it told is told."""
        with self._lock:
            telling = dict(self._untold)
        leaving = self._leaving
        header = {
            "role": self.role,
            "index": self.index,
            "session": self.session,
            "incarnation": self.incarnation,
            "results": list(telling.values()),
            "report": {**self.report(), **({"leaving": True} if leaving else {})},
        }
        try:
            answer, _ = transport.call("beat", header, timeout_s=_CALL_TIMEOUT_S)
        except RoostreamError:
            self._reached = False
            raise
        self._reached, self._answered_s = True, self.clock.monotonic_s()
        self.hold = str(answer.get("hold", ""))
        self._free = leaving and bool(answer.get("free"))
        if self.ending and answer.get("leave_s") is not None:
            self.ending.begin(float(answer["leave_s"]))
        with self._lock:
            for key, result in telling.items():
                if self._untold.get(key) is result:
                    del self._untold[key]
            is_news = (
                sum([self._take(command) for command in sorted(answer.get("commands", ()), key=_key)]) > 0
            )
        self._look_whether_stuck()
        return is_news

    def _take(self, command: Command) -> bool:
        """Inside the lock, so that what two threads take is queued in order."""
        key = _key(command)
        if key in self._done:
            result = self._done[key]
            if result is not None:
                self._untold[key] = result
            return False
        if key < self._newest:
            return False
        self._newest = key
        self._done[key] = None
        while len(self._done) > _KEPT_RESULTS:
            self._done.popitem(last=False)
        self._commands.put(command)
        self.hear(command)
        return True

    def _look_whether_stuck(self) -> None:
        with self._lock:
            running = self._running
            overdue = running is not None and int(running["incarnation"]) < self._newest[0]
            now_s = self.clock.monotonic_s()
            since_s = self._overdue_since_s if self._overdue_since_s is not None else now_s
            self._overdue_since_s = since_s if overdue else None
        if running is not None and overdue and now_s - since_s > STUCK_S:
            self.on_stuck(
                f"{running.get('kind')} has been given up by the controller and still hangs after {now_s - since_s:.0f} s"
            )

    def _command_loop(self) -> None:
        while not self.stop.is_set():
            command = self._commands.get()
            if command is not None and not self.stop.is_set():
                self.run(command)

    def run(self, command: Command) -> None:
        """Do one command and remember its result."""
        incarnation, id_ = _key(command)
        self._running = command
        try:
            if incarnation < self.incarnation:
                raise FencedError(
                    f"expected incarnation {self.incarnation} or later, got {incarnation}: the older one is over"
                )
            result = {"ok": True, **self.execute(command)}
            if command.get("kind") == "restore":
                self.incarnation = incarnation
        except Exception as error:
            result = error_result(error)
            defect = not isinstance(error, RoostreamError)
            level = logging.ERROR if defect else logging.WARNING
            log.log(level, "%s: %s", command.get("kind"), result["error"], exc_info=defect)
        with self._lock:
            self._running = None
            self._done[incarnation, id_] = self._untold[incarnation, id_] = {"id": id_, **result}
        self._told.set()

    def _answer_loop(self) -> None:
        """Results don't wait for the beat that is held. A call that fails is left to the next beat. Who goes tells what it did
        last, and how it goes, unless nobody hears it."""
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
            if self._reached:
                with contextlib.suppress(RoostreamError):
                    self.beat(transport)
        finally:
            transport.close()

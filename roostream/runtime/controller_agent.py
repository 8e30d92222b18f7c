"""The controller's agent in a shard or worker: sends heartbeats and executes each command once
(docs/protocols.md, "Controller").

    heartbeat thread   calls the controller repeatedly; the controller holds the call until it has a command
    command thread     executes commands one after the other, by ascending id
    result thread      sends a result at once, as a heartbeat may be held; also sends the last heartbeat

A command is identified by (incarnation, id). If it is received again, only its result is sent again. Two
threads receive responses, so one may be late. Each response contains all commands that the controller still
wants, so a command below the newest one was withdrawn and is never started. If a command hangs, the
controller claims a new incarnation; if it still hangs `STUCK_S` after that incarnation's first command, the
process ends, because a thread cannot be killed. A command whose progress is reported does not hang.

Only one process at a time can have a role and index. The controller refuses a second one while the first one
sends heartbeats; `check` raises an error if that lasts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError, UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.rpc.transport import Transport
from roostream.runtime.thread_group import StopBudget, ThreadGroup

log = logging.getLogger("roostream.agent")

Command: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]

STUCK_S = 60.0
REFUSED_S = 10.0
"""A process is refused for less time than this if the one before it has died, and longer if both run."""

_MAX_RESULTS = 256
_CALL_TIMEOUT_S = 3.0
_MIN_HEARTBEAT_INTERVAL_S = 0.05


def error_result(error: Exception) -> Result:
    """The result of a failed command. `damaged`: another manifest may work. `away`: something is unavailable,
    and a retry may help. `permanent`: retries always fail."""
    text = str(error) if isinstance(error, RoostreamError) else f"a defect of Roostream: {error!r}"
    permanent, away = isinstance(error, ConfigError | MemoryError), isinstance(error, UnavailableError)
    damaged = isinstance(error, CheckpointError) and not permanent
    return {"ok": False, "error": text, "damaged": damaged, "away": away, "permanent": permanent}


def check_command_schema(command: Command, fingerprint: int) -> None:
    """Check that this program has the controller's schema, because the contents of a commit depend on it.
    While programs are restarted one after the other with another schema, the restarted ones wait for the
    rest.

    Raises:
        UnavailableError: this program has another schema.
    """
    expected, actual = str(command.get("schema", "")), f"{fingerprint:016x}"
    if expected and expected != actual:
        raise UnavailableError(
            f"expected the controller's schema {expected}, got {actual}; restart the program that has "
            "the older schema file"
        )


def end_process(reason: str) -> None:
    """End the process at once without cleanup, which might hang too. The supervisor restarts it."""
    log.critical("%s; the process ends", reason)
    os._exit(1)


def _key(command: Command) -> tuple[int, int]:
    return int(command["incarnation"]), int(command["id"])


class ControllerAgent:
    """`execute(command)` returns the fields of the result, or raises. `report()` returns the report of each
    heartbeat.

    `execute` runs in the command thread only. Its errors are sent to the controller, which decides what to
    do; an error that is not a RoostreamError is also logged with its traceback.
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
        on_received: Callable[[Command], None] = lambda command: None,
        stop_budget: StopBudget | None = None,
    ) -> None:
        """`report` must not wait for anything. If it has a field `progress`, that changes while a command is
        at work. `on_stuck(reason)` is called when a command hangs for good; the default ends the process.
        `on_received(command)` is called when a command arrives, before earlier ones are done; it must not
        block. `stop_budget` begins when the controller asks this program to leave."""
        self.transport_factory, self.role, self.index = transport_factory, role, index
        self.execute, self.report, self.stop, self.clock = execute, report, stop, clock or SystemClock()
        self.session = session if session is not None else random.SystemRandom().getrandbits(63)
        self.incarnation = 0  # of the last successful RESTORE
        self.hold = ""  # why training is on hold and what ends the hold, from the controller's last response
        self.standby = False  # the controller wants fewer workers than there are, and this one is not needed
        self.refused = ""  # why the controller refuses this process, from its last response
        self._refused_since_s = 0.0
        self.process = f"pid {os.getpid()} on {socket.gethostname()}"
        # Received and not begun; the command thread takes them.
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._done: OrderedDict[tuple[int, int], Result | None] = OrderedDict()  # None: not done yet
        self._newest = 0, 0  # the highest command received
        self._unsent_results: dict[tuple[int, int], Result] = {}
        self._running: Command | None = None
        # Since when a command of a later incarnation waits behind the running one
        self._overdue_since_s: float | None = None
        self._progress: Any = None  # as last reported
        self._progressed_s = 0.0
        self.on_stuck, self.on_received, self.stop_budget = on_stuck or end_process, on_received, stop_budget
        self._leaving = self._may_leave = False
        self._reached = True  # the last call was answered
        self._result_ready = threading.Event()
        self._last_response_s = self.clock.monotonic_s()
        self._threads = ThreadGroup(stop)
        self._log_rate_limit = LogRateLimit(self.clock.monotonic_s)

    @property
    def silent_s(self) -> float:
        """Seconds since the controller's last response."""
        return self.clock.monotonic_s() - self._last_response_s

    def start(self) -> ControllerAgent:
        """Start the threads. They end when `stop` is set; then call `join`."""
        self._threads.start("agent-heartbeat", self._heartbeat_loop)
        self._threads.start("agent-commands", self._command_loop)
        self._threads.start("agent-results", self._result_loop)
        return self

    def check(self) -> None:
        """Check that heartbeats are sent and accepted. Call it in every turn of the main loop.

        Raises:
            ConfigError: another process has this role and index; the message names both.
            RoostreamError, RuntimeError: a thread has failed, so this program cannot do its work.
        """
        self._threads.check()
        refused = self.refused
        if refused and self.clock.monotonic_s() - self._refused_since_s >= REFUSED_S:
            raise ConfigError(refused)

    def leave(self, budget: StopBudget, min_s: float) -> bool:
        """Announce that this program leaves, and wait until no training result is lost by it. False: the
        controller does not answer or refuses this process, a thread has failed, or at most `min_s` of
        `budget` is left."""
        self._leaving = True
        self._result_ready.set()
        while (
            self._reached
            and not self._may_leave
            and not self.refused
            and not self._threads.failed
            and budget.left_s() > min_s
        ):
            self.clock.sleep(_MIN_HEARTBEAT_INTERVAL_S)
        return self._may_leave

    def join(self, timeout_s: float = 5.0) -> bool:
        """Wait for the threads after `stop` was set. False: a command is still running."""
        self.commands.put(None)
        self._result_ready.set()
        return not self._threads.join(timeout_s)

    def _heartbeat_loop(self) -> None:
        transport, backoff = self.transport_factory(), Backoff(what="the controller", clock=self.clock)
        try:
            while not self.stop.is_set():
                began_s = self.clock.monotonic_s()
                has_new = backoff.until(lambda: self.beat(transport), (RoostreamError,), self.stop)
                if not has_new and self.clock.monotonic_s() - began_s < _MIN_HEARTBEAT_INTERVAL_S:
                    # The controller returns a running command again at once: do not spin.
                    self.clock.sleep(_MIN_HEARTBEAT_INTERVAL_S, self.stop)
        except RoostreamError:
            log.debug("stopped while waiting for the controller")
        finally:
            transport.close()

    def beat(self, transport: Transport) -> bool:
        """Send one heartbeat with all unsent results. True: the response had a new command."""
        with self._lock:
            results = dict(self._unsent_results)
        leaving, incarnation, report = self._leaving, self.incarnation, self.report()
        if report.get("progress") != self._progress:
            self._progress, self._progressed_s = report.get("progress"), self.clock.monotonic_s()
        header = {
            "role": self.role,
            "index": self.index,
            "session": self.session,
            "process": self.process,
            "incarnation": incarnation,
            "results": list(results.values()),
            "report": {**report, **({"leaving": True} if leaving else {})},
        }
        try:
            response, _ = transport.call("beat", header, timeout_s=_CALL_TIMEOUT_S)
        except RoostreamError:
            self._reached = False
            raise
        self._reached, self._last_response_s = True, self.clock.monotonic_s()
        self.hold, refused = str(response.get("hold", "")), str(response.get("refused", ""))
        standby = bool(response.get("standby"))
        if standby != self.standby:
            self.standby = standby
            log.info(
                "%s %d %s",
                self.role,
                self.index,
                "stands by: fewer train now" if standby else "is needed again",
            )
        if refused and not self.refused:
            self._refused_since_s = self._last_response_s
            log.warning("the controller refuses this process: %s", refused)
        self.refused = refused
        self._may_leave = leaving and bool(response.get("free"))
        if self.stop_budget and response.get("leave_s") is not None:
            self.stop_budget.begin(float(response["leave_s"]))
        with self._lock:
            for key, result in results.items():
                if self._unsent_results.get(key) is result:
                    del self._unsent_results[key]
            has_new = (
                sum([self._take(command) for command in sorted(response.get("commands", ()), key=_key)]) > 0
            )
        self._check_stuck()
        return has_new

    def _take(self, command: Command) -> bool:
        """Inside the lock, so that what two threads take is queued in order."""
        key = _key(command)
        if key in self._done:
            result = self._done[key]
            if result is not None:
                self._unsent_results[key] = result
            return False
        if key < self._newest:
            return False
        self._newest = key
        self._done[key] = None
        while len(self._done) > _MAX_RESULTS:
            self._done.popitem(last=False)
        self.commands.put(command)
        self.on_received(command)
        return True

    def _check_stuck(self) -> None:
        with self._lock:
            running = self._running
            overdue = running is not None and int(running["incarnation"]) < self._newest[0]
            now_s = self.clock.monotonic_s()
            since_s = self._overdue_since_s if self._overdue_since_s is not None else now_s
            self._overdue_since_s = since_s if overdue else None
            since_s = max(since_s, self._progressed_s)
        if running is not None and overdue and now_s - since_s > STUCK_S:
            self.on_stuck(
                f"command {running.get('kind')} was given up by the controller and still hangs after "
                f"{now_s - since_s:.0f} s"
            )

    def _command_loop(self) -> None:
        while not self.stop.is_set():
            command = self.commands.get()
            if command is not None and not self.stop.is_set():
                self.run(command)

    def run(self, command: Command) -> None:
        """Execute one command and keep its result."""
        incarnation, id_ = _key(command)
        self._running = command
        try:
            newest = max(self.incarnation, self._newest[0])
            if incarnation < newest:  # it waited behind a long one, and the controller has given it up
                raise FencedError(
                    f"expected incarnation {newest} or later, got {incarnation}: this command is outdated"
                )
            result = {"ok": True, **self.execute(command)}
            if self._log_rate_limit.over(command.get("kind")):
                log.info("%s: succeeds again", command.get("kind"))
            if command.get("kind") == "restore":
                self.incarnation = incarnation
        except Exception as error:
            result = error_result(error)
            kind = command.get("kind")
            if isinstance(error, UnavailableError):  # an outage fails the command of every commit
                self._log_rate_limit.warning(log, kind, "%s: %s", kind, error)
            elif isinstance(error, RoostreamError):
                log.warning("%s: %s", kind, error)
            else:
                log.error("%s: %s", kind, result["error"], exc_info=True)
        with self._lock:
            self._running = None
            self._done[incarnation, id_] = self._unsent_results[incarnation, id_] = {"id": id_, **result}
        self._result_ready.set()

    def _result_loop(self) -> None:
        """Send results without waiting for a heartbeat that the controller holds. If a call fails, the next
        heartbeat sends them. At the end, send the last results unless the controller is unreachable."""
        transport = self.transport_factory()
        try:
            while not self.stop.is_set():
                self._result_ready.wait(0.5)
                if self._result_ready.is_set() and not self.stop.is_set():
                    self._result_ready.clear()
                    try:
                        self.beat(transport)
                    except RoostreamError as error:
                        log.debug("a result could not be sent yet: %s", error)
            if self._reached:
                with contextlib.suppress(RoostreamError):
                    self.beat(transport)
        finally:
            transport.close()

"""Supervisor: starts programs, restarts those that die, and stops them.

    with Supervisor() as supervisor:
        supervisor.start([program])                # returns at once
        supervisor.wait_ready(["name"], 60.0)      # raises UnavailableError with the end of the program's log
        supervisor.stop(["name"])                  # SIGTERM, then SIGKILL after the program's time limit

A program's states:

    waiting (for the programs before it, or for its next try) → starting → ready → stopping
    final: stopped (on request) · ended (`restart=False`) · held (training is on hold)
           failed (died too often, or refused its configuration)
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from infra import child_logs
from infra.child import Child, Program, start_child
from roostream.errors import RoostreamError, UnavailableError, describe_error
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.program import HELD_CODE

log = logging.getLogger("roostream.stack")
_TICK_S = 0.1
_ROTATE_EVERY_S = 5.0
_PROBE_EVERY_S = 0.25

State = Literal["waiting", "starting", "ready", "stopping", "stopped", "ended", "failed", "held"]
RUNNING = ("starting", "ready", "stopping")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """Delays between restarts: none at first, then doubling. Not for programs that end by themselves."""

    first_s: float = 0.5
    max_s: float = 15.0
    # A child that lived this long resets the count; a kill a minute is not a crash loop
    stable_s: float = 30.0
    max_restarts: int = 12  # in a row, none of which lived for `stable_s`: about two minutes

    def delay_s(self, deaths: int) -> float | None:
        """Seconds until the next start after `deaths` deaths in a row; None = give up."""
        if deaths > self.max_restarts:
            return None
        return 0.0 if deaths <= 1 else min(self.first_s * 2 ** (deaths - 2), self.max_s)


@dataclasses.dataclass(kw_only=True)
class Slot:
    """A program and its current state. Only the supervisor's thread writes it."""

    program: Program
    started_by_user_s: float
    num_restarts: int = 0
    deaths_in_a_row: int = 0
    state: State = "waiting"
    child: Child | None = None
    due_s: float = 0.0  # waiting: earliest start; starting: next probe; stopping: time of the SIGKILL
    exit_code: int | None = None
    killed: bool = False  # it did not stop within its time limit
    removed: bool = False  # the slot is deleted when the program has ended
    last_error: str = ""  # why it died last
    refused: bool = False  # it exited with `refused_code`
    file_times: tuple[int, ...] = ()  # modification times of `watched_files` at the last start

    @property
    def pid(self) -> int | None:
        child = self.child
        return child.pid if child else None


class Supervisor:
    """Runs programs as child processes. `start`, `stop` and the waits may be called from any thread.

    One thread of its own does everything else. `changed` is called after every change of a state, and again
    after it raised OSError: a full disk must not end the programs.
    """

    def __init__(
        self,
        changed: Callable[[], None] = lambda: None,
        policy: RestartPolicy | None = None,
        log_bytes: int = 16 << 20,
    ) -> None:
        self.changed, self.policy, self.log_bytes = changed, policy or RestartPolicy(), log_bytes
        self.slots: dict[str, Slot] = {}
        self.halting = False  # set while a stack stops: deaths are recorded, nothing is started
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._next_rotation_s = 0.0
        self._is_unreported = False  # `changed` failed
        self._log_rate_limit = LogRateLimit()

    def open(self) -> Supervisor:
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread and kill the children that still run. Idempotent."""
        if self._thread.is_alive():
            self._requests.put(None)
            self._thread.join()

    def __enter__(self) -> Supervisor:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, programs: Sequence[Program]) -> None:
        """Start these programs, each when the programs before it are ready. Running programs stay as they
        are."""
        self._run_in_thread(self._enqueue, programs)

    def stop(self, names: Sequence[str]) -> list[str]:
        """Stop these programs in parallel, each within its time limit. Returns the names of those that had to
        be killed."""
        slots = [self.slots[n] for n in names if n in self.slots]
        self._run_in_thread(self._begin_stop, slots)
        limit_s = max((s.program.stop_timeout_s for s in slots), default=0.0) + 10.0
        self.wait(lambda: all(s.state not in RUNNING for s in slots), limit_s)
        return [s.program.name for s in slots if s.killed]

    def remove(self, names: Sequence[str]) -> None:
        """Stop these programs and delete their slots; returns at once."""
        self._run_in_thread(self._remove, [self.slots[n] for n in names if n in self.slots])

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done()`, which is evaluated after every change. Returns False after the timeout."""
        with self._condition:
            return self._condition.wait_for(done, timeout_s)

    def wait_ready(self, names: Sequence[str], timeout_s: float) -> None:
        """Wait until these programs, which have been started, are ready or have ended by themselves.

        Raises:
            UnavailableError: one was not ready in time, or failed; with the last lines of its log.
        """

        def state(name: str) -> str:
            slot = self.slots.get(name)
            return slot.state if slot and not slot.removed else "removed"

        good, bad = ("ready", "ended", "removed"), ("failed", "stopped", "held")
        self.wait(
            lambda: all(state(n) in good for n in names) or any(state(n) in bad for n in names), timeout_s
        )
        for name in (n for n in names if state(n) not in good):
            tail = "\n".join(f"    | {x}" for x in child_logs.last_lines(self.slots[name].program.log, 12))
            raise UnavailableError(
                f"{name} was not ready within {timeout_s:.0f} s (it is {state(name)}); its log ends:\n{tail}"
            )

    def _run_in_thread(self, action: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Call `action` for each item in the supervisor's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            for item in items:
                action(item)
            done.set()

        self._requests.put(run)
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise UnavailableError("the stack has been stopped; start a new one")

    # The methods below run in the supervisor's thread.

    def _run(self) -> None:
        while True:
            try:
                request = self._requests.get(timeout=_TICK_S)
            except queue.Empty:
                self._tick(time.monotonic())
                continue
            if request is None:
                return self._kill_all()
            request()

    def _tick(self, now_s: float) -> None:
        for slot in list(self.slots.values()):
            try:
                self._advance(slot, now_s)
            except Exception as error:  # all children end with this thread (die_with_parent.py)
                text = "%s cannot be watched now (this is a defect of Roostream): %s"
                name = slot.program.name
                self._log_rate_limit.warning(log, name, text, name, describe_error(error))
        if now_s >= self._next_rotation_s:
            self._next_rotation_s = now_s + _ROTATE_EVERY_S
            for slot in self.slots.values():
                child_logs.rotate(slot.program.log, self.log_bytes)
            if self._is_unreported:
                self._report_change()

    def _advance(self, slot: Slot, now_s: float) -> None:
        if slot.child is not None and (code := slot.child.exit_code()) is not None:
            self._died(slot, code, now_s)
        elif slot.state == "waiting" and not self.halting and now_s >= slot.due_s:
            if self._predecessors_are_ready(slot, now_s):
                self._start(slot, now_s)
        elif slot.state == "starting" and now_s >= slot.due_s:
            self._probe(slot, now_s)
        elif slot.state == "stopping" and now_s >= slot.due_s and not slot.killed:
            self._kill_late(slot)
        elif slot.refused and not self.halting and slot.file_times != _file_times(slot.program):
            log.info("%s is started again: a file that it reads has changed", slot.program.name)
            self._enqueue(slot.program)

    def _enqueue(self, program: Program) -> None:
        slot = self.slots.get(program.name)
        if slot is None:
            self._set(Slot(program=program, started_by_user_s=time.monotonic()), "waiting")
        elif slot.state not in RUNNING and slot.state != "waiting":
            slot.program, slot.due_s, slot.refused, slot.last_error = program, 0.0, False, ""
            slot.deaths_in_a_row = 0  # a start by name grants all tries again
            self._set(slot, "waiting")

    def _predecessors_are_ready(self, slot: Slot, now_s: float) -> bool:
        """Also true for predecessors that are not started at all or were stopped, and after the longest
        wait."""
        if now_s - slot.started_by_user_s > slot.program.max_after_wait_s:
            return True
        states = (self.slots[n].state for n in slot.program.after if n in self.slots)
        return all(state in ("ready", "stopped") for state in states)

    def _start(self, slot: Slot, now_s: float) -> None:
        slot.killed, slot.exit_code, slot.due_s = False, None, now_s
        slot.file_times = _file_times(slot.program)
        try:
            slot.child = start_child(slot.program, now_s)
        except (OSError, RoostreamError) as error:
            log.error("%s can't be started: %s", slot.program.name, error)
            slot.last_error = str(error)
            return self._retry(slot, 0.0, now_s)
        self._set(slot, "starting")

    def _probe(self, slot: Slot, now_s: float) -> None:
        slot.due_s = now_s + _PROBE_EVERY_S
        try:
            if not slot.program.ready():
                return
            slot.program.on_ready()
        except RoostreamError as error:
            log.warning("%s is not ready yet: %s", slot.program.name, error)
            return
        self._set(slot, "ready")

    def _died(self, slot: Slot, code: int, now_s: float) -> None:
        assert slot.child is not None
        name, lived_s = slot.program.name, now_s - slot.child.started_s
        lines = child_logs.last_lines(slot.program.log, 8, since=slot.child.log_start)
        slot.child, slot.exit_code = None, code
        if slot.removed:
            return self._forget(slot)
        if slot.state == "stopping" or self.halting:
            return self._set(slot, "stopped")
        if code == HELD_CODE:
            log.warning(
                "%s has ended because training is on hold; its log names the reason and the way out", name
            )
            return self._set(slot, "held")
        if not slot.program.restart:
            return self._set(slot, "ended")
        if code == 0:
            log.info("%s has ended on request after %.0f s", name, lived_s)
            return self._retry(slot, lived_s, now_s)
        error_before, slot.last_error = slot.last_error, (child_logs.last_error(lines) if code > 0 else "")
        slot.last_error = slot.last_error or _describe_exit(code)
        did_its_work = slot.state == "ready" and lived_s >= self.policy.stable_s
        if code == slot.program.refused_code and not (did_its_work and slot.last_error != error_before):
            return self._refused(slot)
        log.error(
            "%s died (%s) after %.0f s; last lines of %s:",
            name,
            _describe_exit(code),
            lived_s,
            slot.program.log,
        )
        for line in lines:
            log.error("    | %s", line)
        self._retry(slot, lived_s, now_s)

    def _refused(self, slot: Slot) -> None:
        """Leave it down until a watched file changes.

        A program that worked for a while gets one more start first: its configuration may have changed since.
        """
        files = ", ".join(map(str, slot.program.watched_files))
        retry = f"; it is started again when {files} changes" if files else ""
        slot.refused = True
        log.error(
            "%s refuses its configuration: %s; its log: %s%s",
            slot.program.name,
            slot.last_error,
            slot.program.log,
            retry,
        )
        self._set(slot, "failed")

    def _retry(self, slot: Slot, lived_s: float, now_s: float) -> None:
        name, deaths = slot.program.name, 1 if lived_s >= self.policy.stable_s else slot.deaths_in_a_row + 1
        slot.deaths_in_a_row, delay_s = deaths, self.policy.delay_s(deaths)
        if delay_s is None:
            log.error("%s died %d times in a row and stays down; its log says why", name, deaths)
            return self._set(slot, "failed")
        slot.num_restarts += 1
        log.warning("%s will be started again%s", name, f" in {delay_s:.1f} s" if delay_s else "")
        slot.due_s = now_s + delay_s
        self._set(slot, "waiting")

    def _begin_stop(self, slot: Slot) -> None:
        slot.refused = False
        if slot.child is None:
            if slot.state == "waiting":
                self._set(slot, "stopped")
            return
        slot.due_s = time.monotonic() + slot.program.stop_timeout_s
        slot.child.send(slot.program.stop_signal)
        self._set(slot, "stopping")

    def _remove(self, slot: Slot) -> None:
        slot.removed = True
        if slot.state in ("starting", "ready"):
            self._begin_stop(slot)
        elif slot.child is None:
            self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        self._set(slot, "stopped")
        del self.slots[slot.program.name]
        self._report_change()

    def _kill_late(self, slot: Slot) -> None:
        assert slot.child is not None
        log.warning(
            "%s did not stop within %.0f s and is killed", slot.program.name, slot.program.stop_timeout_s
        )
        slot.killed = True
        slot.child.kill()

    def _kill_all(self) -> None:
        for slot in self.slots.values():
            if slot.child is not None:
                slot.child.kill()
                slot.exit_code, slot.child = slot.child.process.wait(), None
                self._set(slot, "stopped")

    def _set(self, slot: Slot, state: State) -> None:
        with self._condition:
            self.slots[slot.program.name] = slot
            slot.state = state
            self._condition.notify_all()
        self._report_change()

    def _report_change(self) -> None:
        try:
            self.changed()
        except OSError as error:
            if not self._is_unreported:
                log.warning("the states of programs can't be written now: %s", error)
            self._is_unreported = True
        else:
            self._is_unreported = False


def _file_times(program: Program) -> tuple[int, ...]:
    """Modification time of each watched file; 0 = the file can't be read."""
    times = []
    for file in program.watched_files:
        try:
            times.append(file.stat().st_mtime_ns)
        except OSError:
            times.append(0)
    return tuple(times)


def _describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

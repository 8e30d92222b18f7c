"""The supervisor: keeps the wanted programs running. One thread starts, watches and restarts every child.

waiting (for those that come before it, or for its next try) → starting → ready
at its end: stopped (asked to) · ended (by itself, not one that is restarted) · held (training is held)
            failed (died too often, or can't be as it was told to)
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from infra import child, logs
from infra.child import Child, Program
from infra.restart import RestartPolicy, Restarts
from roostream.errors import RoostreamError, UnavailableError
from roostream.runtime.program import HELD_CODE

log = logging.getLogger("roostream.stack")
_TICK_S = 0.1
_ROTATE_EVERY_S = 5.0
_PROBE_EVERY_S = 0.25

State = Literal["waiting", "starting", "ready", "stopping", "stopped", "ended", "failed", "held"]
RUNNING = ("starting", "ready", "stopping")


@dataclasses.dataclass(kw_only=True)
class Slot:
    """A program and what is known of it. Written by the supervisor's thread only."""

    program: Program
    restarts: Restarts
    wanted_s: float  # since when
    state: State = "waiting"
    child: Child | None = None
    due_s: float = 0.0  # waiting: not before; starting: next probe; stopping: when it is killed
    exit_code: int | None = None
    killed: bool = False  # it did not stop within its limit
    released: bool = False  # nobody wants it any more: forgotten when it has ended
    said: str = ""  # why it died last
    refused: bool = False  # it can't be as it was told to
    read: tuple[int, ...] = ()  # the files that it reads, as they were at its start (`_stamps`)


class Supervisor:
    """`want`, `stop` and `wait` from any thread; the rest happens in its own. `changed` is called after every change."""

    def __init__(
        self, changed: Callable[[], None], policy: RestartPolicy | None = None, log_bytes: int = 16 << 20
    ) -> None:
        self.changed, self.policy, self.log_bytes = changed, policy or RestartPolicy(), log_bytes
        self.slots: dict[str, Slot] = {}
        self.halting = False  # set while the stack stops: a death is noted, nothing is started
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._rotate_at_s = 0.0

    def open(self) -> Supervisor:
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread; children that still run are killed. Idempotent."""
        if self._thread.is_alive():
            self._asked.put(None)
            self._thread.join()

    def want(self, programs: Sequence[Program]) -> None:
        """Start these, each when those that come before it are ready; those that run already stay as they are."""
        self._ask(self._want, programs)

    def stop(self, names: Sequence[str]) -> list[str]:
        """End these side by side, each within its time limit, and keep them ended; the names of those that had to be killed."""
        slots = [self.slots[n] for n in names if n in self.slots]
        self._ask(self._begin_stop, slots)
        limit_s = max((s.program.stop_timeout_s for s in slots), default=0.0) + 10.0
        self.wait(lambda: all(s.state not in RUNNING for s in slots), limit_s)
        return [s.program.name for s in slots if s.killed]

    def release(self, names: Sequence[str]) -> None:
        """End these within their time limits and forget them; returns at once."""
        self._ask(self._release, [self.slots[n] for n in names if n in self.slots])

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done()`, which is looked at after every change; False if the time passed."""
        with self._condition:
            return self._condition.wait_for(done, timeout_s)

    def _ask(self, work: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Run `work` of each item in the supervisor's thread, and wait for it."""
        done = threading.Event()

        def run() -> None:
            for item in items:
                work(item)
            done.set()

        self._asked.put(run)
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise UnavailableError("the stack has been stopped; start a new one")

    # From here on: the supervisor's thread.

    def _run(self) -> None:
        while True:
            try:
                work = self._asked.get(timeout=_TICK_S)
            except queue.Empty:
                self._tick(time.monotonic())
                continue
            if work is None:
                return self._kill_all()
            work()

    def _tick(self, now_s: float) -> None:
        for slot in list(self.slots.values()):
            if slot.child is not None and (code := slot.child.exit_code()) is not None:
                self._died(slot, code, now_s)
            elif (
                slot.state == "waiting"
                and not self.halting
                and now_s >= slot.due_s
                and self._is_its_turn(slot, now_s)
            ):
                self._start(slot, now_s)
            elif slot.state == "starting" and now_s >= slot.due_s:
                self._probe(slot, now_s)
            elif slot.state == "stopping" and now_s >= slot.due_s and not slot.killed:
                self._kill_late(slot)
            elif slot.refused and not self.halting and slot.read != _stamps(slot.program):
                log.info("%s is started again: what it reads has changed", slot.program.name)
                self._want(slot.program)
        if now_s >= self._rotate_at_s:
            self._rotate_at_s = now_s + _ROTATE_EVERY_S
            for slot in self.slots.values():
                logs.rotate(slot.program.log, self.log_bytes)

    def _want(self, program: Program) -> None:
        slot = self.slots.get(program.name)
        if slot is None:
            slot = Slot(program=program, restarts=Restarts(policy=self.policy), wanted_s=time.monotonic())
            self._set(slot, "waiting")
        elif slot.state not in RUNNING and slot.state != "waiting":
            slot.program, slot.due_s, slot.refused, slot.said = program, 0.0, False, ""
            slot.restarts.forgive()
            self._set(slot, "waiting")

    def _is_its_turn(self, slot: Slot, now_s: float) -> bool:
        if now_s - slot.wanted_s > slot.program.after_s:
            return True
        before = (self.slots[n].state for n in slot.program.after if n in self.slots)
        return all(
            state in ("ready", "stopped") for state in before
        )  # who was asked to stop isn't waited for

    def _start(self, slot: Slot, now_s: float) -> None:
        slot.killed, slot.exit_code, slot.due_s, slot.read = False, None, now_s, _stamps(slot.program)
        try:
            slot.child = child.start(slot.program, now_s)
        except (OSError, RoostreamError) as error:
            log.error("%s can't be started: %s", slot.program.name, error)
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
        name, lived_s, asked = slot.program.name, now_s - slot.child.started_s, slot.state == "stopping"
        lines = logs.last_lines(slot.program.log, 8, since=slot.child.log_start)
        slot.child, slot.exit_code = None, code
        if slot.released:
            return self._forget(slot)
        if asked or self.halting:
            return self._set(slot, "stopped")
        if code == HELD_CODE:
            log.warning("%s rests: training is held; its log says why, and what ends the hold", name)
            return self._set(slot, "held")
        if not slot.program.restarted:
            return self._set(slot, "ended")
        if code == 0:
            log.info("%s has left after %.0f s, as it was asked to", name, lived_s)
            return self._retry(slot, lived_s, now_s)
        before, slot.said = slot.said, (logs.last_words(lines) if code > 0 else "") or _how(code)
        did_its_work = slot.state == "ready" and lived_s >= self.policy.stable_s
        if code == slot.program.refusal and not (did_its_work and slot.said != before):
            return self._refused(slot)
        log.error(
            "%s died (%s) after %.0f s; the last lines of %s:", name, _how(code), lived_s, slot.program.log
        )
        for line in lines:
            log.error("    | %s", line)
        self._retry(slot, lived_s, now_s)

    def _refused(self, slot: Slot) -> None:
        """It stays down. Whoever did its work for a while has another start first, since what it was told may be new to it."""
        files = ", ".join(map(str, slot.program.reads))
        slot.refused = True
        log.error(
            "%s can't be started as it was told to: %s; its log: %s%s",
            *(
                slot.program.name,
                slot.said,
                slot.program.log,
                f"; it is tried again when {files} changes" if files else "",
            ),
        )
        self._set(slot, "failed")

    def _retry(self, slot: Slot, lived_s: float, now_s: float) -> None:
        delay_s = slot.restarts.died(lived_s)
        if delay_s is None:
            log.error(
                "%s died %d times in a row; it stays down until it is asked for",
                slot.program.name,
                slot.restarts.deaths_in_a_row,
            )
            return self._set(slot, "failed")
        log.warning(
            "%s will be started again%s", slot.program.name, f" in {delay_s:.1f} s" if delay_s else ""
        )
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

    def _release(self, slot: Slot) -> None:
        slot.released = True
        if slot.state in ("starting", "ready"):
            self._begin_stop(slot)
        elif slot.child is None:
            self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        self._set(slot, "stopped")
        del self.slots[slot.program.name]
        self.changed()

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
        self.changed()


def _stamps(program: Program) -> tuple[int, ...]:
    """When each file that it reads was written; 0 = it can't be told."""
    found = []
    for file in program.reads:
        try:
            found.append(file.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

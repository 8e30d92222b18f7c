"""The controller around its state machine: calls in, files and clocks on the other side.

A store that can't be read or written now (a full disk, a mount that is gone) is waited for: the effect in hand is tried again,
beats are answered meanwhile. Only what is read and wrong, or absent while the store answers, counts as damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from roostream.errors import CheckpointError, FencedError, RoostreamError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock, MonotonicToWallTime
from roostream.runtime.kafka.topics import SAMPLES, Progress
from roostream.runtime.manifest import Manifest
from roostream.runtime.rpc.transport import Header
from roostream.runtime.work_unit import TableInput, WorkUnit
from trainer.control.backfill_eta import BackfillEta
from trainer.control.coordinator import Coordinator
from trainer.control.holds import DeviceTime, device_use, ratios
from trainer.control.membership import check_notice
from trainer.control.types import (
    TRANSIENT,
    Claim,
    Effect,
    IncarnationPlan,
    InitialRange,
    Key,
    Link,
    Retire,
    State,
)

log = logging.getLogger("roostream.controller")

HOLD_S = 0.5  # a beat is held this long when there is no command
TURN_S = 0.1
FENCE_CHECK_S = 1.0
_KEEP_SPENT_S = 60.0
SPENT = "control/spent"
"""What devices were used for, in seconds: plain JSON."""


class Controller:
    """`handle` serves calls from any thread; `run` does the effects, one at a time, in the caller's thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: CheckpointStore,
        clock: Clock,
        *,
        check: Callable[[Manifest], None] = lambda manifest: None,
        history: Callable[[Mapping[int, int]], Sequence[WorkUnit]] = lambda committed: (),
        open_session: Callable[[], TableInput | None] = lambda: None,
        hold_s: float = HOLD_S,
        keep_commits: int = manifests.KEEP_MANIFESTS,
    ) -> None:
        """`history`: what is to be trained before the stream, behind what is committed of each partition of `samples`;
        `open_session`: the same of the warehouse, where nothing is committed."""
        self.keep_commits, self.history, self.open_session = keep_commits, history, open_session
        self.coordinator, self.store, self.clock, self.check, self.hold_s = (
            coordinator,
            store,
            clock,
            check,
            hold_s,
        )
        self.readers: Callable[[], dict[str, Any]] | None = None  # what is told of those that read a session
        self.freshness: Callable[[], dict[str, Any]] = dict  # stage → what neighbours measured lately
        self.spent, self._pace, self._wall = (
            DeviceTime(clock.monotonic_s()),
            BackfillEta(),
            MonotonicToWallTime(clock),
        )
        self._changed = threading.Condition()
        self._todo: deque[Effect] = deque()
        self._outage = Backoff(what="the checkpoint store", clock=clock)
        self.away = ""  # what is to do next waits for this, in a sentence
        self._fence_checked_s = 0.0
        self._spent_kept_s = clock.monotonic_s()
        self._leave_by_s: float | None = None  # it was asked to go until then

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        """`beat`, `status`, `commit`, `scale`, `release` and `preempt` of docs/protocols.md.

        Raises:
            RoostreamError: an unknown method or member; more workers than there can be; a notice that is too short.
            UnavailableError: who is to be preempted isn't there.
            FencedError: this controller is over; dial the other one.
        """
        match method:
            case "beat":
                return self._beat(header), ()
            case "status":
                return self.status(), ()
            case "commit":
                return self._commit_now(float(header.get("timeout_s", 10.0))), ()
            case "scale":
                return self._scale(int(header["workers"]), float(header.get("timeout_s", 60.0))), ()
            case "release":
                return self._release(), ()
            case "preempt":
                return self._preempt(
                    Key(str(header["role"]), int(header["index"])), float(header["notice_s"])
                ), ()
        raise RoostreamError(
            f"expected a call of beat, status, commit, scale, release or preempt, got {method!r}"
        )

    def run(
        self, stop: threading.Event, turned: Callable[[], None] = lambda: None, closing_s: float = 0.0
    ) -> None:
        """Until `stop` is set or it is preempted, and then until what is trained is committed: after `stop` for `closing_s` at
        most. `turned` is called each time round.

        Raises:
            FencedError: a newer controller exists.
            CheckpointError, SchemaError: what is committed can't be used by this one; says why.
            UnavailableError: stopped while the store was away.
        """
        while True:
            if stop.is_set():
                self._leave_within(closing_s)
            if self._may_go():
                return
            self.turn(None if stop.is_set() else stop)
            turned()
            with self._changed:
                if not self.coordinator.has_effects:
                    self._changed.wait(TURN_S)

    def _leave_within(self, seconds: float) -> None:
        """The shortest notice counts."""
        with self._changed:
            leave_by_s = self.clock.monotonic_s() + seconds
            self._leave_by_s = min(self._leave_by_s or leave_by_s, leave_by_s)
            self.coordinator.leave()

    def _may_go(self) -> bool:
        with self._changed:
            now_s = self.clock.monotonic_s()
            return self._leave_by_s is not None and (
                now_s >= self._leave_by_s or self.coordinator.is_free(now_s)
            )

    def turn(self, stop: threading.Event | None = None) -> None:
        """Do what is to do now, in order; what the store can't serve now stays first, and the turn waits a little."""
        with self._changed:
            self._todo += self.coordinator.take_effects()
        try:
            while self._todo:
                self._do(self._todo[0])
                self._todo.popleft()
            self._check_fence()
            if self.clock.monotonic_s() - self._spent_kept_s >= _KEEP_SPENT_S:
                self._keep_spent()
        except UnavailableError as error:
            self.away = str(error)
            self._outage.wait(error, stop)
        else:
            self.away = ""
            self._outage.reached()
        with self._changed:
            it, now_s = self.coordinator, self.clock.monotonic_s()
            it.tick(now_s)
            self.spent.note(device_use(it.state, it.holds.now), it.roster.wanted_workers, now_s)
            self._changed.notify_all()
            if it.state is State.FENCED:
                raise FencedError(f"{it.reason}; this controller stops")

    def committed(self) -> tuple[Progress, bool]:
        """The next offsets to train as of the last commit, and whether training is held for having nothing to read. Any
        thread."""
        with self._changed:
            it = self.coordinator
            offsets = it.last.manifest.offsets if it.last else {}
            return offsets, it.state is State.HELD and it.holds.is_transient

    def hold_idle(self, reason: str) -> bool:
        """There is nothing to read: all finish and commit, then workers are released. False: not now. Any thread."""
        with self._changed:
            return self.coordinator.hold_idle(reason, self.clock.monotonic_s())

    def end_idle(self) -> bool:
        """There is something to read: end that hold; False if training isn't held so. Any thread."""
        with self._changed:
            return self.coordinator.holds.is_transient and self.coordinator.release()

    def status(self) -> dict[str, Any]:
        """Plain values for `status` and metrics."""
        readers = self.readers() if self.readers else None  # outside the lock: it asks for the session
        with self._changed:
            it, now_s = self.coordinator, self.clock.monotonic_s()
            return {
                "readers": readers,
                "freshness": self.freshness(),
                "state": str(it.state),
                "reason": it.reason,
                "away": self.away,
                "incarnation": it.incarnation,
                "seq": it.seq,
                "manifest": it.last.name if it.last else "",
                "commit_age_ms": (now_s - it.committed_at_s) * 1000,
                "committed_at_ms": self._wall.of(it.committed_at_s),
                "commit_ms": it.commit_s * 1000,
                "paused_ms": it.paused_s * 1000,
                "phases_ms": {name: seconds * 1000 for name, seconds in it.phases_s.items()},
                "commits": it.num_commits,
                "aborts": it.num_aborts,
                "rollbacks": it.num_rollbacks,
                "workers": it.roster.num_workers,
                "wanted_workers": it.roster.wanted_workers,
                "holds": [it.holds.now._asdict()] if it.holds.now else [],
                "device_s": self.spent.told(),
                "device_ratio": ratios(self.spent.told()),
                "initial": self._pace.told(it.phases.progress(), self._trained(), now_s),
                "news": it.has_news(),
                "members": {
                    str(k): {"incarnation": m.incarnation, "silent_ms": (now_s - m.seen_s) * 1000}
                    for k, m in it.members.items()
                },
                "reports": {str(key): member.report for key, member in it.members.items()},
            }

    def _trained(self) -> float | None:
        """Requests, by all workers; None: one doesn't tell."""
        members = [self.coordinator.members.get(key) for key in self.coordinator.roster.workers]
        told = [member.report.get("requests") if member else None for member in members]
        known = [float(count) for count in told if count is not None]
        return sum(known) if len(known) == len(told) else None

    def workers_seen_at(self) -> dict[int, str]:
        """Workers that train, or stand by → "host:port" of their metrics as they tell it; "" of who doesn't. Any thread."""
        with self._changed:
            members = self.coordinator.members
            keys = {*self.coordinator.roster.workers, *(key for key in members if key.role == "worker")}
            return {
                key.index: str(members[key].report.get("seen_at", "")) if key in members else ""
                for key in keys
            }

    def _beat(self, header: Header) -> Header:
        key = Key(str(header["role"]), int(header["index"]))
        with self._changed:
            it = self.coordinator
            it.beat(
                key,
                int(header["session"]),
                int(header["incarnation"]),
                header.get("results", ()),
                dict(header.get("report", {})),
                self.clock.monotonic_s(),
            )
            self._changed.notify_all()
            if self.hold_s:
                self._changed.wait_for(
                    lambda: it.commands(key) or it.state is State.FENCED or self._said(key), self.hold_s
                )
            if it.state is State.FENCED:
                raise FencedError(f"{it.reason}; this controller stops")
            hold = it.holds.now.told if it.holds.now and it.state is State.HELD else ""
            return {
                "commands": it.commands(key),
                "incarnation": it.incarnation,
                "hold": hold,
                **self._said(key),
            }

    def _said(self, key: Key) -> dict[str, Any]:
        """What who leaves is told: that it is to, within how long, or that it is free to go."""
        now_s, member = self.clock.monotonic_s(), self.coordinator.members.get(key)
        if member is None or not member.leaves:
            return {}
        if member.report.get("leaving"):
            return {"free": True} if self.coordinator.is_free(now_s) else {}
        return {"leave_s": max((member.leave_by_s or now_s) - now_s, 0.0)}

    def _preempt(self, key: Key, notice_s: float) -> Header:
        """Have a member, or this controller, go within its notice, once what is trained is committed; waits until it is."""
        with self._changed:
            it = self.coordinator
            if key == Key("controller", 0):
                check_notice(notice_s)
                self._leave_within(notice_s)
            else:
                it.roster.ask_to_leave(key, notice_s, self.clock.monotonic_s())
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: it.is_free(self.clock.monotonic_s()), notice_s)
            return {
                "seq": it.seq,
                "committed": bool(done),
                "why": "" if done else f"the controller is {it.state}: {it.reason}",
            }

    def _commit_now(self, timeout_s: float) -> Header:
        """Commit what is trained, if anything is new, and wait for it. A commit that was cut before doesn't count."""
        with self._changed:
            it = self.coordinator
            enough = it.num_commits + (2 if it.commit else 1)
            it.want_commit()
            settled = (State.RUNNING, State.COMMITTING)
            done = self._changed.wait_for(
                lambda: it.num_commits >= enough or (it.state in settled and not it.has_news()), timeout_s
            )
            return {"seq": it.seq, "committed": bool(done)}

    def _scale(self, count: int, timeout_s: float) -> Header:
        """Train with so many workers from the next commit on; waits until they do. If that takes longer the wish stands: `why`
        says what it waits for."""
        with self._changed:
            it = self.coordinator
            it.roster.want(count)
            over = (State.FENCED,)
            self._changed.wait_for(
                lambda: it.state in over or (it.roster.num_workers == count and it.state is State.RUNNING),
                timeout_s,
            )
            if it.state is State.FENCED:
                raise FencedError(f"{it.reason}; this controller stops")
            is_running = it.roster.num_workers == count and it.state is State.RUNNING
            missing = ", ".join(it.roster.absent(count))
            why = (
                ""
                if is_running
                else f"it waits for {missing}"
                if missing
                else f"the controller is {it.state}: {it.reason}"
            )
            return {"workers": it.roster.num_workers, "running": is_running, "why": why}

    def _release(self) -> Header:
        """End the hold; the next incarnation restores everybody."""
        with self._changed:
            was = self.coordinator.holds.now
            self.coordinator.release()
            return {"held": was is not None, "reason": was.reason if was else ""}

    def _keep_spent(self) -> None:
        """A count that is a little behind harms nobody."""
        self._spent_kept_s = self.clock.monotonic_s()
        try:
            if manifests.newest_incarnation(self.store) != self.coordinator.incarnation:
                return
            self.store.put(SPENT, json.dumps(self.spent.body()).encode())
        except UnavailableError as error:
            log.warning("what devices were used for can't be kept now: %s", error)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Claim():
                self._claim(effect)
            case Link():
                outcome = self._link(effect.manifest)
                with self._changed:
                    self.coordinator.linked(outcome, self.clock.monotonic_s())
            case Retire():
                self._keep_spent()
                try:
                    manifests.retire(self.store, self.keep_commits)
                except UnavailableError as error:
                    log.warning(
                        "old checkpoints could not be deleted (%s); the next commit tries again", error
                    )

    def _claim(self, effect: Claim) -> None:
        known, there = self.coordinator.incarnation, manifests.newest_incarnation(self.store)
        if there < known:
            raise UnavailableError(
                f"expected incarnation {known} in it, got {there}: it isn't the store that was there; bring it back"
            )
        wish = effect.wish or self._kept_wish()
        if wish.hold and not wish.hold.since_ms:
            wish = wish._replace(hold=wish.hold._replace(since_ms=self.clock.now_ms()))
        incarnation = manifests.claim_incarnation(self.store, self.clock.now_ms(), wish.body())
        last = manifests.newest(self.store, effect.passed_over)
        next_seq = manifests.next_seq(self.store)
        if last:
            self.check(last.manifest)
        with self._changed:
            if self.coordinator.state is State.CLAIMING:
                self.coordinator.claimed(incarnation, last, next_seq, self.clock.monotonic_s(), wish)
        self._keep_spent()

    def _kept_wish(self) -> IncarnationPlan:
        """That of the incarnation before this controller; the number of workers only if the settings are as they were."""
        kept = manifests.kept_wish(self.store)
        with contextlib.suppress(CheckpointError, ValueError, AttributeError):  # nothing was counted yet
            self.spent.add(json.loads(self.store.get(SPENT)))
        wish = self.coordinator.phases.kept(kept, self._begin)
        ends_alone = (
            wish.hold is not None and wish.hold.kind == TRANSIENT and not self.coordinator.facts.holds_idle
        )
        return wish._replace(hold=None) if ends_alone else wish  # nobody would end it

    def _begin(self) -> InitialRange:
        """The historical range of now. What a controller that isn't fenced yet commits meanwhile is less that is left."""
        last = manifests.newest(self.store)
        if last is None and (session := self.open_session()):
            return InitialRange(session.units, False, session)
        if not self.coordinator.facts.initial_workers:
            return InitialRange((), False)
        offsets = last.manifest.offsets if last else {}
        committed = {number: at for (topic, number), at in offsets.items() if topic == SAMPLES}
        return InitialRange(tuple(self.history(committed)), False)

    def session_now(self) -> tuple[int, TableInput | None]:
        """The incarnation, and the session of the warehouse that it trains; None = the stream. Any thread."""
        with self._changed:
            phases = self.coordinator.phases
            return self.coordinator.incarnation, phases.session if phases.is_initial else None

    def follow_by(self, session: TableInput | None) -> None:
        """What comes behind the session of now when all of that is trained; None = the stream. Any thread."""
        with self._changed:
            self.coordinator.phases.following = session

    def _link(self, manifest: Manifest) -> str:
        """Outcome for `Coordinator.linked`. The name decides: a create that failed after linking has linked, and nothing is told
        before the name can be read."""
        data, problem = manifest.encode(), ""
        if manifests.newest_incarnation(self.store) > manifest.incarnation:
            raise FencedError(
                f"a controller with an incarnation above {manifest.incarnation} runs; this one stops"
            )
        try:
            if self.store.create(manifest.name, data):
                return "linked"
        except UnavailableError as error:
            problem = str(error)
        try:
            there = self.store.get(manifest.name)
        except CheckpointError:
            return f"away: {problem}"
        return "linked" if there == data else "exists"

    def _check_fence(self) -> None:
        now_s = self.clock.monotonic_s()
        if now_s - self._fence_checked_s < FENCE_CHECK_S:
            return
        self._fence_checked_s = now_s
        newest = manifests.newest_incarnation(self.store)
        with self._changed:
            if self.coordinator.state is not State.CLAIMING and newest > self.coordinator.incarnation:
                self.coordinator.fenced(f"incarnation {newest} was claimed by another controller")

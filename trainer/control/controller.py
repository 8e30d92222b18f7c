"""The controller: the coordinator's adapter to RPC calls, the checkpoint store and clocks.

If the store is temporarily unavailable (a full disk, a lost mount), the controller retries the current effect
and keeps answering beats. Data counts as damaged only if it was read and is wrong, or is absent while the
store answers."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock, MonotonicToWallTime
from roostream.runtime.kafka.topics import SAMPLES, Progress
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.manifest import Manifest
from roostream.runtime.retention import DEFAULT_RETENTION, Retention, StoreCleaner, write_retention
from roostream.runtime.rpc.transport import Header
from roostream.runtime.store_identity import ensure_identity
from roostream.runtime.work_unit import TableInput, WorkUnit
from trainer.control.coordinator import Coordinator
from trainer.control.holds import DeviceTime, device_use, ratios
from trainer.control.membership import check_notice
from trainer.control.types import (
    TRANSIENT,
    Claim,
    Discard,
    Effect,
    IncarnationPlan,
    InitialRange,
    Key,
    Link,
    Retire,
    State,
)
from trainer.monitoring.rates import RateMeter, time_left

log = logging.getLogger("roostream.controller")

LONG_POLL_S = 0.5  # a beat waits this long for a command
POLL_S = 0.1
FENCE_CHECK_S = 1.0
_SAVE_DEVICE_TIME_S = 60.0
_ETA_WINDOW_S = 60.0
DEVICE_TIME_FILE = "control/spent"
"""Device-seconds by use, as plain JSON."""


class _DeletionInterruptedError(Exception):
    """Ends a deletion of old commits early, because another effect is due or another controller has taken
    over."""


_PAUSED_S = 1.0
"""A process that was paused for longer may have been replaced."""


class BackfillEta:
    """Estimates how long the initial phase will take, from a smoothed training rate. Times are seconds of a
    monotonic clock."""

    def __init__(self) -> None:
        self._meter = RateMeter(_ETA_WINDOW_S)
        self._trained = self._trained_at_commit = 0.0
        self._left: int | None = None  # as of the last commit

    def estimate(
        self, initial: Mapping[str, Any] | None, trained: float | None, now_s: float
    ) -> dict[str, Any] | None:
        """Add `eta_s` = [value, low, high] to `initial` (`Phases.progress`); a null value means unknown.
        `trained`: requests that all workers have trained since they started; None if a worker does not report
        it."""
        if initial is None:
            self._left = None
            self._meter.clear()
            return None
        left = initial["left"]  # of all epochs
        if trained is None or trained < self._trained:  # a worker restarted and counts from 0
            self._meter.clear()
            self._left = None
        self._trained = trained or 0.0
        if left != self._left:
            self._left, self._trained_at_commit = left, self._trained
        if trained is not None:
            self._meter.update(now_s, 0.0, trained)
        ahead = max(left - (self._trained - self._trained_at_commit), 0.0)
        return {**initial, "eta_s": list(time_left(ahead, self._meter.consumption))}


class Controller:
    """`handle` serves calls from any thread. `run` performs effects one at a time, in the caller's thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: CheckpointStore,
        clock: Clock,
        *,
        check: Callable[[Manifest], None] = lambda manifest: None,
        history: Callable[[Mapping[int, int]], Sequence[WorkUnit]] = lambda committed: (),
        open_session: Callable[[], TableInput | None] = lambda: None,
        long_poll_s: float = LONG_POLL_S,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        """`history`: units to train before the stream, given the committed offset of each partition of
        `samples`. `open_session`: a session of the warehouse to train first if nothing is committed."""
        self.coordinator, self.store, self.clock, self.check = coordinator, store, clock, check
        self.history, self.open_session = history, open_session
        self.long_poll_s, self.cleaner = long_poll_s, StoreCleaner(store, retention)
        self._has_written_retention = False
        self.readers: Callable[[], dict[str, Any]] | None = None  # status of the session's readers
        self.freshness: Callable[[], dict[str, Any]] = dict  # stage → latency measured by other programs
        self.topic_problems: Callable[[], Mapping[str, str]] = dict  # topic → what is wrong with it
        self.device_time = DeviceTime(clock.monotonic_s())
        self._eta, self._committed = BackfillEta(), MonotonicToWallTime(clock)
        self._uncommitted = MonotonicToWallTime(clock)
        self._changed = threading.Condition()
        self._effects: deque[Effect] = deque()
        self._outage = Backoff(what="the checkpoint store", clock=clock)
        self._log_rate_limit = LogRateLimit(clock.monotonic_s)
        self.outage = ""  # why the next effect is waiting for the store
        self._store_id = ""  # identity of the store of the first claim
        self._fence_checked_s = 0.0
        self._device_time_saved_s = clock.monotonic_s()
        self._has_read_device_time = False
        self._leave_by_s: float | None = None  # deadline of its own preemption
        self._on_progress: Callable[[], None] = lambda: None  # of the current turn

    def handle(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        """Serve `beat`, `status`, `commit`, `scale`, `release` and `preempt` of docs/protocols.md.

        Raises:
            RoostreamError: an unknown method or member; more workers than allowed; a notice that is too
                short.
            UnavailableError: the member to preempt is not connected.
            FencedError: a newer controller exists; connect to that one.
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
                key = Key(str(header["role"]), int(header["index"]))
                return self._preempt(key, float(header["notice_s"])), ()
        raise RoostreamError(
            f"expected a call of beat, status, commit, scale, release or preempt, got {method!r}"
        )

    def run(
        self, stop: threading.Event, on_turn: Callable[[], None] = lambda: None, closing_s: float = 0.0
    ) -> None:
        """Run until `stop` is set or the controller is preempted, then commit what is trained; after `stop`,
        for at most `closing_s` seconds. `on_turn` is called in every iteration, and within a long one.

        Raises:
            FencedError: a newer controller exists.
            CheckpointError, SchemaError: this controller cannot use what is committed.
            UnavailableError: stopped while the store was unavailable.
        """
        while True:
            if stop.is_set():
                self._leave_within(closing_s)
            if self._may_exit():
                return
            self.turn(None if stop.is_set() else stop, on_turn)
            on_turn()
            with self._changed:
                if not self.coordinator.has_effects:
                    self._changed.wait(POLL_S)

    def _leave_within(self, seconds: float) -> None:
        """The shortest notice counts."""
        with self._changed:
            leave_by_s = self.clock.monotonic_s() + seconds
            self._leave_by_s = min(self._leave_by_s or leave_by_s, leave_by_s)
            self.coordinator.leave()

    def _may_exit(self) -> bool:
        with self._changed:
            now_s = self.clock.monotonic_s()
            return self._leave_by_s is not None and (
                now_s >= self._leave_by_s or self.coordinator.can_leave(now_s)
            )

    def turn(
        self, stop: threading.Event | None = None, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Perform the pending effects in order. If the store is unavailable, the current effect stays first
        in the queue and the call waits for a short time. `on_progress` is called within an effect that takes
        long."""
        self._on_progress = on_progress
        with self._changed:
            self._effects += self.coordinator.take_effects()
        try:
            while self._effects:
                self.perform(self._effects[0])
                self._effects.popleft()
            self._check_fence()
            if self.clock.monotonic_s() - self._device_time_saved_s >= _SAVE_DEVICE_TIME_S:
                self._save_device_time()
        except UnavailableError as error:
            self.outage = str(error)
            self._outage.wait(error, stop)
        else:
            self.outage = ""
            self._outage.reached()
        with self._changed:
            coordinator, now_s = self.coordinator, self.clock.monotonic_s()
            coordinator.tick(now_s)
            use = device_use(coordinator.state, coordinator.holds.now)
            self.device_time.note(use, coordinator.membership.wanted_workers, now_s)
            self._changed.notify_all()
            self._raise_if_fenced()

    def _raise_if_fenced(self) -> None:
        if self.coordinator.state is State.FENCED:
            raise FencedError(f"{self.coordinator.reason}; this controller stops")

    def committed(self) -> tuple[Progress, bool]:
        """The next offsets to train as of the last commit, and whether training is on hold for lack of input.
        Any thread."""
        with self._changed:
            coordinator = self.coordinator
            offsets = coordinator.last.manifest.offsets if coordinator.last else {}
            return offsets, coordinator.state is State.HELD and coordinator.holds.is_transient

    def hold_idle(self, reason: str) -> bool:
        """Let all workers commit and release them, because there is nothing to read. False: not possible now.
        Any thread."""
        with self._changed:
            return self.coordinator.hold_idle(reason, self.clock.monotonic_s())

    def end_idle(self) -> bool:
        """End such a hold, because there is something to read. False if there is none. Any thread."""
        with self._changed:
            return self.coordinator.holds.is_transient and self.coordinator.release()

    def status(self) -> dict[str, Any]:
        """Plain values for `status` and metrics."""
        readers = self.readers() if self.readers else None  # outside the lock, because it calls `session_now`
        with self._changed:
            coordinator, now_s = self.coordinator, self.clock.monotonic_s()
            device_s, at_s = self.device_time.by_name(), coordinator.uncommitted_at_s
            committed_ms, commit_age_ms = self._last_commit(now_s)
            return {
                "readers": readers,
                "freshness": self.freshness(),
                "topic_problems": dict(self.topic_problems()),
                "state": str(coordinator.state),
                "reason": coordinator.reason,
                "away": self.outage,
                "incarnation": coordinator.incarnation,
                "seq": coordinator.seq,
                "manifest": coordinator.last.name if coordinator.last else "",
                "trained": coordinator.last.manifest.num_trained if coordinator.last else 0,
                "commit_age_ms": commit_age_ms,
                "committed_at_ms": committed_ms,
                "uncommitted_ms": None if at_s is None else (now_s - at_s) * 1000,
                "uncommitted_at_ms": None if at_s is None else self._uncommitted.of(at_s),
                "commit_ms": coordinator.commit_s * 1000,
                "paused_ms": coordinator.paused_s * 1000,
                "phases_ms": {name: seconds * 1000 for name, seconds in coordinator.phases_s.items()},
                "commits": coordinator.num_commits,
                "aborts": coordinator.num_aborts,
                "abort_reason": coordinator.abort_reason,
                "rollbacks": coordinator.num_rollbacks,
                "workers": coordinator.membership.num_workers,
                "wanted_workers": coordinator.membership.wanted_workers,
                "holds": [coordinator.holds.now._asdict()] if coordinator.holds.now else [],
                "rivals": coordinator.membership.rivals(now_s),
                "device_s": device_s,
                "device_ratio": ratios(device_s),
                "initial": self._eta.estimate(coordinator.phases.progress(), self._num_trained(), now_s),
                "news": coordinator.has_uncommitted_steps(),
                "members": {
                    str(k): {"incarnation": m.incarnation, "silent_ms": (now_s - m.seen_s) * 1000}
                    for k, m in coordinator.members.items()
                },
                "reports": {str(key): member.report for key, member in coordinator.members.items()},
            }

    def _last_commit(self, now_s: float) -> tuple[int | None, float | None]:
        """Wall time and age in ms of the last commit, which a controller before this one may have made; None
        = there is none."""
        at_s, last = self.coordinator.committed_at_s, self.coordinator.last
        if at_s is not None:
            return self._committed.of(at_s), (now_s - at_s) * 1000
        if last is None or not last.manifest.time_ms:
            return None, None
        return last.manifest.time_ms, float(max(0, self.clock.now_ms() - last.manifest.time_ms))

    def _num_trained(self) -> float | None:
        """Requests trained by all workers. None if a worker does not report it."""
        members = [self.coordinator.members.get(key) for key in self.coordinator.membership.workers]
        reported = [member.report.get("requests") if member else None for member in members]
        known = [float(count) for count in reported if count is not None]
        return sum(known) if len(known) == len(reported) else None

    def worker_metrics_addresses(self) -> dict[int, str]:
        """Connected and training workers → "host:port" of their metrics as they report it; "" if unknown. Any
        thread."""
        with self._changed:
            members = self.coordinator.members
            keys = {*self.coordinator.membership.workers, *(key for key in members if key.role == "worker")}
            known = {key: members[key].report.get("seen_at", "") for key in keys if key in members}
            return {key.index: str(known.get(key, "")) for key in keys}

    def _beat(self, header: Header) -> Header:
        key = Key(str(header["role"]), int(header["index"]))
        with self._changed:
            coordinator = self.coordinator
            session, incarnation = int(header["session"]), int(header["incarnation"])
            results, report = header.get("results", ()), dict(header.get("report", {}))
            process = str(header.get("process", ""))
            refused = coordinator.beat(
                key, session, incarnation, results, report, self.clock.monotonic_s(), process
            )
            if refused:
                if self.long_poll_s:
                    self._changed.wait_for(lambda: coordinator.state is State.FENCED, self.long_poll_s)
                self._raise_if_fenced()
                return {"commands": [], "incarnation": coordinator.incarnation, "refused": refused}
            self._changed.notify_all()
            if self.long_poll_s:
                self._changed.wait_for(
                    lambda: (
                        coordinator.commands(key)
                        or coordinator.state is State.FENCED
                        or self._leave_fields(key)
                    ),
                    self.long_poll_s,
                )
            self._raise_if_fenced()
            hold = (
                coordinator.holds.now.describe()
                if coordinator.holds.now and coordinator.state is State.HELD
                else ""
            )
            answer = {
                "commands": coordinator.commands(key),
                "incarnation": coordinator.incarnation,
                "hold": hold,
            }
            answer["standby"] = key not in coordinator.membership.everyone
            return answer | self._leave_fields(key)

    def _leave_fields(self, key: Key) -> dict[str, Any]:
        """Fields of the answer to a leaving member: the time it has left, or that it may exit."""
        now_s, member = self.clock.monotonic_s(), self.coordinator.members.get(key)
        if member is None or not member.leaves:
            return {}
        if member.report.get("leaving"):
            return {"free": True} if self.coordinator.can_leave(now_s) else {}
        return {"leave_s": max((member.leave_by_s or now_s) - now_s, 0.0)}

    def _preempt(self, key: Key, notice_s: float) -> Header:
        """Preempt a member or this controller.

        Waits until what is trained is committed, within the notice."""
        with self._changed:
            coordinator = self.coordinator
            if key == Key("controller", 0):
                check_notice(notice_s)
                self._leave_within(notice_s)
            else:
                coordinator.membership.ask_to_leave(key, notice_s, self.clock.monotonic_s())
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: coordinator.can_leave(self.clock.monotonic_s()), notice_s)
            why = "" if done else f"the controller is {coordinator.state}: {coordinator.reason}"
            return {"seq": coordinator.seq, "committed": bool(done), "why": why}

    def _commit_now(self, timeout_s: float) -> Header:
        """Commit what is trained, if anything is new, and wait for it. A commit that was cut earlier does not
        count."""
        with self._changed:
            coordinator = self.coordinator
            enough = coordinator.num_commits + (2 if coordinator.commit else 1)
            coordinator.want_commit()
            settled = (State.RUNNING, State.COMMITTING)
            done = self._changed.wait_for(
                lambda: (
                    coordinator.num_commits >= enough
                    or (coordinator.state in settled and not coordinator.has_uncommitted_steps())
                ),
                timeout_s,
            )
            return {"seq": coordinator.seq, "committed": bool(done)}

    def _scale(self, count: int, timeout_s: float) -> Header:
        """Train with `count` workers from the next commit on, and wait until they do. After a timeout the
        request stays; `why` says what is missing. Raises ConfigError: there cannot be that many, or the
        controller follows the connected workers."""
        with self._changed:
            coordinator = self.coordinator
            if coordinator.config.follow_workers:
                raise ConfigError(
                    "follow_workers is set, so all connected workers train; start or stop workers instead"
                )
            coordinator.membership.want(count)

            def is_running() -> bool:
                return coordinator.membership.num_workers == count and coordinator.state is State.RUNNING

            self._changed.wait_for(lambda: coordinator.state is State.FENCED or is_running(), timeout_s)
            self._raise_if_fenced()
            why = ""
            if not is_running():
                missing = ", ".join(coordinator.membership.absent(count))
                why = (
                    f"it waits for {missing}"
                    if missing
                    else f"the controller is {coordinator.state}: {coordinator.reason}"
                )
            return {"workers": coordinator.membership.num_workers, "running": is_running(), "why": why}

    def _release(self) -> Header:
        """End the hold; the next incarnation restores everyone."""
        with self._changed:
            was = self.coordinator.holds.now
            self.coordinator.release()
            return {"held": was is not None, "reason": was.reason if was else ""}

    def _save_device_time(self) -> None:
        """Best effort: a count that is slightly behind is harmless."""
        self._device_time_saved_s = self.clock.monotonic_s()
        try:
            if manifests.newest_incarnation(self.store) != self.coordinator.incarnation:
                return
            self.store.put(DEVICE_TIME_FILE, json.dumps(self.device_time.body()).encode())
        except UnavailableError as error:
            log.warning("device times could not be saved: %s", error)

    def perform(self, effect: Effect) -> None:
        """Perform one effect and report its outcome to the coordinator."""
        match effect:
            case Claim():
                self._claim(effect)
            case Link():
                outcome = self._link(effect.manifest)
                with self._changed:
                    self.coordinator.linked(outcome, self.clock.monotonic_s())
            case Discard():
                try:
                    for name in effect.names:
                        self.store.delete(name)
                except UnavailableError as error:
                    text = "files of an aborted commit could not be deleted: %s; the next commit tries again"
                    self._log_rate_limit.warning(log, "discard", text, error)
            case Retire():
                self._save_device_time()
                text = "old checkpoints could not be deleted: %s; the next commit tries again"
                checked_s = self.clock.monotonic_s()

                def check() -> None:
                    nonlocal checked_s
                    self._on_progress()
                    if self.clock.monotonic_s() - checked_s > _PAUSED_S:
                        if manifests.newest_incarnation(self.store) != self.coordinator.incarnation:
                            raise _DeletionInterruptedError
                        checked_s = self.clock.monotonic_s()
                    if self.coordinator.has_effects:
                        raise _DeletionInterruptedError

                try:
                    self.cleaner.clean(check)
                    self._write_retention()
                    self._log_rate_limit.over("clean")
                except _DeletionInterruptedError:
                    log.debug("deletion of old checkpoints continues after the next commit")
                except UnavailableError as error:
                    self._log_rate_limit.warning(log, "clean", text, error)

    def _write_retention(self) -> None:
        is_mine = manifests.newest_incarnation(self.store) == self.coordinator.incarnation
        if is_mine and not self._has_written_retention:
            write_retention(self.store, self.cleaner.retention)
            self._has_written_retention = True

    def _claim(self, effect: Claim) -> None:
        store_id = ensure_identity(self.store)
        if self._store_id not in ("", store_id):
            raise UnavailableError(
                f"expected the checkpoint store {self._store_id}, got store {store_id}; bring the earlier "
                "one back, or restart all programs with the right setting `store`"
            )
        if not self._store_id and (committed := manifests.newest(self.store, effect.skipped_manifests)):
            self.check(committed.manifest)  # before a claim could fence the controller of another deployment
        self._store_id = store_id
        known, newest = self.coordinator.incarnation, manifests.newest_incarnation(self.store)
        if newest < known:
            raise UnavailableError(
                f"expected incarnation {known} in the checkpoint store, got {newest}: this is an older copy "
                "of the store; bring the newest one back"
            )
        before = self.coordinator.last
        if before and manifests.has_lost(self.store, before.manifest.seq, before.manifest.incarnation):
            raise UnavailableError(
                f"expected {before.name} in the checkpoint store, got a store without it: bring it back, or "
                "restart the controller to continue from an older commit"
            )
        plan = effect.plan or self._stored_plan()
        if plan.hold and not plan.hold.since_ms:
            plan = plan._replace(hold=plan.hold._replace(since_ms=self.clock.now_ms()))
        incarnation = manifests.claim_incarnation(self.store, self.clock.now_ms(), plan.body())
        last = manifests.newest(self.store, effect.skipped_manifests)
        next_seq = manifests.next_seq(self.store)
        if last:
            self.check(last.manifest)
        with self._changed:
            if self.coordinator.state is State.CLAIMING:
                self.coordinator.store_id = store_id
                self.coordinator.claimed(incarnation, last, next_seq, self.clock.monotonic_s(), plan)
        self._save_device_time()

    def _stored_plan(self) -> IncarnationPlan:
        """The plan of the incarnation before this controller. Its number of workers counts only if the
        settings are unchanged."""
        saved = manifests.newest_purpose(self.store)
        if not self._has_read_device_time:  # a claim that fails after this is repeated
            with contextlib.suppress(CheckpointError, ValueError, AttributeError):  # nothing was counted yet
                self.device_time.add(json.loads(self.store.get(DEVICE_TIME_FILE)))
            self._has_read_device_time = True
        plan = self.coordinator.phases.stored_plan(saved, self._initial_range)
        is_transient = plan.hold is not None and plan.hold.kind == TRANSIENT
        if is_transient and not self.coordinator.config.holds_idle:
            return plan._replace(hold=None)  # nothing would end this hold
        return plan

    def _initial_range(self) -> InitialRange:
        """The historical range as of now. If an older controller commits meanwhile, less of it is left."""
        last = manifests.newest(self.store)
        if last is None and (session := self.open_session()):
            return InitialRange(session.units, False, session)
        if not self.coordinator.config.initial_workers:
            return InitialRange((), False)
        offsets = last.manifest.offsets if last else {}
        committed = {number: offset for (topic, number), offset in offsets.items() if topic == SAMPLES}
        return InitialRange(tuple(self.history(committed)), False)

    def session_now(self) -> tuple[int, TableInput | None]:
        """The incarnation and the session of the warehouse that it trains; None = the stream. Any thread."""
        with self._changed:
            phases = self.coordinator.phases
            return self.coordinator.incarnation, phases.session if phases.is_initial else None

    def set_following(self, session: TableInput | None) -> None:
        """Set what is trained after the current session; None = the stream. Any thread."""
        with self._changed:
            self.coordinator.phases.following = session

    def _link(self, manifest: Manifest) -> str:
        """Create the manifest; returns the outcome for `Coordinator.linked`. The name decides: a create that
        reports an error may have succeeded, so the outcome is known only once the name can be read."""
        data, problem = manifest.encode(), ""
        if manifests.newest_incarnation(self.store) > manifest.incarnation:
            raise FencedError(
                f"a controller with an incarnation above {manifest.incarnation} is running; this one stops"
            )
        try:
            if self.store.create(manifest.name, data):
                return "linked"
        except UnavailableError as error:
            problem = str(error)
        try:
            found = self.store.get(manifest.name)
        except CheckpointError:
            return f"away: {problem}"
        return "linked" if found == data else "exists"

    def _check_fence(self) -> None:
        now_s = self.clock.monotonic_s()
        if now_s - self._fence_checked_s < FENCE_CHECK_S:
            return
        newest = manifests.newest_incarnation(self.store)
        self._fence_checked_s = now_s  # a check that failed is repeated in the next turn
        with self._changed:
            if self.coordinator.state is not State.CLAIMING and newest > self.coordinator.incarnation:
                self.coordinator.fenced(f"incarnation {newest} was claimed by another controller")

"""The controller's decisions: a pure state machine. Events in (beats, ticks, what became of an effect), effects out.

    CLAIMING ──► GATHERING ──► RESTORING ──► RUNNING ──► CUTTING ──► FREEZING ──► WRITING ──► LINKING ──► COMMITTING ─┐
       ▲         every member    to the last    ▲                        │            │           │                   │
       │         is there        manifest       ├────── ABORTING ◄───────┴────────────┴───────────┘                   │
       └── any member lost, or broken           └─────────────────────────────────────────────────────────────────────┘

Commit:
  1. Workers train continuously.
  2. At `commit_interval_ms`, on preemption, at an epoch's end (phases.py), CUT: each worker ends its batch, tells its offsets.
  3. Drain: a worker answers CUT with no pull in flight, every push acknowledged and its predictions flushed.
  4. FREEZE: each shard fixes its dirty set; then RESUME: training goes on.
  5. WRITE: shards write the frozen rows, each worker its own part, worker 0 the shared one too.
  6. The manifest is created under its name, exclusively: that is the commit.
  7. COMMIT tells everyone to forget the generation before.
Any failure before 6: nothing is committed. A refusal is answered with ABORT, a lost member with the next incarnation, which
begins with RESTORE of the last manifest.

No state without a way out: whoever is asked has a time limit. A late step of a commit is aborted, everything else that is late
ends the incarnation, and so do `max_aborts` in a row. Aborts for which a member or the store says that something can't be
written now don't count: going back mends no disk, and the next commit that can be written has everything.

A member that was asked to stop says that it leaves: a commit at once closes the incarnation for all, so that nothing is trained
twice, and the next one waits until it is back. So it is when the controller itself is asked to.

How many workers train is a wish that is kept with each incarnation. Another wish is carried out at a commit after which nobody
goes on (no RESUME): the next incarnation restores as many as are wanted. Workers above that number stand by: their beats are
answered, and nothing is asked of them. What no restart mends holds training, and so does, where that is wanted, a stream with
nothing to read: the next incarnation is HELD (trainer/control/holds.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from roostream.runtime.manifest import Restorable
from trainer.control.holds import Holds, idle_hold
from trainer.control.manifest_builder import cut_twice, draft, watermark_of
from trainer.control.membership import Membership
from trainer.control.pending_commands import PendingCommands
from trainer.control.phases import Phases
from trainer.control.types import (
    Claim,
    Command,
    CommitInProgress,
    CoordinatorConfig,
    Effect,
    IncarnationPlan,
    Key,
    Link,
    MemberState,
    Retire,
    State,
)

log = logging.getLogger("roostream.controller")

_SETTLED_S = 1.0  # after this much of training every worker's beats have told whether there is anything new


class Coordinator:
    """Call `beat`, `tick`, `claimed`, `linked` with the same monotonic clock; do what `take_effects` gives. Not thread-safe."""

    def __init__(self, facts: CoordinatorConfig, now_s: float = 0.0) -> None:
        self.facts = facts
        self.state = State.CLAIMING
        self.reason = "start"
        self.incarnation = 0
        self.roster, self.holds = Membership(facts), Holds()
        self.phases, self.members = Phases(facts, self.roster), self.roster.members
        self.last: Restorable | None = None
        self.commit: CommitInProgress | None = None
        self.num_commits = self.num_aborts = self.num_rollbacks = 0
        self.commit_s = self.paused_s = 0.0  # of the last commit
        self.phases_s: dict[str, float] = {}
        self.committed_at_s = now_s
        self._effects: list[Effect] = [Claim(frozenset())]
        self._passed_over: set[str] = set()
        self._asking = PendingCommands(self.members, now_s)
        self._aborts_in_a_row = self._late_restores = 0
        self._next_seq = 1
        self._due_s = self._closing_s = self._not_before_s = self._running_s = now_s
        self._wanted = False

    # Events

    def beat(
        self, key: Key, session: int, incarnation: int, results: Iterable[dict], report: dict, now_s: float
    ) -> None:
        """A member called. A new session of a known member means that the old process died.

        Raises:
            ConfigError: the member isn't one of this controller's.
        """
        self.roster.check(key)
        is_active = key in self.roster.everyone
        if incarnation > self.incarnation and self.state is not State.CLAIMING:
            return self.fenced(
                f"{key} is at incarnation {incarnation}, this controller at {self.incarnation}"
            )
        member = self.members.get(key)
        if member is None or member.session != session:
            before = member  # None: one that was silent, which has been counted
            self.members[key] = member = MemberState(session=session, seen_s=now_s, since_s=now_s)
            if is_active and before:
                self._died(key, before, f"{key} started again")
            elif is_active:
                self._lost(f"{key} started again")
        member.seen_s, member.incarnation, member.report = now_s, incarnation, report
        for result in results:
            if (answered := self._asking.take(key, member, result)) and not answered.result.get("ok"):
                self._refused(answered.kind, key, answered.result, now_s)
        if is_active and incarnation == self.incarnation and report.get("fatal"):
            self._hold(key, str(report["fatal"]))
        if (
            is_active
            and incarnation == self.incarnation
            and (report.get("broken") or report.get("ready") is False)
        ):
            self._lost(f"{key} can't go on: {report.get('broken') or 'it is not ready any more'}")
        self.tick(now_s)

    def tick(self, now_s: float) -> None:
        """Time passed: members can be lost, a commit can be due, a step can be late."""
        for key, member in self.roster.lost(now_s).items():
            if key in self.roster.everyone:
                self._died(key, member, f"{key} has been silent for {self.facts.lost_after_s:g} s")
        match self.state:
            case State.GATHERING if self.roster.rescales():
                self._end(self.roster.why_closing())
            case State.GATHERING if (
                not self.roster.absent(self.roster.num_workers) and now_s >= self._not_before_s
            ):
                self._restore(now_s)
            case _ if self._asking and now_s - self._asking.asked_s >= self._limit_s:
                self._too_late(now_s)
            case State.RUNNING if now_s >= self._closing_s and (self.roster.rescales() or self._is_left()):
                self._cut(now_s, closing=True)
            case State.RUNNING if now_s >= self._closing_s and self.phases.is_trained(self.incarnation):
                self._cut(now_s)
            case State.RUNNING if (now_s >= self._due_s or self._wanted) and self.has_news():
                self._cut(now_s)
            case (
                State.RESTORING
                | State.CUTTING
                | State.FREEZING
                | State.WRITING
                | State.COMMITTING
                | State.ABORTING
            ):
                if not self._asking:
                    self._step(now_s)

    def claimed(
        self,
        incarnation: int,
        last: Restorable | None,
        next_seq: int,
        now_s: float,
        wish: IncarnationPlan | None = None,
    ) -> None:
        """The claim succeeded, for `wish` (None: what is wanted); `last` is what everyone will be restored to (None: nothing was
        ever committed)."""
        assert self.state is State.CLAIMING and incarnation > self.incarnation
        is_first = self.incarnation == 0
        self.state, self.incarnation, self.last, self._next_seq = State.GATHERING, incarnation, last, next_seq
        self.roster.claimed(self.phases.begun(wish, last))
        if self.holds.now is not None and wish and wish.hold is None:
            return self._end(f"held: {self.holds.now.reason}")  # since the claim: it has to be kept
        if wish and wish.hold:
            if not is_first and self.holds.now is None:
                return self._end("released")
            self.holds.now, self.state = wish.hold, State.HELD
        log.info(
            "incarnation %d (%s): %s",
            incarnation,
            self.reason,
            last.name if last else "nothing committed yet",
        )
        self.tick(now_s)

    def linked(self, outcome: str, now_s: float) -> None:
        """What became of step 6: "linked"; "exists" (an older controller's late link took the name); "away: why" (the store
        couldn't be written, and has no such name)."""
        if (
            self.state is not State.LINKING
        ):  # a member was lost meanwhile: the claim that follows reads what is there
            return
        if outcome == "linked":
            self._commit(now_s)
        else:
            reason = f"manifest {self._running_commit().seq} could not be linked ({outcome})"
            self._abort(reason, now_s, away=outcome.startswith("away"))

    def fenced(self, reason: str) -> None:
        """A newer controller exists: never command anything again."""
        self.state, self.reason, self.commit = State.FENCED, reason, None
        self._effects.clear()
        self._asking.clear()

    def release(self) -> bool:
        """End the hold; False if there was none."""
        was_held = self.holds.now is not None
        self.holds.release()
        if self.state is State.HELD:
            self._end("released")
        return was_held

    def hold_idle(self, reason: str, now_s: float) -> bool:
        """Have all finish and commit, and then hold until `release`. False: they can't now, since training doesn't run."""
        if self.state is not State.RUNNING or now_s < self._closing_s:
            return False
        self._cut(now_s, closing=True)
        self._running_commit().hold = idle_hold(reason)
        return True

    def leave(self) -> None:
        """The controller itself goes: what is trained is committed, and nothing begins that it would not see to its end."""
        self.roster.controller_leaves = True

    def want_commit(self) -> None:
        """Commit as soon as possible, if there is anything new."""
        self._wanted = True

    # What the adapter reads

    def is_free(self, now_s: float) -> bool:
        """Whether anybody may go now, and nothing that was trained is lost."""
        if self.state is State.RUNNING:
            quiet = not self.roster.trains_on() or now_s - self._running_s >= _SETTLED_S
            return quiet and not self.has_news()
        return self.state in (State.CLAIMING, State.GATHERING, State.RESTORING, State.HELD, State.FENCED)

    def commands(self, key: Key) -> list[Command]:
        """Commands that `key` has not answered, oldest first; they are given again until it does."""
        return self._asking.commands(key)

    def take_effects(self) -> list[Effect]:
        taken, self._effects = self._effects, []
        return taken

    @property
    def has_effects(self) -> bool:
        return bool(self._effects)

    @property
    def seq(self) -> int:
        """Of the last commit; 0 before the first."""
        return self.last.manifest.seq if self.last else 0

    # Restore

    def _lost(self, reason: str) -> None:
        """The incarnation is over, unless it hasn't begun to do anything."""
        if self.state in (State.CLAIMING, State.GATHERING, State.HELD, State.FENCED):
            return
        log.warning("%s: everyone goes back to %s", reason, self.last.name if self.last else "the beginning")
        self.num_rollbacks += 1
        self._end(reason)

    def _died(self, key: Key, member: MemberState, reason: str) -> None:
        """A process ended: everyone is restored; where it does so again and again, without being asked to, training is held."""
        counts = self.state not in (State.HELD, State.FENCED) and not member.leaves
        if counts and (
            hold := self.holds.died(key, member.seen_s - member.since_s, str(member.report.get("saved", "")))
        ):
            return self._hold(key, hold.reason)
        self._lost(reason)

    def _hold(self, key: Key, reason: str) -> None:
        """No restart helps: workers are released until a person says so."""
        if self.state in (State.CLAIMING, State.HELD, State.FENCED):
            return
        self.holds.stop(key, reason)
        log.error("training is held: %s: %s; `roostream trainer release` ends the hold", key, reason)
        self._end(f"held: {key}: {reason}")

    def _end(self, reason: str) -> None:
        """The next incarnation follows, with as many workers as are wanted if they are there."""
        self._aborts_in_a_row = 0
        self.state, self.reason, self.commit = State.CLAIMING, reason, None
        self._asking.clear()
        self._effects = [Claim(frozenset(self._passed_over), self.phases.wish(self.holds.now))]

    def _restore(self, now_s: float) -> None:
        self.state = State.RESTORING
        told = {"manifest": self.last.name if self.last else "", "schema": self.facts.schema}
        self._ask("restore", self.facts.shards, now_s, **told)
        self._ask_workers("restore", now_s, self.phases.restore_of, **told)

    def _start(self, now_s: float) -> None:
        self.state, self._due_s, self._running_s = State.RUNNING, now_s + self.facts.commit_interval_s, now_s
        self._late_restores = 0
        self._ask_workers("start", now_s, self.phases.told)

    def _pass_over(self, key: Key, error: str) -> None:
        """What the manifest names is damaged: the one before it is tried, by the next incarnation."""
        assert self.last is not None
        log.warning("%s can't restore %s: %s; passing it over", key, self.last.name, error)
        self._passed_over.add(self.last.name)
        self._lost(f"{self.last.name} is damaged")

    # Commit

    def _is_left(self) -> bool:
        """Somebody goes, and something would be lost with it."""
        return bool(self.roster.leaving()) and self.has_news()

    def _cut(self, now_s: float, *, closing: bool = False) -> None:
        """2. Every worker stops after the batch in hand; 3. its answer says that nothing is in flight."""
        self.state, self._wanted = State.CUTTING, False
        self.commit = CommitInProgress(seq=self._next_seq, started_s=now_s, closing=closing)
        self._next_seq += 1
        self._ask("cut", self.roster.workers, now_s, seq=self.commit.seq)

    def _freeze(self, now_s: float) -> None:
        """4. Nothing moves: the shards fix their dirty sets, and expire rows by the watermark that will be the manifest's."""
        commit = self._running_commit()
        self.state, commit.cuts = State.FREEZING, self._asking.answers("cut", self.roster.workers)
        commit.cut_s = now_s
        if cut_twice(commit):
            return self._abort("two workers cut the same partition", now_s)
        if commit.hold and not self.has_news():
            return self._close(commit)  # all stand still, and nothing is new
        self._ask("freeze", self.facts.shards, now_s, seq=commit.seq, watermark_ms=watermark_of(commit))

    def _write(self, now_s: float) -> None:
        """4. (end) Training goes on, unless this commit closes the incarnation. 5. Shards write what is frozen, workers their own
        parts, the first the shared one too."""
        commit = self._running_commit()
        self.state, commit.frozen_s = State.WRITING, now_s
        self._ask("resume", () if commit.closing else self.roster.workers, now_s, seq=commit.seq)
        self._ask("write", self.facts.shards, now_s, seq=commit.seq)
        self._ask_workers(
            "write", now_s, lambda key: {"shared": key == self.roster.workers[0]}, seq=commit.seq
        )

    def _link(self, now_s: float) -> None:
        """6. The manifest is complete; creating it is the commit."""
        self.state = State.LINKING
        commit = self._running_commit()
        commit.written_s = now_s
        shards, its = (
            self._asking.answers("write", self.facts.shards),
            self._asking.answers("write", self.roster.workers),
        )
        commit.manifest = self.phases.stated(
            draft(self.facts, self.incarnation, self.last, commit, shards, its)
        )
        self._effects.append(Link(commit.manifest))

    def _commit(self, now_s: float) -> None:
        """7. It is committed, whatever happens now: everyone may forget the generation before."""
        commit = self._running_commit()
        assert commit.manifest is not None
        self.state, self.last = State.COMMITTING, Restorable(commit.manifest, commit.manifest.checksum)
        self.num_commits += 1
        self.holds.committed()
        self._aborts_in_a_row = 0
        self.commit_s, self.paused_s = now_s - commit.started_s, commit.frozen_s - commit.started_s
        self.phases_s = commit.phases_s(now_s)
        self.committed_at_s = now_s
        self.phases.committed(self.last)
        self._ask("commit", self.facts.shards, now_s, seq=commit.seq)
        self._ask_workers("commit", now_s, self.phases.told, seq=commit.seq)
        self._effects.append(Retire())

    def _abort(self, reason: str, now_s: float, *, away: bool = False) -> None:
        """`away`: something can't be written now, and everyone is in order."""
        log.warning(
            "commit %d is abandoned: %s; nothing of it is committed", self._running_commit().seq, reason
        )
        self.num_aborts += 1
        self._aborts_in_a_row += not away
        self._closing_s = now_s + self.facts.commit_interval_s
        if self._aborts_in_a_row >= self.facts.max_aborts:
            return self._lost(
                f"{self._aborts_in_a_row} commits in a row were abandoned, the last one because {reason}"
            )
        self.state = State.ABORTING
        self._asking.clear()
        self._ask("abort", self.roster.everyone, now_s, seq=self._running_commit().seq)

    def _go_on(self, now_s: float) -> None:
        """1. Workers train."""
        if self.state is State.COMMITTING and (self._running_commit().closing or self.phases.switches):
            return self._close(self._running_commit())
        self.state, self.commit, self._running_s = State.RUNNING, None, now_s
        self._due_s = now_s + self.facts.commit_interval_s

    def _close(self, commit: CommitInProgress) -> None:
        """The incarnation ends in order."""
        self.holds.now = self.holds.now or commit.hold
        self._end(
            f"held: {commit.hold.reason}" if commit.hold else self.phases.why() or self.roster.why_closing()
        )

    def _running_commit(self) -> CommitInProgress:
        assert self.commit is not None, self.state
        return self.commit

    def has_news(self) -> bool:
        """Has any worker cut a batch since the last commit? An idle loop writes nothing."""
        return self.roster.newest_step() > (self.last.manifest.step if self.last else 0)

    # Commands and their results

    def _ask(self, kind: str, keys: Iterable[Key], now_s: float, **arguments: Any) -> None:
        self._asking.ask(kind, keys, self.incarnation, now_s, **arguments)

    def _ask_workers(
        self, kind: str, now_s: float, its: Callable[[Key], Mapping[str, Any]], **arguments: Any
    ) -> None:
        """Each with what is its own."""
        for key in self.roster.workers:
            self._ask(kind, (key,), now_s, **arguments, **its(key))

    def _refused(self, kind: str, key: Key, result: Mapping[str, Any], now_s: float) -> None:
        """`result` as roostream.runtime.controller_agent.error_result tells it."""
        error = str(result.get("error", "no reason given"))
        if kind == "restore" and result.get("damaged") and self.last:
            self._pass_over(key, error)
        elif kind in ("restore", "start") and result.get("permanent"):
            self._hold(key, error)
        elif kind in ("cut", "freeze", "resume", "write"):
            self._abort(f"{key} refused {kind}: {error}", now_s, away=bool(result.get("away")))
        else:  # restore, start, commit, abort: its state is unknown
            self._not_before_s = now_s + self.facts.retry_s
            self._lost(f"{key} refused {kind}: {error}")

    @property
    def _limit_s(self) -> float:
        """What those who are asked have for an answer."""
        if self.state is State.RESTORING:
            return self.facts.restore_timeout_s * 2 ** min(self._late_restores, 4)
        return self.facts.step_timeout_s

    def _too_late(self, now_s: float) -> None:
        reason = (
            f"{self._asking.late()} didn't answer for {now_s - self._asking.asked_s:g} s while {self.state}"
        )
        if self.state in (State.CUTTING, State.FREEZING, State.WRITING):
            return self._abort(reason, now_s)
        self._late_restores += self.state is State.RESTORING
        self._not_before_s = now_s + self.facts.retry_s
        self._lost(reason)

    def _step(self, now_s: float) -> None:
        """Everyone asked has answered."""
        match self.state:
            case State.RESTORING:
                self._start(now_s)
            case State.CUTTING:
                self._freeze(now_s)
            case State.FREEZING:
                self._write(now_s)
            case State.WRITING:
                self._link(now_s)
            case State.COMMITTING | State.ABORTING:
                self._go_on(now_s)

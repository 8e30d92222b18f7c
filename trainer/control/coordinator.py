"""The controller's decisions as a pure state machine: events in (beats, ticks, outcomes of effects), effects
and commands out.

   CLAIMING ─► GATHERING ─► RESTORING ─► RUNNING ─► CUTTING ─► FREEZING ─► WRITING ─► LINKING ─► COMMITTING ─┐
      ▲        all members     to the last  ▲                     │           │          │                   │
      │        connected       manifest     ├── ABORTING ◄────────┴───────────┴──────────┘                   │
      └── any member lost, or broken        └────────────────────────────────────────────────────────────────┘

Commit protocol:
  1. Workers train continuously.
  2. CUT is sent every `commit_interval_ms`, on preemption and at the end of an epoch (phases.py). Each worker
     finishes its batch and reports its offsets.
  3. Drain: a worker answers CUT with no pull in flight, every push acknowledged and its predictions flushed.
  4. FREEZE: each shard fixes its dirty set. RESUME follows, and training continues.
  5. WRITE: shards write the frozen rows. Each worker writes its own part; worker 0 also writes the shared
     part.
  6. The manifest is created exclusively under its name. This step is the commit.
  7. COMMIT lets every member delete the previous generation.
A failure before step 6 commits nothing. A refused command leads to ABORT. A lost member leads to the next
incarnation, which starts with RESTORE of the last manifest.

Every state has a way out, because every command has a time limit. It begins again whenever the member reports
progress, so it follows the size of the work. A late step of a commit is aborted.
Anything else that is late ends the incarnation, and so do `max_aborts` aborts in a row. Aborts caused by
storage that is temporarily unavailable do not count: a rollback would not help, and the next successful
commit contains everything.

A member that is preempted reports that it is leaving. One commit then closes the incarnation for all members,
so that nothing is trained twice, and the next incarnation waits until the member is back. The same happens
when the controller is preempted.

The wanted number of workers is stored with each incarnation. A new number takes effect at a commit that is
not followed by RESUME; the next incarnation restores the wanted number. Workers above that number stand by:
their beats are answered, and they get no commands. An error that no restart can fix puts training on hold,
and so can an empty input (holds.py): the next incarnation is then HELD."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from roostream.runtime import manifest as manifests
from roostream.runtime.kafka.topics import flat
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.manifest import Manifest, Restorable, StoredFile, WorkerPart
from trainer.control.holds import Holds, idle_hold
from trainer.control.membership import Membership
from trainer.control.phases import Phases
from trainer.control.types import (
    Claim,
    Command,
    CommitInProgress,
    CoordinatorConfig,
    Discard,
    Effect,
    IncarnationPlan,
    Key,
    Link,
    MemberState,
    Retire,
    State,
)

log = logging.getLogger("roostream.controller")

_PROGRESS_S = 10.0  # a member whose last progress is older may hang
_MAX_RETRY_S = 15.0  # between a refused RESTORE and the next one
_SETTLED_S = 1.0  # after this much training, every worker's beats have reported whether there is new data


class CommandResult(NamedTuple):
    """A member's answer to an outstanding command."""

    kind: str
    result: Mapping[str, Any]


class PendingCommands:
    """Commands sent to members. Each one is repeated until its result arrives. Not thread-safe."""

    def __init__(self, members: Mapping[Key, MemberState], now_s: float) -> None:
        """`members` is owned and updated by the caller."""
        self.members = members
        self.asked_s = now_s  # time of the newest command
        self._waiting: dict[int, Key] = {}
        self._results: dict[tuple[str, Key], dict[str, Any]] = {}
        self._next_id = 0

    def __bool__(self) -> bool:
        """Whether any member has not answered."""
        return bool(self._waiting)

    def ask(self, kind: str, keys: Iterable[Key], incarnation: int, now_s: float, **arguments: Any) -> None:
        self.asked_s = now_s
        for key in keys:
            self._next_id += 1
            id_ = (incarnation << 32) + self._next_id  # unique over all controllers
            self.members[key].outbox[id_] = {"id": id_, "kind": kind, "incarnation": incarnation, **arguments}
            self._waiting[id_] = key
            self._results.pop((kind, key), None)

    def take(self, key: Key, member: MemberState, result: Mapping[str, Any]) -> CommandResult | None:
        """Record a result. None if it belongs to an earlier incarnation or was already recorded."""
        command = member.outbox.pop(result.get("id", 0), None)
        if command is None or self._waiting.pop(command["id"], None) is None:
            return None
        if result.get("ok"):
            self._results[command["kind"], key] = {k: v for k, v in result.items() if k not in ("id", "ok")}
        return CommandResult(command["kind"], result)

    def commands(self, key: Key) -> list[Command]:
        """Commands that `key` has not answered, oldest first."""
        member = self.members.get(key)
        return list(member.outbox.values()) if member else []

    def answers(self, kind: str, keys: Iterable[Key]) -> list[dict[str, Any]]:
        """Results of `keys`, all of which must have answered."""
        return [self._results[kind, key] for key in keys]

    def late(self, now_s: float, limit_s: float) -> str:
        """Names of the members that have neither answered nor reported progress for `limit_s`."""
        late = {key for key in self._waiting.values() if now_s - self._active_s(key) >= limit_s}
        return ", ".join(sorted(map(str, late)))

    def progresses(self, role: str, now_s: float) -> bool:
        """Whether a member of this role works on a command that it was sent recently, or has recently
        reported progress with."""
        waiting = [key for key in self._waiting.values() if key.role == role]
        return any(self._active_s(key) > now_s - _PROGRESS_S for key in waiting)

    def _active_s(self, key: Key) -> float:
        member = self.members.get(key)
        return max(self.asked_s, member.progressed_s if member else 0.0)

    def clear(self) -> None:
        """Drop all outstanding commands."""
        self._waiting.clear()
        self._results.clear()
        for member in self.members.values():
            member.outbox.clear()


def build_manifest(
    config: CoordinatorConfig,
    incarnation: int,
    last: Restorable | None,
    commit: CommitInProgress,
    shards: Sequence[Mapping[str, Any]],
    workers: Sequence[Mapping[str, Any]],
) -> Manifest:
    """Build the manifest of a commit from the answers to CUT and WRITE, in the order of member indices. The
    first worker wrote the shared part."""
    rows_end: dict[int, int] = {}
    # Take the smallest: a restore that reads more only republishes more, which is harmless.
    for shard in shards:
        for partition, offset in shard.get("rows_end", {}).items():
            rows_end[int(partition)] = min(int(offset), rows_end.get(int(partition), int(offset)))
    return Manifest(
        seq=commit.seq,
        incarnation=incarnation,
        previous={"seq": last.manifest.seq if last else 0, "checksum": last.checksum if last else ""},
        step=max(int(c["step"]) for c in commit.cuts),
        watermark_ms=commit_watermark_ms(commit),
        schema=config.schema,
        seed=config.seed,
        num_shards=config.num_shards,
        num_buckets=config.num_buckets,
        num_partitions=config.num_partitions,
        kafka=dict(config.kafka),
        rows_end=rows_end,
        shards={i: {k: v for k, v in shard.items() if k != "rows_end"} for i, shard in enumerate(shards)},
        dense=StoredFile(**workers[0]["dense"]),
        model=dict(commit.cuts[0]["model"]),
        bucket_map=last.manifest.bucket_map if last else None,
        workers={
            i: WorkerPart(
                offsets=flat(cut["offsets"]),
                file=StoredFile(**written["own"]),
                id_files=tuple(StoredFile(**file) for file in written["id_files"]),
                dedupe=int(written["dedupe"]),
                metrics=dict(written["metrics"]),
            )
            for i, (cut, written) in enumerate(zip(commit.cuts, workers, strict=True))
        },
        time_ms=max(int(c["time_ms"]) for c in commit.cuts),
    )


def commit_watermark_ms(commit: CommitInProgress) -> int:
    """Watermark of the slowest worker. A worker that never had a record (watermark 0) does not hold the
    others back."""
    return min((ms for cut in commit.cuts if (ms := int(cut["watermark_ms"]))), default=0)


def has_duplicate_partition(commit: CommitInProgress) -> bool:
    """Whether two workers cut the same partition."""
    cut = [partition for answer in commit.cuts for partition in flat(answer["offsets"])]
    return len(cut) != len(set(cut))


class Coordinator:
    """Decides when members restore, train, commit and wait. It has no threads and does no I/O.

    Call `beat`, `tick`, `claimed` and `linked` with times of one monotonic clock in seconds, and perform the
    effects that `take_effects` returns. Not thread-safe."""

    def __init__(
        self, config: CoordinatorConfig, now_s: float = 0.0, log_rate_limit: LogRateLimit | None = None
    ) -> None:
        self.config, self._log_rate_limit = config, log_rate_limit or LogRateLimit()
        self.state = State.CLAIMING
        self.reason = "start"
        self.incarnation = 0
        self.store_id = ""  # of the checkpoint store; members refuse to restore from another one
        self.membership, self.holds = Membership(config), Holds()
        self.phases, self.members = Phases(config, self.membership), self.membership.members
        self.last: Restorable | None = None
        self.commit: CommitInProgress | None = None
        self.num_commits = self.num_aborts = self.num_rollbacks = 0
        self.abort_reason = ""  # of the last abort since the last commit
        self.commit_s = self.paused_s = 0.0  # of the last commit
        self.phases_s: dict[str, float] = {}
        self.committed_at_s: float | None = None  # None: nothing was committed since the start
        self.uncommitted_at_s: float | None = None  # since when trained steps wait for a commit
        self._effects: list[Effect] = [Claim(frozenset())]
        self._skipped_manifests: set[str] = set()
        self._pending = PendingCommands(self.members, now_s)
        self._aborts_in_a_row = self._late_restores = 0
        self._num_aborted = 0  # since the last commit, for whatever reason
        self._refused_restore = ""  # why this incarnation ends once no shard makes progress with its RESTORE
        self._num_refused = 0  # restores in a row
        self._next_seq = 1
        self._due_s = self._closing_s = self._not_before_s = self._running_s = now_s
        self._wanted = False

    # Events

    def beat(
        self,
        key: Key,
        session: int,
        incarnation: int,
        results: Iterable[dict],
        report: dict,
        now_s: float,
        process: str = "",
    ) -> str:
        """Handle a beat of a member's process ("pid 12 on host a"). Returns "", or why this process is
        refused: another one has the key. Raises ConfigError: the member does not belong to this controller.

        A new session of a known key is accepted once the process before is silent. It means that the old one
        died."""
        self.membership.check(key)
        is_active = key in self.membership.everyone
        if refused := self.membership.refuse_rival(key, session, process, now_s):
            return refused
        if incarnation > self.incarnation and self.state is not State.CLAIMING:
            self.fenced(f"{key} is at incarnation {incarnation}, this controller is at {self.incarnation}")
            return ""
        member = self.members.get(key)
        if member is None or member.session != session:
            before = member  # None: the member was silent, and its loss is already counted
            if before is None:
                self.holds.lives(key, session)
            self.members[key] = member = MemberState(
                session=session, seen_s=now_s, since_s=now_s, process=process
            )
            if is_active:
                self._num_refused, self._not_before_s = 0, min(self._not_before_s, now_s)
            if is_active and before:
                self._died(key, before, f"{key} restarted", now_s)
            elif is_active:
                self._lost(f"{key} restarted")
        if report.get("progress") != member.report.get("progress"):
            member.progressed_s = now_s
        member.seen_s, member.incarnation, member.report = now_s, incarnation, report
        for result in results:
            if (answered := self._pending.take(key, member, result)) and not answered.result.get("ok"):
                self._refused(answered.kind, key, answered.result, now_s)
        is_current = is_active and incarnation == self.incarnation
        if is_current and report.get("fatal"):
            self._hold(key, str(report["fatal"]))
        if is_current and (report.get("broken") or report.get("ready") is False):
            self._lost(f"{key} cannot continue: {report.get('broken') or 'it is no longer ready'}")
        self.tick(now_s)
        return ""

    def tick(self, now_s: float) -> None:
        """Check for lost members, a due commit and a late step."""
        for key, member in self.membership.lost(now_s).items():
            if key in self.membership.everyone:
                reason = f"{key} has sent no beat for {self.config.lost_after_s:g} s"
                self._died(key, member, reason, now_s)
        if self.config.follow_workers and not self.phases.is_initial:
            self.membership.follow_connected(now_s)
        if self.uncommitted_at_s is None and self.has_uncommitted_steps():
            self.uncommitted_at_s = now_s  # until a commit: a restore only repeats the steps
        match self.state:
            case State.GATHERING if self.membership.should_rescale():
                self._end(self.membership.closing_reason())
            case State.GATHERING if (
                not self.membership.absent(self.membership.num_workers) and now_s >= self._not_before_s
            ):
                self._restore(now_s)
            case State.RESTORING if self._refused_restore and not self._pending.progresses("shard", now_s):
                self._retry_later(now_s)
                self._lost(self._refused_restore)
            case _ if late := self._pending.late(now_s, self._time_limit_s):
                self._handle_timeout(late, now_s)
            case State.RUNNING if now_s >= self._closing_s and (
                self.membership.should_rescale() or self._must_commit_before_leaving()
            ):
                self._cut(now_s, closing=True)
            case State.RUNNING if now_s >= self._closing_s and self.phases.is_trained(self.incarnation):
                self._cut(now_s)
            case State.RUNNING if (now_s >= self._due_s or self._wanted) and self.has_uncommitted_steps():
                self._cut(now_s)
            case _ if not self._pending:
                self._step(now_s)

    def claimed(
        self,
        incarnation: int,
        last: Restorable | None,
        next_seq: int,
        now_s: float,
        plan: IncarnationPlan | None = None,
    ) -> None:
        """The claim succeeded for `plan` (None: the configured one). Everyone is restored to `last` (None: no
        commit exists)."""
        assert self.state is State.CLAIMING and incarnation > self.incarnation
        is_first = self.incarnation == 0
        self.state, self.incarnation, self.last, self._next_seq = State.GATHERING, incarnation, last, next_seq
        self.membership.claimed(self.phases.begin_incarnation(plan, last))
        if self.holds.now is not None and plan and plan.hold is None:
            # The hold began during the claim and must be stored.
            return self._end(f"held: {self.holds.now.reason}")
        if plan and plan.hold:
            if not is_first and self.holds.now is None:
                return self._end("released")
            self.holds.now, self.state = plan.hold, State.HELD
        found = last.name if last else "no commit yet"
        log.info("incarnation %d (%s): %s", incarnation, self.reason, found)
        self.tick(now_s)

    def linked(self, outcome: str, now_s: float) -> None:
        """Outcome of step 6: "linked"; "exists" (an older controller's late link took the name); "away:
        REASON" (the store could not be written and has no such name)."""
        if self.state is not State.LINKING:
            return  # a member was lost meanwhile; the next claim reads the newest manifest
        if outcome == "linked":
            self._commit(now_s)
        else:
            reason = f"manifest {self._running_commit().seq} could not be created ({outcome})"
            self._abort(reason, now_s, counts=not outcome.startswith("away"))

    def fenced(self, reason: str) -> None:
        """A newer controller exists: never send a command again."""
        self.state, self.reason, self.commit = State.FENCED, reason, None
        self._effects.clear()
        self._pending.clear()

    def release(self) -> bool:
        """End the hold. False if there was none."""
        was_held = self.holds.now is not None
        self.holds.release()
        if self.state is State.HELD:
            self._end("released")
        return was_held

    def hold_idle(self, reason: str, now_s: float) -> bool:
        """Let all workers commit, then hold until `release`. False if training is not running now."""
        if self.state is not State.RUNNING or now_s < self._closing_s:
            return False
        self._cut(now_s, closing=True)
        self._running_commit().hold = idle_hold(reason)
        return True

    def leave(self) -> None:
        """The controller is being stopped: commit what is trained, and start nothing new."""
        self.membership.controller_leaves = True

    def want_commit(self) -> None:
        """Commit as soon as possible if there is anything new."""
        self._wanted = True

    # Read by the adapter

    def can_leave(self, now_s: float) -> bool:
        """Whether members may leave now without losing trained samples."""
        if self.state is State.RUNNING:
            quiet = not self.membership.has_active_worker() or now_s - self._running_s >= _SETTLED_S
            return quiet and not self.has_uncommitted_steps()
        return self.state in (State.CLAIMING, State.GATHERING, State.RESTORING, State.HELD, State.FENCED)

    def commands(self, key: Key) -> list[Command]:
        """Commands that `key` has not answered, oldest first. They are repeated until it does."""
        return self._pending.commands(key)

    def take_effects(self) -> list[Effect]:
        taken, self._effects = self._effects, []
        return taken

    @property
    def has_effects(self) -> bool:
        return bool(self._effects)

    @property
    def seq(self) -> int:
        """Number of the last commit; 0 before the first."""
        return self.last.manifest.seq if self.last else 0

    # Restore

    def _lost(self, reason: str) -> None:
        """End the incarnation, unless it has not started anything yet."""
        if self.state in (State.CLAIMING, State.GATHERING, State.HELD, State.FENCED):
            return
        log.warning(
            "%s: all members are restored to %s", reason, self.last.name if self.last else "the beginning"
        )
        self.num_rollbacks += 1
        self._end(reason)

    def _died(self, key: Key, member: MemberState, reason: str, now_s: float) -> None:
        """A process ended: everyone is restored. A worker that keeps dying without being asked to puts
        training on hold."""
        counts = self.state not in (State.HELD, State.FENCED) and not member.leaves
        lived_s, saved = member.seen_s - member.since_s, str(member.report.get("saved", ""))
        rival = self.membership.rival(key, now_s)
        if counts and (hold := self.holds.died(key, lived_s, saved, rival, member.session)):
            return self._hold(key, hold.reason)
        self._lost(reason)

    def _hold(self, key: Key, reason: str) -> None:
        """Put training on hold: no restart helps, and workers are released until an operator ends the
        hold."""
        if self.state in (State.CLAIMING, State.HELD, State.FENCED):
            return
        self.holds.stop(key, reason)
        log.error("training is on hold: %s: %s; `roostream trainer release` ends the hold", key, reason)
        self._end(f"held: {key}: {reason}")

    def _end(self, reason: str) -> None:
        """Claim the next incarnation, with the wanted number of workers if they are connected."""
        self._aborts_in_a_row = 0
        self.state, self.reason, self.commit = State.CLAIMING, reason, None
        self._pending.clear()
        self._effects = [Claim(frozenset(self._skipped_manifests), self.phases.next_plan(self.holds.now))]

    def _restore(self, now_s: float) -> None:
        self.state, self._refused_restore = State.RESTORING, ""
        fields = {
            "manifest": self.last.name if self.last else "",
            "schema": self.config.schema,
            "store": self.store_id,
        }
        self._ask("restore", self.config.shards, now_s, **fields, keep_commits=self.config.keep_commits)
        self._ask_workers("restore", now_s, self.phases.restore_fields, **fields)

    def _start(self, now_s: float) -> None:
        self.state, self._due_s, self._running_s = State.RUNNING, now_s + self.config.commit_interval_s, now_s
        self._late_restores = self._num_refused = 0
        self._ask_workers("start", now_s, self.phases.epoch_fields)

    def _skip_manifest(self, key: Key, error: str) -> None:
        """The manifest's files are damaged: the next incarnation tries the previous manifest."""
        assert self.last is not None
        log.warning("%s cannot restore %s: %s; the previous manifest is tried", key, self.last.name, error)
        self._skipped_manifests.add(self.last.name)
        self._lost(f"{self.last.name} is damaged")

    # Commit

    def _must_commit_before_leaving(self) -> bool:
        """Whether a member is leaving while there are uncommitted steps."""
        return bool(self.membership.leaving()) and self.has_uncommitted_steps()

    def _cut(self, now_s: float, *, closing: bool = False) -> None:
        """Step 2: every worker stops after its current batch. Step 3: its answer confirms that nothing is in
        flight."""
        self.state, self._wanted = State.CUTTING, False
        self.commit = CommitInProgress(seq=self._next_seq, started_s=now_s, closing=closing)
        self._next_seq += 1
        self._ask("cut", self.membership.workers, now_s, seq=self.commit.seq)

    def _freeze(self, now_s: float) -> None:
        """Step 4: training is paused. Shards fix their dirty sets and expire rows by the watermark of the
        coming manifest."""
        commit = self._running_commit()
        self.state, commit.cuts = State.FREEZING, self._pending.answers("cut", self.membership.workers)
        commit.cut_s = now_s
        if has_duplicate_partition(commit):
            return self._abort("two workers cut the same partition", now_s)
        if commit.hold and not self.has_uncommitted_steps():
            return self._close(commit)  # all workers are paused, and there is nothing new
        self._ask(
            "freeze", self.config.shards, now_s, seq=commit.seq, watermark_ms=commit_watermark_ms(commit)
        )

    def _write(self, now_s: float) -> None:
        """End of step 4: training continues, unless this commit closes the incarnation. Step 5: shards write
        their frozen rows, workers their own parts, and worker 0 the shared part."""
        commit = self._running_commit()
        self.state, commit.frozen_s = State.WRITING, now_s
        # Workers that resumed would wait for each other's next step, and see the restore as a lost worker.
        commit.closing |= self.phases.completes(
            {partition: at for cut in commit.cuts for partition, at in flat(cut["offsets"]).items()}
        )
        self._ask("resume", () if commit.closing else self.membership.workers, now_s, seq=commit.seq)
        self._ask("write", self.config.shards, now_s, seq=commit.seq)
        self._ask_workers(
            "write", now_s, lambda key: {"shared": key == self.membership.workers[0]}, seq=commit.seq
        )

    def _link(self, now_s: float) -> None:
        """Step 6: the manifest is complete, and creating it is the commit."""
        self.state = State.LINKING
        commit = self._running_commit()
        commit.written_s = now_s
        shards = self._pending.answers("write", self.config.shards)
        workers = self._pending.answers("write", self.membership.workers)
        commit.manifest = self.phases.with_input(
            build_manifest(self.config, self.incarnation, self.last, commit, shards, workers)
        )
        self._effects.append(Link(commit.manifest))

    def _commit(self, now_s: float) -> None:
        """Step 7: the commit is durable. Every member may delete the previous generation."""
        commit = self._running_commit()
        assert commit.manifest is not None
        self.state, self.last = State.COMMITTING, Restorable(commit.manifest, commit.manifest.checksum)
        self.num_commits, self.abort_reason = self.num_commits + 1, ""
        if self._num_aborted:
            log.info("commit %d succeeded; before it, %d were aborted", commit.seq, self._num_aborted)
        self._log_rate_limit.over("abort")
        self.holds.committed()
        self._aborts_in_a_row = self._num_aborted = 0
        self.commit_s, self.paused_s = now_s - commit.started_s, commit.frozen_s - commit.started_s
        self.phases_s = commit.phases_s(now_s)
        self.committed_at_s, self.uncommitted_at_s = now_s, None
        self.phases.committed(self.last)
        self._ask("commit", self.config.shards, now_s, seq=commit.seq)
        self._ask_workers("commit", now_s, self.phases.epoch_fields, seq=commit.seq)
        self._effects.append(Retire())

    def _abort(self, reason: str, now_s: float, *, counts: bool = True) -> None:
        """Abandon the commit. `counts`: False if only storage is unavailable and all members are in order."""
        seq, text = self._running_commit().seq, "commit %d is aborted: %s; nothing of it is committed"
        if counts:
            log.warning(text, seq, reason)
        else:  # an outage aborts every commit
            self._log_rate_limit.warning(log, "abort", text, seq, reason)
        self.num_aborts, self.abort_reason = self.num_aborts + 1, reason
        self._num_aborted += 1
        self._aborts_in_a_row += counts
        self._closing_s = now_s + self.config.commit_interval_s
        if self._aborts_in_a_row >= self.config.max_aborts:
            return self._lost(
                f"{self._aborts_in_a_row} commits in a row were aborted, the last one because {reason}"
            )
        # While the manifest is created, it is not certain that it never will be.
        self._running_commit().leaves_files = self.state is State.WRITING
        self.state = State.ABORTING
        self._pending.clear()
        self._ask("abort", self.membership.everyone, now_s, seq=seq)

    def _continue(self, now_s: float) -> None:
        """Step 1: workers train."""
        if self.state is State.COMMITTING and (self._running_commit().closing or self.phases.switches):
            return self._close(self._running_commit())
        if self._running_commit().leaves_files:
            self._effects.append(Discard(self._files_of(self._running_commit().seq)))
        self.state, self.commit, self._running_s = State.RUNNING, None, now_s
        self._due_s = now_s + self.config.commit_interval_s

    def _files_of(self, seq: int) -> tuple[str, ...]:
        """Names of all files in the store that members may have written for a commit."""
        at = seq, self.incarnation
        names = [manifests.dense_name(*at)]
        for worker in self.membership.workers:
            names += [manifests.worker_name(*at, worker.index), manifests.worker_ids_name(*at, worker.index)]
        segment = f"{seq}-{self.incarnation}"
        return *names, *(manifests.segment_copy_name(shard.index, segment) for shard in self.config.shards)

    def _close(self, commit: CommitInProgress) -> None:
        """End the incarnation after its closing commit."""
        self.holds.now = self.holds.now or commit.hold
        held = f"held: {commit.hold.reason}" if commit.hold else ""
        self._end(held or self.phases.closing_reason() or self.membership.closing_reason())

    def _running_commit(self) -> CommitInProgress:
        assert self.commit is not None, self.state
        return self.commit

    def has_uncommitted_steps(self) -> bool:
        """Whether any worker has trained a batch since the last commit. An idle loop commits nothing."""
        return self.membership.newest_step() > (self.last.manifest.step if self.last else 0)

    # Commands and their results

    def _ask(self, kind: str, keys: Iterable[Key], now_s: float, **arguments: Any) -> None:
        self._pending.ask(kind, keys, self.incarnation, now_s, **arguments)

    def _ask_workers(
        self, kind: str, now_s: float, fields_of: Callable[[Key], Mapping[str, Any]], **arguments: Any
    ) -> None:
        """Send each worker its own fields."""
        for key in self.membership.workers:
            self._ask(kind, (key,), now_s, **arguments, **fields_of(key))

    def _refused(self, kind: str, key: Key, result: Mapping[str, Any], now_s: float) -> None:
        """Handle a refused command; `result` is what controller_agent.error_result made of its exception."""
        error = str(result.get("error", "no reason given"))
        if kind == "restore" and result.get("damaged") and self.last:
            self._skip_manifest(key, error)
        elif kind in ("restore", "start") and result.get("permanent"):
            self._hold(key, error)
        elif kind in ("cut", "freeze", "resume", "write"):
            self._abort(f"{key} refused {kind}: {error}", now_s, counts=not result.get("away"))
        elif kind == "restore" and self._pending.progresses("shard", now_s):
            # A large shard would begin again in the next incarnation, and never finish.
            self._refused_restore = self._refused_restore or f"{key} refused {kind}: {error}"
        else:  # restore, start, commit, abort: the member's state is unknown
            self._retry_later(now_s)
            self._lost(f"{key} refused {kind}: {error}")

    def _retry_later(self, now_s: float) -> None:
        """Wait before the next RESTORE, longer after each refusal: until a roll-out has reached the member
        with the older schema, it refuses every one. Those with the new schema must be sent it nevertheless:
        it makes them ready, and a StatefulSet waits for that before it restarts the next member. A restarted
        member ends the wait."""
        self._not_before_s = now_s + min(self.config.retry_s * 2**self._num_refused, _MAX_RETRY_S)
        self._num_refused = min(self._num_refused + 1, 8)

    @property
    def _time_limit_s(self) -> float:
        """Time limit of the outstanding commands."""
        if self.state is State.RESTORING:
            return self.config.restore_timeout_s * 2 ** min(self._late_restores, 4)
        return self.config.step_timeout_s

    def _handle_timeout(self, late: str, now_s: float) -> None:
        waited_s = now_s - self._pending.asked_s
        reason = f"{late} did not answer for {waited_s:g} s in state {self.state}"
        if self.state in (State.CUTTING, State.FREEZING, State.WRITING):
            return self._abort(reason, now_s)
        self._late_restores += self.state is State.RESTORING
        self._not_before_s = now_s + self.config.retry_s
        self._lost(reason)

    def _step(self, now_s: float) -> None:
        """Advance after every member has answered; other states wait for an event or an effect."""
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
                self._continue(now_s)

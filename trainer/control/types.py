"""Data types of the coordinator: states, members, effects, holds, and the commit in progress."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.manifest import KEEP_MANIFESTS, Manifest
from roostream.runtime.work_unit import TableInput, WorkUnit, plain_units, units_of

COMMIT_PHASES = ("cut", "freeze", "write", "link")
"""Phases of a commit until its manifest exists."""


class State(enum.StrEnum):
    """State of the controller."""

    CLAIMING = "claiming"  # claims an incarnation and reads the last manifest
    GATHERING = "gathering"  # waits until every member is connected
    RESTORING = "restoring"
    RUNNING = "running"
    CUTTING = "cutting"
    FREEZING = "freezing"
    WRITING = "writing"
    LINKING = "linking"
    COMMITTING = "committing"
    ABORTING = "aborting"
    HELD = "held"  # workers are released: no restart helps, or there is nothing to read
    FENCED = "fenced"  # a newer controller exists: this one must exit


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """A member's role and index. A restarted process keeps its key."""

    role: str  # "shard" | "worker"
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


PERMANENT, TRANSIENT = "permanent", "transient"
"""Kinds of holds: an operator ends a permanent one, the controller itself a transient one."""


class Hold(NamedTuple):
    """Why training is on hold."""

    kind: str
    reason: str
    member: str
    since_ms: int = 0  # 0 = not stored yet

    def describe(self) -> str:
        """The reason, and what ends the hold."""
        ends = "it ends by itself" if self.kind == TRANSIENT else "`roostream trainer release` ends the hold"
        return f"{self.reason}; {ends}"

    @classmethod
    def from_saved(cls, saved: object) -> Hold | None:
        """Parse a stored hold. None if it is not one."""
        if not isinstance(saved, Mapping) or not saved.get("reason"):
            return None
        known = {name: saved[name] for name in cls._fields if name in saved}
        return cls(**{"kind": PERMANENT, "member": "", **known})


class InitialRange(NamedTuple):
    """Historical data to train before the stream."""

    units: tuple[WorkUnit, ...]  # one per partition, up to its export point; fixed when the phase begins
    is_over: bool  # the plan that contains this was made for the stream
    # The warehouse session whose positions `units` has; None: offsets of the topic
    session: TableInput | None = None

    @classmethod
    def from_saved(cls, saved: object) -> InitialRange | None:
        """Parse a stored range. None if it is not one."""
        try:
            if not isinstance(saved, Mapping):
                return None
            return cls(units_of(saved["whole"]), bool(saved["over"]), TableInput.of(saved.get("session")))
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError):
            return None

    def body(self) -> dict[str, Any]:
        """The range as it is stored."""
        body = {"whole": plain_units(self.units), "over": self.is_over}
        return {**body, "session": self.session.plain()} if self.session else body


class IncarnationPlan(NamedTuple):
    """What an incarnation is claimed for. It is stored in the incarnation's file."""

    workers: int
    # The configured number for its phase when the plan was made; a changed setting overrides the plan.
    configured: int
    hold: Hold | None = None
    initial: InitialRange | None = None  # None: there is only the stream

    def body(self) -> dict[str, Any]:
        """The plan as it is stored."""
        body: dict[str, Any] = {"workers": self.workers, "configured": self.configured}
        if self.hold:
            body["hold"] = self.hold._asdict()
        if self.initial:
            body["historical"] = self.initial.body()
        return body


class Claim(NamedTuple):
    """Effect: claim the next incarnation for `plan` (None: the stored plan, or the settings), and read the
    newest manifest that is not in `skipped_manifests`. Answer with `Coordinator.claimed`."""

    skipped_manifests: frozenset[str]
    plan: IncarnationPlan | None = None


class Link(NamedTuple):
    """Effect: create `manifest` exclusively under its name. Answer with `Coordinator.linked`."""

    manifest: Manifest


class Retire(NamedTuple):
    """Effect: delete checkpoints that no restart needs. No answer is expected."""


class Discard(NamedTuple):
    """Effect: delete these files of an aborted commit, whose manifest was never created and whose writers are
    done. No answer is expected."""

    names: tuple[str, ...]


Effect: TypeAlias = Claim | Link | Retire | Discard
Command: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Facts that every manifest of this controller states, and its sizes and time limits."""

    schema: str
    seed: int
    num_shards: int
    num_workers: int = 1  # at the start, unless a stored plan has another number
    initial_workers: int = 0  # while history is trained; 0 = history is not separated from the stream
    from_table: bool = False  # if nothing is committed yet, history is what the warehouse has
    unit_records: int = 1 << 16  # maximum records of a partition handed out at once
    num_buckets: int
    num_partitions: int
    kafka: Mapping[str, Any]
    commit_interval_s: float = 10.0
    keep_commits: int = KEEP_MANIFESTS  # shards keep the rows of as many
    lost_after_s: float = 3.0
    step_timeout_s: float = 60.0  # for one step of a commit, and every other command except RESTORE
    # Doubled each time in a row that it passes, so that a large state is restored in the end
    restore_timeout_s: float = 600.0
    max_aborts: int = 3  # in a row; then everyone is restored, because ABORT may not repair a member's state
    retry_s: float = 1.0  # between a refused RESTORE and the next one; doubled at each further refusal
    follow_workers: bool = False  # train with all connected workers
    holds_idle: bool = False  # a watcher calls `hold_idle` and ends such holds

    @property
    def shards(self) -> tuple[Key, ...]:
        return tuple(Key("shard", i) for i in range(self.num_shards))

    @property
    def workers(self) -> tuple[Key, ...]:
        return worker_keys(self.num_workers)

    @property
    def max_workers(self) -> int:
        """Each worker needs at least one partition."""
        return min(self.num_partitions, MAX_WORKERS)


def worker_keys(count: int) -> tuple[Key, ...]:
    """The keys of the first `count` workers."""
    return tuple(Key("worker", i) for i in range(count))


@dataclasses.dataclass(kw_only=True)
class MemberState:
    """What a member's current process has reported."""

    session: int
    seen_s: float
    since_s: float = 0.0  # time of its first beat
    process: str = ""  # "pid 12 on host a"
    progressed_s: float = 0.0  # when its report stated progress with a command, last
    outbox: dict[int, Command] = dataclasses.field(default_factory=dict)  # commands without a result
    incarnation: int = 0
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    leave_by_s: float | None = None  # deadline of its preemption

    @property
    def leaves(self) -> bool:
        """Whether it will leave as soon as its training is committed."""
        return self.leave_by_s is not None or bool(self.report.get("leaving"))


@dataclasses.dataclass(kw_only=True)
class CommitInProgress:
    """The commit in progress. It is dropped when it fails."""

    seq: int
    started_s: float
    closing: bool = False  # the incarnation ends with this commit: training does not resume
    hold: Hold | None = None  # training is on hold after this commit
    cuts: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # in the order of workers
    cut_s: float = 0.0
    frozen_s: float = 0.0
    written_s: float = 0.0
    manifest: Manifest | None = None
    leaves_files: bool = False  # it was aborted while members wrote

    def phases_s(self, linked_s: float) -> dict[str, float]:
        """Duration of each phase. Training is paused during the first two."""
        ends_s = (self.started_s, self.cut_s, self.frozen_s, self.written_s, linked_s)
        return {
            name: end_s - begin_s
            for name, (begin_s, end_s) in zip(COMMIT_PHASES, pairwise(ends_s), strict=True)
        }

"""What the coordinator's decisions are made of: states, members, effects, and the commit under way."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.manifest import Manifest
from roostream.runtime.work_unit import TableInput, WorkUnit, plain_units, units_of

PHASES = ("cut", "freeze", "write", "link")
"""Of a commit, until its manifest is there."""


class State(enum.StrEnum):
    CLAIMING = "claiming"  # an incarnation is being claimed and the last manifest read
    GATHERING = "gathering"  # waiting for every member to be there
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
    """A member: what it is, not which process."""

    role: str  # "shard" | "worker"
    index: int

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


PERMANENT, TRANSIENT = "permanent", "transient"
"""Kinds of holds: a person ends the one, the controller itself the other."""


class Hold(NamedTuple):
    """Why training is held."""

    kind: str
    reason: str
    member: str
    since_ms: int = 0  # 0 = not kept yet

    @property
    def told(self) -> str:
        """To members and people: why, and what ends it."""
        ends = "it ends by itself" if self.kind == TRANSIENT else "`roostream trainer release` ends the hold"
        return f"{self.reason}; {ends}"

    @classmethod
    def of(cls, kept: object) -> Hold | None:
        """From what was kept; None where that is no hold."""
        if not isinstance(kept, Mapping) or not kept.get("reason"):
            return None
        known = {name: kept[name] for name in cls._fields if name in kept}
        return cls(**{"kind": PERMANENT, "member": "", **known})


class InitialRange(NamedTuple):
    """What is trained before the stream."""

    whole: tuple[WorkUnit, ...]  # of each partition, up to its export point; fixed when the phase begins
    over: bool  # the wish beside it was made for the stream
    session: TableInput | None = (
        None  # of the warehouse, whose positions `whole` has; None: offsets of the topic
    )

    @classmethod
    def of(cls, kept: object) -> InitialRange | None:
        """From what was kept; None where that is no range."""
        try:
            if not isinstance(kept, Mapping):
                return None
            return cls(units_of(kept["whole"]), bool(kept["over"]), TableInput.of(kept.get("session")))
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError):
            return None

    def body(self) -> dict[str, Any]:
        """As the file has it."""
        kept = {"whole": plain_units(self.whole), "over": self.over}
        return {**kept, "session": self.session.plain()} if self.session else kept


class IncarnationPlan(NamedTuple):
    """What an incarnation is claimed for; kept in its file."""

    workers: int
    configured: int  # number of the settings for its phase when it was made: other settings are a newer wish
    hold: Hold | None = None  # what training is held by
    historical: InitialRange | None = None  # None: there is the stream alone

    def body(self) -> dict[str, Any]:
        """As the file has it."""
        kept: dict[str, Any] = {"workers": self.workers, "configured": self.configured}
        if self.hold:
            kept["hold"] = self.hold._asdict()
        if self.historical:
            kept["historical"] = self.historical.body()
        return kept


class Claim(NamedTuple):
    """Effect: claim the next incarnation for `wish` (None: the one that is kept, or the settings'), read the newest manifest not
    in `passed_over`; answer by `claimed`."""

    passed_over: frozenset[str]
    wish: IncarnationPlan | None = None


class Link(NamedTuple):
    """Effect: create `manifest` under its name, exclusively; answer by `linked`."""

    manifest: Manifest


class Retire(NamedTuple):
    """Effect: delete what no restart needs any more. Nothing waits for it."""


Effect: TypeAlias = Claim | Link | Retire
Command: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """What every manifest of this controller states, and the sizes and times it runs by."""

    schema: str
    seed: int
    num_shards: int
    num_workers: int = 1  # to begin with, unless another number is kept (`Wish`)
    initial_workers: int = 0  # while history is trained; 0 = it isn't told from the stream
    from_table: bool = False  # history is what the warehouse has, where nothing is committed yet
    unit_records: int = 1 << 16  # of each partition handed out at once, at most
    num_buckets: int
    num_partitions: int
    kafka: Mapping[str, Any]
    commit_interval_s: float = 10.0
    lost_after_s: float = 3.0
    step_timeout_s: float = (
        60.0  # one step of a commit, and everything else that a member is asked, but RESTORE
    )
    restore_timeout_s: float = (
        600.0  # doubled each time in a row that it passes: a large state comes back in the end
    )
    max_aborts: int = 3  # in a row, then everyone is restored: a member may be in a state that no ABORT ends
    retry_s: float = 1.0  # between a refused RESTORE and the next
    holds_idle: bool = False  # somebody calls `hold_idle` and ends such a hold

    @property
    def shards(self) -> tuple[Key, ...]:
        return tuple(Key("shard", i) for i in range(self.num_shards))

    @property
    def workers(self) -> tuple[Key, ...]:
        return workers(self.num_workers)

    @property
    def max_workers(self) -> int:
        """Each has a partition at least."""
        return min(self.num_partitions, MAX_WORKERS)


def workers(count: int) -> tuple[Key, ...]:
    return tuple(Key("worker", i) for i in range(count))


@dataclasses.dataclass(kw_only=True)
class MemberState:
    """One process behind a key, as far as it has told."""

    session: int
    seen_s: float
    since_s: float = 0.0  # its first beat
    outbox: dict[int, Command] = dataclasses.field(default_factory=dict)  # until each one's result arrives
    incarnation: int = 0
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    leave_by_s: float | None = None  # it was asked to go until then

    @property
    def leaves(self) -> bool:
        """It goes as soon as what is trained is committed."""
        return self.leave_by_s is not None or bool(self.report.get("leaving"))


@dataclasses.dataclass(kw_only=True)
class CommitInProgress:
    """The commit under way; dropped whole when it fails."""

    seq: int
    started_s: float
    closing: bool = False  # nobody goes on training after it: the incarnation ends with it
    hold: Hold | None = None  # what training is held by from then on
    cuts: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # in the order of workers
    cut_s: float = 0.0
    frozen_s: float = 0.0
    written_s: float = 0.0
    manifest: Manifest | None = None

    def phases_s(self, linked_s: float) -> dict[str, float]:
        """What each part of it took; training stands still in the first two."""
        ends_s = (self.started_s, self.cut_s, self.frozen_s, self.written_s, linked_s)
        return {
            name: end_s - begin_s for name, (begin_s, end_s) in zip(PHASES, pairwise(ends_s), strict=True)
        }

"""Who there is, how many workers an incarnation has, and how many are wanted."""

from __future__ import annotations

import math
from typing import Any

from roostream.errors import ConfigError, UnavailableError
from trainer.control.types import CoordinatorConfig, Key, MemberState, workers

_MIN_NOTICE_S = 5.0


def check_notice(notice_s: float) -> None:
    """Raises ConfigError: it is too short to commit in."""
    if not _MIN_NOTICE_S <= notice_s < math.inf:
        raise ConfigError(
            f"expected a notice of {_MIN_NOTICE_S:g} s at least, got {notice_s:g}: a commit takes its time"
        )


class Membership:
    """Members by key. Not thread-safe."""

    def __init__(self, facts: CoordinatorConfig) -> None:
        self.facts = facts
        self.members: dict[Key, MemberState] = {}
        self.num_workers = self.wanted_workers = facts.num_workers
        self.controller_leaves = False

    def check(self, key: Key) -> None:
        """Raises ConfigError: the member isn't one of this controller's."""
        if key not in (*self.facts.shards, *workers(self.facts.max_workers)):
            raise ConfigError(
                f"expected shards 0..{self.facts.num_shards - 1} and workers 0..{self.facts.max_workers - 1}, got {key}; "
                "start it with the controller's own numbers"
            )

    @property
    def workers(self) -> tuple[Key, ...]:
        """Those that train in this incarnation."""
        return workers(self.num_workers)

    @property
    def everyone(self) -> tuple[Key, ...]:
        """Whose loss ends the incarnation."""
        return (*self.facts.shards, *self.workers)

    @property
    def meet(self) -> str:
        """Where worker 0 listens for the others."""
        first = self.members.get(self.workers[0])
        return str(first.report.get("meet", "")) if first else ""

    def absent(self, num_workers: int) -> list[str]:
        """Who would have to come, or to come back, before so many workers can train."""
        leaving = self.leaving()
        missing = [
            str(k)
            for k in (*self.facts.shards, *workers(num_workers))
            if k not in self.members or str(k) in leaving
        ]
        missing += ["the controller"] if self.controller_leaves else []
        return missing or (["worker 0's address for the others"] if num_workers > 1 and not self.meet else [])

    def leaving(self) -> list[str]:
        """Those of the incarnation that were asked to stop, and go as soon as what is trained is committed."""
        its = [str(key) for key in self.everyone if key in self.members and self.members[key].leaves]
        return its + (["the controller"] if self.controller_leaves else [])

    def ask_to_leave(self, key: Key, notice_s: float, now_s: float) -> None:
        """It is told with its next beat.

        Raises:
            ConfigError: it isn't one of this controller's, or the notice is too short to commit.
            UnavailableError: it isn't there.
        """
        self.check(key)
        check_notice(notice_s)
        if key not in self.members:
            raise UnavailableError(
                f"{key} isn't there, so there is nothing to preempt; see `roostream status`"
            )
        self.members[key].leave_by_s = now_s + notice_s

    def trains_on(self) -> bool:
        """Some worker of the incarnation hasn't told that it leaves, and how far it came."""
        return any(
            key in self.members and not self.members[key].report.get("leaving") for key in self.workers
        )

    def want(self, count: int) -> None:
        """Raises ConfigError: there can't be so many."""
        if not 1 <= count <= self.facts.max_workers:
            raise ConfigError(
                f"expected 1 to {self.facts.max_workers} workers, got {count}: each trains one of the "
                f"{self.facts.num_partitions} partitions at least"
            )
        self.wanted_workers = count

    def rescales(self) -> bool:
        """Whether another number of workers is wanted, and there."""
        return self.wanted_workers != self.num_workers and not self.absent(self.wanted_workers)

    @property
    def next_count(self) -> int:
        """Of the next incarnation: as many as are wanted if they are there."""
        return self.num_workers if self.absent(self.wanted_workers) else self.wanted_workers

    def why_closing(self) -> str:
        """Why nobody goes on after the commit."""
        if leaving := self.leaving():
            return f"{', '.join(leaving)} leaves"
        return f"{self.wanted_workers} workers are wanted, no longer {self.num_workers}"

    def claimed(self, count: int | None) -> None:
        """An incarnation with so many (None: as wanted); what was wanted while the claim was under way is wanted still."""
        count = self.wanted_workers if count is None else min(count, self.facts.max_workers)
        if self.wanted_workers == self.num_workers:
            self.wanted_workers = count
        self.num_workers = count

    def lost(self, now_s: float) -> dict[Key, MemberState]:
        """Forget those that have been silent for too long; who they were. Who was asked to go and is there long after goes on."""
        gone = {k: m for k, m in self.members.items() if now_s - m.seen_s >= self.facts.lost_after_s}
        for key in gone:
            del self.members[key]
        for member in self.members.values():
            if member.leave_by_s is not None and now_s >= member.leave_by_s + self.facts.lost_after_s:
                member.leave_by_s = None
        return gone

    def restore_of(self, key: Key) -> dict[str, Any]:
        """What RESTORE tells a worker beside the manifest."""
        count = self.num_workers
        its = [p for p in range(self.facts.num_partitions) if p % count == key.index]
        return {"workers": count, "partitions": its, "meet": self.meet if count > 1 else ""}

    def newest_step(self) -> int:
        return max(
            (int(self.members[key].report.get("step", 0)) for key in self.workers if key in self.members),
            default=0,
        )

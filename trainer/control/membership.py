"""Members of the controller, the number of workers in this incarnation, and the wanted number."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

from roostream.errors import ConfigError, UnavailableError
from trainer.control.types import CoordinatorConfig, Key, MemberState, worker_keys

log = logging.getLogger("roostream.controller")

_MIN_NOTICE_S = 5.0
_RECENT_RIVAL_S = 60.0
_FOLLOW_AFTER_S = 30.0
"""A further worker is followed when it has been connected for this long, a lost one is given up after it."""


def check_notice(notice_s: float) -> None:
    """Raises ConfigError: the notice of a preemption is too short for a commit."""
    if not _MIN_NOTICE_S <= notice_s < math.inf:
        raise ConfigError(
            f"expected a notice of at least {_MIN_NOTICE_S:g} s, got {notice_s:g}: a commit needs that time"
        )


class Membership:
    """Members by key. Not thread-safe.

    A key belongs to one process at a time. A second process with the same key is refused as long as the first
    one sends beats, so that two of them cannot take the key from each other in turns."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.members: dict[Key, MemberState] = {}
        self.num_workers = self.wanted_workers = config.num_workers
        self.controller_leaves = False
        self._short_since_s = math.inf  # fewer workers than wanted are connected
        self._rivals: dict[Key, tuple[str, float]] = {}  # a sentence, and when it was last true

    def refuse_rival(self, key: Key, session: int, process: str, now_s: float) -> str:
        """Why a process with this session cannot be `key` now; "" if it can.

        The process that has the key keeps it until it has been silent for `lost_after_s`, or leaves."""
        member = self.members.get(key)
        if member is None or member.session == session or member.leaves:
            return ""
        if now_s - member.seen_s >= self.config.lost_after_s:
            return ""
        sentence = (
            f"two processes run as {key}: {member.process or 'an unnamed one'}, which has this index now, "
            f"and {process or 'an unnamed one'}, which is refused; stop one of them, or give it another index"
        )
        if self._rivals.get(key, ("", 0.0))[0] != sentence:
            log.warning("%s", sentence)
        self._rivals[key] = sentence, now_s
        return sentence

    def rival(self, key: Key, now_s: float) -> str:
        """The sentence of a recently refused process of this key; "" if there is none."""
        sentence, seen_s = self._rivals.get(key, ("", -math.inf))
        return sentence if now_s - seen_s < _RECENT_RIVAL_S else ""

    def rivals(self, now_s: float) -> list[str]:
        """Sentences of all recently refused processes."""
        return [sentence for key in sorted(self._rivals) if (sentence := self.rival(key, now_s))]

    def check(self, key: Key) -> None:
        """Raises ConfigError: the member does not belong to this controller."""
        if key not in (*self.config.shards, *worker_keys(self.config.max_workers)):
            raise ConfigError(
                f"expected shards 0..{self.config.num_shards - 1} and workers "
                f"0..{self.config.max_workers - 1}, got {key}; start it with the controller's numbers"
            )

    @property
    def workers(self) -> tuple[Key, ...]:
        """Workers that train in this incarnation."""
        return worker_keys(self.num_workers)

    @property
    def everyone(self) -> tuple[Key, ...]:
        """Members whose loss ends the incarnation."""
        return (*self.config.shards, *self.workers)

    @property
    def rendezvous_address(self) -> str:
        """Address at which worker 0 listens for the other workers."""
        first = self.members.get(self.workers[0])
        return str(first.report.get("meet", "")) if first else ""

    def absent(self, num_workers: int) -> list[str]:
        """Names of everything that is missing before `num_workers` workers can train."""
        leaving, needed = self.leaving(), (*self.config.shards, *worker_keys(num_workers))
        missing = [str(k) for k in needed if k not in self.members or str(k) in leaving]
        missing += ["the controller"] if self.controller_leaves else []
        if not missing and num_workers > 1 and not self.rendezvous_address:
            return ["the rendezvous address of worker 0"]
        return missing

    def leaving(self) -> list[str]:
        """Names of the members that leave as soon as their training is committed."""
        names = [str(key) for key in self.everyone if key in self.members and self.members[key].leaves]
        return names + (["the controller"] if self.controller_leaves else [])

    def ask_to_leave(self, key: Key, notice_s: float, now_s: float) -> None:
        """Preempt a member; its next beat is answered with the deadline.

        Raises:
            ConfigError: the member does not belong to this controller, or the notice is too short for a
                commit.
            UnavailableError: the member is not connected.
        """
        self.check(key)
        check_notice(notice_s)
        if key not in self.members:
            raise UnavailableError(f"{key} is not connected, so it cannot be drained; see `roostream status`")
        self.members[key].leave_by_s = now_s + notice_s

    def has_active_worker(self) -> bool:
        """Whether a worker of the incarnation is connected and not leaving."""
        connected = [self.members[key] for key in self.workers if key in self.members]
        return any(not member.report.get("leaving") for member in connected)

    def want(self, count: int) -> None:
        """Set the wanted number of workers. Raises ConfigError: there cannot be that many."""
        if not 1 <= count <= self.config.max_workers:
            raise ConfigError(
                f"expected 1 to {self.config.max_workers} workers, got {count}: each one trains "
                f"at least one of the {self.config.num_partitions} partitions"
            )
        self.wanted_workers = count

    def follow_connected(self, now_s: float) -> None:
        """Want as many workers as are connected, counted from worker 0 to the first that is absent or leaves.

        Nothing changes while worker 0 is absent."""
        keys = worker_keys(self.config.max_workers)
        staying = itertools.takewhile(lambda k: k in self.members and not self.members[k].leaves, keys)
        connected, count = sum(1 for _ in staying), self.wanted_workers
        if connected >= count:
            self._short_since_s = math.inf
            while count < connected and now_s - self.members[keys[count]].since_s >= _FOLLOW_AFTER_S:
                count += 1
        elif connected:
            self._short_since_s = min(self._short_since_s, now_s)
            if keys[connected] in self.members or now_s - self._short_since_s >= _FOLLOW_AFTER_S:
                count = connected
        if count != self.wanted_workers:
            log.info("workers that are connected and stay: %d; as many train from the next commit on", count)
            self.wanted_workers = count

    def should_rescale(self) -> bool:
        """Whether another number of workers is wanted and connected."""
        return self.wanted_workers != self.num_workers and not self.absent(self.wanted_workers)

    @property
    def next_count(self) -> int:
        """Number of workers of the next incarnation: the wanted number if they are connected."""
        return self.num_workers if self.absent(self.wanted_workers) else self.wanted_workers

    def closing_reason(self) -> str:
        """Why training does not resume after the commit."""
        if leaving := self.leaving():
            return f"{', '.join(leaving)} leaves"
        return f"{self.wanted_workers} workers are wanted instead of {self.num_workers}"

    def claimed(self, count: int | None) -> None:
        """An incarnation with `count` workers was claimed (None: the wanted number). A number that was
        requested during the claim stays wanted."""
        count = self.wanted_workers if count is None else min(count, self.config.max_workers)
        if self.wanted_workers == self.num_workers:
            self.wanted_workers = count
        self.num_workers = count

    def lost(self, now_s: float) -> dict[Key, MemberState]:
        """Remove and return the members without a recent beat. A preempted member that is still connected
        `lost_after_s` after its deadline is no longer leaving."""
        gone = {k: m for k, m in self.members.items() if now_s - m.seen_s >= self.config.lost_after_s}
        for key in gone:
            del self.members[key]
        for member in self.members.values():
            if member.leave_by_s is not None and now_s >= member.leave_by_s + self.config.lost_after_s:
                member.leave_by_s = None
        return gone

    def restore_fields(self, key: Key) -> dict[str, Any]:
        """Fields of a worker's RESTORE besides the manifest."""
        count = self.num_workers
        partitions = [p for p in range(self.config.num_partitions) if p % count == key.index]
        address = self.rendezvous_address if count > 1 else ""
        return {"workers": count, "partitions": partitions, "meet": address}

    def newest_step(self) -> int:
        connected = [self.members[key] for key in self.workers if key in self.members]
        return max((int(member.report.get("step", 0)) for member in connected), default=0)

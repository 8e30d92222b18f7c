"""Tracks for each id whether it was seen and which outcomes it has. No I/O.

Marks are bits that are only added, so the counts do not depend on the order of marks. An id that was seen and
has no outcome is `pending`; one with an outcome that was not seen is `unknown`. Both are kept until they are
settled or given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

SEEN, PREDICTED = 1, 2  # marks that are no outcomes
FOLDED, CORRECTED, DEAD, SAMPLED, REPEATED = 4, 8, 16, 32, 64  # outcomes
_ALL = 127  # all marks
NOWHERE = -1  # no position: a dead letter cannot settle it
_MAX_IDS = 1_000_000
_NEVER_MS = 1 << 62


class Ledger:
    """Counts ids by outcome; `outcomes` are in order of precedence.

    Settled ids are forgotten one to two `horizon_ms` of event time after their last mark (0 = never), or
    sooner if there are more than `max_ids`; `rotate` passes the time. The counts stay. Forgotten ids are
    older than `floor_ms`.
    """

    def __init__(self, outcomes: tuple[int, ...], horizon_ms: int = 0, max_ids: int = _MAX_IDS) -> None:
        self.horizon_ms, self.max_ids = horizon_ms, max_ids
        self._outcome_of = [next((o for o in outcomes if bits & o), 0) for bits in range(_ALL + 1)]
        self.counts: Counter[int] = Counter()  # outcome → number of seen ids
        self.pending: dict[int, list[int]] = {}  # id → time, then the positions at which it was seen
        self.unknown: dict[int, int] = {}  # id → time
        self.lost = self.invented = 0  # given up: seen without an outcome, or an outcome without being seen
        self.overdue_before_ms = 0  # ids waiting since before then will not settle
        self.floor_ms = 0
        self._at: dict[int, int] = {}  # position → pending id
        # Id → marks, in two generations: `rotate` forgets the old one.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._rotated_ms = 0

    def mark(self, id_: int, bit: int, time_ms: int, place: int = NOWHERE) -> bool:
        """Add a mark; returns whether it is new. `place`: position at which the id was seen, for
        `mark_dead`."""
        before = self._young.get(id_) or self._old.get(id_, 0)
        after = self._young[id_] = before | bit
        if after != before:
            self._recount(id_, before, after, time_ms)
        if place != NOWHERE and id_ in self.pending:
            self.pending[id_].append(place)
            self._at[place] = id_
        return after != before

    def mark_dead(self, place: int, time_ms: int) -> bool:
        """The record at position `place` has a dead letter. Returns whether a pending id was there."""
        id_ = self._at.get(place)
        return id_ is not None and self.mark(id_, DEAD, time_ms)

    def bits(self, id_: int) -> int:
        return self._young.get(id_) or self._old.get(id_, 0)

    def is_stale(self, id_: int, time_ms: int) -> bool:
        """Whether `id_`, with an event of `time_ms`, may be one of the forgotten ids."""
        return time_ms < self.floor_ms and not self.bits(id_)

    def num_pending(self, limit_ms: int) -> int:
        """Ids pending since before `limit_ms`."""
        return sum(times[0] < limit_ms for times in self.pending.values())

    def num_overdue(self, limit_ms: int) -> int:
        """Ids given up, and ids pending or unknown since before `limit_ms`."""
        unknown = sum(time_ms < limit_ms for time_ms in self.unknown.values())
        return self.lost + self.invented + self.num_pending(limit_ms) + unknown

    def _recount(self, id_: int, before: int, after: int, time_ms: int) -> None:
        old, new = self._outcome_of[before], self._outcome_of[after]
        if old and before & SEEN:
            self.counts[old] -= 1
        if not after & SEEN:
            if new:
                self.unknown.setdefault(id_, time_ms)
            return
        if new:
            self.counts[new] += 1
            self._leave(id_)
        else:
            self.pending.setdefault(id_, [time_ms])
        self.unknown.pop(id_, None)

    def _leave(self, id_: int) -> None:
        for place in self.pending.pop(id_, ())[1:]:
            self._at.pop(place, None)

    def rotate(self, now_ms: int) -> int:
        """Advance event time to `now_ms`, which never decreases, and forget ids that settled long ago. Times
        of marks are not used, because they may be wrong. Returns the time of the next call that can forget
        any by time."""
        self._rotated_ms = self._rotated_ms or now_ms
        if not self.horizon_ms:
            return _NEVER_MS
        if now_ms - self._rotated_ms < self.horizon_ms and len(self._young) < self.max_ids:
            return self._rotated_ms + self.horizon_ms
        self._give_up(min(self.overdue_before_ms, now_ms - self.horizon_ms))
        if self._old:
            self.floor_ms = self._rotated_ms + 1
        kept = {i: bits for i, bits in self._old.items() if i in self.pending or i in self.unknown}
        self._old, self._young, self._rotated_ms = self._young, kept, now_ms
        return self._rotated_ms + self.horizon_ms

    def _give_up(self, limit_ms: int) -> None:
        lost = [i for i, times in self.pending.items() if times[0] < limit_ms]
        invented = [i for i, time_ms in self.unknown.items() if time_ms < limit_ms]
        self.lost += len(lost)
        self.invented += len(invented)
        for id_ in lost:
            self._leave(id_)
        for id_ in (*lost, *invented):
            self.unknown.pop(id_, None)
            self._young.pop(id_, None)
            self._old.pop(id_, None)

    def dump(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The complete state as (JSON numbers, arrays), for `load`."""
        names = ("lost", "invented", "overdue_before_ms", "floor_ms")
        numbers = {
            "counts": {str(k): v for k, v in self.counts.items()},
            "_turned_ms": self._rotated_ms,
            "_now_ms": self._rotated_ms,  # older programs read it
            **{n: getattr(self, n) for n in names},
        }
        arrays = {}
        for name, bits in (("young", self._young), ("old", self._old)):
            arrays[f"{name}_ids"] = np.fromiter(bits, np.uint64, len(bits))
            arrays[f"{name}_bits"] = np.fromiter(bits.values(), np.uint8, len(bits))
        arrays["unknown_ids"] = np.fromiter(self.unknown, np.uint64, len(self.unknown))
        arrays["unknown_ms"] = np.fromiter(self.unknown.values(), np.int64, len(self.unknown))
        arrays["pending_ids"] = np.fromiter(self.pending, np.uint64, len(self.pending))
        arrays["pending_sizes"] = np.fromiter(map(len, self.pending.values()), np.int64, len(self.pending))
        arrays["pending"] = np.array([n for values in self.pending.values() for n in values], np.int64)
        return numbers, arrays

    def load(self, numbers: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Restore the state of `dump`; horizon and limits stay."""
        self.counts = Counter({int(k): int(v) for k, v in numbers["counts"].items()})
        for name in ("lost", "invented", "overdue_before_ms", "floor_ms"):
            setattr(self, name, int(numbers[name]))
        self._rotated_ms = int(numbers["_turned_ms"])
        self._young, self._old = (
            dict(zip(arrays[f"{n}_ids"].tolist(), arrays[f"{n}_bits"].tolist(), strict=True))
            for n in ("young", "old")
        )
        self.unknown = dict(zip(arrays["unknown_ids"].tolist(), arrays["unknown_ms"].tolist(), strict=True))
        ends = np.cumsum(arrays["pending_sizes"])[:-1]
        values = (
            [part.tolist() for part in np.split(arrays["pending"], ends)]
            if len(arrays["pending_ids"])
            else []
        )
        self.pending = dict(zip(arrays["pending_ids"].tolist(), values, strict=True))
        self._at = {place: id_ for id_, times in self.pending.items() for place in times[1:]}

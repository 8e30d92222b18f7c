"""How much of a log's request-only values come again, by feature and group, and what keeping each once is worth (RecD §3, §4.2).

Feed windows of requests, in time order. Each is looked at twice: as it was logged, and clustered, requests of one user (or
session) next to each other; both cut into batches of B requests, within which values are shared. Every request goes through once,
whatever the log's length; what is kept are a few sums a feature.

    l  entries of a row, on average                 S  rows of a user in a clustered batch, on average
    d  chance that a user's next row has the same   exact, partial  entries over entries that remain of a batch, counted

Groups are features that change together, found in the first window: they agree on GROUPED of the steps from one row of a user to
the next, and share one inverse index from then on. A float is a list of one. Worth it is what takes away more than the index
adds, which is a number a row.

Letters: R requests, F features, P steps from a row to the next of the same user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from roostream.wire.batch import Batch
from roostream.wire.dedup import (
    MIN_FACTOR,
    RowValues,
    dedupe_factor,
    dedupe_len,
    find_inverse,
    find_partial_dedup,
    request_values,
)

ARRANGEMENTS = ("logged", "clustered")
EVERYTHING = "all request-only features"
GROUPED = 0.99
MAX_GROUPED = 256  # features that groups are looked for among: the lists first


@dataclasses.dataclass
class _EntryCounts:
    """Of a feature or group, over all batches so far."""

    rows: int = 0
    entries: int = 0
    exact: int = 0  # entries that remain
    partial: int = 0  # the same with overlaps; of what has no order as `exact`
    steps: int = 0
    same: int = 0  # steps on which nothing changed


class DuplicateStatistics:
    """`batch_requests`: B. Memory: sums a feature."""

    def __init__(self, batch_requests: int) -> None:
        assert batch_requests > 0
        self.batch_requests = batch_requests
        self.num_requests = self.num_candidates = 0
        self._users = dict.fromkeys(ARRANGEMENTS, 0)  # of each batch, summed
        self._sums: dict[str, dict[str, _EntryCounts]] = {name: {} for name in ARRANGEMENTS}
        self._groups: dict[str, tuple[str, ...]] | None = None
        self._kinds: dict[str, str] = {}

    def add(self, batch: Batch, who_R: np.ndarray, candidates_R: np.ndarray) -> None:
        """A window: requests in time order, whose each is (int64), and how many candidates it showed; those of `batch` don't
        count, so that it may have been read without them. Nothing is shared between windows."""
        if not batch.num_requests:
            return
        self.num_requests += batch.num_requests
        self.num_candidates += int(candidates_R.sum())
        self._kinds = {f.name: f.kind for f in (*batch.schema.lists("ro"), *batch.schema.floats("ro"))}
        clustered_R = np.argsort(who_R, kind="stable")
        if self._groups is None:
            window = _Arranged(batch.take_requests(clustered_R), who_R[clustered_R], batch.num_requests)
            self._groups = dict(_together(list(self._kinds), window)) if window.step_P.size else {}
        arranged = (np.arange(batch.num_requests), clustered_R)
        for name, order_R in zip(ARRANGEMENTS, arranged, strict=True):
            window = _Arranged(batch.take_requests(order_R), who_R[order_R], self.batch_requests)
            self._users[name] += window.num_users
            for feature, kind in self._kinds.items():
                window.count_feature(feature, kind, self._sums[name].setdefault(feature, _EntryCounts()))
            for group, features in {EVERYTHING: tuple(self._kinds), **self._groups}.items():
                window.count_group(features, self._sums[name].setdefault(group, _EntryCounts()))

    def report(self) -> dict[str, Any]:
        """`batch_requests`, `requests`, `candidates`; `arrangements` → `session_rows` and, for each of `features` and `groups`,
        `length` and `same` (l, d), `dedupe_len` and `dedupe_factor` by RecD's formula, `exact` and `partial` as counted; and
        `advice`."""
        groups = self._groups or {}
        arrangements = {}
        for name in ARRANGEMENTS if self.num_requests else ():
            session_rows = self.num_requests / self._users[name]
            told = {key: self._told(of, session_rows) for key, of in self._sums[name].items()}
            arrangements[name] = {
                "session_rows": session_rows,
                "features": {key: {"kind": self._kinds[key], **told[key]} for key in self._kinds},
                "groups": {
                    key: {"members": list(groups.get(key, ())), **told[key]} for key in (EVERYTHING, *groups)
                },
            }
        return {
            "batch_requests": self.batch_requests,
            "requests": self.num_requests,
            "candidates": self.num_candidates,
            "arrangements": arrangements,
            "advice": list(_advice(arrangements, self.num_candidates / max(self.num_requests, 1))),
        }

    def _told(self, of: _EntryCounts, session_rows: float) -> dict[str, float | None]:
        length = of.entries / of.rows if of.rows else 0.0
        same = of.same / of.steps if of.steps else None
        args = (length, float(self.batch_requests), min(session_rows, self.batch_requests), same or 0.0)
        return {
            "length": length,
            "same": same,
            "dedupe_len": dedupe_len(*args),
            "dedupe_factor": dedupe_factor(*args),
            "exact": of.entries / of.exact if of.exact else 1.0,
            "partial": of.entries / of.partial if of.partial else 1.0,
        }


class _Arranged:
    """A window in one arrangement, cut into batches."""

    def __init__(self, batch: Batch, who_R: np.ndarray, batch_requests: int) -> None:
        self.batch = batch
        self._number_R = np.arange(batch.num_requests, dtype=np.int64) // batch_requests
        self._apart = RowValues(np.arange(batch.num_requests + 1, dtype=np.int64), self._number_R)
        of_users = find_inverse(
            [self._apart, RowValues(self._apart.offset_N1, who_R.astype(np.int64))], batch.num_requests
        )
        self.num_users = of_users.num_unique
        self._visited_R = np.lexsort((of_users.row_N, self._number_R))
        self.step_P = np.flatnonzero(np.diff(of_users.row_N) == 0) + 1
        """int64: rows that come right behind one of the same user in the same batch."""

    def inverse_of(self, features: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(distinct row of each, first of each distinct one), no two batches sharing any."""
        found = find_inverse([self._apart, *request_values(self.batch, features)], self.batch.num_requests)
        return found.row_N, found.first_U

    def same_P(self, features: tuple[str, ...]) -> np.ndarray:
        """bool: on which steps these stay as they are."""
        row_N, _ = self.inverse_of(features)
        same_P: np.ndarray = row_N[self.step_P] == row_N[self.step_P - 1]
        return same_P

    def count_feature(self, name: str, kind: str, sums: _EntryCounts) -> None:
        """An id list is a set, a weighted one too: only a sequence has an order in which it moves on."""
        before = sums.exact
        self.count_group((name,), sums)
        if kind == "sequence":
            sums.partial += len(
                find_partial_dedup(
                    self.batch.ro_lists, name, order_M=self._visited_R, apart_N=self._number_R
                ).entry_V
            )
        else:
            sums.partial += sums.exact - before

    def count_group(self, features: tuple[str, ...], sums: _EntryCounts) -> None:
        row_N, first_U = self.inverse_of(features)
        length_R = self._lengths(features)
        sums.rows += len(row_N)
        sums.entries += int(length_R.sum())
        sums.exact += int(length_R[first_U].sum())
        sums.steps += len(self.step_P)
        sums.same += int((row_N[self.step_P] == row_N[self.step_P - 1]).sum())

    def _lengths(self, features: tuple[str, ...]) -> np.ndarray:
        """int64 [R]: entries of all of them; a float that is there is one."""
        lists, length_R = self.batch.ro_lists, np.zeros(self.batch.num_requests, dtype=np.int64)
        for i, f in enumerate(self.batch.schema.floats("ro")):
            if f.name in features:
                length_R += self.batch.ro_present_RF[:, i]
        for k, key in enumerate(lists.keys):
            if key in features:
                length_R += lists.lengths_KN[k]
        return length_R


def _together(features: list[str], window: _Arranged) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Groups of two or more that change together, and that stay often enough to be worth it in a session without end."""
    same = {name: window.same_P((name,)) for name in features[:MAX_GROUPED]}
    left = [name for name, same_P in same.items() if same_P.mean() >= 1 - 1 / MIN_FACTOR]
    while left:
        first, *others = left
        group = [first, *(name for name in others if (same[name] == same[first]).mean() >= GROUPED)]
        left = [name for name in left if name not in group]
        if len(group) > 1:
            yield " + ".join(group), tuple(group)


def _advice(arrangements: Mapping[str, Any], candidates: float) -> Iterator[str]:
    """What pays, in sentences; first what clustering does."""
    if not arrangements:
        return
    if candidates >= MIN_FACTOR:
        yield (
            f"requests show {candidates:.1f} candidates each: kept as requests and not as impressions, request-only values are "
            f"{candidates:.1f} times fewer, before anything below"
        )
    paying = {name: dict(_paying(its)) for name, its in arrangements.items()}
    for key, what in paying["clustered"].items():
        also = "" if key in paying["logged"] else "; only once clustered by user (the warehouse does)"
        yield f"{key}: {what}{also}"
    if not paying["clustered"]:
        yield f"nothing that requests share pays: no factor is above {MIN_FACTOR}"


def _paying(its: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Groups, then features that are in none of them, then sequences that pay partially alone."""
    grouped: set[str] = set()
    for key, of in its["groups"].items():
        if _is_worth(of, "exact"):
            grouped |= set(of["members"] or its["features"])
            yield key, f"deduplicate as one group, {of['exact']:.1f} times fewer entries"
    for key, of in its["features"].items():
        moves = of["partial"] > MIN_FACTOR * of["exact"]
        if _is_worth(of, "partial") and (moves or key not in grouped):
            how = "deduplicate partially: its rows are shifts of each other" if moves else "deduplicate"
            yield key, f"{how}, {of['partial']:.1f} times fewer entries"


def _is_worth(of: Mapping[str, Any], how: str) -> bool:
    taken_away = of["length"] * (1 - 1 / of[how])
    return bool(of[how] > MIN_FACTOR and taken_away > 1)

"""Measures how often request-only values of a log repeat, and what deduplication would save (RecD §3, §4.2).

It is fed windows of requests in time order. Each window is analyzed twice: as logged, and clustered, with the
requests of a user (or session) together. Both are cut into batches of B requests; values are shared within a
batch. Memory is a few sums per feature, whatever the length of the log.

    l  mean entries of a row                        S  mean rows of a user in a clustered batch
    d  probability that a user's next row is equal  exact, partial  entries divided by entries kept, counted

Groups are features that change together. They are found in the first window: their changes agree on
GROUP_AGREEMENT of the steps from one row of a user to the next. A group shares one inverse index. A float
counts as a list of one. Deduplication pays if it removes more than the index adds, which is one number per
row.

Letters: R requests, F features, P steps from a row to the next row of the same user.
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
GROUP_AGREEMENT = 0.99
MAX_GROUP_CANDIDATES = 256  # features that are compared for groups, lists first


@dataclasses.dataclass
class _EntryCounts:
    """Counts of a feature or group over all batches so far."""

    rows: int = 0
    entries: int = 0
    exact: int = 0  # entries kept
    partial: int = 0  # the same with overlaps; equal to `exact` without an order
    steps: int = 0
    same: int = 0  # steps without a change


class DuplicateStatistics:
    """Statistics of windows of requests; `batch_requests` is B."""

    def __init__(self, batch_requests: int) -> None:
        assert batch_requests > 0
        self.batch_requests = batch_requests
        self.num_requests = self.num_candidates = 0
        self._users = dict.fromkeys(ARRANGEMENTS, 0)  # sum over all batches
        self._sums: dict[str, dict[str, _EntryCounts]] = {name: {} for name in ARRANGEMENTS}
        self._groups: dict[str, tuple[str, ...]] | None = None
        self._kinds: dict[str, str] = {}

    def add(self, batch: Batch, user_R: np.ndarray, candidates_R: np.ndarray) -> None:
        """Add a window: requests in time order with their users (int64) and numbers of candidates. The
        candidates of `batch` itself are ignored, so it may be read without them. Values are not shared
        between windows."""
        if not batch.num_requests:
            return
        self.num_requests += batch.num_requests
        self.num_candidates += int(candidates_R.sum())
        self._kinds = {f.name: f.kind for f in (*batch.schema.lists("ro"), *batch.schema.floats("ro"))}
        clustered_R = np.argsort(user_R, kind="stable")
        if self._groups is None:
            window = _ArrangedWindow(
                batch.take_requests(clustered_R), user_R[clustered_R], batch.num_requests
            )
            self._groups = dict(_groups_of(list(self._kinds), window)) if window.step_P.size else {}
        orders = (np.arange(batch.num_requests), clustered_R)
        for name, order_R in zip(ARRANGEMENTS, orders, strict=True):
            window = _ArrangedWindow(batch.take_requests(order_R), user_R[order_R], self.batch_requests)
            self._users[name] += window.num_users
            for feature, kind in self._kinds.items():
                window.count_feature(feature, kind, self._sums[name].setdefault(feature, _EntryCounts()))
            for group, features in {EVERYTHING: tuple(self._kinds), **self._groups}.items():
                window.count_group(features, self._sums[name].setdefault(group, _EntryCounts()))

    def report(self) -> dict[str, Any]:
        """`batch_requests`, `requests`, `candidates`, `advice`, and `arrangements` → `session_rows` and, for
        each of `features` and `groups`, `length` and `same` (l, d), `dedupe_len` and `dedupe_factor` by
        RecD's formula, and the counted `exact` and `partial`."""
        groups = self._groups or {}
        arrangements = {}
        for name in ARRANGEMENTS if self.num_requests else ():
            session_rows = self.num_requests / self._users[name]
            figures = {key: self._figures(counts, session_rows) for key, counts in self._sums[name].items()}
            arrangements[name] = {
                "session_rows": session_rows,
                "features": {key: {"kind": self._kinds[key], **figures[key]} for key in self._kinds},
                "groups": {
                    key: {"members": list(groups.get(key, ())), **figures[key]}
                    for key in (EVERYTHING, *groups)
                },
            }
        return {
            "batch_requests": self.batch_requests,
            "requests": self.num_requests,
            "candidates": self.num_candidates,
            "arrangements": arrangements,
            "advice": list(_advice(arrangements, self.num_candidates / max(self.num_requests, 1))),
        }

    def _figures(self, counts: _EntryCounts, session_rows: float) -> dict[str, float | None]:
        length = counts.entries / counts.rows if counts.rows else 0.0
        same = counts.same / counts.steps if counts.steps else None
        args = (length, float(self.batch_requests), min(session_rows, self.batch_requests), same or 0.0)
        return {
            "length": length,
            "same": same,
            "dedupe_len": dedupe_len(*args),
            "dedupe_factor": dedupe_factor(*args),
            "exact": counts.entries / counts.exact if counts.exact else 1.0,
            "partial": counts.entries / counts.partial if counts.partial else 1.0,
        }


class _ArrangedWindow:
    """A window in one order, cut into batches."""

    def __init__(self, batch: Batch, user_R: np.ndarray, batch_requests: int) -> None:
        self.batch = batch
        self._number_R = np.arange(batch.num_requests, dtype=np.int64) // batch_requests
        self._apart = RowValues(np.arange(batch.num_requests + 1, dtype=np.int64), self._number_R)
        users = find_inverse(
            [self._apart, RowValues(self._apart.offset_N1, user_R.astype(np.int64))], batch.num_requests
        )
        self.num_users = users.num_unique
        self._visited_R = np.lexsort((users.row_N, self._number_R))
        self.step_P = np.flatnonzero(np.diff(users.row_N) == 0) + 1
        """int64 [P]: rows that follow a row of the same user in the same batch."""

    def inverse_of(self, features: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(distinct row of each request, first request of each distinct row), separately for each batch."""
        found = find_inverse([self._apart, *request_values(self.batch, features)], self.batch.num_requests)
        return found.row_N, found.first_U

    def same_P(self, features: tuple[str, ...]) -> np.ndarray:
        """bool [P]: the steps on which these features do not change."""
        row_N, _ = self.inverse_of(features)
        same_P: np.ndarray = row_N[self.step_P] == row_N[self.step_P - 1]
        return same_P

    def count_feature(self, name: str, kind: str, sums: _EntryCounts) -> None:
        """Only a sequence is ordered and can overlap; a list of ids, weighted or not, is a set."""
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
        """int64 [R]: entries of all these features; a present float is one entry."""
        lists, length_R = self.batch.ro_lists, np.zeros(self.batch.num_requests, dtype=np.int64)
        for i, f in enumerate(self.batch.schema.floats("ro")):
            if f.name in features:
                length_R += self.batch.ro_present_RF[:, i]
        for k, key in enumerate(lists.keys):
            if key in features:
                length_R += lists.lengths_KN[k]
        return length_R


def _groups_of(features: list[str], window: _ArrangedWindow) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Groups of two or more features that change together and seldom enough to pay in an endless session."""
    same = {name: window.same_P((name,)) for name in features[:MAX_GROUP_CANDIDATES]}
    left = [name for name, same_P in same.items() if same_P.mean() >= 1 - 1 / MIN_FACTOR]
    while left:
        first, *others = left
        group = [first, *(name for name in others if (same[name] == same[first]).mean() >= GROUP_AGREEMENT)]
        left = [name for name in left if name not in group]
        if len(group) > 1:
            yield " + ".join(group), tuple(group)


def _advice(arrangements: Mapping[str, Any], candidates: float) -> Iterator[str]:
    """Sentences of advice on what pays."""
    if not arrangements:
        return
    if candidates >= MIN_FACTOR:
        yield (
            f"requests have {candidates:.1f} candidates: stored as requests instead of impressions, "
            f"request-only values are {candidates:.1f} times fewer, before any deduplication"
        )
    paying = {name: dict(_paying(figures)) for name, figures in arrangements.items()}
    for key, what in paying["clustered"].items():
        also = "" if key in paying["logged"] else "; only if clustered by user, as in the warehouse"
        yield f"{key}: {what}{also}"
    if not paying["clustered"]:
        yield f"no deduplication pays: no factor is above {MIN_FACTOR}"


def _paying(arrangement: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, advice) of groups that pay, then of features outside of groups and of sequences that pay only
    partially."""
    grouped: set[str] = set()
    for key, figures in arrangement["groups"].items():
        if _pays(figures, "exact"):
            grouped |= set(figures["members"] or arrangement["features"])
            yield key, f"deduplicate as one group, {figures['exact']:.1f} times fewer entries"
    for key, figures in arrangement["features"].items():
        overlaps = figures["partial"] > MIN_FACTOR * figures["exact"]
        if _pays(figures, "partial") and (overlaps or key not in grouped):
            how = "deduplicate partially, since its rows overlap" if overlaps else "deduplicate"
            yield key, f"{how}, {figures['partial']:.1f} times fewer entries"


def _pays(figures: Mapping[str, Any], how: str) -> bool:
    removed = figures["length"] * (1 - 1 / figures[how])
    return bool(figures[how] > MIN_FACTOR and removed > 1)

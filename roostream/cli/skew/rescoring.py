"""Logged lists scored again with the forward pass of training, by the version that served them: is the difference rounding, rows
that have moved since, or a skew.

    within    1e-5 or less, with the rows of a commit beside the request (docs/operations/skew.md)
    rows      more, but no more than rows moved between those commits: it can't be told
    skew      more than that: what was scored isn't what was logged
    unscored, pages, schema, gone, unreadable    not scored again; `why` says it

Letters: n candidates, T tasks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from roostream.cli.skew.commit_states import CommitStates
from roostream.cli.skew.explaining import explained
from roostream.cli.skew.logged_lists import LoggedList
from roostream.errors import CheckpointError, RoostreamError
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from serving.scorer import Version, probabilities

TOLERANCE = 1e-5
MAX_EXPLAINED = 3
Verdict = Literal["within", "rows", "skew", "unscored", "pages", "schema", "gone", "unreadable"]
JUDGED = ("within", "rows", "skew")


@dataclasses.dataclass(kw_only=True)
class Rescored:
    """What became of one list."""

    logged: LoggedList
    verdict: Verdict
    why: str = ""
    rows_of: int = 0  # commit
    num_changed: int = 0  # rows of the list that aren't the same in the commits around it
    difference_n: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.float32)
    )  # largest of a candidate's tasks

    @property
    def largest(self) -> float:
        return float(self.difference_n.max(initial=0))

    def told(self) -> dict[str, Any]:
        """As plain values; keys stay."""
        its = self.logged
        return {
            "request_id": its.request_id,
            "version": its.version,
            "time_ms": its.time_ms,
            "where": its.where,
            "verdict": self.verdict,
            "why": self.why,
            "largest": self.largest,
            "differences": [float(x) for x in self.difference_n],
            "rows_of_commit": self.rows_of,
            "rows_changed": self.num_changed,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Readable:
    """A list that can be scored again."""

    logged: LoggedList
    version: Version
    batch: Batch
    lookup: Lookup


def rescored(commits: CommitStates, lists: Sequence[LoggedList]) -> list[Rescored]:
    """Each in order. A list costs a forward pass a commit beside it, and one that differs some thousands."""
    opened = [_opened(commits, logged) for logged in lists]
    wanted: dict[str, set[tuple[int, int]]] = {}
    for one in opened:
        if isinstance(one, Readable):
            for stack, its in one.lookup.stacks.items():
                wanted.setdefault(stack, set()).update(
                    zip(its.table_U.tolist(), its.id_U.tolist(), strict=True)
                )
    commits.want(wanted)
    out = [_judged(commits, one) if isinstance(one, Readable) else one for one in opened]
    differing = (pair for pair in zip(opened, out, strict=True) if pair[1].verdict == "skew")
    for (one, judged), _ in zip(differing, range(MAX_EXPLAINED), strict=False):
        assert isinstance(one, Readable)
        rows = commits.rows(judged.rows_of).gather(one.version.schema, one.lookup)
        judged.why = explained(one.version, one.batch, one.lookup, rows, TOLERANCE)
    return out


def _opened(commits: CommitStates, logged: LoggedList) -> Readable | Rescored:
    """A list without its version, or that wasn't scored as it is logged, is told as that."""
    if not logged.served or not logged.version:
        return Rescored(
            logged=logged, verdict="unscored", why="nothing scored it: it has no scores or no version"
        )
    if logged.num_pages != 1:
        why = f"it came in {logged.num_pages} pages, each scored alone; the feature log has them"
        return Rescored(logged=logged, verdict="pages", why=why)
    try:
        version = commits.version(logged.version)
    except CheckpointError as error:
        return Rescored(logged=logged, verdict="gone", why=str(error))
    if logged.fingerprint != version.schema.fingerprint:
        why = (
            f"logged with schema {logged.fingerprint:016x}, its version has {version.schema.fingerprint:016x}"
        )
        return Rescored(logged=logged, verdict="schema", why=why)
    batch, rejects = Decoder(version.schema, commits.registry).decode([logged.record])
    if rejects or batch.num_requests != 1 or np.isnan(batch.served_score_BT).any():
        why = rejects[0].error if rejects else "its scores don't fit its candidates and tasks"
        return Rescored(logged=logged, verdict="unreadable", why=why)
    return Readable(logged=logged, version=version, batch=batch, lookup=build_lookup(batch))


def _judged(commits: CommitStates, one: Readable) -> Rescored:
    """By the rows of the commits beside the request, the likeliest first."""
    schema = one.version.schema
    rows: dict[int, dict[str, np.ndarray]] = {}
    scores: dict[int, np.ndarray] = {}
    why = ""
    for seq in commits.around(one.version.name, one.logged.time_ms):
        try:
            rows[seq] = commits.rows(seq).gather(schema, one.lookup)
        except (RoostreamError, KeyError) as error:
            why = why or str(error)
            continue
        scores[seq] = probabilities(one.version.forward(one.batch, one.lookup, rows[seq]))
    if not scores:
        return Rescored(logged=one.logged, verdict="gone", why=why)
    served_nT = one.batch.served_score_BT
    best = min(scores, key=lambda seq: (not _is_within(scores[seq], served_nT), list(scores).index(seq)))
    difference_n = np.abs(scores[best] - served_nT).max(axis=1, initial=0)
    verdict, why = _verdict(list(scores.values()), scores[best], served_nT)
    return Rescored(
        logged=one.logged,
        verdict=verdict,
        why=why,
        rows_of=best,
        num_changed=_changed(rows),
        difference_n=difference_n,
    )


def _is_within(score_nT: np.ndarray, served_nT: np.ndarray) -> bool:
    return bool((np.abs(score_nT - served_nT) <= TOLERANCE).all())


def _verdict(scores: Sequence[np.ndarray], best_nT: np.ndarray, served_nT: np.ndarray) -> tuple[Verdict, str]:
    """A served score farther from all commits' than these are from each other, and than 1e-5, isn't one that rows gave."""
    if _is_within(best_nT, served_nT):
        return "within", ""
    if len(scores) < 2:
        return (
            "rows",
            "only one commit beside it has its rows, so that it can't be told how far rows have moved",
        )
    low_nT, high_nT = np.minimum.reduce(scores), np.maximum.reduce(scores)
    span = float((high_nT - low_nT).max())
    beyond = float(np.maximum(low_nT - served_nT, served_nT - high_nT).max())
    if beyond <= max(span, TOLERANCE):
        return "rows", f"rows moved its scores by {span:.2g} between the commits beside it"
    return "skew", f"beyond what rows moved ({span:.2g})"


def _changed(rows: dict[int, dict[str, np.ndarray]]) -> int:
    """Rows that aren't equal in all."""
    first, *others = rows.values()
    changed = 0
    for stack, rows_UD in first.items():
        differs_U = np.zeros(len(rows_UD), dtype=np.bool_)
        for other in others:
            differs_U |= (other[stack] != rows_UD).any(axis=1)
        changed += int(differs_U.sum())
    return changed


def summary(found: Sequence[Rescored]) -> dict[str, Any]:
    """Over all, and by version; keys stay."""
    judged = [one for one in found if one.verdict in JUDGED]
    verdicts = Counter(one.verdict for one in found)
    versions: dict[str, dict[str, Any]] = {}
    for one in found:
        its = versions.setdefault(
            one.logged.version, {"lists": 0, "largest": 0.0, **dict.fromkeys(JUDGED, 0)}
        )
        its["lists"] += 1
        its["largest"] = max(its["largest"], one.largest)
        if one.verdict in JUDGED:
            its[one.verdict] += 1
    differing = sorted(
        (one for one in found if one.verdict in ("skew", "rows")),
        key=lambda one: (one.verdict != "skew", -one.largest),
    )
    return {
        "tolerance": TOLERANCE,
        "lists": len(found),
        "scored_again": len(judged),
        "share_within": sum(one.verdict == "within" for one in judged) / len(judged) if judged else None,
        "largest": max((one.largest for one in judged), default=None),
        "verdicts": dict(verdicts),
        "versions": versions,
        "differing": [one.told() for one in differing],
        "not_scored": dict(Counter(one.why for one in found if one.verdict not in JUDGED)),
    }

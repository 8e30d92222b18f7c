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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from roostream.cli.skew.commit_states import CommitStates
from roostream.cli.skew.scored_lists import LoggedList
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


_FIRST_G = np.sinh(np.linspace(-14.5, 14.5, 59))  # ±1,000,000, dense around 0: the model reads asinh
_ROUNDS, _EACH = 8, 9
_MAX_CANDIDATES = 8
_NOTHING = "no single float, missing or of another value, gives the scores that were served"


def explained(
    version: Version, batch: Batch, lookup: Lookup, rows: Mapping[str, np.ndarray], tolerance: float
) -> str:
    """A sentence, of the first feature that does."""
    trial = _Trial(version, batch, lookup, rows)
    for side, at, name in _floats(batch):
        if trial.difference(trial.batch_with(side, at, None, None)).max(initial=0) <= tolerance:
            return f"its scores are those without {name!r}, which the log has"
    worst_n = np.argsort(-trial.difference(batch), kind="stable")[:_MAX_CANDIDATES].tolist()
    for side, at, name in _floats(batch):
        for row in [0] if side == "ro" else worst_n:
            value = trial.fitting(side, at, row, tolerance)
            if value is not None:
                logged = _arrays(batch, side)[0][row, at]
                whose = "" if side == "ro" else f" of item {batch.item_B[row]}"
                return f"its scores are those of {name!r}{whose} = {value:.4g}; the log has {logged:.4g}"
    return _NOTHING


class _Trial:
    def __init__(
        self, version: Version, batch: Batch, lookup: Lookup, rows: Mapping[str, np.ndarray]
    ) -> None:
        self.version, self.batch, self.lookup, self.rows = version, batch, lookup, rows

    def difference(self, batch: Batch) -> np.ndarray:
        """float32 [n]: of the candidates' scores from those served."""
        score_nT = probabilities(self.version.forward(batch, self.lookup, self.rows))
        return np.abs(score_nT - batch.served_score_BT).max(axis=1, initial=0)

    def batch_with(self, side: str, at: int, row: int | None, value: float | None) -> Batch:
        """The list with another value of one float, in all rows (None) or one; None = missing, which reads as its default."""
        value_NF, present_NF = (array.copy() for array in _arrays(self.batch, side))
        default = self.batch.schema.floats("ro" if side == "ro" else "nro")[at].default
        rows = slice(None) if row is None else row
        value_NF[rows, at] = default if value is None else value
        present_NF[rows, at] = value is not None
        if side == "ro":
            return dataclasses.replace(self.batch, ro_float_RF=value_NF, ro_present_RF=present_NF)
        return dataclasses.replace(self.batch, nro_float_BF=value_NF, nro_present_BF=present_NF)

    def fitting(self, side: str, at: int, row: int, tolerance: float) -> float | None:
        """The value of one row that gives the served scores; None where none does."""
        grid_G = _FIRST_G
        for _ in range(_ROUNDS):
            differs = [
                float(self.difference(self.batch_with(side, at, row, float(x))).max(initial=0))
                for x in grid_G
            ]
            nearest = int(np.argmin(differs))
            if differs[nearest] <= tolerance / 4:
                break
            low, high = grid_G[max(nearest - 1, 0)], grid_G[min(nearest + 1, len(grid_G) - 1)]
            grid_G = np.sinh(np.linspace(np.arcsinh(low), np.arcsinh(high), _EACH))
        return float(grid_G[nearest]) if differs[nearest] <= tolerance else None


def _arrays(batch: Batch, side: str) -> tuple[np.ndarray, np.ndarray]:
    return (
        (batch.ro_float_RF, batch.ro_present_RF)
        if side == "ro"
        else (batch.nro_float_BF, batch.nro_present_BF)
    )


def _floats(batch: Batch) -> Iterator[tuple[str, int, str]]:
    """(side, column, name)."""
    for side in ("ro", "nro"):
        for at, feature in enumerate(batch.schema.floats("ro" if side == "ro" else "nro")):
            yield side, at, feature.name

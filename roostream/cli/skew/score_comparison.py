"""Scores logged lists again with the training code and the version that served them, and gives each list a
verdict on the difference between the two scores (docs/operations/monitor.md).

    within    with the rows of a commit shortly before or after the request, the scores differ by at most 1e-5
    rows      they differ more, but no more than the scores of these commits differ from each other
    skew      they differ more than that: the features that were scored are not those in the log
    unscored, pages, schema, gone, unreadable    the list could not be scored again; `why` has the reason

For a skewed list, `explain_skew` searches a single float whose change reproduces the served scores. It tries
for each float: missing, and the best fitting value, for the whole list if it is a request feature, else for
one of the eight most different candidates. A feature is reported only if that value reproduces all served
scores within the tolerance.

Letters: n candidates, T tasks, F floats of a side, G values of a grid.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from infra.home import Home
from roostream.cli.checkpoint.checkpoint_command import opened_store, place_options
from roostream.cli.inspect_batch import side_floats
from roostream.cli.options import NonEmptyPath, json_option
from roostream.cli.output import Row, print_report, progress_bar
from roostream.cli.skew.commit_states import CommitStates
from roostream.cli.skew.scored_lists import LoggedList, of_file, of_topic
from roostream.errors import CheckpointError, ConfigError, RoostreamError, SetupError
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from serving.scorer import Version, probabilities

TOLERANCE = 1e-5
MAX_EXPLAINED = 3
Verdict = Literal["within", "rows", "skew", "unscored", "pages", "schema", "gone", "unreadable"]
JUDGED = ("within", "rows", "skew")


_MAX_SHOWN = 10


@click.command("skew")
@click.argument("files", nargs=-1, type=NonEmptyPath(path_type=Path))
@place_options
@click.option(
    "--lists",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="number of newest lists to score again",
)
@json_option
def skew_command(files: tuple[Path, ...], home: Path, store: str | None, lists: int, as_json: bool) -> None:
    """Score logged lists again with the training code and the version that served them, and compare the
    scores.

    The lists are the newest samples of the stack in --home, or those in FILES: segments of a feature log, or
    saved batches. Exit code 1: a list was served with other features than those logged, or no list could be
    scored again.

    \b
    Example:
      roostream inspect skew --lists 500
      roostream inspect skew .roostream/serving/log/* --home .roostream
    """
    commits = CommitStates(opened_store(home, store), Home(home).root)
    if files:
        logged = (each for file in files for each in of_file(file))
        found = sorted(logged, key=lambda each: each.time_ms)[-lists:]
    else:
        found = _newest(home, lists)
    with progress_bar("scoring lists"):
        report = summary(compare_scores(commits, found))
    again = report["scored_again"]
    print_report(as_json, report, skew_rows(report), f"{again:,} of {report['lists']:,} lists scored again")
    sys.exit(1 if report["verdicts"].get("skew") or not again else 0)


def _newest(home: Path, lists: int) -> list[LoggedList]:
    """Lists from the newest samples of the running stack."""
    try:
        stack = Home(home).running_stack()
    except SetupError as error:
        raise ConfigError(f"{error}; or give its --home, or segments of serving's log as FILES") from None
    return of_topic(stack["kafka"], stack["prefix"], int(stack["partitions"]), lists)


def skew_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of text for `score_comparison.summary`."""
    if not found["scored_again"]:
        yield "within", "no list could be scored again"
    else:
        share = f"{found['share_within']:.2%} of {found['scored_again']:,} lists"
        yield f"within {found['tolerance']:g}", f"{share}, the largest difference {found['largest']:.3g}"
    names = {"skew": "SKEW", "rows": "rows changed"}
    for verdict, name in names.items():
        if count := found["verdicts"].get(verdict):
            yield name, f"{count:,} lists"
    for why, count in found["not_scored"].items():
        yield "not scored", f"{count:,}: {why}"
    for version, figures in found["versions"].items():
        judged = ", ".join(f"{figures[v]:,} {v}" for v in JUDGED if figures[v])
        scored = f"{judged}; largest {figures['largest']:.3g}" if judged else "none scored"
        yield f"version {version or '(none)'}", f"{figures['lists']:,} lists: {scored}"
    for one in found["differing"][:_MAX_SHOWN]:
        at = f"rows of commit {one['rows_of_commit']}, {one['rows_changed']:,} of them changed around it"
        yield (
            f"{one['verdict']} {one['request_id']}",
            f"{one['largest']:.3g}: {one['why']} ({at}; {one['where']})",
        )


@dataclasses.dataclass(kw_only=True)
class ScoreComparison:
    """The result of scoring one list again."""

    logged: LoggedList
    verdict: Verdict
    why: str = ""
    rows_of: int = 0  # commit
    num_changed: int = 0  # rows of the list that differ between the commits around it
    # Largest of a candidate's tasks.
    difference_n: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def largest(self) -> float:
        return float(self.difference_n.max(initial=0))

    def plain(self) -> dict[str, Any]:
        """As plain values with stable keys."""
        logged = self.logged
        return {
            "request_id": logged.request_id,
            "version": logged.version,
            "time_ms": logged.time_ms,
            "where": logged.where,
            "verdict": self.verdict,
            "why": self.why,
            "largest": self.largest,
            "differences": [float(x) for x in self.difference_n],
            "rows_of_commit": self.rows_of,
            "rows_changed": self.num_changed,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScorableList:
    """A list that can be scored again."""

    logged: LoggedList
    version: Version
    batch: Batch
    lookup: Lookup


def compare_scores(commits: CommitStates, lists: Sequence[LoggedList]) -> list[ScoreComparison]:
    """Compare the lists in order. A list costs one forward pass for each commit around it, and a skewed list
    some thousands."""
    opened = [_opened(commits, logged) for logged in lists]
    wanted: dict[str, set[tuple[int, int]]] = {}
    for one in opened:
        if isinstance(one, ScorableList):
            for stack, stack_lookup in one.lookup.stacks.items():
                wanted.setdefault(stack, set()).update(
                    zip(stack_lookup.table_U.tolist(), stack_lookup.id_U.tolist(), strict=True)
                )
    commits.want(wanted)
    out = [_judged(commits, one) if isinstance(one, ScorableList) else one for one in opened]
    differing = (pair for pair in zip(opened, out, strict=True) if pair[1].verdict == "skew")
    for (one, judged), _ in zip(differing, range(MAX_EXPLAINED), strict=False):
        assert isinstance(one, ScorableList)
        rows = commits.rows(judged.rows_of).gather(one.version.schema, one.lookup)
        judged.why = explain_skew(one.version, one.batch, one.lookup, rows, TOLERANCE)
    return out


def _opened(commits: CommitStates, logged: LoggedList) -> ScorableList | ScoreComparison:
    """Decode a list, or say why it cannot be scored again."""
    if not logged.served or not logged.version:
        return ScoreComparison(logged=logged, verdict="unscored", why="it has no scores or no version")
    if logged.num_pages != 1:
        why = f"its {logged.num_pages} pages were scored separately; use the feature log"
        return ScoreComparison(logged=logged, verdict="pages", why=why)
    try:
        version = commits.version(logged.version)
    except CheckpointError as error:
        return ScoreComparison(logged=logged, verdict="gone", why=str(error))
    if logged.fingerprint != version.schema.fingerprint:
        why = (
            f"logged with schema {logged.fingerprint:016x}, its version has {version.schema.fingerprint:016x}"
        )
        return ScoreComparison(logged=logged, verdict="schema", why=why)
    batch, rejects = Decoder(version.schema, commits.registry).decode([logged.record])
    if rejects or batch.num_requests != 1 or np.isnan(batch.served_score_BT).any():
        why = rejects[0].error if rejects else "its scores do not match its candidates and tasks"
        return ScoreComparison(logged=logged, verdict="unreadable", why=why)
    return ScorableList(logged=logged, version=version, batch=batch, lookup=build_lookup(batch))


def _judged(commits: CommitStates, one: ScorableList) -> ScoreComparison:
    """Compare with the rows of the commits shortly before and after the request, beginning with the one that
    serving most likely had."""
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
        return ScoreComparison(logged=one.logged, verdict="gone", why=why)
    served_nT = one.batch.served_score_BT
    best = min(scores, key=lambda seq: (not _is_within(scores[seq], served_nT), list(scores).index(seq)))
    difference_n = np.abs(scores[best] - served_nT).max(axis=1, initial=0)
    verdict, why = _verdict(list(scores.values()), scores[best], served_nT)
    return ScoreComparison(
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
    """A skew is a served score that is farther from the scores of all commits than these are from each other,
    and than 1e-5."""
    if _is_within(best_nT, served_nT):
        return "within", ""
    if len(scores) < 2:
        return ("rows", "only one commit around it has its rows, so the effect of changed rows is unknown")
    low_nT, high_nT = np.minimum.reduce(scores), np.maximum.reduce(scores)
    span = float((high_nT - low_nT).max())
    beyond = float(np.maximum(low_nT - served_nT, served_nT - high_nT).max())
    if beyond <= max(span, TOLERANCE):
        return "rows", f"changed rows explain a difference of up to {span:.2g} between the commits around it"
    return "skew", f"more than changed rows explain ({span:.2g})"


def _changed(rows: dict[int, dict[str, np.ndarray]]) -> int:
    """Number of rows that differ between commits."""
    first, *others = rows.values()
    changed = 0
    for stack, rows_UD in first.items():
        differs_U = np.zeros(len(rows_UD), dtype=np.bool_)
        for other in others:
            differs_U |= (other[stack] != rows_UD).any(axis=1)
        changed += int(differs_U.sum())
    return changed


def summary(found: Sequence[ScoreComparison]) -> dict[str, Any]:
    """Counts over all lists and by version, with stable keys."""
    judged = [one for one in found if one.verdict in JUDGED]
    verdicts = Counter(one.verdict for one in found)
    versions: dict[str, dict[str, Any]] = {}
    for one in found:
        counts = versions.setdefault(
            one.logged.version, {"lists": 0, "largest": None, **dict.fromkeys(JUDGED, 0)}
        )
        counts["lists"] += 1
        if one.verdict in JUDGED:
            counts[one.verdict] += 1
            counts["largest"] = max(counts["largest"] or 0.0, one.largest)
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
        "differing": [one.plain() for one in differing],
        "not_scored": dict(Counter(one.why for one in found if one.verdict not in JUDGED)),
    }


_FIRST_G = np.sinh(np.linspace(-14.5, 14.5, 59))  # ±1,000,000, dense around 0: the model reads asinh
_ROUNDS, _EACH = 8, 9
_MAX_CANDIDATES = 8
_NOT_EXPLAINED = "no single float, missing or with another value, reproduces the served scores"


def explain_skew(
    version: Version, batch: Batch, lookup: Lookup, rows: Mapping[str, np.ndarray], tolerance: float
) -> str:
    """A sentence about the first float feature whose change reproduces the served scores, or one that says
    that there is none."""
    trial = _Trial(version, batch, lookup, rows)
    for side, at, name in _floats(batch):
        if trial.difference(trial.batch_with(side, at, None, None)).max(initial=0) <= tolerance:
            return f"it was scored without {name!r}, which the log has"
    worst_n = np.argsort(-trial.difference(batch), kind="stable")[:_MAX_CANDIDATES].tolist()
    for side, at, name in _floats(batch):
        for row in [0] if side == "ro" else worst_n:
            value = trial.fitting(side, at, row, tolerance)
            if value is not None:
                logged = side_floats(batch, side)[0][row, at]
                item = "" if side == "ro" else f" of item {batch.item_B[row]}"
                return f"it was scored with {name!r}{item} = {value:.4g}, but the log has {logged:.4g}"
    return _NOT_EXPLAINED


class _Trial:
    def __init__(
        self, version: Version, batch: Batch, lookup: Lookup, rows: Mapping[str, np.ndarray]
    ) -> None:
        self.version, self.batch, self.lookup, self.rows = version, batch, lookup, rows

    def difference(self, batch: Batch) -> np.ndarray:
        """float32 [n]: largest difference of each candidate's scores from the served scores."""
        score_nT = probabilities(self.version.forward(batch, self.lookup, self.rows))
        return np.abs(score_nT - batch.served_score_BT).max(axis=1, initial=0)

    def batch_with(self, side: Side, at: int, row: int | None, value: float | None) -> Batch:
        """A copy of the list with another value of the float in column `at`, in one row or, with None, in all
        rows. A value of None removes the feature: the model then reads its default."""
        value_NF, present_NF = (array.copy() for array in side_floats(self.batch, side))
        default = self.batch.schema.floats(side)[at].default
        rows = slice(None) if row is None else row
        value_NF[rows, at] = default if value is None else value
        present_NF[rows, at] = value is not None
        if side == "ro":
            return dataclasses.replace(self.batch, ro_float_RF=value_NF, ro_present_RF=present_NF)
        return dataclasses.replace(self.batch, nro_float_BF=value_NF, nro_present_BF=present_NF)

    def fitting(self, side: Side, at: int, row: int, tolerance: float) -> float | None:
        """The value in one row that reproduces the served scores; None if there is none."""
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


def _floats(batch: Batch) -> Iterator[tuple[Side, int, str]]:
    """Yield (side, column, name) for each float feature. The side is `ro` for features of the request, or
    `nro` for those of candidates; the column is that of the side's array in the batch."""
    sides: tuple[Side, Side] = ("ro", "nro")
    for side in sides:
        for at, feature in enumerate(batch.schema.floats(side)):
            yield side, at, feature.name

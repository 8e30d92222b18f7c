"""Progressive metrics: every candidate is scored before the model trains on its labels, and counted here.

A label above 0 is positive, as in `roostream.models.loss`. Weight 0 excludes a candidate from a task.

    ne             mean log loss / entropy of the base rate over the same candidates (He et al. 2014); like
                   `calibration` for objective "event" only, because other scores are no probabilities
    auc            over all candidates, by weight, ties ½; `auc_error` bounds the error (ranking_metrics.py)
    request_auc    like `mrr` and `ndcg@10`: mean over requests with a positive and a negative
    calibration    Σ predictions / Σ positives
    mae            objective "amount" only: mean absolute error of the value, in its unit, up to its scale

Letters: R requests, B candidates, T tasks, K candidates with weight > 0, M requests with both kinds of
labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.schema.schema import Label
from roostream.wire.batch import Batch
from trainer.monitoring.ranking_metrics import (
    RequestScores,
    ScoreHistogram,
    normalized_entropy,
    ordered,
    ratio,
    score_requests,
)

Report = dict[str, object]
METRIC_NAMES = ("base_rate", "ne", "auc", "request_auc", "mrr", "ndcg@10", "calibration")
"""The metrics of a task in reports, heartbeats, manifests and pages."""

SHARED_SCORES = 256
"""Rounded scores a task that each of several workers reports, so that the AUC of all can be computed."""
_MAX_MERGED_SCORES = 1 << 18
_EVENT = Label(name="event", action="event")
_EPSILON = 1e-12  # as in TorchRec: avoids log(0)
_SUMS = ("candidates", "weight", "positive", "predicted", "log_loss", "ranked_requests", "auc", "mrr", "ndcg")


class ScoredBatch(NamedTuple):
    """Candidates that were scored before their labels were used."""

    score_BT: np.ndarray
    label_BT: np.ndarray
    weight_BT: np.ndarray
    request_index_B: np.ndarray  # int64, into the R requests, including those without candidates
    time_ms_R: np.ndarray
    declared_T: Sequence[Label] = ()  # as the schema declares the labels; empty = all are events
    importance_R: np.ndarray | None = None
    """How many requests each one represents in request metrics, as `weight_BT` already says for candidates;
    None = 1."""

    def of_requests(self, kept_R: np.ndarray) -> ScoredBatch:
        """The scores of some requests. `kept_R`: bool."""
        kept_B = kept_R[self.request_index_B]
        return ScoredBatch(
            self.score_BT[kept_B],
            self.label_BT[kept_B],
            self.weight_BT[kept_B],
            (np.cumsum(kept_R) - 1)[self.request_index_B[kept_B]],
            self.time_ms_R[kept_R],
            self.declared_T,
            None if self.importance_R is None else self.importance_R[kept_R],
        )


def sampling_weights(batch: Batch) -> np.ndarray:
    """float32 [R]: the weight that the log gives each request, 1 for one without candidates or labels."""
    weight_R = np.ones(batch.num_requests, np.float32)
    known_B = np.flatnonzero(batch.weight_BT.any(axis=1))
    weight_R[batch.request_index_B[known_B]] = batch.weight_BT[known_B].max(axis=1)
    return weight_R


class TaskMetrics:
    """Sums and scores of one task."""

    def __init__(self, max_scores: int) -> None:
        self.sums = dict.fromkeys(_SUMS, 0.0)
        self.absolute_error, self.is_probability = 0.0, True
        self.amount_scale: float | None = None  # as `Label.amount_scale`
        self.scores = ScoreHistogram(max_scores)

    def merge(self, other: TaskMetrics) -> None:
        self.add(**other.sums, **other.amount())
        self.scores.merge(other.scores)

    def report(self) -> Report:
        s = self.sums
        base_rate = ratio(s["positive"], s["weight"])
        return {
            "candidates": int(s["candidates"]),
            "base_rate": base_rate,
            "ne": normalized_entropy(s["log_loss"], s["weight"], base_rate) if self.is_probability else None,
            "auc": self.scores.auc(),
            "auc_error": self.scores.auc_error(),
            "request_auc": ratio(s["auc"], s["ranked_requests"]),
            "mrr": ratio(s["mrr"], s["ranked_requests"]),
            "ndcg@10": ratio(s["ndcg"], s["ranked_requests"]),
            "calibration": ratio(s["predicted"], s["positive"]) if self.is_probability else None,
            **({} if self.amount_scale is None else {"mae": ratio(self.absolute_error, s["weight"])}),
        }

    def state(self) -> dict[str, np.ndarray]:
        sums = np.array([self.sums[name] for name in _SUMS], dtype=np.float64)
        amount = {"amount": np.array([*self.amount().values()])} if self.amount() else {}
        return {"sums": sums, **amount, **{f"scores.{k}": v for k, v in self.scores.state().items()}}

    def load(self, state: Mapping[str, np.ndarray], declared: Label | None = None) -> None:
        """Replace everything, unless the label is `declared` with another objective or scale by now."""
        absolute_error, scale = state.get("amount", np.zeros(2)).tolist()
        if declared is not None and scale != _stored_scale(declared.is_probability, declared.amount_scale):
            return
        self.sums = dict.fromkeys(_SUMS, 0.0)
        self.add(absolute_error, scale, **dict(zip(_SUMS, state["sums"].tolist(), strict=True)))
        self.scores.load({k.removeprefix("scores."): v for k, v in state.items() if k.startswith("scores.")})

    def amount(self) -> dict[str, float]:
        """Absolute error and stored scale; {} for an event."""
        scale = _stored_scale(self.is_probability, self.amount_scale)
        return {"absolute_error": self.absolute_error, "scale": scale} if scale else {}

    def add(self, absolute_error: float = 0.0, scale: float = 0.0, **sums: float) -> None:
        """`scale`: as stored."""
        self.absolute_error += float(absolute_error)
        if scale and self.is_probability:
            self.is_probability, self.amount_scale = False, float(scale) if scale > 0 else None
        for name, value in sums.items():
            self.sums[name] += float(value)


def _stored_scale(is_probability: bool, amount_scale: float | None) -> float:
    """The number for both in commits and heartbeats: 0 = probability, -1 = neither."""
    return 0.0 if is_probability else -1.0 if amount_scale is None else amount_scale


class Metrics:
    """All tasks over everything passed to `update`. Merged over workers; saved in commits as arrays."""

    def __init__(self, tasks: Sequence[str], max_scores: int = 1 << 18) -> None:
        """`max_scores`: distinct scores that the AUC of each task keeps before it loses resolution (20 bytes
        each)."""
        self.tasks = {task: TaskMetrics(max_scores) for task in tasks}
        self.num_requests = 0
        self._first_ms, self._last_ms = np.iinfo(np.int64).max, np.iinfo(np.int64).min

    def update(self, batch: ScoredBatch) -> None:
        """Count a batch."""
        update_each([self], np.zeros(len(batch.time_ms_R), dtype=np.int64), batch)

    def note(self, time_ms_R: np.ndarray) -> None:
        """Count requests with these times."""
        self.num_requests += len(time_ms_R)
        if len(time_ms_R):
            self._first_ms = min(self._first_ms, int(time_ms_R.min()))
            self._last_ms = max(self._last_ms, int(time_ms_R.max()))

    def merge(self, other: Metrics) -> None:
        """Add the counts of `other`."""
        for name, task in self.tasks.items():
            task.merge(other.tasks[name])
        self.num_requests += other.num_requests
        self._first_ms = min(self._first_ms, other._first_ms)
        self._last_ms = max(self._last_ms, other._last_ms)

    def report(self) -> Report:
        """Number of requests, their time range, the metrics of the first task, and all tasks under `tasks`.

        A metric is None where it is undefined (no positive, no request that counts).
        """
        tasks = {name: task.report() for name, task in self.tasks.items()}
        empty = self.num_requests == 0
        return {
            "requests": self.num_requests,
            "first_ms": None if empty else self._first_ms,
            "last_ms": None if empty else self._last_ms,
            **next(iter(tasks.values())),
            "tasks": tasks,
        }

    def sums(self) -> dict[str, dict[str, float]]:
        """Task → the sums behind its metrics."""
        return {name: {**task.sums, **task.amount()} for name, task in self.tasks.items()}

    def mergeable_summary(self, max_scores: int) -> dict[str, Any]:
        """`summarize` of the report, with what `merge_summaries` needs: by task the `sums` behind its
        metrics, and `scores`, the counts of at most `max_scores` rounded scores (0 = none)."""
        coarse = {name: ScoreHistogram(max_scores) for name in self.tasks if max_scores}
        for name, scores in coarse.items():
            scores.merge(self.tasks[name].scores)
        return {
            **summarize(self.report()),
            "sums": self.sums(),
            "scores": {
                name: {key: column.tolist() for key, column in scores.state().items()}
                for name, scores in coarse.items()
            },
        }

    def state(self) -> dict[str, np.ndarray]:
        """The counts as arrays, which `load` reads. The names must not change: commits contain them."""
        out = {"requests": np.array([self.num_requests, self._first_ms, self._last_ms], dtype=np.int64)}
        for name, task in self.tasks.items():
            out |= {f"{name}.{key}": value for key, value in task.state().items()}
        return out

    def load(self, state: Mapping[str, np.ndarray], declared_T: Sequence[Label] = ()) -> None:
        """Replace everything by a `state`. A task starts empty if it is new in the schema, or if its label is
        `declared_T` with another objective or scale now."""
        declared = {label.name: label for label in declared_T}
        self.num_requests, self._first_ms, self._last_ms = (int(x) for x in state["requests"])
        for name, task in self.tasks.items():
            task_state = {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
            if task_state:
                task.load(task_state, declared.get(name))


def update_each(metrics: Sequence[Metrics], of_R: np.ndarray, batch: ScoredBatch) -> None:
    """`Metrics.update` of several in one pass: request r counts in `metrics[of_R[r]]`."""
    for t, name in enumerate(metrics[0].tasks):
        tasks = [one.tasks[name] for one in metrics]
        kept_B = np.flatnonzero(batch.weight_BT[:, t] > 0)
        request_K = batch.request_index_B[kept_B]
        of_K, score_K, label_K = of_R[request_K], batch.score_BT[kept_B, t], batch.label_BT[kept_B, t]
        weight_K, positive_K = batch.weight_BT[kept_B, t].astype(np.float64), label_K > 0
        ranked = score_requests(score_K, positive_K, request_K)
        importance_M = np.ones(len(ranked.request_M))
        if batch.importance_R is not None:
            importance_M = batch.importance_R[ranked.request_M].astype(np.float64)
        columns = {
            **_candidate_sums(len(tasks), of_K, score_K, positive_K, weight_K),
            **_request_sums(len(tasks), of_R[ranked.request_M], ranked, importance_M),
        }
        for task, values in zip(tasks, np.stack(list(columns.values()), axis=1).tolist(), strict=True):
            task.add(**dict(zip(columns, values, strict=True)))
        declared, errors = batch.declared_T[t] if batch.declared_T else _EVENT, [0.0] * len(tasks)
        if (scale := declared.amount_scale) is not None:
            expected_K = np.expm1(score_K.astype(np.float64) * np.log1p(scale))
            error_K = weight_K * np.abs(expected_K - np.clip(label_K, 0, scale))
            errors = np.bincount(of_K, error_K, len(tasks)).tolist()
        for task, error in zip(tasks, errors, strict=True):
            task.add(absolute_error=error, scale=_stored_scale(declared.is_probability, scale))
        order_K = np.argsort(of_K, kind="stable")
        ends = np.cumsum(np.bincount(of_K, minlength=len(tasks))).tolist()
        sides = ordered(score_K), weight_K * positive_K, weight_K * ~positive_K
        for task, start, end in zip(tasks, [0, *ends[:-1]], ends, strict=True):
            task.scores.add_sides(*(side_K[order_K[start:end]] for side_K in sides))
    for number, one in enumerate(metrics):
        one.note(batch.time_ms_R[of_R == number])


def _candidate_sums(
    n: int, of_K: np.ndarray, score_K: np.ndarray, positive_K: np.ndarray, weight_K: np.ndarray
) -> dict[str, np.ndarray]:
    """Those of _SUMS that are over candidates, float64 [n]."""
    clipped_K = np.clip(score_K.astype(np.float64), _EPSILON, 1 - _EPSILON)
    loss_K = np.log(np.where(positive_K, clipped_K, 1 - clipped_K))
    return {
        "candidates": np.bincount(of_K, minlength=n),
        "weight": np.bincount(of_K, weight_K, n),
        "positive": np.bincount(of_K, weight_K * positive_K, n),
        "predicted": np.bincount(of_K, weight_K * score_K, n),
        "log_loss": -np.bincount(of_K, weight_K * loss_K, n),
    }


def _request_sums(
    n: int, of_M: np.ndarray, ranked: RequestScores, importance_M: np.ndarray
) -> dict[str, np.ndarray]:
    """Those of _SUMS that are over requests, float64 [n]."""
    return {
        "ranked_requests": np.bincount(of_M, importance_M, n),
        "auc": np.bincount(of_M, importance_M * ranked.auc_M, n),
        "mrr": np.bincount(of_M, importance_M * ranked.mrr_M, n),
        "ndcg": np.bincount(of_M, importance_M * ranked.ndcg_M, n),
    }


def summarize(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that heartbeats and manifests carry."""
    names = ("candidates", *METRIC_NAMES, "mae")
    tasks = {
        task: {name: values[name] for name in names if name in values}
        for task, values in report["tasks"].items()
    }
    return {**{name: report[name] for name in ("requests", "candidates", *METRIC_NAMES)}, "tasks": tasks}


def merge_summaries(summaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the `Metrics.mergeable_summary` of several workers. {} without reports.

    Sums and counts are added, so all metrics are exact but `auc`, whose scores were rounded: the error was
    below 1e-4 with 256 scores. A metric is None if a worker that has counted anything does not report what it
    needs.
    """
    reported = [one for one in summaries if one]
    counted = [one for one in reported if one.get("requests")] or reported[:1]
    if len(counted) < 2:
        return {key: value for one in counted for key, value in one.items() if key not in ("sums", "scores")}
    requests = sum(one["requests"] for one in counted)
    if not all("sums" in one for one in counted):
        unknown = dict.fromkeys(("candidates", *METRIC_NAMES))
        return {**unknown, "requests": requests, "tasks": {}}
    tasks: dict[str, dict[str, Any]] = {}
    for name in counted[0]["sums"]:
        task = TaskMetrics(_MAX_MERGED_SCORES)
        for one in counted:
            task.add(**one["sums"][name])
            if scores := one.get("scores", {}).get(name):
                part = ScoreHistogram(_MAX_MERGED_SCORES)
                part.load({key: np.array(column) for key, column in scores.items()})
                task.scores.merge(part)
        has_scores = all(one.get("scores", {}).get(name) for one in counted)
        tasks[name] = task.report() if has_scores else {**task.report(), "auc": None}
    return summarize({"requests": requests, **next(iter(tasks.values())), "tasks": tasks})


_MAX_DAILY_SCORES = 1 << 24


class DailyMetrics:
    """Metrics of a report (docs/protocols.md, Reports): overall, from `measure_from_ms` on, and by day of
    request time (UTC)."""

    def __init__(self, tasks: Sequence[str], *, measure_from_ms: int = 0) -> None:
        self.tasks, self._measure_from_ms = tasks, measure_from_ms
        self._overall, self._measured = (Metrics(tasks, _MAX_DAILY_SCORES) for _ in range(2))
        self._by_day: dict[str, Metrics] = {}

    def update(self, batch: ScoredBatch) -> None:
        """Count a batch in all sums: the whole, the measured part, and each day. See `Metrics.update`."""
        self._overall.update(batch)
        self._measured.update(batch.of_requests(batch.time_ms_R >= self._measure_from_ms))
        day_R = batch.time_ms_R // 86_400_000
        for day in np.unique(day_R).tolist():
            date = str(np.datetime64(day, "D"))  # of any year, unlike those of datetime
            metrics = self._by_day.setdefault(date, Metrics(self.tasks, _MAX_DAILY_SCORES))
            metrics.update(batch.of_requests(day_R == day))

    def report(self) -> Report:
        return {
            "overall": self._overall.report(),
            "measured": self._measured.report(),
            "by_day": {date: metrics.report() for date, metrics in sorted(self._by_day.items())},
        }

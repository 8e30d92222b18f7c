"""The verdict of a replay: does the model order requests better than the baselines, and since when?

Model and baselines are compared on the same requests by request AUC of the first label (a paired comparison),
so differences between requests cancel out. Only requests with a positive and a negative candidate count.

Letters: N paired requests, M baselines.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from roostream.online.counters import sources_of
from roostream.schema.schema import Schema

RULES = ("place", "item", "recent", "linear")
"""The baselines that a model is judged by (roostream/cli/replay/baselines.py)."""
_WINDOWS = 10
_MIN_REQUESTS = 100
"""With fewer paired requests there is no verdict."""
_SHORT_LOG = 5000
_Z = 1.96  # of a 95 % interval


class PairedRequests:
    """Request AUC of the model and of each baseline for the same samples. Memory: 40 bytes per request."""

    def __init__(self) -> None:
        self._model: dict[int, tuple[int, int, float]] = {}  # sample → place in training order, time, AUC
        self._rules: dict[int, tuple[float, ...]] = {}
        self._pairs: list[tuple[int, int, float, tuple[float, ...]]] = []

    def add_model(
        self, sample_id_M: Sequence[int], place_M: np.ndarray, time_ms_M: np.ndarray, auc_M: np.ndarray
    ) -> None:
        """Add requests that the model scored. `place_M`: the number of requests scored before each."""
        columns = (x.tolist() for x in (place_M, time_ms_M, auc_M))
        for sample, place, time_ms, auc in zip(sample_id_M, *columns, strict=True):
            if (rules := self._rules.pop(sample, None)) is not None:
                self._pairs.append((place, time_ms, auc, rules))
            else:
                self._model[sample] = (place, time_ms, auc)

    def add_rules(self, sample_id_M: Sequence[int], auc_by_rule: Mapping[str, np.ndarray]) -> None:
        """Add requests that the baselines scored; `auc_by_rule` has an array [M] for each of RULES."""
        columns = [auc_by_rule[name].tolist() for name in RULES]
        for sample, *rules in zip(sample_id_M, *columns, strict=True):
            if (scored := self._model.pop(sample, None)) is not None:
                self._pairs.append((*scored, tuple(rules)))
            else:
                self._rules[sample] = tuple(rules)

    def between(self, edges: Sequence[int]) -> list[Comparison]:
        """Compare the requests that were scored as number edges[0] + 1 to edges[1], edges[1] + 1 to edges[2]
        and so on, in training order. Intervals without paired requests are left out."""
        pairs = sorted(self._pairs)
        place_N = np.array([p[0] for p in pairs], np.int64)
        found = []
        for first, last in itertools.pairwise(edges):
            part = pairs[slice(*np.searchsorted(place_N, (first, last)).tolist())]
            if not part:
                continue
            model_N, rule_NM = np.array([p[2] for p in part]), np.array([p[3] for p in part])
            best = int(rule_NM.mean(axis=0).argmax())
            found.append(
                Comparison(
                    last_request=last,
                    requests=len(part),
                    model=float(model_N.mean()),
                    rules=dict(zip(RULES, rule_NM.mean(axis=0).tolist(), strict=True)),
                    difference=_mean(model_N - rule_NM[:, best]),
                )
            )
        return found

    def verdict(self, measure_from_ms: int = 0) -> Verdict:
        """Judge the requests from `measure_from_ms` on, or, if that is 0, the second half."""
        pairs = sorted(self._pairs)
        place_N = np.array([p[0] for p in pairs], np.int64)
        time_ms_N = np.array([p[1] for p in pairs], np.int64)
        model_N = np.array([p[2] for p in pairs])
        rule_NM = np.array([p[3] for p in pairs]).reshape(-1, len(RULES))
        judged_N = (
            time_ms_N >= measure_from_ms if measure_from_ms else np.arange(len(pairs)) >= len(pairs) // 2
        )
        if judged_N.sum() < _MIN_REQUESTS:
            return Verdict(state="unknown", requests=int(judged_N.sum()))
        best = int(rule_NM[judged_N].mean(axis=0).argmax())
        difference_N = model_N - rule_NM[:, best]
        mean, error = _mean(difference_N[judged_N])
        windows = [
            Window(
                first_request=int(place_N[part[0]]) + 1,
                requests=len(part),
                model=float(model_N[part].mean()),
                baseline=float(rule_NM[part, best].mean()),
                difference=_mean(difference_N[part]),
            )
            for part in np.array_split(np.arange(len(pairs)), _WINDOWS)
        ]
        state = "ahead" if mean - error > 0 else "behind" if mean + error < 0 else "level"
        return Verdict(
            state=state,
            requests=int(judged_N.sum()),
            model=float(model_N[judged_N].mean()),
            baseline=RULES[best],
            baseline_value=float(rule_NM[judged_N, best].mean()),
            difference=(mean, error),
            ahead_since=_ahead_since(windows) if state == "ahead" else None,
            windows=windows,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Request AUC of the model and of each baseline over an interval of requests."""

    last_request: int
    requests: int  # with a positive and a negative candidate
    model: float
    rules: dict[str, float]
    difference: tuple[float, float]  # to the interval's best baseline: mean, half of its 95 % interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A tenth of the paired requests, in training order."""

    first_request: int  # counted from 1 over all scored requests
    requests: int
    model: float
    baseline: float
    difference: tuple[float, float]  # mean, half of its 95 % interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The model against its best baseline. Its states `ahead` and `behind` are significant at 95 %;
    `unknown` means that there are too few requests."""

    state: str  # ahead, level, behind, unknown
    requests: int
    model: float | None = None
    baseline: str = ""
    baseline_value: float | None = None
    difference: tuple[float, float] | None = None  # mean, half of its 95 % interval
    ahead_since: int | None = None
    windows: list[Window] = dataclasses.field(default_factory=list)

    def sentence(self) -> str:
        """One line for tables, pages and warnings."""
        if self.difference is None:
            return (
                f"unknown: {self.requests} requests have a positive and a negative candidate; "
                f"at least {_MIN_REQUESTS} are needed"
            )
        mean, error = self.difference
        figures = (
            f"request AUC {self.model:.4f} against {self.baseline_value:.4f} by {self.baseline!r}, the best "
            f"baseline: {mean:+.4f} ± {error:.4f} over {self.requests} requests"
        )
        since = f", since request {self.ahead_since:,}" if self.ahead_since else ""
        words = {"level": "level with the best baseline"}.get(self.state, self.state)
        return f"{words}{since}: {figures}"


def _mean(x_N: np.ndarray) -> tuple[float, float]:
    """Mean and half of its 95 % interval, for independent requests."""
    error = _Z * float(x_N.std(ddof=1)) / len(x_N) ** 0.5 if len(x_N) > 1 else float("inf")
    return float(x_N.mean()), error


def _ahead_since(windows: list[Window]) -> int | None:
    """The first request from which on the model was ahead in each window; None if not in the last."""
    since = None
    for window in reversed(windows):
        if window.difference[0] <= 0:
            break
        since = window.first_request
    return since


def likely_reasons(verdict: Verdict, schema: Schema, num_requests: int) -> list[str]:
    """At most three likely reasons why the model is not ahead, the likeliest first, each with what to
    change."""
    if verdict.state not in ("behind", "level"):
        return []
    return list(_reasons(verdict, schema, num_requests))[:3]


def _reasons(verdict: Verdict, schema: Schema, num_requests: int) -> Iterator[str]:
    nro, ro = sources_of(schema, "nro"), sources_of(schema, "ro")
    counters = {counter.name: counter.aggregation for counter in schema.counters}
    rates = [
        name
        for name, source in nro.items()
        if source.startswith(("ctr_", "expected_")) or counters.get(source) in ("rate", "expected")
    ]
    compared = {t.input for t in schema.transforms if t.op in ("rank", "share")}
    has_item = "item_id" in nro.values()
    has_history = "history" in ro.values() or "history" in counters.values()
    if verdict.baseline in ("item", "recent") and not rates:
        yield (
            "no feature says how often an item is clicked; add [[nro]] online = "
            '"{views,ctr,expected}_{1h,24h}"'
        )
    if not has_item:
        yield 'no feature is the candidate itself; add [[nro]] name = "item", kind = "ids", table = "item"'
    if rates and not compared & set(rates):
        yield (
            "click rates are not compared within the list; add [[transform]] inputs = "
            f'["{rates[0]}"], op = ["rank", "share"]'
        )
    if not has_history:
        yield (
            'the model does not see what the user clicked; add [[ro]] name = "history", kind = "sequence", '
            'table = "item", online = "history"'
        )
    if num_requests < _SHORT_LOG:
        yield (
            f"the log is short ({num_requests:,} requests); learn in smaller steps: "
            "--set worker.first_batch_requests=4 --set worker.batch_requests=16"
        )
    if verdict.baseline == "linear":
        yield (
            "a linear model on the same floats is better, so the network learns too slowly for this log; try "
            "--learning-rate 0.005"
        )
    if verdict.baseline == "place":
        yield (
            "positions explain most positives, because users take what is on top; log the propensities of "
            "explored lists, and judge by them"
        )
    yield "the settings of the model may not fit this log; compare others with --set model.KEY=VALUE"

"""The verdict on a model: is it better than the baselines, and since when?

Model and baselines are compared on the same requests by the first label, so what makes a request hard for all
of them cancels out.

    request AUC  mean over requests with a positive and a negative; higher is better
    NE           log loss / entropy of the base rate, over all requests; lower is better; only if the label's
                 objective is "event"

Both are ratios of sums over requests, and so are their differences: d = sum(x) / sum(y). The interval is the
normal approximation with the residuals x - d y of the requests (Cochran 1977, section 6.4), as if requests
were independent. It covers the true differences to all baselines at once with 95 % (Bonferroni).

Letters: R requests of a call, N paired requests, M baselines.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from roostream.runtime.metrics_collector import MetricSpec
from roostream.runtime.scrape import ScrapedMetrics
from trainer.monitoring.ranking_metrics import score_requests

RULES = ("place", "item", "recent", "linear")
"""The baselines that a model is judged by (trainer/monitoring/baselines.py)."""
WINDOWS = 10
MIN_REQUESTS = 100
"""With fewer paired requests there is no verdict."""
MIN_POSITIVES = 30
"""With fewer requests with a positive, log losses are too far from normal for a verdict."""
METRICS = ("request_auc", "ne")
STATES = ("ahead", "undecided", "behind", "unknown")
WORDS = {"request_auc": "request AUC", "ne": "NE"}
_SIGN = {"request_auc": 1.0, "ne": -1.0}  # of a difference that is a gain
_EPSILON = 1e-12  # as in progressive_metrics.py
_CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)


class RequestScores(NamedTuple):
    """Scores of one model or rule for the first label of R requests."""

    auc_R: np.ndarray  # NaN without a positive and a negative
    log_loss_R: np.ndarray  # sum over the candidates; NaN for scores that are no probabilities


def request_scores(
    score_B: np.ndarray,
    positive_B: np.ndarray,
    request_index_B: np.ndarray,
    num_requests: int,
    *,
    is_probability: bool = True,
) -> RequestScores:
    """AUC (NaN where it is undefined) and log loss of each request. `request_index_B`: int64, not decreasing;
    `positive_B`: bool. `is_probability`: False for scores of an objective other than "event"."""
    ranked = score_requests(score_B, positive_B, request_index_B)
    auc_R = np.full(num_requests, np.nan)
    auc_R[ranked.request_M] = ranked.auc_M
    if not is_probability:
        return RequestScores(auc_R, np.full(num_requests, np.nan))
    probability_B = np.clip(score_B.astype(np.float64), _EPSILON, 1 - _EPSILON)
    loss_B = -np.log(np.where(positive_B, probability_B, 1 - probability_B))
    return RequestScores(auc_R, np.bincount(request_index_B, loss_B, num_requests))


class PairedRequests:
    """Scores of a model and of baselines for the same requests, which arrive in any order.

    Memory: 64 bytes per request of the model, and 8 + 16 M per request of the baselines.
    """

    def __init__(self, rules: Sequence[str] = RULES, max_requests: int = 0) -> None:
        """`max_requests`: keep about this many requests, the newest; 0 keeps all."""
        self.rules, self._max_requests = tuple(rules), max_requests
        self._model = _Table(7)
        self._rules = _Table(2 * len(self.rules))

    def add_model(
        self,
        sample_id_R: Sequence[int],
        scores: RequestScores,
        *,
        place_R: np.ndarray,
        time_ms_R: np.ndarray,
        candidates_R: np.ndarray,
        positives_R: np.ndarray,
        weight_R: np.ndarray | None = None,
    ) -> None:
        """Add requests that the model scored; the first scores of an id count. `place_R`: the number of
        requests scored before each. `weight_R`: how many requests each one represents; None = 1."""
        self._model.add(
            sample_id_R,
            place_R,
            time_ms_R,
            *scores,
            candidates_R,
            positives_R,
            np.ones(len(sample_id_R)) if weight_R is None else weight_R,
        )
        self._trim(self._model)

    def with_other_model(self) -> PairedRequests:
        """Pairs of another model with the same scores of the baselines, those that are still to come too."""
        other = PairedRequests(self.rules, self._max_requests)
        other._rules = self._rules
        return other

    def against(self, other: PairedRequests, name: str) -> PairedRequests:
        """Pairs of this model with the model of `other`, which takes the place of a baseline."""
        paired = PairedRequests((name,))
        paired._model = self._model
        ids, _, _, auc_R, log_loss_R, *_ = other._model.columns()
        paired.add_rules(ids.tolist(), {name: RequestScores(auc_R, log_loss_R)})
        return paired

    def add_rules(self, sample_id_R: Sequence[int], scores: Mapping[str, RequestScores]) -> None:
        """Add requests that all baselines scored; the first scores of an id count."""
        columns = itertools.chain.from_iterable(scores[name] for name in self.rules)
        self._rules.add(sample_id_R, *columns)
        self._trim(self._rules)

    def between(self, edges: Sequence[int], metric: str = "request_auc") -> list[Interval]:
        """Compare the requests that were scored as number edges[0] + 1 to edges[1], edges[1] + 1 to edges[2]
        and so on, in training order, by a metric of METRICS. Intervals without a request that counts are
        left out."""
        pairs = self._paired()
        found = []
        for first, last in itertools.pairwise(edges):
            part = pairs.of((pairs.place_N >= first) & (pairs.place_N < last))
            compared = part.compare(metric, self.rules, _Z)
            if not compared.baselines:
                continue
            best = min(compared.baselines.values(), key=lambda rule: _SIGN[metric] * rule.difference)
            found.append(
                Interval(
                    last_request=last,
                    requests=compared.requests,
                    model=compared.model,
                    rules={name: each.value for name, each in compared.baselines.items()},
                    difference=(best.difference, best.high - best.difference),
                )
            )
        return found

    def verdict(self, measure_from_ms: int = 0) -> Verdict:
        """Judge the requests from `measure_from_ms` on, or, if that is 0, the second half."""
        pairs = self._paired()
        num = len(pairs.place_N)
        judged_N = pairs.time_ms_N >= measure_from_ms if measure_from_ms else np.arange(num) >= num // 2
        z = NormalDist().inv_cdf(1 - (1 - _CONFIDENCE) / 2 / len(self.rules))
        parts = [pairs.of(part_n) for part_n in np.array_split(np.arange(num), WINDOWS)] if num else []
        windows = [
            Window(
                first_request=int(part.place_N[0]) + 1,
                last_request=int(part.place_N[-1]) + 1,
                **{metric: part.compare(metric, self.rules, z) for metric in METRICS},
            )
            for part in parts
            if len(part.place_N)
        ]
        judged = pairs.of(judged_N)
        metrics = {}
        for metric in METRICS:
            compared = judged.compare(metric, self.rules, z)
            if compared.state == "ahead":
                tails = [pairs.of(pairs.place_N >= w.first_request - 1) for w in windows]
                after = [tail.compare(metric, self.rules, z) for tail in tails]
                since = _ahead_since(windows, [getattr(w, metric) for w in windows], after)
                compared = dataclasses.replace(compared, ahead_since=since)
            metrics[metric] = compared
        return Verdict(requests=len(judged.place_N), windows=windows, **metrics)

    def _trim(self, table: _Table) -> None:
        if self._max_requests:
            table.keep(self._max_requests)

    def _paired(self) -> _Pairs:
        """The requests that both sides scored, in training order."""
        model, rules = self._model.columns(), self._rules.columns()
        _, at_model, at_rules = np.intersect1d(model[0], rules[0], return_indices=True)
        order = np.argsort(model[1][at_model], kind="stable")
        place, time_ms, auc, loss, candidates, positives, weight = (
            column[at_model][order] for column in model[1:]
        )
        rule = [column[at_rules][order] for column in rules[1:]]
        return _Pairs(
            place.astype(np.int64),
            time_ms.astype(np.int64),
            auc,
            loss,
            np.array(rule[0::2]),
            np.array(rule[1::2]),
            candidates,
            positives,
            weight,
        )


class _Table:
    """Growing columns: uint64 ids, and float64 numbers."""

    def __init__(self, num_columns: int) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._num_columns, self._num_rows = num_columns, 0

    def add(self, id_R: Sequence[int], *columns: np.ndarray) -> None:
        if len(id_R):
            self._num_rows += len(id_R)
            self._parts.append(
                (np.array(id_R, np.uint64), *(np.asarray(column, np.float64) for column in columns))
            )

    def keep(self, num_rows: int) -> None:
        """Drop the oldest parts, so that at least `num_rows` stay."""
        while self._parts and self._num_rows - len(self._parts[0][0]) >= num_rows:
            self._num_rows -= len(self._parts.pop(0)[0])

    def columns(self) -> list[np.ndarray]:
        empty = (np.zeros(0, np.uint64), *(np.zeros(0) for _ in range(self._num_columns)))
        return [np.concatenate(column) for column in zip(empty, *self._parts, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Pairs:
    """Columns of the paired requests, in training order."""

    place_N: np.ndarray
    time_ms_N: np.ndarray
    auc_N: np.ndarray
    loss_N: np.ndarray
    auc_MN: np.ndarray
    loss_MN: np.ndarray
    candidates_N: np.ndarray
    positives_N: np.ndarray
    weight_N: np.ndarray

    def of(self, kept_N: np.ndarray) -> _Pairs:
        """`kept_N`: bool [N], or positions."""
        return _Pairs(*(getattr(self, field.name)[..., kept_N] for field in dataclasses.fields(self)))

    def compare(self, metric: str, rules: Sequence[str], z: float) -> Comparison:
        """All baselines of one metric; each interval has ± z standard errors."""
        if metric == "request_auc":
            kept = self.of(~np.isnan(self.auc_N))
            model_N, rule_MN = kept.auc_N, kept.auc_MN
            y_N, num_known = kept.weight_N, len(kept.auc_N)
        else:
            kept = self.of(~np.isnan(self.loss_N))
            model_N, rule_MN = kept.loss_N, kept.loss_MN
            y_N, num_known = kept.entropy(), int((kept.positives_N > 0).sum())
        requests = len(model_N)
        if requests < 2 or not y_N.sum() > 0:
            return Comparison(metric=metric, state="unknown", requests=requests)
        model_N = kept.weight_N * model_N
        baselines = {}
        for name, rule_N in zip(rules, kept.weight_N * rule_MN, strict=True):
            difference, error = _ratio(model_N - rule_N, y_N)
            baselines[name] = Baseline(
                value=float(rule_N.sum() / y_N.sum()),
                difference=difference,
                low=difference - z * error,
                high=difference + z * error,
            )
        enough = requests >= MIN_REQUESTS and num_known >= MIN_POSITIVES
        model = float(model_N.sum() / y_N.sum())
        return Comparison.of(metric, baselines, requests=requests, model=model, is_known=enough)

    def entropy(self) -> np.ndarray:
        """Log loss of each request under the base rate of all; its sum's derivative by the rate is 0, so the
        rate's own error does not count."""
        candidates_N, positives_N = self.candidates_N * self.weight_N, self.positives_N * self.weight_N
        total, positive = candidates_N.sum(), positives_N.sum()
        if not 0 < positive < total:
            return np.zeros(len(candidates_N))
        rate = positive / total
        return -(positives_N * np.log(rate) + (candidates_N - positives_N) * np.log1p(-rate))


def _ratio(x_N: np.ndarray, y_N: np.ndarray) -> tuple[float, float]:
    """sum(x) / sum(y) and its standard error, for N of at least 2."""
    ratio, n = float(x_N.sum() / y_N.sum()), len(x_N)
    residual_N = x_N - ratio * y_N
    return ratio, float(np.sqrt((residual_N**2).sum() * n / (n - 1)) / y_N.sum())


def _judge(metric: str, baselines: Mapping[str, Baseline]) -> tuple[str, str]:
    """State, and the baseline that decides it: the best one, among those that are significantly better if
    there are any, else among those from which the model does not differ significantly if there are any."""
    sign = _SIGN[metric]
    gain = {name: sign * each.difference for name, each in baselines.items()}
    lowest = {name: min(sign * each.low, sign * each.high) for name, each in baselines.items()}
    highest = {name: max(sign * each.low, sign * each.high) for name, each in baselines.items()}
    if better := [name for name in baselines if highest[name] < 0]:
        return "behind", min(better, key=gain.__getitem__)
    if undecided := [name for name in baselines if lowest[name] <= 0]:
        return "undecided", min(undecided, key=gain.__getitem__)
    return "ahead", min(gain, key=gain.__getitem__)


def _ahead_since(
    windows: Sequence[Window], inside: Sequence[Comparison], after: Sequence[Comparison]
) -> int | None:
    """The first request of the first window from which on the model is ahead of all baselines, with no later
    window significantly behind; its own window must be ahead on average."""
    since = None
    for window, own, rest in zip(reversed(windows), reversed(inside), reversed(after), strict=True):
        significantly_behind = bool(own.baselines) and _judge(own.metric, own.baselines)[0] == "behind"
        if significantly_behind:
            break
        on_average = own.baselines and all(
            _SIGN[own.metric] * each.difference > 0 for each in own.baselines.values()
        )
        if on_average and rest.baselines and _judge(rest.metric, rest.baselines)[0] == "ahead":
            since = window.first_request
    return since


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A metric of the model and of each baseline over an interval of requests."""

    last_request: int
    requests: int  # that count: for request AUC those with a positive and a negative candidate
    model: float
    rules: dict[str, float]
    difference: tuple[float, float]  # to the interval's best baseline: mean, half of its 95 % interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline, and the model minus it with its interval."""

    value: float
    difference: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The model and all baselines by one metric over the same requests.

    `state` is `ahead` if the model is significantly better than each baseline, `behind` if at least one is
    significantly better than the model, else `undecided`; `unknown` with too few requests.
    """

    metric: str
    state: str
    requests: int
    model: float = 0.0
    nearest: str = ""  # the baseline that decides the state
    ahead_since: int | None = None  # number of a request, counted from 1 over all scored requests
    baselines: dict[str, Baseline] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, metric: str, baselines: dict[str, Baseline], *, requests: int, model: float, is_known: bool
    ) -> Comparison:
        """`is_known`: there are enough requests for a state."""
        if not baselines:
            return cls(metric=metric, state="unknown", requests=requests)
        state, nearest = _judge(metric, baselines)
        return cls(
            metric=metric,
            state=state if is_known else "unknown",
            requests=requests,
            model=model,
            nearest=nearest,
            baselines=baselines,
        )

    def phrase(self) -> str:
        """Metric, state and figures, as a part of a sentence."""
        word = WORDS[self.metric]
        if self.state == "unknown" and not self.requests:
            return f"{word} not defined for the first label"
        if self.state == "unknown":
            return f"{word} unknown: {self.requests} requests are too few"
        rule = self.baselines[self.nearest]
        figures = f"{self.model:.4f} against {rule.value:.4f} over {self.requests:,} requests"
        if self.state == "behind":
            low, high = sorted((abs(rule.low), abs(rule.high)))
            return (
                f"behind {self.nearest!r} by {abs(rule.difference):.4f} [{low:.4f}, {high:.4f}] in {word}: "
                f"{figures}"
            )
        since = f" since request {self.ahead_since:,}" if self.ahead_since else ""
        return (
            f"{self.state}{since} in {word}: {rule.difference:+.4f} [{rule.low:+.4f}, {rule.high:+.4f}] to "
            f"{self.nearest!r}, {figures}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A tenth of the paired requests, in training order."""

    first_request: int  # counted from 1 over all scored requests
    last_request: int
    request_auc: Comparison
    ne: Comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The model against its baselines by both metrics, over `requests` paired requests."""

    requests: int
    request_auc: Comparison
    ne: Comparison
    windows: list[Window] = dataclasses.field(default_factory=list)

    @property
    def comparisons(self) -> tuple[Comparison, Comparison]:
        return self.request_auc, self.ne

    @property
    def state(self) -> str:
        """The state of both metrics together: `behind` if either metric is, else that of request AUC. That of
        NE, if request AUC is unknown because no request has both a positive and a negative."""
        states = [each.state for each in self.comparisons]
        if "behind" in states:
            return "behind"
        return states[0] if states[0] != "unknown" else states[1]

    def sentence(self) -> str:
        """One line for tables, pages and warnings; the metric that decides the state comes first."""
        if self.state == "unknown":
            return (
                f"unknown: {self.requests} requests were scored by the model and the baselines; at least "
                f"{MIN_REQUESTS} are needed, {MIN_POSITIVES} with a positive, and some with a negative"
            )
        first = [each for each in self.comparisons if each.state == self.state]
        return "; ".join(each.phrase() for each in (*first, *(c for c in self.comparisons if c not in first)))

    def report(self) -> dict[str, object]:
        """The `verdict` of a report, without its reasons (docs/protocols.md, Reports)."""
        return {"state": self.state, "sentence": self.sentence(), **dataclasses.asdict(self)}


# The verdict of a running stack as metrics of the auditor, and back from a scrape for the controller's page

_MODEL = "model"
_VALUES = "roostream_auditor_model_quality"
_DIFFERENCES = "roostream_auditor_model_difference"
_REQUESTS = "roostream_auditor_model_requests"
_STATE = "roostream_auditor_model_state"
_BOUNDS = ("difference", "low", "high")
METRIC_SPECS = {
    _VALUES: MetricSpec("quality of the model and of baselines on the same requests", ("metric", "of")),
    _DIFFERENCES: MetricSpec(
        "quality of the model minus that of a baseline; low and high: 95 % for all baselines together",
        ("metric", "baseline", "bound"),
    ),
    _REQUESTS: MetricSpec("requests of this comparison", ("metric",)),
    _STATE: MetricSpec("1 for the state of the comparison", ("metric", "state")),
}


def metrics_of(verdict: Verdict) -> dict[str, dict[Any, float]]:
    """Full metric name → label values → value."""
    values: dict[Any, float] = {}
    differences: dict[Any, float] = {}
    for each in verdict.comparisons:
        if each.baselines:
            values[each.metric, _MODEL] = each.model
        for name, baseline in each.baselines.items():
            values[each.metric, name] = baseline.value
            differences |= {(each.metric, name, bound): getattr(baseline, bound) for bound in _BOUNDS}
    return {
        _VALUES: values,
        _DIFFERENCES: differences,
        _REQUESTS: {each.metric: each.requests for each in verdict.comparisons},
        _STATE: {
            (each.metric, state): float(each.state == state)
            for each in verdict.comparisons
            for state in STATES
        },
    }


def report_of(scraped: ScrapedMetrics) -> dict[str, Any] | None:
    """The `verdict` of a report without windows, from a scrape of the auditor; None = it compares nothing."""
    requests = scraped.by(_REQUESTS, "metric")
    if requests.keys() != set(METRICS):
        return None
    auc, ne = (_comparison(scraped, metric, int(requests[metric])) for metric in METRICS)
    return Verdict(requests=max(auc.requests, ne.requests), request_auc=auc, ne=ne).report()


def _comparison(scraped: ScrapedMetrics, metric: str, requests: int) -> Comparison:
    values = scraped.by(_VALUES, "of", metric=metric)
    model = values.pop(_MODEL, 0.0)
    bounds = {bound: scraped.by(_DIFFERENCES, "baseline", metric=metric, bound=bound) for bound in _BOUNDS}
    baselines = {
        name: Baseline(value=value, **{bound: found[name] for bound, found in bounds.items()})
        for name, value in values.items()
        if all(name in found for found in bounds.values())
    }
    states = scraped.by(_STATE, "state", metric=metric)
    state = next((name for name, value in states.items() if value == 1), "unknown")
    return Comparison.of(metric, baselines, requests=requests, model=model, is_known=state != "unknown")

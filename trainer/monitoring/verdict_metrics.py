"""The verdict of a running stack as metrics, and back from a scrape for the controller's page."""

from __future__ import annotations

from typing import Any

from roostream.runtime.metrics_collector import MetricSpec
from roostream.runtime.scrape import ScrapedMetrics
from trainer.monitoring.verdict import METRICS, STATES, Baseline, Comparison, Verdict

_MODEL = "model"
_VALUES = "roostream_auditor_model_quality"
_DIFFERENCES = "roostream_auditor_model_difference"
_REQUESTS = "roostream_auditor_model_requests"
_STATE = "roostream_auditor_model_state"
_BOUNDS = ("difference", "low", "high")
SPECS = {
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
    return Verdict(requests=ne.requests, request_auc=auc, ne=ne).report()


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

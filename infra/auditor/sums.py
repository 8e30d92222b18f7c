"""The result of an audit: both sums of G1 and the count of G2, and their metrics. Several auditors each have
a part of them; `of_programs` adds the parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

from roostream.runtime.kafka.topics import EVENTS
from roostream.runtime.metrics_collector import MetricSpec, one_of
from roostream.runtime.scrape import ScrapedMetrics
from trainer.monitoring.audit_parts import STATES, audit_parts, whole_state


class _Gauge(NamedTuple):
    metric: str
    help: str
    label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Numbers of distinct ids unless noted, and their metrics. `accounted`: both sums hold, and nothing waits
    longer than allowed.

    Not part of any sum: events older than the audit (`since_ms`), undecodable records that get no dead letter
    (`unreadable`), copies of events that settled longer ago than the horizon (`stale`), and records that
    retention deleted before they were read (`lost_records`).
    """

    requests: Annotated[int, _Gauge("roostream_auditor_requests", "requests logged")]
    candidates: Annotated[int, _Gauge("roostream_auditor_candidates", "candidates of these requests")]
    engagements: Annotated[int, _Gauge("roostream_auditor_engagements", "engagements logged")]
    actions: Annotated[dict[str, int], _Gauge("roostream_auditor_actions", "engagements by action", "action")]
    samples: Annotated[int, _Gauge("roostream_auditor_samples", "samples joined")]
    closed_by: Annotated[
        dict[str, int], _Gauge("roostream_auditor_closed_by", "samples by reason of their close", "reason")
    ]
    folded: Annotated[int, _Gauge("roostream_auditor_folded", "engagements folded into samples")]
    corrected: Annotated[int, _Gauge("roostream_auditor_corrected", "engagements that a correction contains")]
    # only_repeated: the labels of these engagements were not trained
    only_repeated: Annotated[
        int, _Gauge("roostream_auditor_only_repeated", "engagements only in repeated copies of samples")
    ]
    corrections: Annotated[int, _Gauge("roostream_auditor_corrections", "corrections")]
    dead_engagements: Annotated[
        int, _Gauge("roostream_auditor_dead_engagements", "engagements that are dead letters")
    ]
    dead_requests: Annotated[int, _Gauge("roostream_auditor_dead_requests", "requests that are dead letters")]
    dead_letters: Annotated[
        dict[str, int], _Gauge("roostream_auditor_dead_letters", "dead letters by reason", "reason")
    ]
    duplicates: Annotated[int, _Gauge("roostream_auditor_duplicates", "duplicate records")]
    pending: Annotated[int, _Gauge("roostream_auditor_pending", "engagements that are not settled yet")]
    pending_requests: Annotated[
        int, _Gauge("roostream_auditor_pending_requests", "requests that are not settled yet")
    ]
    unread: Annotated[
        int, _Gauge("roostream_auditor_unread", "undecodable records that wait for their dead letter")
    ]
    unreadable: Annotated[
        dict[str, int],
        _Gauge(
            "roostream_auditor_unreadable", "undecodable records without a dead letter, by topic", "topic"
        ),
    ]
    misplaced: Annotated[
        dict[str, int],
        _Gauge(
            "roostream_auditor_misplaced",
            "records whose counterparts another auditor reads, by topic",
            "topic",
        ),
    ]
    unknown: Annotated[int, _Gauge("roostream_auditor_unknown", "engagements of unknown requests")]
    overdue: Annotated[
        int, _Gauge("roostream_auditor_overdue", "events that the joiner has passed: they are missing")
    ]
    # late: these events are missing, or the joiner is behind
    late: Annotated[int, _Gauge("roostream_auditor_late", "events that the inputs have passed")]
    predicted: Annotated[
        int, _Gauge("roostream_auditor_predicted", "samples that the trainer has disposed of")
    ]
    # predicted_by: trained, frozen, or the reason for skipping; adds up to `predicted`
    predicted_by: Annotated[
        dict[str, int],
        _Gauge("roostream_auditor_predicted_by", "samples by what the trainer did", "disposition"),
    ]
    unpredicted: Annotated[
        int, _Gauge("roostream_auditor_unpredicted", "samples without a prediction or dead letter so far")
    ]
    untrained_by: Annotated[
        dict[str, int], _Gauge("roostream_auditor_untrained_by", "samples that the trainer refused", "reason")
    ]
    stale: Annotated[
        int, _Gauge("roostream_auditor_stale", "copies of events that settled before the horizon")
    ]
    lost_records: Annotated[
        int, _Gauge("roostream_auditor_lost_records", "records deleted before they were read")
    ]
    since_ms: Annotated[
        int, _Gauge("roostream_auditor_since_timestamp_seconds", "begin of the audit; 0 = all events")
    ]
    accounted: Annotated[bool, _Gauge("roostream_auditor_accounted", "1 for the state of the audit", "state")]

    def counts(self) -> dict[str, object]:
        """`counts` of a report (docs/protocols.md, Reports)."""
        values = dataclasses.asdict(self)
        del values["accounted"]
        return values


_GAUGES: dict[str, _Gauge] = {
    **{name: hint.__metadata__[0] for name, hint in get_type_hints(Sums, include_extras=True).items()},
    "behind": _Gauge("roostream_auditor_behind", "records that are not read yet"),
}
"""Fields of `Sums`, and `behind` → their metrics."""
METRICS = {
    gauge.metric: MetricSpec(gauge.help, (gauge.label,) if gauge.label else ()) for gauge in _GAUGES.values()
} | {
    "roostream_auditor_index": MetricSpec("number of this auditor, from 0"),
    "roostream_auditor_auditors": MetricSpec("auditors whose sums together are those of the deployment"),
}


def state_of(sums: Sums, is_current: bool, behind: int | None) -> str:
    """One of STATES; `behind`: unread records, None = unknown."""
    if behind is None or any(sums.misplaced.get(topic) for topic in EVENTS):
        return "unknown"
    if not is_current:
        return "reading"
    return "no" if not sums.accounted else "waiting" if sums.late else "yes"


def metrics_of(
    sums: Sums, is_current: bool, behind: int | None, index: int = 0, num_auditors: int = 1
) -> dict[str, Any]:
    """Full metric name → value. `index`, `num_auditors`: which part of a deployment's sums these are."""
    values: dict[str, Any] = {**dataclasses.asdict(sums), "behind": behind, "since_ms": sums.since_ms / 1000}
    values["accounted"] = one_of(state_of(sums, is_current, behind), STATES)
    return {
        **{_GAUGES[field].metric: value for field, value in values.items()},
        "roostream_auditor_index": index,
        "roostream_auditor_auditors": num_auditors,
    }


def of_programs(scraped: Mapping[str, ScrapedMetrics]) -> dict[str, Any]:
    """The sums of a deployment from the metrics of its programs: field → number, {label: number}, or None if
    unknown. `accounted` is True, False, or None if unknown. If the parts of all auditors are not there,
    everything is unknown, because a sum of some parts is no sum."""
    parts = [_of_metrics(part) for part in audit_parts(scraped)] or [_of_metrics(ScrapedMetrics())]
    state = whole_state(part["state"] for part in parts)
    whole = {field: _add(field, [part[field] for part in parts]) for field in _GAUGES if field != "accounted"}
    return {"state": state, **whole, "accounted": {"yes": True, "no": False}.get(state)}


def _add(field: str, values: list[Any]) -> Any:
    if _GAUGES[field].label:
        labels = sorted({key for value in values for key in value})
        return {key: sum(value.get(key, 0) for value in values) for key in labels}
    if None in values:
        return None
    return max(values) if field == "since_ms" else sum(values)


def _of_metrics(scraped: ScrapedMetrics) -> dict[str, Any]:
    """Inverse of `metrics_of`."""
    out: dict[str, Any] = {"state": scraped.state("roostream_auditor_accounted", "state") or "unknown"}
    for field, gauge in _GAUGES.items():
        if gauge.label:
            out[field] = {k: int(v) for k, v in scraped.by(gauge.metric, gauge.label).items()}
        else:
            value = scraped.value(gauge.metric)
            out[field] = None if value is None else round(value * 1000 if field == "since_ms" else value)
    return out

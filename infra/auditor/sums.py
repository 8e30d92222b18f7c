"""The auditor's result: both sums of G1 and the count of G2, and their metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

from roostream.runtime.metrics_collector import in_seconds, one_of
from roostream.runtime.scrape import ScrapedMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Numbers of distinct ids unless noted. `accounted`: both sums hold, and nothing waits longer than
    allowed.

    Not part of any sum: events older than the audit (`since_ms`), undecodable records that get no dead letter
    (`unreadable`), copies of events that settled longer ago than the horizon (`stale`), and records that
    retention deleted before they were read (`lost_records`).
    """

    requests: int
    candidates: int
    engagements: int
    actions: dict[str, int]
    samples: int
    closed_by: dict[str, int]
    folded: int
    corrected: int
    only_repeated: int  # engagements only in repeated copies of samples: their labels were not trained
    corrections: int
    dead_engagements: int
    dead_requests: int
    dead_letters: dict[str, int]  # by reason
    duplicates: int
    pending: int
    pending_requests: int
    unread: int  # undecodable records that wait for their dead letter
    unreadable: dict[str, int]  # by topic
    unknown: int
    overdue: int  # the joiner has passed them: they are missing
    late: int  # the inputs have passed them: they are missing, or the joiner is behind
    predicted: int
    predicted_by: dict[str, int]  # trained, frozen, or the reason for skipping; adds up to `predicted`
    unpredicted: int  # samples without a prediction or dead letter so far
    untrained_by: dict[str, int]  # samples that the trainer refused, by reason
    stale: int
    lost_records: int
    since_ms: int  # earlier events are not audited; 0 = all are
    accounted: bool

    def counts(self) -> dict[str, object]:
        """`counts` of a report (docs/protocols.md, Reports)."""
        values = dataclasses.asdict(self)
        del values["accounted"]
        return values


LABELS = {
    "accounted": "state",
    "actions": "action",
    "closed_by": "reason",
    "dead_letters": "reason",
    "untrained_by": "reason",
    "predicted_by": "disposition",
    "unreadable": "topic",
}
STATES = ("reading", "unknown", "waiting", "yes", "no")
"""Of `accounted`. reading: the end offsets of the start are not reached yet. unknown: Kafka does not report
end offsets. waiting: events that should be joined by now are not, nor is any later event."""


def state_of(sums: Sums, is_current: bool, behind: int | None) -> str:
    """One of STATES; `behind`: unread records, None = unknown."""
    if behind is None:
        return "unknown"
    if not is_current:
        return "reading"
    return "no" if not sums.accounted else "waiting" if sums.late else "yes"


def gauges(sums: Sums, is_current: bool, behind: int | None) -> dict[str, Any]:
    """Values for `MetricsCollector`, with LABELS."""
    state = state_of(sums, is_current, behind)
    return {**sums.counts(), "behind": behind, "accounted": one_of(state, STATES)}


def of_gauges(scraped: ScrapedMetrics) -> dict[str, Any]:
    """Inverse of `gauges`: name → number, {label: number}, or None if unknown. `accounted` is True, False, or
    None if unknown."""
    state = scraped.state("roostream_auditor_accounted", "state") or "unknown"
    out: dict[str, Any] = {"state": state, "accounted": {"yes": True, "no": False}.get(state)}
    for field in ("behind", *(f.name for f in dataclasses.fields(Sums) if f.name != "accounted")):
        shown, scale = in_seconds(field)
        name = f"roostream_auditor_{shown}"
        if field in LABELS:
            out[field] = {k: int(v) for k, v in scraped.by(name, LABELS[field]).items()}
        else:
            value = scraped.value(name)
            out[field] = None if value is None else round(value / scale)
    return out

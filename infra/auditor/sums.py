"""What the audit tells: both sums of G1, and G2's count."""

from __future__ import annotations

import dataclasses
from typing import Any

from roostream.runtime.metrics_collector import in_seconds, one_of
from roostream.runtime.scrape import ScrapedMetrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Numbers of distinct ids unless said otherwise. `accounted`: both sums hold, and nothing waits longer than it may.

    Not in any sum, and counted by name only: what is older than the audit itself (`since_ms`), what can't be read and waits for
    no dead letter (`unreadable`), copies of what was settled longer ago than the horizon (`stale`), and what retention deleted
    before it was read (`lost_records`).
    """

    requests: int
    candidates: int
    engagements: int
    actions: dict[str, int]
    samples: int
    closed_by: dict[str, int]
    folded: int
    corrected: int
    only_repeated: int  # engagements folded in a repeated copy of a sample, and in no first one: their label was not trained
    corrections: int
    dead_engagements: int
    dead_requests: int
    dead_letters: dict[str, int]  # by reason
    duplicates: int
    pending: int
    pending_requests: int
    unread: int  # records that can't be read and wait for their dead letter
    unreadable: dict[str, int]  # by topic
    unknown: int
    overdue: int  # the joiner has gone past them: they are missing
    late: int  # the inputs have gone past them: they are missing, or the joiner is behind
    predicted: int
    predicted_by: dict[str, int]  # trained, frozen, or why it was skipped; together `predicted`
    unpredicted: int  # samples that are neither trained nor dead so far
    untrained_by: dict[str, int]  # samples that the trainer refused, by reason
    stale: int
    lost_records: int
    since_ms: int  # only events from then on are audited; 0 = all
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
"""Of `accounted`: the ends that were there at the start have not been passed · Kafka does not tell how far the topics reach ·
what should have been joined by now has not been, nor has anything that came after it."""


def state_of(sums: Sums, is_current: bool, behind: int | None) -> str:
    """One of STATES: a reading that can't be taken is never good."""
    if behind is None:
        return "unknown"
    if not is_current:
        return "reading"
    return "no" if not sums.accounted else "waiting" if sums.late else "yes"


def gauges(sums: Sums, is_current: bool, behind: int | None) -> dict[str, Any]:
    """For `roostream.runtime.metrics_collector.MetricsCollector`, with LABELS."""
    state = state_of(sums, is_current, behind)
    return {**sums.counts(), "behind": behind, "accounted": one_of(state, STATES)}


def of_gauges(scraped: ScrapedMetrics) -> dict[str, Any]:
    """Inverse of `gauges`: each name → number or {label: number}, None where it is not told; `state`, and `accounted` as yes
    (True), no (False) or neither (None)."""
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

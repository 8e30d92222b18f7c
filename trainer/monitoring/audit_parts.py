"""The parts of an audit, one for each auditor, in the metrics of a deployment's programs.

Every auditor counts its share of the partitions. Only all parts together say something of the deployment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roostream.runtime.scrape import ScrapedMetrics

STATES = ("reading", "unknown", "waiting", "yes", "no")
"""Of `accounted`. reading: the end offsets of the start are not reached yet. unknown: Kafka does not report
end offsets, an auditor does not answer, or events lie in partitions of other keys. waiting: events that
should be joined by now are not, nor is any later event."""
_PRECEDENCE = ("unknown", "reading", "no", "waiting", "yes")


def audit_parts(scraped: Mapping[str, ScrapedMetrics]) -> list[ScrapedMetrics]:
    """The metrics of all auditors, in order; [] unless each of them is there once, and all have the same
    number of auditors. `scraped`: program → its metrics."""
    parts = {name: s for name, s in scraped.items() if name.partition("-")[0] == "auditor" and s}
    numbers = {s.value("roostream_auditor_auditors") or 1 for s in parts.values()}
    by_index = {int(s.value("roostream_auditor_index") or 0): s for s in parts.values()}
    if len(numbers) != 1 or len(by_index) != len(parts) or sorted(by_index) != list(range(int(*numbers))):
        return []
    return [part for _, part in sorted(by_index.items())]


def whole_state(states: Iterable[str]) -> str:
    """The state of a deployment whose auditors are in these STATES; unknown without any."""
    found = set(states) or {"unknown"}
    return next((state for state in _PRECEDENCE if state in found), "unknown")


def accounted(scraped: Mapping[str, ScrapedMetrics]) -> str | None:
    """The state of the whole audit; None = a part is missing."""
    parts = audit_parts(scraped)
    states = [part.state("roostream_auditor_accounted", "state") or "unknown" for part in parts]
    return whole_state(states) if states else None

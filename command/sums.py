"""What the audit tells: both sums of G1, and G2's count."""

from __future__ import annotations

import dataclasses


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
    overdue: int
    predicted: int
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

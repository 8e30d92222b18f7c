"""What a request may hold: one budget, so that whatever is made of it fits a message, and its state stays small.

A sample, a correction and what training says of them are no larger than FIXED and the costs of the pages, candidates and
engagements that they are made of. A request within `max_bytes` so makes no output that a topic, a sink or a reader refuses. What
would exceed it is a dead letter on arrival (`overflow`).
"""

from __future__ import annotations

from joiner.state import Engagement, Impression
from roostream.schema.schema import Limits

FIXED = 512
"""Bytes of a sample that are there once: ids, tags, lengths, the opening header's copy."""
_PAGE = 64  # tags and lengths of its part
_ROW = 12  # of a candidate, beside what its page says of it: its row, position and propensity
_LABEL = 12  # of a candidate and label: label, score as served, and a third number where training tells what it predicted
_EVENT = 32  # of an engagement, beside its record: the columns' entries


def max_bytes(limits: Limits) -> int:
    """The budget of one request."""
    return limits.max_sample_bytes - FIXED


def of_impression(impression: Impression) -> int:
    """Bytes that a page adds at most, to a sample or to the state, without `of_candidates`."""
    return len(impression.raw) + len(impression.canonical) + _PAGE


def of_candidates(count: int, num_labels: int) -> int:
    """Bytes that items add which no page has shown before."""
    return count * (_ROW + _LABEL * num_labels)


def of_engagement(event: Engagement) -> int:
    """The same of an engagement; its action's name is in its record."""
    return len(event.raw) + _EVENT

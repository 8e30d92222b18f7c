"""When a request closes, and what it holds: declarative functions of the events that are there.

    close_at(r) = min( time(r) + window,                                                             → window
                       time of the engagement that reaches the threshold or is terminal,             → engaged
                       time of the next request of the same user and session + linger )              → next_request

Every term that lies at or before the watermark is final, since all events up to it are here: that is why the order of
arrival doesn't matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from joiner.state import OPEN, WAITING, Engagement, Impression, Request, State
from roo import roo_pb2 as pb
from roo.ids import sample_id, splitmix64

WINDOW, ENGAGED, NEXT_REQUEST = pb.CLOSE_WINDOW, pb.CLOSE_ENGAGED, pb.CLOSE_NEXT_REQUEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """See JoinerConfig for what each means; here all defaults are filled in."""

    window_ms: int
    surface_windows: Mapping[str, int]
    window_jitter_ms: int
    orphan_timeout_ms: int
    late_horizon_ms: int
    next_request: Literal["off", "session", "user"]
    linger_ms: int
    engaged_threshold: int
    terminal_actions: frozenset[str]
    engaged_min_wait_ms: int
    correction_horizon_ms: int
    max_open_requests: int
    max_requests: int
    max_orphans: int
    max_engagements: int

    @property
    def longest_window_ms(self) -> int:
        return max([self.window_ms, *self.surface_windows.values()])

    @property
    def shortest_window_ms(self) -> int:
        return min([self.window_ms, *self.surface_windows.values()])

    @property
    def closes_on_engagement(self) -> bool:
        return self.engaged_threshold > 0 or bool(self.terminal_actions)


def opening(impressions: Iterable[Impression]) -> Impression:
    """The impression that gives a request its time, header, surface and schema: the smallest by (time, xxh3 of bytes)."""
    return min(impressions, key=lambda i: (i.time_ms, i.digest))


def first_shown(request: Request) -> dict[int, int]:
    """Item id → when it was first shown, by the impressions of the request's own schema."""
    shown: dict[int, int] = {}
    if request.impressions:
        schema = opening(request.impressions).schema
        for impression in request.impressions:
            if impression.schema == schema:
                for item in impression.item_ids:
                    shown[item] = min(impression.time_ms, shown.get(item, impression.time_ms))
    return shown


def joins_at(engagement: Engagement, shown: Mapping[int, int], rules: Rules) -> int | None:
    """When an engagement takes effect: at its time, but no sooner than its item was shown. None: it doesn't join, since its
    item isn't shown, or only after the engagement was given up."""
    shown_ms = shown.get(engagement.item_id)
    if shown_ms is None or shown_ms > engagement.time_ms + rules.orphan_timeout_ms:
        return None
    return max(engagement.time_ms, shown_ms)


def window_of(rules: Rules, key: bytes, first: Impression) -> int:
    """The window of the request that `first` opens, in ms."""
    window_ms = rules.surface_windows.get(first.surface, rules.window_ms)
    if not rules.window_jitter_ms:
        return window_ms
    return window_ms - splitmix64(sample_id(key, first.request_id)) % (rules.window_jitter_ms + 1)


def close_at(rules: Rules, key: bytes, state: State, request: Request) -> tuple[int, int]:
    """(close_ms, reason) of an open request, as far as is known now. Of equal times, the reason named first above holds."""
    first = opening(request.impressions)
    terms = [(first.time_ms + window_of(rules, key, first), WINDOW)]
    if rules.closes_on_engagement:
        terms += [(ms, ENGAGED) for ms in _engaged_at(rules, request)]
    if rules.next_request != "off":
        terms += [(ms + rules.linger_ms, NEXT_REQUEST) for ms in _next_request_at(rules, state, request)]
    return min(terms, key=lambda term: term[0])


def _engaged_at(rules: Rules, request: Request) -> list[int]:
    """Time of the engagement that closes `request`, in (time, event id) order; [] if none does."""
    shown = first_shown(request)
    joining = [(joins_at(e, shown, rules), e.event_id, e.action) for e in request.pending.values()]
    in_order = sorted((ms, event_id, action) for ms, event_id, action in joining if ms is not None)
    for count, (ms, _, action) in enumerate(in_order, 1):
        if count == rules.engaged_threshold or action in rules.terminal_actions:
            return [max(ms, request.time_ms + rules.engaged_min_wait_ms)]
    return []


def _next_request_at(rules: Rules, state: State, request: Request) -> list[int]:
    """Smallest time after `request`'s at which another request in scope begins; [] if there is none. A request that came
    behind the watermark ends nobody's window: engagements that are already here would fall out of it."""
    later = [
        other.time_ms
        for other in state.requests.values()
        if other.phase != WAITING
        and not other.late
        and other.time_ms > request.time_ms
        and (rules.next_request == "user" or other.session_id == request.session_id)
    ]
    return [min(later)] if later else []


def num_open(state: State) -> int:
    return sum(r.phase == OPEN for r in state.requests.values())


def num_orphans(state: State) -> int:
    """Engagements of this key that wait for their request or item."""
    count = 0
    for request in state.requests.values():
        if request.phase == WAITING:
            count += len(request.pending)
        elif request.phase == OPEN and request.pending:
            shown = first_shown(request)
            count += sum(e.item_id not in shown for e in request.pending.values())
    return count

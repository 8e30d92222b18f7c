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
from typing import Any, Literal

from joiner.state import OPEN, WAITING, Engagement, Impression, Request, State
from roo import roo_pb2 as pb
from roo.config import Settings, parse_duration_ms, refusal, setting
from roo.ids import sample_id, splitmix64

WINDOW, ENGAGED, NEXT_REQUEST = pb.CLOSE_WINDOW, pb.CLOSE_ENGAGED, pb.CLOSE_NEXT_REQUEST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules(Settings):
    """What joins with what, and for how long. A 0 that means "as the longest window" is replaced when the rules are made, and
    so are the durations of `surface_windows`: what is read from rules is what holds."""

    window_ms: int = setting(600_000, "a request closes this long after its time at the latest", least=1)
    surface_windows: dict[str, Any] = setting(factory=dict, help="windows of single surfaces: name = duration")
    window_jitter_ms: int = setting(0, "windows are shortened by a hash of the request, by up to this", least=0)
    orphan_timeout_ms: int = setting(0, "how long an engagement waits for its request and item; 0 = the longest window", least=0)
    late_horizon_ms: int = setting(0, "how long a closed request is remembered; 0 = 10 x the longest window", least=0)
    next_request: Literal["off", "session", "user"] = setting("off", "a later request of the same session (user) closes one")
    linger_ms: int = setting(0, "next_request: how long after that later request", least=0)
    engaged_threshold: int = setting(0, "that many distinct engagements close a request; 0 = off", least=0)
    terminal_actions: tuple[str, ...] = setting((), "an engagement with one of these actions closes its request")
    engaged_min_wait_ms: int = setting(0, "such a close comes no sooner than this after the request (calibration)", least=0)
    correction_horizon_ms: int = setting(0, "corrections carry features this long after the close; 0 = labels only", least=0)
    max_open_requests: int = setting(64, "open requests a user; more are dead letters (overflow)", least=1)
    max_requests: int = setting(4096, "requests a user, closed ones that are still remembered included", least=1)
    max_orphans: int = setting(256, "engagements of a user that wait for their request or item", least=0)
    max_engagements: int = setting(10_000, "distinct engagements a request", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        windows = {surface: _window_ms(surface, window) for surface, window in self.surface_windows.items()}
        object.__setattr__(self, "surface_windows", windows)
        object.__setattr__(self, "orphan_timeout_ms", self.orphan_timeout_ms or self.longest_window_ms)
        object.__setattr__(self, "late_horizon_ms", self.late_horizon_ms or 10 * self.longest_window_ms)
        if self.window_jitter_ms >= self.shortest_window_ms:
            raise refusal(
                "window_jitter_ms", f"less than the shortest window ({self.shortest_window_ms} ms)", self.window_jitter_ms
            )
        if self.late_horizon_ms < self.longest_window_ms:
            raise refusal("late_horizon_ms", f"at least the longest window ({self.longest_window_ms} ms)", self.late_horizon_ms)
        if self.correction_horizon_ms > self.late_horizon_ms:
            raise refusal(
                "correction_horizon_ms", f"at most the late horizon ({self.late_horizon_ms} ms)", self.correction_horizon_ms
            )

    @property
    def longest_window_ms(self) -> int:
        return max([self.window_ms, *self.surface_windows.values()])

    @property
    def shortest_window_ms(self) -> int:
        return min([self.window_ms, *self.surface_windows.values()])

    @property
    def closes_on_engagement(self) -> bool:
        return self.engaged_threshold > 0 or bool(self.terminal_actions)


def _window_ms(surface: str, window: Any) -> int:
    ms = parse_duration_ms(window)
    if ms < 1:
        raise refusal(f"surface_windows.{surface}", "at least 1 ms", window)
    return ms


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

"""Rules of the join: when a request closes, and which engagements join it. Pure functions of the events known
so far.

    close time of r = min( time(r) + window,                                                  → window
                           time(r) + early close,                                             → early
                           time of the engagement that reaches the threshold or is terminal,  → engaged
                           time of the next request of the same user or session + linger )    → next_request

Every term at or before the watermark is final, because all events up to the watermark have arrived. Therefore
the order of arrival does not matter.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from typing import Any, Literal

from joiner.state import NEVER, Engagement, Page, Request, index_of
from roostream.schema.ids import sample_id, splitmix64
from roostream.schema.settings import Settings, parse_duration_ms, setting, setting_error
from roostream.wire import roo_pb2 as pb

WINDOW = pb.CLOSE_WINDOW
EARLY = pb.CLOSE_EARLY
ENGAGED = pb.CLOSE_ENGAGED
NEXT_REQUEST = pb.CLOSE_NEXT_REQUEST
LATE_REASON = pb.CloseReason.Name(pb.CLOSE_LATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules(Settings):
    """Settings of the join. A 0 that means "as the longest window" is replaced in `__post_init__`, and the
    durations of `surface_windows` become milliseconds there."""

    window_ms: int = setting(600_000, "a request closes at the latest this long after its time", ge=1)
    surface_windows: dict[str, Any] = setting(
        factory=dict, help="windows of single surfaces, as name = duration"
    )
    window_jitter_ms: int = setting(
        0, "each window is shortened by a hash of the request, by at most this", ge=0
    )
    early_close_ms: int = setting(
        0,
        "a request closes this long after its time; later engagements within its window become "
        "corrections; 0 = off",
        ge=0,
    )
    orphan_timeout_ms: int = setting(
        0, "how long an engagement waits for its request and item; 0 = the longest window", ge=0
    )
    late_horizon_ms: int = setting(
        0, "how long a closed request is remembered; 0 = 10 x the longest window", ge=0
    )
    next_request: Literal["off", "session", "user"] = setting(
        "off", "close a request when a later one of the same session or user arrives"
    )
    linger_ms: int = setting(0, "next_request: wait this long after the later request", ge=0)
    engaged_threshold: int = setting(0, "number of distinct engagements that close a request; 0 = off", ge=0)
    terminal_actions: tuple[str, ...] = setting(
        (), "an engagement with one of these actions closes its request"
    )
    engaged_min_wait_ms: int = setting(
        0, "earliest close by an engagement, after the request's time (for calibration)", ge=0
    )
    correction_horizon_ms: int = setting(
        0,
        "corrections have features this long after the close; 0 = labels only, or the longest window with "
        "early_close",
        ge=0,
    )
    max_open_requests: int = setting(
        256,
        "open requests a user; events of further ones become dead letters (overflow). The default allows a "
        "request every 2.3 s in a window of 10 min",
        ge=1,
    )
    max_requests: int = setting(
        4096, "requests a user, including closed ones that are still remembered", ge=1
    )
    max_orphans: int = setting(256, "engagements of a user that wait for their request or item", ge=0)
    max_engagements: int = setting(10_000, "distinct engagements a request", ge=1)
    max_impressions: int = setting(
        256, "distinct impressions of a request: the opening page and later pages", ge=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        windows = {surface: _window_ms(surface, window) for surface, window in self.surface_windows.items()}
        object.__setattr__(self, "surface_windows", windows)
        object.__setattr__(self, "orphan_timeout_ms", self.orphan_timeout_ms or self.longest_window_ms)
        object.__setattr__(self, "late_horizon_ms", self.late_horizon_ms or 10 * self.longest_window_ms)
        if self.early_close_ms:
            object.__setattr__(
                self, "correction_horizon_ms", self.correction_horizon_ms or self.longest_window_ms
            )
        if self.window_jitter_ms >= self.shortest_window_ms:
            text = f"less than the shortest window ({self.shortest_window_ms} ms)"
            raise setting_error("window_jitter_ms", text, self.window_jitter_ms)
        min_ms = self.shortest_window_ms - self.window_jitter_ms
        if self.early_close_ms >= min_ms:
            text = f"less than the shortest window ({min_ms} ms), or 0 for off"
            raise setting_error("early_close_ms", text, self.early_close_ms)
        if self.late_horizon_ms < self.longest_window_ms:
            text = f"at least the longest window ({self.longest_window_ms} ms)"
            raise setting_error("late_horizon_ms", text, self.late_horizon_ms)
        if self.correction_horizon_ms > self.late_horizon_ms:
            text = f"at most the late horizon ({self.late_horizon_ms} ms)"
            raise setting_error("correction_horizon_ms", text, self.correction_horizon_ms)

    @property
    def longest_window_ms(self) -> int:
        return max([self.window_ms, *self.surface_windows.values()])

    @property
    def shortest_window_ms(self) -> int:
        return min([self.window_ms, *self.surface_windows.values()])

    @property
    def text(self) -> str:
        """The rules as JSON. Engines store it with their state and compare it after a restore."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Rules)}
        return json.dumps(values, sort_keys=True)

    @property
    def closes_on_engagement(self) -> bool:
        return self.engaged_threshold > 0 or bool(self.terminal_actions)


def _window_ms(surface: str, window: Any) -> int:
    ms = parse_duration_ms(window)
    if ms < 1:
        raise setting_error(f"surface_windows.{surface}", "at least 1 ms", window)
    return ms


def set_join_time(engagement: Engagement, request: Request, rules: Rules) -> None:
    """Set `row` and `joins_ms` of an engagement from the pages known so far.

    An engagement joins at its own time, but not before its item was first shown. It does not join (NEVER) if
    no page of the request's schema shows the item, or only after the orphan timeout.
    """
    time_ms, entry = engagement.time_ms, engagement.item_id.to_bytes(8, "little")
    for page in request.pages:  # by time
        if page.schema == request.schema:
            at = page.items.find(entry)
            if at & 7:  # absent (-1), or found across two entries
                at = 8 * index_of(page.items, entry)
            if at >= 0:
                shown_ms = page.time_ms
                engagement.row = at >> 3
                if shown_ms <= time_ms:
                    engagement.joins_ms = time_ms
                else:
                    engagement.joins_ms = shown_ms if shown_ms <= time_ms + rules.orphan_timeout_ms else NEVER
                return
    engagement.row, engagement.joins_ms = -1, NEVER


def window_of(rules: Rules, key: bytes, request_id: str, opening: Page) -> int:
    """The window of a request in ms. `opening`: its first page by (time, digest), which also gives it time
    and schema."""
    window_ms = rules.surface_windows.get(opening.surface, rules.window_ms)
    if not rules.window_jitter_ms:
        return window_ms
    return window_ms - splitmix64(sample_id(key, request_id)) % (rules.window_jitter_ms + 1)


def record_join(rules: Rules, request: Request, action: str, join_ms: int) -> None:
    """Note that an engagement joins `request` at `join_ms`. Only as many times are kept as decide about the
    close."""
    if rules.engaged_threshold:
        bisect.insort(request.joined_ms, join_ms)
        del request.joined_ms[rules.engaged_threshold :]
    if action in rules.terminal_actions:
        request.terminal_ms = min(request.terminal_ms, join_ms)


def close_time(rules: Rules, request: Request) -> tuple[int, int]:
    """(close_ms, reason) of an open request, from the events known so far. At equal times the reason listed
    first wins."""
    close_ms, reason = request.time_ms + request.window_ms, WINDOW
    if rules.early_close_ms:
        close_ms, reason = request.time_ms + rules.early_close_ms, EARLY
    threshold = rules.engaged_threshold  # a lower one than before may be exceeded already
    reached = 0 < threshold <= len(request.joined_ms)
    engaged_ms = min(request.joined_ms[threshold - 1] if reached else NEVER, request.terminal_ms)
    if engaged_ms != NEVER:
        engaged_ms = max(engaged_ms, request.time_ms + rules.engaged_min_wait_ms)
        if engaged_ms < close_ms:
            close_ms, reason = engaged_ms, ENGAGED
    if request.next_ms + rules.linger_ms < close_ms:
        close_ms, reason = request.next_ms + rules.linger_ms, NEXT_REQUEST
    return close_ms, reason

"""A log's actions made later than it says, for logs that don't tell when their clicks were.

Delays are exponential and cut off at the end of the join window, as Chapelle (KDD 2014, "Modeling delayed feedback in display
advertising") found those of conversions to be. They are a function of the request, so that a click stays before what follows it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator

from roostream.replay.events import Action, Event, Request
from roostream.schema.ids import MASK64, hash64


def late(events: Iterable[Event], mean_ms: int, window_ms: int) -> Iterator[Event]:
    """`events`, in time order again, every action later by its request's delay, but not behind the window of `window_ms`.

    Memory: the actions whose time hasn't come, and the requests of a window.
    """
    waiting: list[tuple[int, int, Action]] = []
    ends_ms: dict[str, int] = {}
    order: deque[str] = deque()
    for arrival, event in enumerate(events):
        while waiting and waiting[0][0] < event.time_ms:
            yield heapq.heappop(waiting)[2]
        if isinstance(event, Request):
            while order and ends_ms[order[0]] < event.time_ms:
                del ends_ms[order.popleft()]
            if event.request_id not in ends_ms:
                ends_ms[event.request_id] = event.time_ms + window_ms
                order.append(event.request_id)
            yield event
            continue
        end_ms = max(ends_ms.get(event.request_id, event.time_ms), event.time_ms)
        time_ms = min(event.time_ms + delay_ms(event.request_id, mean_ms, window_ms), end_ms)
        heapq.heappush(waiting, (time_ms, arrival, _at(event, time_ms)))
    while waiting:
        yield heapq.heappop(waiting)[2]


def delay_ms(request_id: str, mean_ms: int, window_ms: int) -> int:
    """Of an exponential distribution, given that it is no longer than the window."""
    share = (hash64(f"{request_id}/late") & MASK64) / 2**64
    return int(-mean_ms * math.log1p(share * math.expm1(-window_ms / mean_ms)))


def _at(action: Action, time_ms: int) -> Action:
    a = action
    return Action(
        a.request_id,
        a.user_id,
        a.session_id,
        time_ms,
        a.event_id,
        a.item_id,
        a.action,
        a.value,
        a.surface,
        a.where,
    )

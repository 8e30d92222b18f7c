"""Events of a log in event time: requests and actions. Datasets create them, and `encoder.py` encodes them as
records.

`delay_actions` simulates late engagements, for logs without the times of clicks. Delays are exponential and
truncated at the end of the join window, as found for conversions by Chapelle (KDD 2014, "Modeling delayed
feedback in display advertising").
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from roostream.schema.ids import MASK64, hash64


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A list that was shown. Ids are uint64 as integers; features are those in the log, by their schema
    names."""

    request_id: str
    user_id: int
    session_id: int
    time_ms: int
    items_n: np.ndarray  # int64 [n], shown order
    # None: a further page, which only adds candidates.
    ro: Mapping[str, object] | None = dataclasses.field(default_factory=dict)
    nro: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # columns of n
    surface: str = ""
    positions: Sequence[int] = ()  # empty = 0..n-1
    propensities: Sequence[float] = ()
    weight: float = 1.0
    where: str = ""  # `file:line`, for messages


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """An engagement of a user with an item of a request, with the header of the request."""

    request_id: str
    user_id: int
    session_id: int
    time_ms: int
    event_id: int
    item_id: int
    action: str
    value: float = 0.0
    surface: str = ""
    where: str = ""


Event: TypeAlias = Request | Action


def in_time_order(groups: Iterable[tuple[Request, Sequence[Action]]]) -> Iterator[Event]:
    """Merge requests, which are in time order, with their later actions. At equal times a request comes
    first.

    Memory: the actions that are still in the future. Raises AssertionError if the requests are not in time
    order.
    """
    waiting: list[tuple[int, int, Action]] = []
    arrival = last_ms = 0
    for request, actions in groups:
        assert arrival == 0 or request.time_ms >= last_ms, "requests go back in time"
        last_ms = request.time_ms
        while waiting and waiting[0][0] < request.time_ms:
            yield heapq.heappop(waiting)[2]
        yield request
        for action in actions:
            assert action.time_ms >= request.time_ms, "an action before its request"
            arrival += 1
            heapq.heappush(waiting, (action.time_ms, arrival, action))
        arrival += 1
    while waiting:
        yield heapq.heappop(waiting)[2]


def delay_actions(events: Iterable[Event], mean_ms: int, window_ms: int) -> Iterator[Event]:
    """Delay every action by a delay drawn for its request, at most until the window ends; the result is in
    time order.

    Memory: the actions that are still in the future, and the requests of one window.
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
        heapq.heappush(waiting, (time_ms, arrival, dataclasses.replace(event, time_ms=time_ms)))
    while waiting:
        yield heapq.heappop(waiting)[2]


def delay_ms(request_id: str, mean_ms: int, window_ms: int) -> int:
    """Sample of an exponential distribution truncated at the window, as a function of the request id.

    One delay per request keeps a click before the actions that follow it.
    """
    share = (hash64(f"{request_id}/late") & MASK64) / 2**64
    return int(-mean_ms * math.log1p(share * math.expm1(-window_ms / mean_ms)))

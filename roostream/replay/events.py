"""What a log says happened, before it has the form that serving logs: requests and actions, in event time.

Readers (`ebnerd`, `jsonl`) make these; `roostream.replay.encoder` turns them into impressions and engagements.
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
    """A list that was shown. Ids are uint64 as integers; features are those that the log gives, by schema name."""

    request_id: str
    user_id: int
    session_id: int
    time_ms: int
    items_n: np.ndarray  # int64 [n], shown order
    ro: Mapping[str, object] | None = dataclasses.field(
        default_factory=dict
    )  # None: the event only adds candidates
    nro: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # columns of n
    surface: str = ""
    positions: Sequence[int] = ()  # empty = 0..n-1
    propensities: Sequence[float] = ()
    weight: float = 1.0
    where: str = ""  # in the log, for messages


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """Something that a user did with an item of a request; carries the request's own header."""

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
    """Merge requests (in time order) with their actions (none before its request) by (time, request first, arrival).

    Memory: the actions of which the time hasn't come. AssertionError if the groups' requests go back in time.
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

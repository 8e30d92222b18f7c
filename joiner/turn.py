"""One call of the join: what it was given, and what comes of it."""

from __future__ import annotations

import heapq
from typing import TypeAlias

from msgspec import Struct  # an empty list as a default is a new one each time

from joiner.build import Output
from joiner.state import NEVER, JoinState

Due: TypeAlias = tuple[int, bool, int, str]
"""Something to look at: (time in ms, whether it is a request, event id or time of the request, request id). In the order in which
it is done: at equal times engagements come before requests, since a request leaves behind what its engagements need."""


class Turn(Struct, gc=False):
    """`outputs` are to be written; at each of `timers_ms` the join wants `advance`."""

    state: JoinState
    key: bytes
    watermark_ms: int
    outputs: list[Output] = []
    timers_ms: list[int] = []
    now: list[Due] = []  # a heap: what is due at or before the watermark

    def wake_event(self, due_ms: int, request_id: str, event_id: int) -> None:
        """Look at an engagement when the watermark reaches `due_ms`; in this turn if it has."""
        if due_ms <= self.watermark_ms:
            heapq.heappush(self.now, (due_ms, False, event_id, request_id))
        else:
            self._later(due_ms, request_id, event_id)

    def wake_request(self, due_ms: int, request_id: str, time_ms: int) -> None:
        """The same for a request, whose time is `time_ms`; NEVER is never."""
        if due_ms <= self.watermark_ms:
            heapq.heappush(self.now, (due_ms, True, time_ms, request_id))
        elif due_ms != NEVER:
            self._later(due_ms, request_id, 0)

    def _later(self, due_ms: int, request_id: str, event_id: int) -> None:
        waiting = self.state.due.get(due_ms)
        if waiting is None:
            waiting = []
            self.timers_ms.append(due_ms)
        waiting.append((request_id, event_id))
        self.state.due[due_ms] = waiting

    def take_due(self, due_ms: int) -> None:
        """What waits for a time is due now; nothing if that was another time's."""
        waiting = self.state.due.get(due_ms)
        if waiting is None:
            return
        del self.state.due[due_ms]
        if len(waiting) == 1:
            request_id, event_id = waiting[0]
            self.now.append((due_ms, not event_id, event_id, request_id))
            return
        for request_id, event_id in waiting:
            if event_id:
                heapq.heappush(self.now, (due_ms, False, event_id, request_id))
            elif (request := self.state.requests.get(request_id)) is not None:
                heapq.heappush(self.now, (due_ms, True, request.time_ms, request_id))

"""The joiner as a total, deterministic state machine: (state, event | timer, watermark) → (state, outputs, timers).

Events are stored on arrival; nothing closes on arrival. What is due at or before the watermark is done, in event-time order:

    WAITING ─impression─► OPEN ─close_at─► CLOSED ─late horizon─► THIN ─late horizon─► forgotten
       ▲                                     │ emits the sample,                          │
       │                                     │ then corrections                           │
       └───────────── engagements from beyond that, as orphans ──────────────────────────┘

An event reads and writes the entries that it touches and no others (joiner/state.py); what happens when a time comes is in
joiner/passage.py. No clock, no I/O, no Flink. For every order of arrival in which no event comes at or behind the watermark, the
samples, corrections and dead letters are the same; tests/joiner holds this against an offline oracle. Outside of that claim, and
still total: events behind the watermark, caps, an event id reused with other bytes, a request id reused after it was forgotten.
"""

from __future__ import annotations

import bisect
import heapq
import struct
from collections.abc import Iterable

from msgspec import structs

from joiner import budget, scopes
from joiner.build import dead_event
from joiner.passage import Passage
from joiner.rules import Rules, close_at, note_joined, set_joins, window_of
from joiner.state import (
    NEVER,
    OPEN,
    WAITING,
    Engagement,
    Impression,
    JoinState,
    Page,
    Request,
    Trace,
    index_of,
)
from joiner.turn import Turn
from roostream.schema.schema import Limits, Registry
from roostream.wire import roo_pb2 as pb

_u8 = struct.Struct("<Q").pack


class Join:
    """Stateless: all state is in the `JoinState` given, one a Kafka key, which calls change.

    Both calls take the current watermark, which never goes back, and return what is to be written and the times at which the
    machine wants `advance` for this key. A call that raises (a defect) may leave the state half-changed: adapters keep the bytes
    from before.
    """

    def __init__(self, rules: Rules, registry: Registry, limits: Limits) -> None:
        self.rules, self.max_candidates, self._max_bytes = (
            rules,
            limits.max_candidates,
            budget.max_bytes(limits),
        )
        self._passage = Passage(rules, registry, limits.max_sample_bytes)
        self._engages = rules.closes_on_engagement
        self._follows = rules.next_request != "off"

    def apply(self, state: JoinState, key: bytes, event: Impression | Engagement, watermark_ms: int) -> Turn:
        """Store one event that has come, and do what it made due."""
        turn = Turn(state, key, watermark_ms)
        if type(event) is Engagement:
            self._engagement(turn, event)
        else:
            assert isinstance(event, Impression)
            self._impression(turn, event)
        if turn.now:
            self._drain(turn)
        return turn

    def advance(self, state: JoinState, key: bytes, timer_ms: int, watermark_ms: int) -> Turn:
        """Do what is due at `timer_ms`, one of the times that a turn asked for, which the watermark has reached; at the end of
        input that is `END`. Timers of a key come in ascending order. One that is no longer wanted does nothing."""
        turn = Turn(state, key, watermark_ms)
        turn.take_due(timer_ms)
        self._drain(turn)
        return turn

    def _drain(self, turn: Turn) -> None:
        while turn.now:
            due_ms, is_request, order, request_id = heapq.heappop(turn.now)
            request = turn.state.requests.get(request_id)
            if request is None:
                continue
            if not is_request:
                self._passage.event(turn, request_id, request, order)
            elif request.due_ms == due_ms:  # otherwise it has moved
                self._passage.request(turn, request_id, request)

    def _impression(self, turn: Turn, event: Impression) -> None:
        state, request_id, page = turn.state, event.request_id, event.page
        request = state.requests.get(request_id)
        refusal = self._refuse_impression(turn, request, event)
        if refusal == ("", ""):
            return
        pages = request.pages if request is not None else []
        num_shown = page.num_distinct if not pages else _num_shown([*pages, page])
        num_bytes = self._num_bytes(request, event, num_shown)
        refusal = refusal or self._refuse_large(num_shown, num_bytes)
        if refusal is not None:
            turn.outputs.append(dead_event(turn.key, event, *refusal))
            return
        if request is None:
            request = Request()
            state.head.num_requests += 1
        if request.phase == WAITING:
            request.phase, request.late = OPEN, page.time_ms <= turn.watermark_ms
            state.head.num_open += 1
        request.num_shown, request.num_bytes = num_shown, num_bytes
        state.impressions[request_id, page.digest] = event
        if request.pages:
            bisect.insort(request.pages, page, key=_order)
        else:
            request.pages.append(page)
        if request.pages[0] is page:
            self._open(turn, request_id, request, page)
        if request.num_pending:
            self._meet_page(turn, request_id, request, page)
        self._set_close(turn, request_id, request)
        if request.late and request.close_ms <= turn.watermark_ms:
            request.reason = pb.CLOSE_LATE
        state.requests[request_id] = request

    def _refuse_impression(
        self, turn: Turn, request: Request | None, event: Impression
    ) -> tuple[str, str] | None:
        """(reason, error) of the dead letter, ("", "") for a duplicate, None to take it if it is not too large."""
        page, watermark_ms, rules = event.page, turn.watermark_ms, self.rules
        if request is None or request.phase == WAITING:
            if page.time_ms + rules.late_horizon_ms <= watermark_ms:
                behind_ms = watermark_ms - page.time_ms
                return (
                    "too_late",
                    f"came {behind_ms} ms behind the watermark: its request may have been emitted",
                )
            head = turn.state.head
            if head.num_open >= rules.max_open_requests or head.num_requests >= rules.max_requests:
                return "overflow", f"expected at most {rules.max_open_requests} open requests a user"
            return None
        if request.phase != OPEN:
            digest = _u8(page.digest)
            if index_of(request.digests, digest) >= 0:
                return "", ""
            if len(request.digests) < 16 * rules.max_impressions:
                request.digests += digest
                turn.state.requests[event.request_id] = request
            return (
                "after_close",
                f"its request closed at {request.close_ms}, this came with time {page.time_ms}",
            )
        for n, known in enumerate(request.pages):
            if known.digest == page.digest:
                request.pages[n] = structs.replace(known, copies=known.copies + 1)
                turn.state.requests[event.request_id] = request
                return "", ""
        if len(request.pages) >= rules.max_impressions:
            return "overflow", f"expected at most {rules.max_impressions} impressions a request"
        return None

    def _num_bytes(self, request: Request | None, event: Impression, num_shown: int) -> int:
        """Of the budget, with one more impression. `num_shown`: distinct candidates with it."""
        num_labels = self._passage.labels_of(event.page.schema).count
        before = (0, 0) if request is None else (request.num_bytes, request.num_shown)
        return (
            before[0] + budget.of_impression(event) + budget.of_candidates(num_shown - before[1], num_labels)
        )

    def _refuse_large(self, num_shown: int, num_bytes: int) -> tuple[str, str] | None:
        if num_shown > self.max_candidates:
            return "overflow", f"expected at most {self.max_candidates} candidates a request"
        if num_bytes > self._max_bytes:
            return (
                "overflow",
                f"expected a request of at most {self._max_bytes} bytes, got {num_bytes} with this",
            )
        return None

    def _open(self, turn: Turn, request_id: str, request: Request, page: Page) -> None:
        """`page` gives the request its time, session and schema, and so its place among the others."""
        if request.scope is not None:
            self._look_again(turn, scopes.leave(turn.state, request_id, request))
        request.time_ms, request.session_id, request.schema = page.time_ms, page.session_id, page.schema
        request.window_ms = window_of(self.rules, turn.key, request_id, page)
        if self._follows:
            scope_id = 0 if self.rules.next_request == "user" else page.session_id
            request.next_ms = scopes.next_after(turn.state, scope_id, page.time_ms)
            if not request.late:
                self._look_again(turn, scopes.enter(turn.state, scope_id, request_id, request))

    def _look_again(self, turn: Turn, request_ids: Iterable[str]) -> None:
        """Other open requests, whose next one may be another now."""
        for request_id in request_ids:
            request = turn.state.requests.get(request_id)
            assert request is not None and request.scope is not None
            next_ms = scopes.next_after(turn.state, request.scope, request.time_ms)
            if next_ms != request.next_ms:
                request.next_ms = next_ms
                self._set_close(turn, request_id, request)
                turn.state.requests[request_id] = request

    def _meet_page(self, turn: Turn, request_id: str, request: Request, page: Page) -> None:
        """Which engagements join may have changed: of those that waited if the page is the last one, of all if items are shown
        sooner by it, or perhaps no longer (its schema)."""
        state, rules = turn.state, self.rules
        waited = set(request.waiting)
        held = state.events_of(request_id)
        if request.pages[-1] is page:
            events = [held.get(event_id) for event_id in request.waiting]
        else:
            events = [*state.chain(request_id, request)]
            request.joined_ms, request.terminal_ms = [], NEVER
        num_orphans, request.waiting = 0, []
        for event in events:
            if not isinstance(event, Engagement):
                continue
            set_joins(event, request, rules)
            num_orphans += event.row < 0
            held[event.event_id] = event
            if event.joins_ms != NEVER:
                note_joined(rules, request, event.action, event.joins_ms)
                continue
            request.waiting.append(event.event_id)
            if event.event_id not in waited:
                turn.wake_event(event.time_ms + rules.orphan_timeout_ms, request_id, event.event_id)
        if num_orphans != request.num_orphans:
            state.head.num_orphans += num_orphans - request.num_orphans
            request.num_orphans = num_orphans

    def _engagement(self, turn: Turn, event: Engagement) -> None:
        state, rules, request_id = turn.state, self.rules, event.request_id
        request = state.requests.get(request_id)
        if request is None:
            if event.time_ms + rules.late_horizon_ms <= turn.watermark_ms:
                error = f"came {turn.watermark_ms - event.time_ms} ms behind the watermark"
                turn.outputs.append(dead_event(turn.key, event, "too_late", error))
                return
            request = Request()
        event_id, phase, held, known = event.event_id, request.phase, None, None
        if request.last_event:
            held = state.events_of(request_id)
            known = held.get(event_id)
            if known is not None and not (type(known) is Trace and known.gone):
                if type(known) is Engagement:
                    known.copies += 1
                    held[event_id] = known
                return
        waits = False
        if phase <= OPEN:
            set_joins(event, request, rules)
            waits = event.joins_ms == NEVER
        num_bytes = request.num_bytes + budget.of_engagement(event)
        if (
            request.num_events >= rules.max_engagements
            or num_bytes > self._max_bytes
            or (waits and self._too_many_wait(state, request, event))
        ):
            error = (
                f"expected at most {rules.max_orphans} waiting engagements a user, {rules.max_engagements} a request and "
                f"{self._max_bytes} bytes a request"
            )
            turn.outputs.append(dead_event(turn.key, event, "overflow", error))
            return
        if known is not None:
            event.previous = known.previous  # its place in the chain
        else:
            event.previous, request.last_event = request.last_event, event_id
        if not request.num_events and phase == WAITING:
            state.head.num_requests += 1
        request.num_events += 1
        request.num_pending += 1
        request.num_bytes = num_bytes
        if phase > OPEN:
            self._passage.plan_event(turn, request_id, request, event)
        elif waits:
            self._wait(turn, request, event)
        elif self._engages:
            note_joined(rules, request, event.action, event.joins_ms)
            self._set_close(turn, request_id, request)
        if held is None:
            held = state.events_of(request_id)
        held[event_id] = event
        state.requests[request_id] = request

    def _too_many_wait(self, state: JoinState, request: Request, event: Engagement) -> bool:
        """Whether one more that does not join is too many for its request, or for the user if its item is not shown."""
        most = self.rules.max_orphans
        return len(request.waiting) >= most or (event.row < 0 and state.head.num_orphans >= most)

    def _wait(self, turn: Turn, request: Request, event: Engagement) -> None:
        """Before the close: an engagement that does not join as things are."""
        request.waiting.append(event.event_id)
        if event.row < 0:
            request.num_orphans += 1
            turn.state.head.num_orphans += 1
        turn.wake_event(event.time_ms + self.rules.orphan_timeout_ms, event.request_id, event.event_id)

    def _set_close(self, turn: Turn, request_id: str, request: Request) -> None:
        """Of an open request: when it closes, and so when it is due."""
        request.close_ms, request.reason = close_at(self.rules, request, self._engages)
        self._passage.set_due(turn, request_id, request)


def _order(page: Page) -> tuple[int, int]:
    return page.time_ms, page.digest


def _num_shown(pages: Iterable[Page]) -> int:
    return len(set().union(*[struct.unpack(f"<{len(page.items) >> 3}Q", page.items) for page in pages]))

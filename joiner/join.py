"""The join as a deterministic state machine: (state, event or timer, watermark) → (state, outputs, timers).

Events are stored on arrival; a request never closes on arrival. What is due at or before the watermark is
done in event-time order:

    WAITING ─impression─► OPEN ─close_ms─► CLOSED ─late horizon─► EXPIRED ─late horizon─► forgotten
       ▲                                     │ emits the sample,                             │
       │                                     │ then corrections                              │
       └──────────── engagements later than that wait again, as orphans ────────────────────┘

No clock, no I/O, no Flink. For every order of arrival in which no event arrives behind the watermark,
samples, corrections and dead letters are the same; tests/joiner compares them with an offline oracle. The
machine also handles, without that guarantee: events behind the watermark, exceeded limits, an event id reused
with other content, and a request id reused after it was forgotten.
"""

from __future__ import annotations

import bisect
import heapq
import struct
from collections.abc import Iterable
from typing import TypeAlias

from msgspec import Struct, structs  # an empty list as a Struct's default is a new list for each instance

from joiner import next_request
from joiner.labels import JoinedEngagement, LabelFolder
from joiner.outputs import (
    LabelChange,
    Output,
    SampleContent,
    correction,
    dead_event,
    enforce_max_bytes,
    header_of,
    sample,
    select_rows,
)
from joiner.rules import Rules, close_time, record_join, set_join_time, window_of
from joiner.state import (
    CLOSED,
    EXPIRED,
    GONE,
    NEVER,
    OPEN,
    WAITING,
    Engagement,
    Impression,
    JoinState,
    LabelAggregate,
    Page,
    Request,
    SeenEngagement,
    index_of,
)
from roostream.errors import CheckpointError, RoostreamError
from roostream.schema.ids import other_id_form
from roostream.schema.schema import Limits, Registry
from roostream.wire import roo_pb2 as pb

_pack_u64 = struct.Struct("<Q").pack
INTERNAL_ERROR = "internal_error"
_MAX_ITEMS_COMPARED = 256

# The size budget of a request. The costs are upper bounds of what a page, a candidate and an engagement add
# to a sample, to a correction and to training's report of them. A request within `max_request_bytes`
# therefore never produces a record that a topic, a sink or a reader refuses. Events that would exceed the
# budget become dead letters on arrival (`overflow`).
FIXED_BYTES = 512  # ids, tags, lengths, and the copy of the opening page's header
_PAGE_BYTES = 64  # tags and lengths of the page's part
_CANDIDATE_BYTES = 12  # row, position and propensity
_LABEL_BYTES = 12  # label, logged score, and the prediction that training reports
_ENGAGEMENT_BYTES = 32  # entries of the engagement columns, beside the record itself

Due: TypeAlias = tuple[int, bool, int, str]
"""(due time in ms, whether it is the request itself, event id or request time, request id), in processing
order. At equal times engagements come before requests, because closing a request drops what its engagements
need."""


def max_request_bytes(limits: Limits) -> int:
    """The size budget of one request."""
    return limits.max_sample_bytes - FIXED_BYTES


def impression_cost(impression: Impression) -> int:
    """Bytes of the budget that an impression takes, without its candidates."""
    return len(impression.raw) + len(impression.canonical) + _PAGE_BYTES


def candidates_cost(count: int, num_labels: int) -> int:
    """Bytes of the budget that `count` candidates take, which no earlier page of the request has shown."""
    return count * (_CANDIDATE_BYTES + _LABEL_BYTES * num_labels)


def engagement_cost(engagement: Engagement) -> int:
    """Bytes of the budget that an engagement takes."""
    return len(engagement.raw) + _ENGAGEMENT_BYTES


class FailedRequest(Exception):
    """Processing a due request raised the cause of this error."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id


class StepResult(Struct, gc=False):
    """Input and result of one call of the join: the caller writes `outputs`, and calls `advance` at each of
    `timers_ms`."""

    state: JoinState
    key: bytes
    watermark_ms: int
    outputs: list[Output] = []
    timers_ms: list[int] = []
    due_now: list[Due] = []  # a heap: what is due at or before the watermark
    phase_changes: list[tuple[int, int]] = []  # (before, after) of requests, for metrics

    def schedule_engagement(self, due_ms: int, request_id: str, event_id: int) -> None:
        """Process an engagement when the watermark reaches `due_ms`, in this step if it already has."""
        if due_ms <= self.watermark_ms:
            heapq.heappush(self.due_now, (due_ms, False, event_id, request_id))
        else:
            self._schedule_later(due_ms, request_id, event_id)

    def schedule_request(self, due_ms: int, request_id: str, time_ms: int) -> None:
        """The same for a request with time `time_ms`."""
        if due_ms <= self.watermark_ms:
            heapq.heappush(self.due_now, (due_ms, True, time_ms, request_id))
        elif due_ms != NEVER:
            self._schedule_later(due_ms, request_id, 0)

    def _schedule_later(self, due_ms: int, request_id: str, event_id: int) -> None:
        entries = self.state.due.get(due_ms)
        if entries is None:
            entries = []
            self.timers_ms.append(due_ms)
        entries.append((request_id, event_id))
        self.state.due[due_ms] = entries

    def take_due(self, due_ms: int) -> None:
        """Move everything scheduled for `due_ms` to `due_now`."""
        entries = self.state.due.get(due_ms)
        if entries is None:
            return
        del self.state.due[due_ms]
        if len(entries) == 1:
            request_id, event_id = entries[0]
            self.due_now.append((due_ms, not event_id, event_id, request_id))
            return
        for request_id, event_id in entries:
            if event_id:
                heapq.heappush(self.due_now, (due_ms, False, event_id, request_id))
            elif (request := self.state.requests.get(request_id)) is not None:
                heapq.heappush(self.due_now, (due_ms, True, request.time_ms, request_id))


class _JoinedAtClose(Struct, gc=False):
    """The engagements of a request that closes."""

    joined: list[JoinedEngagement] = []  # sorted
    joined_events: list[Engagement] = []
    pending: list[Engagement] = []  # those that may become corrections
    num_copies: int = 0  # duplicates of the joined ones


class Join:
    """Holds no state of its own: all state is in the `JoinState` that is passed in (one a Kafka key) and
    changed in place.

    The watermark passed in must never decrease. A call that raises may leave the state half-changed; callers
    keep the earlier bytes.
    """

    def __init__(self, rules: Rules, registry: Registry, limits: Limits) -> None:
        self.rules, self.registry = rules, registry
        self.max_candidates = limits.max_candidates
        self.max_sample_bytes = limits.max_sample_bytes
        self.max_request_bytes = max_request_bytes(limits)
        self._closes_on_engagement = rules.closes_on_engagement
        self._closes_on_next_request = rules.next_request != "off"
        self._folders: dict[int, LabelFolder] = {}

    def apply(
        self, state: JoinState, key: bytes, event: Impression | Engagement, watermark_ms: int
    ) -> StepResult:
        """Add an event that has arrived to the state of its request, and do what is due because of it: close
        the request, or emit a sample, a correction or a dead letter."""
        step = StepResult(state, key, watermark_ms)
        if type(event) is Engagement:
            self._add_engagement(step, event)
        else:
            assert isinstance(event, Impression)
            self._add_impression(step, event)
        if step.due_now:
            self._process_due(step)
        return step

    def advance(self, state: JoinState, key: bytes, timer_ms: int, watermark_ms: int) -> StepResult:
        """Do what is due at `timer_ms`, a time from `StepResult.timers_ms` that the watermark has reached
        (`END` at the end of input). Timers of a key must come in ascending order. A timer that is no longer
        needed does nothing.

        Raises:
            FailedRequest: a request could not be processed, because of a defect.
        """
        step = StepResult(state, key, watermark_ms)
        step.take_due(timer_ms)
        self._process_due(step)
        return step

    def remove_failed(
        self, state: JoinState, key: bytes, request_id: str, watermark_ms: int, error: str
    ) -> StepResult:
        """Remove a request whose processing fails. Its events that are in no output yet become dead
        letters."""
        step = StepResult(state, key, watermark_ms)
        request = state.requests.get(request_id)
        if request is None:
            return step
        for page in request.pages:
            impression = state.impressions.get((request_id, page.digest))
            if impression is not None:
                if request.phase == OPEN:
                    step.outputs.append(dead_event(key, impression, INTERNAL_ERROR, error))
                del state.impressions[request_id, page.digest]
        for event in _pending(state, request_id, request):
            step.outputs.append(dead_event(key, event, INTERNAL_ERROR, error))
        if request.newest_event:
            state.drop_engagements(request_id, request)
        if request.aggregated:
            state.drop_aggregates(request_id, request.aggregated)
        if request.scope is not None:
            next_request.leave(state, request_id, request)
        if request.phase <= OPEN:
            state.counts.num_orphans -= request.num_orphans
        state.counts.num_open -= request.phase == OPEN
        del state.requests[request_id]
        state.counts.num_requests -= 1
        step.phase_changes.append((request.phase, GONE))
        return step

    def _process_due(self, step: StepResult) -> None:
        request_id = ""
        try:
            while step.due_now:
                due_ms, is_request, event_id, request_id = heapq.heappop(step.due_now)
                request = step.state.requests.get(request_id)
                if request is None:
                    continue
                if not is_request:
                    self._engagement_due(step, request_id, request, event_id)
                elif request.due_ms == due_ms:  # otherwise it was rescheduled
                    self._request_due(step, request_id, request)
        except RoostreamError:
            raise
        except Exception as error:
            raise FailedRequest(request_id) from error

    # An impression arrives.

    def _add_impression(self, step: StepResult, event: Impression) -> None:
        state, request_id, page = step.state, event.request_id, event.page
        request = state.requests.get(request_id)
        if request is not None and self._is_duplicate(step, request, event):
            return
        pages = request.pages if request is not None else []
        num_shown = page.num_distinct if not pages else _num_distinct_items([*pages, page])
        num_bytes = self._num_bytes_with(request, event, num_shown)
        refusal = self._refuse_impression(step, request, event)
        if refusal is None and num_shown > self.max_candidates:
            error = (
                f"expected at most {self.max_candidates} candidates a request (max_candidates of the schema)"
            )
            refusal = "overflow", error
        if refusal is None and num_bytes > self.max_request_bytes:
            error = f"expected a request of at most {self.max_request_bytes} bytes, got {num_bytes}"
            refusal = "overflow", error
        if refusal is not None:
            step.outputs.append(dead_event(step.key, event, *refusal))
            return
        phase = WAITING if request is not None else GONE
        if request is None:
            request = Request()
            state.counts.num_requests += 1
        if request.phase == WAITING:
            step.phase_changes.append((phase, OPEN))
            request.phase, request.late = OPEN, page.time_ms <= step.watermark_ms
            state.counts.num_open += 1
        request.num_shown, request.num_bytes = num_shown, num_bytes
        state.impressions[request_id, page.digest] = event
        if request.pages:
            bisect.insort(request.pages, page, key=_page_order)
        else:
            request.pages.append(page)
        if request.pages[0] is page:
            self._set_opening_page(step, request_id, request, page)
        if request.num_pending:
            self._rejoin_pending(step, request_id, request, page)
        self._set_close(step, request_id, request)
        if request.late and request.close_ms <= step.watermark_ms:
            request.reason = pb.CLOSE_LATE
        state.requests[request_id] = request

    def _is_duplicate(self, step: StepResult, request: Request, event: Impression) -> bool:
        """Whether the request has this impression already. If the request is open, the copy is counted."""
        if request.phase > OPEN:
            return index_of(request.digests, _pack_u64(event.page.digest)) >= 0
        for n, page in enumerate(request.pages):
            if page.digest == event.page.digest:
                request.pages[n] = structs.replace(page, copies=page.copies + 1)
                step.state.requests[event.request_id] = request
                return True
        return False

    def _refuse_impression(
        self, step: StepResult, request: Request | None, event: Impression
    ) -> tuple[str, str] | None:
        """(reason, error) of the dead letter; None: the impression is accepted if it is not too large."""
        page, rules, state = event.page, self.rules, step.state
        is_old = page.time_ms + rules.late_horizon_ms <= step.watermark_ms
        if is_old and (request is None or request.phase <= OPEN):
            behind_ms = step.watermark_ms - page.time_ms
            return (
                "too_late",
                f"arrived {behind_ms} ms behind the watermark: its request may have been emitted",
            )
        if request is None or request.phase == WAITING:
            counts = state.counts
            if counts.num_open >= rules.max_open_requests:
                error = "open requests of the user have reached max_open_requests"
                return "overflow", f"{error} ({rules.max_open_requests})"
            if counts.num_requests >= rules.max_requests:
                error = "requests of the user, open or remembered, have reached max_requests"
                return "overflow", f"{error} ({rules.max_requests})"
        elif request.phase == OPEN:
            if len(request.pages) >= rules.max_impressions:
                error = f"impressions of the request have reached max_impressions ({rules.max_impressions})"
                return "overflow", error
        else:
            if len(request.digests) < 16 * rules.max_impressions:
                request.digests += _pack_u64(page.digest)
                state.requests[event.request_id] = request
            return (
                "after_close",
                f"its request closed at {request.close_ms}, this impression has time {page.time_ms}",
            )
        return None

    def _num_bytes_with(self, request: Request | None, event: Impression, num_shown: int) -> int:
        """Bytes of the request's sample with one more impression. `num_shown`: distinct candidates with those
        of the impression."""
        num_labels = self._label_folder(event.page.schema).num_labels
        num_bytes, shown_before = (0, 0) if request is None else (request.num_bytes, request.num_shown)
        new_candidates = num_shown - shown_before
        return num_bytes + impression_cost(event) + candidates_cost(new_candidates, num_labels)

    def _set_opening_page(self, step: StepResult, request_id: str, request: Request, page: Page) -> None:
        """`page` gives the request its time, session and schema, and so its position among the other
        requests."""
        if request.scope is not None:
            self._update_next_request(step, next_request.leave(step.state, request_id, request))
        request.time_ms, request.session_id, request.schema = page.time_ms, page.session_id, page.schema
        request.window_ms = window_of(self.rules, step.key, request_id, page)
        if self._closes_on_next_request:
            scope_id = 0 if self.rules.next_request == "user" else page.session_id
            request.next_ms = next_request.next_time(step.state, scope_id, page.time_ms)
            if not request.late:
                affected = next_request.enter(step.state, scope_id, request_id, request)
                self._update_next_request(step, affected)

    def _update_next_request(self, step: StepResult, request_ids: Iterable[str]) -> None:
        """Update other open requests, whose next request may have changed."""
        for request_id in request_ids:
            request = step.state.requests.get(request_id)
            assert request is not None and request.scope is not None
            next_ms = next_request.next_time(step.state, request.scope, request.time_ms)
            if next_ms != request.next_ms:
                request.next_ms = next_ms
                self._set_close(step, request_id, request)
                step.state.requests[request_id] = request

    def _rejoin_pending(self, step: StepResult, request_id: str, request: Request, page: Page) -> None:
        """Recompute which engagements join: the waiting ones if the new page is the last, else all, because
        an earlier page may show items sooner or, with another schema, no longer."""
        state, rules = step.state, self.rules
        was_waiting = set(request.waiting)
        stored = state.engagements_of(request_id)
        if request.pages[-1] is page:
            engagements = [stored.get(event_id) for event_id in request.waiting]
        else:
            engagements = [*state.engagement_list(request_id, request)]
            request.joined_ms, request.terminal_ms = [], NEVER
        num_orphans, request.waiting = 0, []
        for engagement in engagements:
            if not isinstance(engagement, Engagement):
                continue
            set_join_time(engagement, request, rules)
            num_orphans += engagement.row < 0
            stored[engagement.event_id] = engagement
            if engagement.joins_ms != NEVER:
                record_join(rules, request, engagement.action, engagement.joins_ms)
                continue
            request.waiting.append(engagement.event_id)
            if engagement.event_id not in was_waiting:
                due_ms = engagement.time_ms + rules.orphan_timeout_ms
                step.schedule_engagement(due_ms, request_id, engagement.event_id)
        if num_orphans != request.num_orphans:
            state.counts.num_orphans += num_orphans - request.num_orphans
            request.num_orphans = num_orphans

    # An engagement arrives.

    def _add_engagement(self, step: StepResult, event: Engagement) -> None:
        state, rules, request_id = step.state, self.rules, event.request_id
        request = state.requests.get(request_id)
        if request is None:
            if event.time_ms + rules.late_horizon_ms <= step.watermark_ms:
                error = f"arrived {step.watermark_ms - event.time_ms} ms behind the watermark"
                step.outputs.append(dead_event(step.key, event, "too_late", error))
                return
            request = Request()
        phase, stored, known = request.phase, None, None
        if request.newest_event:
            stored = state.engagements_of(request_id)
            known = stored.get(event.event_id)
            if known is not None and not (type(known) is SeenEngagement and known.forgotten):
                if type(known) is Engagement:
                    known.copies += 1
                    stored[event.event_id] = known
                return
        waits = False
        if phase <= OPEN:
            set_join_time(event, request, rules)
            waits = event.joins_ms == NEVER
        num_bytes = request.num_bytes + engagement_cost(event)
        error = self._overflow(state, request, event, num_bytes, waits)
        if error:
            step.outputs.append(dead_event(step.key, event, "overflow", error))
            return
        if known is not None:
            event.previous_id = known.previous_id  # keeps its position in the list
        else:
            event.previous_id, request.newest_event = request.newest_event, event.event_id
        if not request.num_events and phase == WAITING:
            state.counts.num_requests += 1
            step.phase_changes.append((GONE, WAITING))
        request.num_events += 1
        request.num_pending += 1
        request.num_bytes = num_bytes
        if phase > OPEN:
            self._schedule_after_close(step, request_id, request, event)
        elif waits:
            request.waiting.append(event.event_id)
            if event.row < 0:
                request.num_orphans += 1
                state.counts.num_orphans += 1
            step.schedule_engagement(event.time_ms + rules.orphan_timeout_ms, request_id, event.event_id)
        elif self._closes_on_engagement:
            record_join(rules, request, event.action, event.joins_ms)
            self._set_close(step, request_id, request)
        if stored is None:
            stored = state.engagements_of(request_id)
        stored[event.event_id] = event
        state.requests[request_id] = request

    def _overflow(
        self, state: JoinState, request: Request, event: Engagement, num_bytes: int, waits: bool
    ) -> str:
        """The limit that one more engagement exceeds; empty if there is none. `waits`: it does not join so
        far, and counts for its request, and for the user if its item is not shown."""
        rules = self.rules
        if request.num_events >= rules.max_engagements:
            return f"engagements of the request have reached max_engagements ({rules.max_engagements})"
        if num_bytes > self.max_request_bytes:
            return f"expected a request of at most {self.max_request_bytes} bytes, got {num_bytes}"
        if waits:
            limit = rules.max_orphans
            if len(request.waiting) >= limit or (event.row < 0 and state.counts.num_orphans >= limit):
                return f"engagements that wait for their request or item have reached max_orphans ({limit})"
        return ""

    # Scheduling.

    def _set_close(self, step: StepResult, request_id: str, request: Request) -> None:
        request.close_ms, request.reason = close_time(self.rules, request)
        self._schedule_request(step, request_id, request)

    def _schedule_request(self, step: StepResult, request_id: str, request: Request) -> None:
        """Set the time of the request's next step. Called after every change that it depends on."""
        if request.phase == OPEN:
            due_ms = request.close_ms
        elif request.phase == CLOSED:
            horizon_ms = self.rules.correction_horizon_ms if request.pages else self.rules.late_horizon_ms
            due_ms = request.close_ms + horizon_ms
        elif request.phase == EXPIRED:
            due_ms = request.close_ms + 2 * self.rules.late_horizon_ms
        else:
            due_ms = NEVER
        if due_ms != request.due_ms:
            request.due_ms = due_ms
            step.schedule_request(due_ms, request_id, request.time_ms)

    def _schedule_after_close(
        self, step: StepResult, request_id: str, request: Request, event: Engagement
    ) -> None:
        """Schedule an engagement of a CLOSED or EXPIRED request. Those beyond the phase are scheduled when
        the phase ends."""
        horizon_ms = request.close_ms + self.rules.late_horizon_ms
        if request.phase == EXPIRED:
            if event.time_ms <= horizon_ms + self.rules.late_horizon_ms:
                step.schedule_engagement(event.time_ms, request_id, event.event_id)
        elif event.time_ms <= horizon_ms:
            is_shown = _candidate_of(request, event) >= 0
            due_ms = event.time_ms if is_shown else event.time_ms + self.rules.orphan_timeout_ms
            if due_ms < horizon_ms or is_shown:
                step.schedule_engagement(due_ms, request_id, event.event_id)

    # A time is reached.

    def _request_due(self, step: StepResult, request_id: str, request: Request) -> None:
        if request.phase == EXPIRED:
            self._forget(step, request_id, request)
            return
        due_ms = request.due_ms
        request.due_ms = NEVER  # after a change of the rules, the next step may have the same time
        if request.phase == OPEN:
            self._close(step, request_id, request)
        else:
            for page in request.pages:  # later corrections have no features
                del step.state.impressions[request_id, page.digest]
            request.pages = []
            if due_ms >= request.close_ms + self.rules.late_horizon_ms:
                self._expire(step, request_id, request)
        self._schedule_request(step, request_id, request)
        step.state.requests[request_id] = request

    def _engagement_due(self, step: StepResult, request_id: str, request: Request, event_id: int) -> None:
        """Process a pending engagement; nothing if it has joined or was refused since."""
        event = step.state.engagements_of(request_id).get(event_id) if request.num_pending else None
        if type(event) is not Engagement:
            return
        if request.phase == CLOSED:
            self._settle(step, request_id, request, event)
        elif request.phase == EXPIRED:
            self._refuse_too_late(step, request_id, request, event)
        elif event_id in request.waiting:
            newer_id = next(iter(request.waiting[request.waiting.index(event_id) + 1 :]), 0)
            self._give_up(step, request_id, request, event)
            if request.phase == WAITING:
                if not request.waiting:
                    self._remove(step, request_id, request)
                    return
                _unlink_refused(step.state, request_id, request, event, newer_id)
        step.state.requests[request_id] = request

    def _close(self, step: StepResult, request_id: str, request: Request) -> None:
        """Emit the sample and keep what corrections and duplicates need."""
        state, pages = step.state, request.pages
        impressions = [_present(state.impressions.get((request_id, page.digest))) for page in pages]
        used_pages, used = pages, impressions
        if len(pages) > 1:
            used_pages = [p for p in pages if p.time_ms <= request.close_ms and p.schema == request.schema]
            digests = {p.digest for p in used_pages}
            used = [i for i in impressions if i.page.digest in digests]
        selection = select_rows(used_pages)
        request.items, request.header = selection.items, header_of(used[0])
        at_close = _JoinedAtClose()
        if request.num_pending:
            rows_are_candidates = len(pages) == 1 and not selection.num_repeats
            self._join_pending(step, request_id, request, at_close, rows_are_candidates)
        if request.scope is not None:
            next_request.close(state, request_id, request)
        state.counts.num_open -= 1
        state.counts.num_orphans -= request.num_orphans
        request.phase = CLOSED
        step.phase_changes.append((OPEN, CLOSED))
        request.digests = b"".join([page.digest.to_bytes(8, "little") for page in pages])
        request.waiting, request.joined_ms, request.num_orphans = [], [], 0
        # Not needed any more; NEVER and ids take 9 bytes each, 0 takes 1.
        request.next_ms = request.terminal_ms = request.session_id = request.num_shown = 0
        folder, aggregates = self._label_folder(request.schema), dict[int, LabelAggregate]()
        if at_close.joined:
            folder.fold(aggregates, at_close.joined, request.time_ms, request.window_ms)
            request.aggregated = [*aggregates]
            state.set_aggregates(request_id, aggregates)
        num_duplicates = selection.num_repeats - len(used_pages) + at_close.num_copies
        for page in used_pages:
            num_duplicates += page.copies
        labels = folder.pack_all(aggregates, len(request.items) >> 3)
        content = SampleContent(
            used, selection.rows, folder.num_labels, labels, at_close.joined, num_duplicates
        )
        request.num_bytes = sum(map(engagement_cost, at_close.pending))
        output = sample(step.key, request_id, request, content)
        step.outputs += enforce_max_bytes(output, self.max_sample_bytes, [*used, *at_close.joined_events])
        self._drop_pages_at_close(step, request_id, request, impressions, used_pages)
        for event in at_close.pending:
            self._schedule_after_close(step, request_id, request, event)

    def _drop_pages_at_close(
        self,
        step: StepResult,
        request_id: str,
        request: Request,
        impressions: list[Impression],
        used_pages: list[Page],
    ) -> None:
        """Write dead letters of the impressions that the sample could not use; keep those that corrections
        need."""
        if len(used_pages) < len(impressions):
            digests = {page.digest for page in used_pages}
            step.outputs += [
                _unused_impression(step.key, i, request) for i in impressions if i.page.digest not in digests
            ]
        keeps_features = self.rules.correction_horizon_ms > 0
        for page in request.pages:
            if not keeps_features or page not in used_pages:
                del step.state.impressions[request_id, page.digest]
        request.pages = used_pages if keeps_features else []

    def _join_pending(
        self,
        step: StepResult,
        request_id: str,
        request: Request,
        at_close: _JoinedAtClose,
        rows_are_candidates: bool,
    ) -> None:
        """Join the engagements up to the close and keep the rest; those whose orphan timeout is over are
        refused.

        `rows_are_candidates`: the request has one page without repeats, so an item's row is its candidate
        index.
        """
        close_ms = request.close_ms
        stored = step.state.engagements_of(request_id)
        expired = list[Engagement]()
        joined = at_close.joined
        for event in step.state.engagement_list(request_id, request):
            if type(event) is not Engagement:
                continue
            if event.joins_ms <= close_ms:
                candidate = event.row if rows_are_candidates else _candidate_of(request, event)
                joined.append((event.joins_ms, event.event_id, event.action, event.value, candidate))
                at_close.num_copies += event.copies - 1
                at_close.joined_events.append(event)
                stored[event.event_id] = SeenEngagement(event.event_id, event.previous_id)
            elif event.joins_ms == NEVER and event.time_ms + self.rules.orphan_timeout_ms <= close_ms:
                expired.append(event)
            else:
                at_close.pending.append(event)
        request.num_pending -= len(joined)
        joined.sort()
        for event in _in_order(expired) if expired else ():
            self._give_up(step, request_id, request, event)

    def _settle(self, step: StepResult, request_id: str, request: Request, event: Engagement) -> None:
        """CLOSED: turn an engagement into a correction at its time, or refuse it after the orphan timeout."""
        horizon_ms = request.close_ms + self.rules.late_horizon_ms
        if event.time_ms > min(step.watermark_ms, horizon_ms):
            return
        candidate = _candidate_of(request, event)
        if candidate >= 0:
            self._correct(step, request_id, request, event, candidate)
        elif min(event.time_ms + self.rules.orphan_timeout_ms, horizon_ms) <= step.watermark_ms:
            self._give_up(step, request_id, request, event)

    def _correct(
        self, step: StepResult, request_id: str, request: Request, event: Engagement, candidate: int
    ) -> None:
        state, folder = step.state, self._label_folder(request.schema)
        aggregate = state.aggregate_of(request_id, candidate)
        if aggregate is None:
            aggregate = folder.empty()
            request.aggregated.append(candidate)
        engagement = (
            max(event.time_ms, request.time_ms),
            event.event_id,
            event.action,
            event.value,
            candidate,
        )
        before, aggregates = folder.pack(aggregate), {candidate: aggregate}
        folder.fold(aggregates, [engagement], request.time_ms, request.window_ms)
        state.set_aggregates(request_id, aggregates)
        change = LabelChange(engagement, [], before, folder.pack(aggregate))
        if request.pages and event.time_ms <= request.close_ms + self.rules.correction_horizon_ms:
            change = self._with_features(state, request_id, request, change)
        output = correction(step.key, request_id, request, change, folder.num_labels)
        step.outputs += enforce_max_bytes(output, self.max_sample_bytes, [event])
        _mark_seen(state, request_id, request, event)

    def _with_features(
        self, state: JoinState, request_id: str, request: Request, change: LabelChange
    ) -> LabelChange:
        """The change with the labels of all candidates and the impressions of the sample."""
        folder, candidate = self._label_folder(request.schema), change.engagement[4]
        aggregates = {}
        for c in request.aggregated:
            if (aggregate := state.aggregate_of(request_id, c)) is not None:
                aggregates[c] = aggregate
        after = folder.pack_all(aggregates, len(request.items) >> 3)
        begin, end = (len(change.before) * n for n in (candidate, candidate + 1))
        used = [_present(state.impressions.get((request_id, page.digest))) for page in request.pages]
        return LabelChange(change.engagement, used, after[:begin] + change.before + after[end:], after)

    def _give_up(self, step: StepResult, request_id: str, request: Request, event: Engagement) -> None:
        """Refuse an engagement whose orphan timeout is over."""
        timeout_ms = self.rules.orphan_timeout_ms
        if request.phase in (WAITING, OPEN):
            request.waiting.remove(event.event_id)
            if event.row < 0:
                request.num_orphans -= 1
                step.state.counts.num_orphans -= 1
        if request.time_ms > event.time_ms + timeout_ms:
            error = f"no impression of its request arrived within {timeout_ms} ms, or it closed more than "
            error += f"{self.rules.late_horizon_ms} ms before"
            step.outputs.append(dead_event(step.key, event, "no_request", error))
            _mark_seen(step.state, request_id, request, event, forgotten=True)
        else:
            hint = other_id_form(event.item_id, _some_items(request))
            error = f"its request did not show item {event.item_id}{hint}"
            step.outputs.append(dead_event(step.key, event, "item_not_shown", error))
            _mark_seen(step.state, request_id, request, event)

    def _refuse_too_late(
        self, step: StepResult, request_id: str, request: Request, event: Engagement
    ) -> None:
        late_horizon_ms = self.rules.late_horizon_ms
        error = f"its request closed at {request.close_ms}, more than {late_horizon_ms} ms before this event"
        step.outputs.append(dead_event(step.key, event, "too_late", error))
        _mark_seen(step.state, request_id, request, event, forgotten=True)

    def _expire(self, step: StepResult, request_id: str, request: Request) -> None:
        """End corrections; only engagements beyond the late horizon stay pending."""
        state, horizon_ms = step.state, request.close_ms + self.rules.late_horizon_ms
        for event in _pending(state, request_id, request):
            if event.time_ms <= horizon_ms:
                self._settle(step, request_id, request, event)
        if request.aggregated:
            state.drop_aggregates(request_id, request.aggregated)
        step.phase_changes.append((CLOSED, EXPIRED))
        request.phase, request.header, request.items, request.aggregated = EXPIRED, b"", b"", []
        request.schema = request.window_ms = request.reason = 0
        for event in _keep_pending(state, request_id, request):
            self._schedule_after_close(step, request_id, request, event)

    def _forget(self, step: StepResult, request_id: str, request: Request) -> None:
        """Forget the request. Engagements of a later time wait again, for another request of the same id."""
        state, end_ms = step.state, request.close_ms + 2 * self.rules.late_horizon_ms
        for event in _pending(state, request_id, request):
            if event.time_ms <= end_ms:
                self._refuse_too_late(step, request_id, request, event)
        if request.scope is not None:
            next_request.leave(state, request_id, request)
        waiting = _keep_pending(state, request_id, request)
        if not waiting:
            self._remove(step, request_id, request)
            return
        step.phase_changes.append((EXPIRED, WAITING))
        state.requests[request_id] = Request(
            waiting=[e.event_id for e in waiting],
            num_orphans=len(waiting),
            num_events=len(waiting),
            num_pending=len(waiting),
            newest_event=request.newest_event,
            num_bytes=request.num_bytes,
        )
        state.counts.num_orphans += len(waiting)
        for event in waiting:
            event.row, event.joins_ms = -1, NEVER  # no page shows its item any more
            state.engagements_of(request_id)[event.event_id] = event
            step.schedule_engagement(event.time_ms + self.rules.orphan_timeout_ms, request_id, event.event_id)

    def _remove(self, step: StepResult, request_id: str, request: Request) -> None:
        _keep_pending(step.state, request_id, request)
        del step.state.requests[request_id]
        step.state.counts.num_requests -= 1
        step.phase_changes.append((request.phase, GONE))

    def _label_folder(self, fingerprint: int) -> LabelFolder:
        folder = self._folders.get(fingerprint)
        if folder is None:
            schema = self.registry(fingerprint)
            if schema is None:
                raise CheckpointError(
                    f"schema {fingerprint:016x} of an open request is not in the store; restore its file"
                )
            folder = self._folders[fingerprint] = LabelFolder(schema)
        return folder


def _page_order(page: Page) -> tuple[int, int]:
    return page.time_ms, page.digest


def _num_distinct_items(pages: Iterable[Page]) -> int:
    return len(set().union(*[struct.unpack(f"<{len(page.items) >> 3}Q", page.items) for page in pages]))


def _candidate_of(request: Request, event: Engagement) -> int:
    """Candidate index of the engagement's item in a closed request; -1 if it was not shown."""
    return index_of(request.items, event.item_id.to_bytes(8, "little"))


def _in_order(engagements: Iterable[Engagement]) -> list[Engagement]:
    return sorted(engagements, key=lambda e: (e.time_ms, e.event_id))


def _pending(state: JoinState, request_id: str, request: Request) -> list[Engagement]:
    """In (time, event id) order."""
    if not request.num_pending:
        return []
    return _in_order([e for e in state.engagement_list(request_id, request) if isinstance(e, Engagement)])


def _mark_seen(
    state: JoinState, request_id: str, request: Request, event: Engagement, *, forgotten: bool = False
) -> None:
    """Replace a processed engagement by a mark that recognizes copies; a `forgotten` one only keeps its list
    position."""
    request.num_pending -= 1
    request.num_events -= forgotten
    request.num_bytes -= engagement_cost(event)
    seen = SeenEngagement(event.event_id, event.previous_id, forgotten)
    state.engagements_of(request_id)[event.event_id] = seen


def _unlink_refused(
    state: JoinState, request_id: str, request: Request, event: Engagement, newer_id: int
) -> None:
    """Remove a refused engagement of a WAITING request, whose list has the order of `waiting`. Such a request
    may live as long as its id is used, so marks would accumulate. `newer_id`: of the next one; 0 = none."""
    stored = state.engagements_of(request_id)
    newer = stored.get(newer_id) if newer_id else None
    if newer is None and request.newest_event == event.event_id:
        request.newest_event = event.previous_id
    elif newer is not None and newer.previous_id == event.event_id:
        newer.previous_id = event.previous_id
        stored[newer_id] = newer
    else:
        return  # state of an earlier build has marks in between
    del stored[event.event_id]


def _keep_pending(state: JoinState, request_id: str, request: Request) -> list[Engagement]:
    """Drop all engagements of a request except the pending ones, which are returned and form the new list."""
    kept = _pending(state, request_id, request)
    if request.newest_event:
        state.drop_engagements(request_id, request)
    request.newest_event, request.num_events = 0, len(kept)
    request.num_bytes = sum(map(engagement_cost, kept))
    for event in kept:
        event.previous_id, request.newest_event = request.newest_event, event.event_id
        state.engagements_of(request_id)[event.event_id] = event
    return kept


def _some_items(request: Request) -> list[int]:
    """Shown items, for an error message; at most 256, so that the search costs a bounded time."""
    columns = [page.items for page in request.pages] or [request.items]
    items = [item for column in columns for item in memoryview(column).cast("Q")[:_MAX_ITEMS_COMPARED]]
    return items[:_MAX_ITEMS_COMPARED]


def _present(impression: Impression | None) -> Impression:
    assert impression is not None, "the impressions of a request are kept until it closes"
    return impression


def _unused_impression(key: bytes, impression: Impression, request: Request) -> Output:
    """The dead letter of an impression that its request could not use."""
    if impression.time_ms > request.close_ms:
        error = f"its request closed at {request.close_ms}, this impression has time {impression.time_ms}"
        return dead_event(key, impression, "after_close", error)
    got = f"{impression.page.schema:016x}"
    error = f"expected schema {request.schema:016x} of the request's opening page, got {got}"
    return dead_event(key, impression, "unknown_schema", error)

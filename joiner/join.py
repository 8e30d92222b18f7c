"""The joiner as a total, deterministic state machine: (state, event | watermark) → (state, outputs, timer).

Events are stored on arrival; nothing closes on arrival. What is due at or before the watermark is done, in event-time order:

    WAITING ─impression─► OPEN ─close_at─► CLOSED ─late horizon─► THIN ─late horizon─► forgotten
       ▲                                     │ emits the sample,                          │
       │                                     │ then corrections                           │
       └───────────── engagements from beyond that, as orphans ──────────────────────────┘

No clock, no I/O, no Flink. For every order of arrival in which no event comes at or behind the watermark, the samples,
corrections and dead letters are the same; tests/joiner holds this against an offline oracle. Outside of that claim, and still
total: events behind the watermark, caps, an event id reused with other bytes, a request id reused after it was forgotten.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from joiner import build
from joiner.build import Output, dead_event
from joiner.rules import Rules, close_at, first_shown, joins_at, num_open, num_orphans, opening, window_of
from joiner.state import CLOSED, NEVER, OPEN, THIN, WAITING, Engagement, Folded, Impression, Request, State, Tombstone
from roo import roo_pb2 as pb
from roo.errors import CheckpointError
from roo.schema import Schema


class Join:
    """Stateless: all state is in the `State` given, one a Kafka key, which calls change in place.

    Both calls take the current watermark, which never goes back, and return what is to be written. Afterwards `state.due_ms`
    is when the machine wants `advance` next: the one timer of the key. A call that raises (a defect) may leave the state
    half-changed: adapters keep the bytes from before.
    """

    def __init__(self, rules: Rules, schemas: Callable[[int], Schema | None], max_candidates: int = 1000) -> None:
        self.rules, self.schemas, self.max_candidates = rules, schemas, max_candidates

    def apply(self, state: State, key: bytes, event: Impression | Engagement, watermark_ms: int) -> list[Output]:
        """Store one event that has come, and do what it made due."""
        if isinstance(event, Impression):
            outputs = self._impression(state, key, event, watermark_ms)
            if self.rules.next_request != "off":
                self._plan_open(state, key)
        else:
            outputs = self._engagement(state, key, event, watermark_ms)
        return outputs + self.advance(state, key, watermark_ms)

    def advance(self, state: State, key: bytes, watermark_ms: int) -> list[Output]:
        """Do what is due at or before the watermark. At `END` everything is: all requests close, orphans are given up."""
        outputs: list[Output] = []
        due = [(r.time_ms, request_id) for request_id, r in state.requests.items() if r.due_ms <= watermark_ms]
        for _, request_id in sorted(due):  # by request time: a request closes before the one that ends it is forgotten
            request = state.requests[request_id]
            while request.due_ms <= watermark_ms:
                outputs += self._step(state, key, request, watermark_ms)
                self._plan(state, key, request)
            if request.due_ms == NEVER:
                del state.requests[request_id]
        return outputs

    def _impression(self, state: State, key: bytes, event: Impression, watermark_ms: int) -> list[Output]:
        request = state.requests.get(event.request_id)
        refusal = self._refuse_impression(state, request, event, watermark_ms)
        if refusal == ("", ""):
            return []
        if refusal is not None:
            return [dead_event(key, event, *refusal)]
        if request is None:
            request = state.requests[event.request_id] = Request()
        if request.phase == WAITING:
            request.phase, request.late = OPEN, event.time_ms <= watermark_ms
        request.impressions.append(event)
        first = opening(request.impressions)
        request.time_ms, request.session_id = first.time_ms, first.session_id
        self._plan(state, key, request)
        return []

    def _refuse_impression(
        self, state: State, request: Request | None, event: Impression, watermark_ms: int
    ) -> tuple[str, str] | None:
        """(reason, error) of the dead letter, ("", "") for a duplicate, None to take it."""
        if request is None or request.phase == WAITING:
            if event.time_ms + self.rules.late_horizon_ms <= watermark_ms:
                return (
                    "too_late",
                    f"came {watermark_ms - event.time_ms} ms behind the watermark: its request may have been emitted",
                )
            if num_open(state) >= self.rules.max_open_requests or len(state.requests) >= self.rules.max_requests:
                return "overflow", f"expected at most {self.rules.max_open_requests} open requests a user"
            return None
        if request.tombstone is not None:
            if event.digest in request.tombstone.digests:
                return "", ""
            if len(request.tombstone.digests) < self.rules.max_engagements:
                request.tombstone.digests.append(event.digest)
            return "after_close", f"its request closed at {request.tombstone.close_ms}, this came with time {event.time_ms}"
        for known in request.impressions:
            if known.digest == event.digest:
                known.copies += 1
                return "", ""
        shown = {item for i in request.impressions for item in i.item_ids}
        if len(shown.union(event.item_ids)) > self.max_candidates:
            return "overflow", f"expected at most {self.max_candidates} candidates a request"
        return None

    def _engagement(self, state: State, key: bytes, event: Engagement, watermark_ms: int) -> list[Output]:
        request = state.requests.get(event.request_id)
        if request is None:
            if event.time_ms + self.rules.late_horizon_ms <= watermark_ms:
                return [dead_event(key, event, "too_late", f"came {watermark_ms - event.time_ms} ms behind the watermark")]
            request = Request()
        if _is_duplicate(request, event):
            return []
        if self._is_overflow(state, request, event):
            error = (
                f"expected at most {self.rules.max_orphans} waiting engagements a user, {self.rules.max_engagements} a request"
            )
            return [dead_event(key, event, "overflow", error)]
        state.requests[event.request_id] = request
        request.pending[event.event_id] = event
        self._plan(state, key, request)
        return []

    def _is_overflow(self, state: State, request: Request, event: Engagement) -> bool:
        folded = len(request.tombstone.folded) if request.tombstone is not None else 0
        if len(request.pending) + len(request.refused) + folded >= self.rules.max_engagements:
            return True
        waits = request.phase == WAITING or (request.phase == OPEN and event.item_id not in first_shown(request))
        return waits and num_orphans(state) >= self.rules.max_orphans

    def _step(self, state: State, key: bytes, request: Request, watermark_ms: int) -> list[Output]:
        """The next thing that is due."""
        if request.phase == WAITING:
            return self._expire_orphans(key, request, watermark_ms)
        if request.phase == OPEN:
            close_ms, reason = self._close_at(state, key, request, watermark_ms)
            if close_ms > watermark_ms:
                return self._expire_orphans(key, request, watermark_ms)
            return self._expire_orphans(key, request, close_ms) + self._close(key, request, close_ms, reason)
        if request.phase == CLOSED:
            return self._settle(key, request, watermark_ms)
        return self._forget(key, request, watermark_ms)

    def _expire_orphans(self, key: bytes, request: Request, watermark_ms: int) -> list[Output]:
        shown = first_shown(request)
        gone = [
            e
            for e in request.pending.values()
            if e.time_ms + self.rules.orphan_timeout_ms <= watermark_ms and joins_at(e, shown, self.rules) is None
        ]
        return [self._give_up(key, request, e) for e in _in_order(gone)]

    def _give_up(self, key: bytes, request: Request, event: Engagement) -> Output:
        """An orphan's time is over."""
        del request.pending[event.event_id]
        if request.time_ms > event.time_ms + self.rules.orphan_timeout_ms:
            return dead_event(key, event, "no_request", f"no impression of it came within {self.rules.orphan_timeout_ms} ms")
        request.refused.append(event.event_id)
        return dead_event(key, event, "item_not_shown", f"its request did not show item {event.item_id}")

    def _close_at(self, state: State, key: bytes, request: Request, watermark_ms: int) -> tuple[int, int]:
        close_ms, reason = close_at(self.rules, key, state, request)
        return (min(close_ms, watermark_ms), pb.CLOSE_LATE) if request.late else (close_ms, reason)

    def _close(self, key: bytes, request: Request, close_ms: int, reason: int) -> list[Output]:
        """Emit the sample and leave the tombstone."""
        first, shown = opening(request.impressions), first_shown(request)
        in_order = sorted(request.impressions, key=lambda i: (i.time_ms, i.digest))
        used = [i for i in in_order if i.time_ms <= close_ms and i.schema == first.schema]
        rows = build.choose_rows(used)
        folded = sorted(
            (at_ms, e.event_id)
            for e in request.pending.values()
            if (at_ms := joins_at(e, shown, self.rules)) is not None and at_ms <= close_ms
        )
        taken = [request.pending.pop(event_id) for _, event_id in folded]
        candidate = {item: n for n, item in enumerate(rows.item_ids)}
        request.phase, request.tombstone = (
            CLOSED,
            Tombstone(
                close_ms=close_ms,
                reason=reason,
                header=build.header_of(first),
                window_ms=window_of(self.rules, key, first),
                item_ids=rows.item_ids,
                folded=[
                    Folded(e.event_id, candidate[e.item_id], e.action, e.value, at)
                    for e, (at, _) in zip(taken, folded, strict=True)
                ],
                digests=[i.digest for i in in_order],
            ),
        )
        num_duplicates = rows.num_repeats + sum(i.copies - 1 for i in used) + sum(e.copies - 1 for e in taken)
        outputs = [build.sample(key, used, request.tombstone, self._schema(first.schema), num_duplicates=num_duplicates)]
        outputs += [_unused(key, i, close_ms, first) for i in in_order if i not in used]
        request.impressions = used if self.rules.correction_horizon_ms else []
        return outputs

    def _settle(self, key: bytes, request: Request, watermark_ms: int) -> list[Output]:
        """CLOSED: corrections and refusals up to the watermark, features dropped and the tombstone thinned in their time."""
        assert request.tombstone is not None
        horizon_ms = request.tombstone.close_ms + self.rules.late_horizon_ms
        outputs = []
        for event in _in_order(request.pending.values()):
            if event.time_ms > min(watermark_ms, horizon_ms):
                continue
            if event.item_id in request.tombstone.item_ids:
                outputs.append(self._correct(key, request, request.tombstone, event))
            elif min(event.time_ms + self.rules.orphan_timeout_ms, horizon_ms) <= watermark_ms:
                outputs.append(self._give_up(key, request, event))
        if request.tombstone.close_ms + self.rules.correction_horizon_ms <= watermark_ms:
            request.impressions = []
        if horizon_ms <= watermark_ms:
            request.phase, request.refused = THIN, []
            request.tombstone = Tombstone(close_ms=request.tombstone.close_ms, digests=request.tombstone.digests)
        return outputs

    def _correct(self, key: bytes, request: Request, tombstone: Tombstone, event: Engagement) -> Output:
        del request.pending[event.event_id]
        before = list(tombstone.folded)
        at_ms = max(event.time_ms, request.time_ms)
        new = Folded(event.event_id, tombstone.item_ids.index(event.item_id), event.action, event.value, at_ms)
        bisect.insort(tombstone.folded, new, key=lambda f: (f.time_ms, f.event_id))
        with_features = event.time_ms <= tombstone.close_ms + self.rules.correction_horizon_ms
        header = pb.Header.FromString(tombstone.header)
        used = request.impressions if with_features else []
        return build.correction(key, event, tombstone, before, used, self._schema(header.schema))

    def _forget(self, key: bytes, request: Request, watermark_ms: int) -> list[Output]:
        """THIN: what comes up to the end of it is too late; then the request is as if it had never been."""
        assert request.tombstone is not None
        close_ms, end_ms = request.tombstone.close_ms, request.tombstone.close_ms + 2 * self.rules.late_horizon_ms
        gone = [e for e in request.pending.values() if e.time_ms <= min(watermark_ms, end_ms)]
        for event in gone:
            del request.pending[event.event_id]
        if end_ms <= watermark_ms:
            request.phase, request.tombstone, request.time_ms, request.late = WAITING, None, NEVER, False
        error = f"its request closed at {close_ms}, more than {self.rules.late_horizon_ms} ms before"
        return [dead_event(key, e, "too_late", error) for e in _in_order(gone)]

    def _plan_open(self, state: State, key: bytes) -> None:
        for request in state.requests.values():
            if request.phase == OPEN:
                self._plan(state, key, request)

    def _plan(self, state: State, key: bytes, request: Request) -> None:
        """Set `due_ms`."""
        times = [NEVER]
        timeout_ms, horizon_ms = self.rules.orphan_timeout_ms, self.rules.late_horizon_ms
        if request.phase in (WAITING, OPEN):
            shown = first_shown(request) if request.pending else {}
            times += [e.time_ms + timeout_ms for e in request.pending.values() if joins_at(e, shown, self.rules) is None]
            if request.phase == OPEN:
                times.append(request.time_ms if request.late else close_at(self.rules, key, state, request)[0])
        elif request.tombstone is not None:
            stages_ms = horizon_ms if request.phase == CLOSED else 2 * horizon_ms
            times.append(request.tombstone.close_ms + stages_ms)
            if request.impressions:
                times.append(request.tombstone.close_ms + self.rules.correction_horizon_ms)
            shown_items = request.tombstone.item_ids if request.phase == CLOSED else ()
            waits = timeout_ms if request.phase == CLOSED else 0
            times += [e.time_ms + (0 if e.item_id in shown_items else waits) for e in request.pending.values()]
        request.due_ms = min(times)

    def _schema(self, fingerprint: int) -> Schema:
        schema = self.schemas(fingerprint)
        if schema is None:
            raise CheckpointError(f"schema {fingerprint:016x} of an open request is gone from the store; put its TOML back")
        return schema


def _in_order(events: Iterable[Engagement]) -> list[Engagement]:
    return sorted(events, key=lambda e: (e.time_ms, e.event_id))


def _is_duplicate(request: Request, event: Engagement) -> bool:
    """Whether its id has been seen; a copy that comes before the close is counted."""
    known = request.pending.get(event.event_id)
    if known is not None:
        known.copies += 1
        return True
    if event.event_id in request.refused:
        return True
    return request.tombstone is not None and any(f.event_id == event.event_id for f in request.tombstone.folded)


def _unused(key: bytes, impression: Impression, close_ms: int, first: Impression) -> Output:
    """The dead letter of an impression that its request could not use."""
    if impression.time_ms > close_ms:
        return dead_event(key, impression, "after_close", f"its request closed at {close_ms}, its time is {impression.time_ms}")
    error = f"expected schema {first.schema:016x} as its request began with, got {impression.schema:016x}"
    return dead_event(key, impression, "unknown_schema", error)

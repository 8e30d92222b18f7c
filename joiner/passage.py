"""What time does to a request and its engagements: the close, corrections, giving up, thinning, forgetting."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from joiner import budget, build, scopes
from joiner.build import Change, Content, dead_event
from joiner.fold import Fact, Labels
from joiner.rules import Rules
from joiner.state import (
    CLOSED,
    NEVER,
    OPEN,
    THIN,
    WAITING,
    Engagement,
    Impression,
    JoinState,
    Page,
    Request,
    Tally,
    Trace,
    index_of,
)
from joiner.turn import Turn
from roostream.errors import CheckpointError
from roostream.schema.ids import other_form
from roostream.schema.schema import Registry

_MAX_LOOKED_AT = 256


class _Folds(Struct, gc=False):
    """What becomes of the engagements of a request that closes."""

    facts: list[Fact]  # those that are folded, in order
    num_copies: int  # duplicates of them and of the request's impressions
    left: list[Engagement]  # those that stay
    events: list[Engagement]  # those of `facts`


class Passage:
    """The steps of the state machine that time makes; `join.py` has those that events make."""

    def __init__(self, rules: Rules, registry: Registry, max_bytes: int) -> None:
        """`max_bytes`: of a sample or correction."""
        self.rules, self.registry, self.max_bytes = rules, registry, max_bytes
        self._labels: dict[int, Labels] = {}

    def set_due(self, turn: Turn, request_id: str, request: Request) -> None:
        """When the request's own next step is due. Called after each change of what that depends on."""
        if request.phase == OPEN:
            due_ms = request.close_ms
        elif request.phase == CLOSED:
            kept_ms = self.rules.correction_horizon_ms if request.pages else self.rules.late_horizon_ms
            due_ms = request.close_ms + kept_ms
        elif request.phase == THIN:
            due_ms = request.close_ms + 2 * self.rules.late_horizon_ms
        else:
            due_ms = NEVER
        if due_ms != request.due_ms:
            request.due_ms = due_ms
            turn.wake_request(due_ms, request_id, request.time_ms)

    def request(self, turn: Turn, request_id: str, request: Request) -> None:
        """The request's next step, which is due."""
        if request.phase == OPEN:
            self._close(turn, request_id, request)
        elif request.phase == THIN:
            self._forget(turn, request_id, request)
            return
        else:
            self._drop_pages(turn.state, request_id, request)
            if request.due_ms >= request.close_ms + self.rules.late_horizon_ms:
                self._thin(turn, request_id, request)
        self.set_due(turn, request_id, request)
        turn.state.requests[request_id] = request

    def event(self, turn: Turn, request_id: str, request: Request, event_id: int) -> None:
        """An engagement that was to be looked at now; nothing if it has joined, or was dealt with."""
        event = turn.state.events_of(request_id).get(event_id) if request.num_pending else None
        if type(event) is not Engagement:
            return
        if request.phase == CLOSED:
            self._settle(turn, request_id, request, event)
        elif request.phase == THIN:
            self._refuse_late(turn, request_id, request, event)
        elif event_id in request.waiting:
            self._give_up(turn, request_id, request, event)
            if request.phase == WAITING and not request.waiting:
                self._remove(turn.state, request_id, request)
                return
        turn.state.requests[request_id] = request

    def plan_event(self, turn: Turn, request_id: str, request: Request, event: Engagement) -> None:
        """When an engagement of a CLOSED or THIN request is due. Those that lie beyond the phase are planned when it ends."""
        horizon_ms = request.close_ms + self.rules.late_horizon_ms
        if request.phase == THIN:
            if event.time_ms <= horizon_ms + self.rules.late_horizon_ms:
                turn.wake_event(event.time_ms, request_id, event.event_id)
        elif event.time_ms <= horizon_ms:
            shown = index_of(request.items, event.item_id.to_bytes(8, "little")) >= 0
            due_ms = event.time_ms if shown else event.time_ms + self.rules.orphan_timeout_ms
            if due_ms < horizon_ms or shown:
                turn.wake_event(due_ms, request_id, event.event_id)

    def _close(self, turn: Turn, request_id: str, request: Request) -> None:
        """Emit the sample and leave the tombstone."""
        state, pages = turn.state, request.pages
        impressions = [_known(state.impressions.get((request_id, page.digest))) for page in pages]
        used, shown = pages, impressions
        if len(pages) > 1:
            used = [p for p in pages if p.time_ms <= request.close_ms and p.schema == request.schema]
            digests = {p.digest for p in used}
            shown = [i for i in impressions if i.page.digest in digests]
        rows = build.choose_rows(used)
        request.items, request.header = rows.items, build.header_of(shown[0])
        folds = _Folds([], rows.num_repeats - len(used), [], [])
        if request.num_pending:
            self._divide(turn, request_id, request, folds, one=len(pages) == 1 and not rows.num_repeats)
        if request.scope is not None:
            scopes.close(state, request_id, request)
        state.head.num_open -= 1
        state.head.num_orphans -= request.num_orphans
        request.phase = CLOSED
        request.digests = b"".join([page.digest.to_bytes(8, "little") for page in pages])
        request.waiting, request.joined_ms, request.num_orphans = [], [], 0
        of, tallies = self.labels_of(request.schema), dict[int, Tally]()
        if folds.facts:
            of.tally(tallies, folds.facts, request.time_ms, request.window_ms)
            request.tallied = [*tallies]
            state.set_tallies(request_id, tallies)
        labels = of.pack_all(tallies, len(request.items) >> 3)
        for page in used:
            folds.num_copies += page.copies
        content = Content(shown, rows.of_page, of.count, labels, folds.facts, folds.num_copies)
        request.num_bytes = sum(map(budget.of_engagement, folds.left))
        output = build.sample(turn.key, request_id, request, content)
        turn.outputs += build.within(output, self.max_bytes, [*shown, *folds.events])
        self._drop_unused(turn, request_id, request, impressions, used)
        for event in folds.left:
            self.plan_event(turn, request_id, request, event)

    def _drop_unused(
        self, turn: Turn, request_id: str, request: Request, impressions: list[Impression], used: list[Page]
    ) -> None:
        """Dead letters of the impressions that the sample couldn't use; those are kept that corrections will need."""
        if len(used) < len(impressions):
            digests = {page.digest for page in used}
            turn.outputs += [
                _unused(turn.key, i, request) for i in impressions if i.page.digest not in digests
            ]
        keeps = self.rules.correction_horizon_ms > 0
        for page in request.pages:
            if not keeps or page not in used:
                del turn.state.impressions[request_id, page.digest]
        request.pages = used if keeps else []

    def _divide(self, turn: Turn, request_id: str, request: Request, folds: _Folds, *, one: bool) -> None:
        """Fold what the request has in time and put off the rest; engagements whose time was over before the close are given up.
        `one`: it has one page, and an item's row there is its candidate."""
        close_ms, held, over = request.close_ms, turn.state.events_of(request_id), list[Engagement]()
        facts = folds.facts
        for event in turn.state.chain(request_id, request):
            if type(event) is not Engagement:
                continue
            if event.joins_ms <= close_ms:
                candidate = event.row if one else index_of(request.items, event.item_id.to_bytes(8, "little"))
                facts.append((event.joins_ms, event.event_id, event.action, event.value, candidate))
                folds.num_copies += event.copies - 1
                folds.events.append(event)
                held[event.event_id] = Trace(event.event_id, event.previous)
            elif event.joins_ms == NEVER and event.time_ms + self.rules.orphan_timeout_ms <= close_ms:
                over.append(event)
            else:
                folds.left.append(event)
        request.num_pending -= len(facts)
        facts.sort()
        for event in _in_order(over) if over else ():
            self._give_up(turn, request_id, request, event)

    def _settle(self, turn: Turn, request_id: str, request: Request, event: Engagement) -> None:
        """CLOSED: an engagement becomes a correction at its own time, or is given up at its own."""
        horizon_ms = request.close_ms + self.rules.late_horizon_ms
        if event.time_ms > min(turn.watermark_ms, horizon_ms):
            return
        candidate = index_of(request.items, event.item_id.to_bytes(8, "little"))
        if candidate >= 0:
            self._correct(turn, request_id, request, event, candidate)
        elif min(event.time_ms + self.rules.orphan_timeout_ms, horizon_ms) <= turn.watermark_ms:
            self._give_up(turn, request_id, request, event)

    def _correct(
        self, turn: Turn, request_id: str, request: Request, event: Engagement, candidate: int
    ) -> None:
        state, of = turn.state, self.labels_of(request.schema)
        tally = state.tally_of(request_id, candidate)
        if tally is None:
            tally = of.nothing()
            request.tallied.append(candidate)
        fact = (max(event.time_ms, request.time_ms), event.event_id, event.action, event.value, candidate)
        before, tallies = of.pack(tally), {candidate: tally}
        of.tally(tallies, [fact], request.time_ms, request.window_ms)
        state.set_tallies(request_id, tallies)
        change = Change(fact, [], before, of.pack(tally))
        if request.pages and event.time_ms <= request.close_ms + self.rules.correction_horizon_ms:
            change = self._of_the_list(state, request_id, request, change)
        output = build.correction(turn.key, request_id, request, change, of.count)
        turn.outputs += build.within(output, self.max_bytes, [event])
        _end(state, request_id, request, event)

    def _of_the_list(self, state: JoinState, request_id: str, request: Request, change: Change) -> Change:
        """The change of one candidate's labels as one of all candidates', with the features of the sample."""
        of, candidate = self.labels_of(request.schema), change.fact[4]
        found = {c: state.tally_of(request_id, c) for c in request.tallied}
        after = of.pack_all(
            {c: tally for c, tally in found.items() if tally is not None}, len(request.items) >> 3
        )
        at, end = (len(change.before) * n for n in (candidate, candidate + 1))
        used = [_known(state.impressions.get((request_id, page.digest))) for page in request.pages]
        return Change(change.fact, used, after[:at] + change.before + after[end:], after)

    def _give_up(self, turn: Turn, request_id: str, request: Request, event: Engagement) -> None:
        """An orphan's time is over."""
        timeout_ms = self.rules.orphan_timeout_ms
        if request.phase in (WAITING, OPEN):
            request.waiting.remove(event.event_id)
            if event.row < 0:
                request.num_orphans -= 1
                turn.state.head.num_orphans -= 1
        if request.time_ms > event.time_ms + timeout_ms:
            error = f"no impression of it came within {timeout_ms} ms"
            turn.outputs.append(dead_event(turn.key, event, "no_request", error))
            _end(turn.state, request_id, request, event, gone=True)
        else:
            error = f"its request did not show item {event.item_id}{other_form(event.item_id, _some_shown(request))}"
            turn.outputs.append(dead_event(turn.key, event, "item_not_shown", error))
            _end(turn.state, request_id, request, event)

    def _refuse_late(self, turn: Turn, request_id: str, request: Request, event: Engagement) -> None:
        """THIN: what comes up to the end of it is too late."""
        error = f"its request closed at {request.close_ms}, more than {self.rules.late_horizon_ms} ms before"
        turn.outputs.append(dead_event(turn.key, event, "too_late", error))
        _end(turn.state, request_id, request, event, gone=True)

    def _drop_pages(self, state: JoinState, request_id: str, request: Request) -> None:
        """Corrections carry no features from here on."""
        for page in request.pages:
            del state.impressions[request_id, page.digest]
        request.pages = []

    def _thin(self, turn: Turn, request_id: str, request: Request) -> None:
        """Corrections end here; only what is beyond the late horizon still waits."""
        state, horizon_ms = turn.state, request.close_ms + self.rules.late_horizon_ms
        for event in _pending(state, request_id, request):
            if event.time_ms <= horizon_ms:
                self._settle(turn, request_id, request, event)
        if request.tallied:
            state.forget_tallies(request_id, request.tallied)
        request.phase, request.header, request.items, request.tallied = THIN, b"", b"", []
        for event in _keep_pending(state, request_id, request):
            self.plan_event(turn, request_id, request, event)

    def _forget(self, turn: Turn, request_id: str, request: Request) -> None:
        """From here on the request is as if it had never been; what is from beyond that waits for another of its name."""
        state, end_ms = turn.state, request.close_ms + 2 * self.rules.late_horizon_ms
        for event in _pending(state, request_id, request):
            if event.time_ms <= end_ms:
                self._refuse_late(turn, request_id, request, event)
        if request.scope is not None:
            scopes.leave(state, request_id, request)
        waiting = _keep_pending(state, request_id, request)
        if not waiting:
            self._remove(state, request_id, request)
            return
        n = len(waiting)
        state.requests[request_id] = Request(
            waiting=[e.event_id for e in waiting],
            num_orphans=n,
            num_events=n,
            num_pending=n,
            last_event=request.last_event,
            num_bytes=request.num_bytes,
        )
        state.head.num_orphans += n
        for event in waiting:
            event.row, event.joins_ms = -1, NEVER  # nothing shows its item any more
            state.events_of(request_id)[event.event_id] = event
            turn.wake_event(event.time_ms + self.rules.orphan_timeout_ms, request_id, event.event_id)

    def _remove(self, state: JoinState, request_id: str, request: Request) -> None:
        _keep_pending(state, request_id, request)
        del state.requests[request_id]
        state.head.num_requests -= 1

    def labels_of(self, fingerprint: int) -> Labels:
        known = self._labels.get(fingerprint)
        if known is None:
            schema = self.registry(fingerprint)
            if schema is None:
                raise CheckpointError(
                    f"schema {fingerprint:016x} of an open request is gone from the store; put its TOML back"
                )
            known = self._labels[fingerprint] = Labels(schema)
        return known


def _in_order(events: Iterable[Engagement]) -> list[Engagement]:
    return sorted(events, key=lambda e: (e.time_ms, e.event_id))


def _pending(state: JoinState, request_id: str, request: Request) -> list[Engagement]:
    """In (time, event id) order."""
    if not request.num_pending:
        return []
    return _in_order([e for e in state.chain(request_id, request) if isinstance(e, Engagement)])


def _end(
    state: JoinState, request_id: str, request: Request, event: Engagement, *, gone: bool = False
) -> None:
    """Of an engagement that has come to its end, only what tells copies of it is left; of one that is forgotten, its place."""
    request.num_pending -= 1
    request.num_events -= gone
    request.num_bytes -= budget.of_engagement(event)
    state.events_of(request_id)[event.event_id] = Trace(event.event_id, event.previous, gone)


def _keep_pending(state: JoinState, request_id: str, request: Request) -> list[Engagement]:
    """Forget all engagements of a request but those that are pending, which are returned and make up its chain."""
    kept = _pending(state, request_id, request)
    if request.last_event:
        state.forget_events(request_id, request)
    request.last_event, request.num_events = 0, len(kept)
    request.num_bytes = sum(map(budget.of_engagement, kept))
    for event in kept:
        event.previous, request.last_event = request.last_event, event.event_id
        state.events_of(request_id)[event.event_id] = event
    return kept


def _some_shown(request: Request) -> list[int]:
    """Items that it showed, for a message: looking for one costs a bounded time, however long the lists are."""
    parts = [page.items for page in request.pages] or [request.items]
    return [item for part in parts for item in memoryview(part).cast("Q")[:_MAX_LOOKED_AT]][:_MAX_LOOKED_AT]


def _known(impression: Impression | None) -> Impression:
    assert impression is not None, "the impressions of a request are kept until it closes"
    return impression


def _unused(key: bytes, impression: Impression, request: Request) -> build.Output:
    """The dead letter of an impression that its request could not use."""
    if impression.time_ms > request.close_ms:
        error = f"its request closed at {request.close_ms}, its time is {impression.time_ms}"
        return dead_event(key, impression, "after_close", error)
    error = (
        f"expected schema {request.schema:016x} as its request began with, got {impression.page.schema:016x}"
    )
    return dead_event(key, impression, "unknown_schema", error)

"""A failing call of the join costs only its event or its request."""

from __future__ import annotations

import pytest

from joiner import keyed_join
from joiner.join import Join, StepResult
from joiner.keyed_join import KeyedJoin
from joiner.outputs import Output
from joiner.state import END, GONE, Engagement, Impression, JoinState, MemoryState, Request
from roostream.errors import CheckpointError
from tests.joiner.cases import (
    KEY,
    SCHEMA,
    SCHEMAS,
    DictStore,
    engagement,
    event,
    impression,
    only,
    reasons,
    rules,
    samples,
)

T = 1_000
BAD_ACTION, BAD_REQUEST = "defect", "bad"


class FaultyJoin(Join):
    """Fails for engagements of one action after the state was changed, and at the close of one request."""

    error: Exception = ZeroDivisionError("a defect")

    def apply(
        self, state: JoinState, key: bytes, event: Impression | Engagement, watermark_ms: int
    ) -> StepResult:
        step = super().apply(state, key, event, watermark_ms)
        if isinstance(event, Engagement) and event.action == BAD_ACTION:
            raise self.error
        return step

    def _close(self, step: StepResult, request_id: str, request: Request) -> None:
        if request_id == BAD_REQUEST:
            step.state.impressions[request_id, 1] = None  # type: ignore[assignment]
            raise self.error
        super()._close(step, request_id, request)


def make_join(error: Exception = FaultyJoin.error) -> tuple[KeyedJoin, DictStore]:
    faulty, store = FaultyJoin(rules(), SCHEMAS.get, SCHEMA.limits), DictStore()
    faulty.error = error
    return KeyedJoin(faulty, store), store


def close_all(
    keyed: KeyedJoin, store: DictStore, changes: list[tuple[int, int]] | None = None
) -> list[Output]:
    out = []
    while due := sorted(store.as_memory_state().due):
        step = keyed.advance(KEY, due[0], END)
        out += step.outputs
        if changes is not None:
            changes += step.phase_changes
    return out


def test_an_event_for_which_the_join_fails_becomes_a_dead_letter_and_changes_no_state() -> None:
    keyed, store = make_join()
    keyed.apply(KEY, event(impression(T)), 0)
    before = dict(store)
    step = keyed.apply(KEY, event(engagement(T + 1, event=1, action=BAD_ACTION)), 0)
    dead = only(step.outputs, "dead_letters")
    assert (dead.reason, dead.message.event_id) == ("internal_error", 1) and store == before
    assert "a defect" in dead.message.error and step.timers_ms == []
    keyed.apply(KEY, event(engagement(T + 2, event=2)), 0)
    assert only(close_all(keyed, store), "samples").events == [2]


def test_a_request_whose_close_fails_becomes_dead_letters_and_others_due_at_its_time_close() -> None:
    keyed, store = make_join()
    for request in ("a", BAD_REQUEST, "z"):
        keyed.apply(KEY, event(impression(T, request=request)), 0)
    keyed.apply(KEY, event(engagement(T + 1, event=1, request=BAD_REQUEST)), 0)
    changes: list[tuple[int, int]] = []
    out = close_all(keyed, store, changes)
    assert {s.message.header.request_id for s in samples(out)} == {"a", "z"}
    assert reasons(out) == ["internal_error"] * 2
    assert store.as_memory_state() == MemoryState() and not store
    assert sum(after == GONE for _, after in changes) == 3, "the removed request must be counted too"


def test_a_defect_that_affects_every_event_is_raised() -> None:
    keyed, _ = make_join()
    bad_events = [event(engagement(T, event=n, action=BAD_ACTION)) for n in range(1, 1_000)]
    with pytest.raises(ZeroDivisionError):
        for num_dead, bad_event in enumerate(bad_events):  # noqa: B007
            keyed.apply(KEY, bad_event, 0)
    assert num_dead == keyed_join.MAX_FAILED_CALLS - 1


def test_an_unreadable_store_makes_no_dead_letters() -> None:
    keyed, store = make_join(CheckpointError("schema is not in the store"))
    with pytest.raises(CheckpointError):
        keyed.apply(KEY, event(engagement(T, event=1, action=BAD_ACTION)), 0)
    keyed.apply(KEY, event(impression(T, request=BAD_REQUEST)), 0)
    with pytest.raises(CheckpointError):
        close_all(keyed, store)
    assert store.as_memory_state().counts.num_requests == 1

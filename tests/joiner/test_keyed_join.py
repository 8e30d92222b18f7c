"""A failing call of the join costs its event or its request, and nothing else."""

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
    """Fails for engagements of one action, half-way, and at the close of one request."""

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


def join(error: Exception = FaultyJoin.error) -> tuple[KeyedJoin, DictStore]:
    faulty, store = FaultyJoin(rules(), SCHEMAS.get, SCHEMA.limits), DictStore()
    faulty.error = error
    return KeyedJoin(faulty, store), store


def close_all(
    keyed: KeyedJoin, store: DictStore, changes: list[tuple[int, int]] | None = None
) -> list[Output]:
    out = []
    while due := sorted(store.whole().due):
        step = keyed.advance(KEY, due[0], END)
        out += step.outputs
        if changes is not None:
            changes += step.phase_changes
    return out


def test_an_event_for_which_the_join_fails_becomes_a_dead_letter_and_changes_no_state() -> None:
    keyed, store = join()
    keyed.apply(KEY, event(impression(T)), 0)
    before = dict(store)
    step = keyed.apply(KEY, event(engagement(T + 1, event=1, action=BAD_ACTION)), 0)
    dead = only(step.outputs, "dead_letters")
    assert (dead.reason, dead.message.event_id) == ("internal_error", 1) and store == before
    assert "a defect" in dead.message.error and step.timers_ms == []
    keyed.apply(KEY, event(engagement(T + 2, event=2)), 0)
    assert only(close_all(keyed, store), "samples").events == [2]


def test_a_request_whose_close_fails_becomes_dead_letters_and_others_due_at_its_time_close() -> None:
    keyed, store = join()
    for request in ("a", BAD_REQUEST, "z"):
        keyed.apply(KEY, event(impression(T, request=request)), 0)
    keyed.apply(KEY, event(engagement(T + 1, event=1, request=BAD_REQUEST)), 0)
    changes: list[tuple[int, int]] = []
    out = close_all(keyed, store, changes)
    assert {s.message.header.request_id for s in samples(out)} == {"a", "z"}
    assert reasons(out) == ["internal_error"] * 2
    assert store.whole() == MemoryState() and not store
    assert sum(after == GONE for _, after in changes) == 3, "the removed request is counted too"


def test_a_defect_that_affects_everything_is_raised() -> None:
    keyed, _ = join()
    bad = [event(engagement(T, event=n, action=BAD_ACTION)) for n in range(1, 1_000)]
    with pytest.raises(ZeroDivisionError):
        for num_dead, found in enumerate(bad):  # noqa: B007
            keyed.apply(KEY, found, 0)
    assert num_dead == keyed_join.MAX_FAILED_CALLS - 1


def test_a_store_that_cannot_be_read_costs_no_event() -> None:
    keyed, store = join(CheckpointError("schema is not in the store"))
    with pytest.raises(CheckpointError):
        keyed.apply(KEY, event(engagement(T, event=1, action=BAD_ACTION)), 0)
    keyed.apply(KEY, event(impression(T, request=BAD_REQUEST)), 0)
    with pytest.raises(CheckpointError):
        close_all(keyed, store)
    assert store.whole().counts.num_requests == 1

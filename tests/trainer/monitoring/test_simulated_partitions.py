"""Caught-up over simulated partitions: whatever comes, however it is consumed, an account of every record
beside it."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.runtime.kafka.consumer import PartitionLag
from trainer.monitoring.caught_up import CaughtUpDetector, CaughtUpLimits, TrainingState

T0 = 1_700_000_000_000
GOOD = (TrainingState.IDLE, TrainingState.CAUGHT_UP)
PATIENCE = CaughtUpLimits(lag_ms=5000, hold_s=3)


@dataclasses.dataclass
class Simulated:
    """A partition as an account: every record with the monotonic second at which it became readable, and its
    event time."""

    number: int
    readable_s: list[float] = dataclasses.field(default_factory=list)
    event_ms: list[int] = dataclasses.field(default_factory=list)
    position: int = 0
    oldest: int = 0
    hidden: int = 0
    lost: int = 0

    def produce(self, count: int, now_s: float, clock_off_ms: int) -> None:
        self.readable_s += [now_s] * count
        self.event_ms += [T0 + int(1000 * now_s) + clock_off_ms] * count

    def consume(self, count: int) -> None:
        if self.position < self.oldest:
            self.lost += self.oldest - self.position
            self.position = self.oldest
        self.position = min(self.position + count, self.stable_end)

    @property
    def stable_end(self) -> int:
        return len(self.event_ms) - self.hidden

    def lag(self) -> PartitionLag:
        return PartitionLag(
            position=self.position,
            stable_end=self.stable_end,
            high_watermark=len(self.event_ms),
            position_ms=self.event_ms[self.position - 1] if self.position else 0,
            newest_ms=max(self.event_ms, default=0),
            oldest=self.oldest,
            lost=self.lost,
        )

    def unread_for_s(self, now_s: float) -> float:
        """The truth: for how long the next record has waited."""
        return now_s - self.readable_s[self.position] if self.position < self.stable_end else 0.0


second = st.tuples(
    st.integers(0, 30),  # produced
    st.integers(0, 40),  # consumed
    st.sampled_from([0, 0, 0, -7_200_000, 7_200_000]),  # how wrong the producers' clock is
    st.sampled_from(["fine"] * 8 + ["away", "transaction", "retention", "rollback"]),
)
story = st.lists(st.tuples(second, second), min_size=10, max_size=60)


def tell(found: Simulated, event: str) -> None:
    match event:
        case "transaction":
            found.hidden = min(5, len(found.event_ms) - max(found.position, found.oldest))
        case "retention":
            found.oldest = min(found.position + 3, found.stable_end)
        case "rollback":
            found.position = max(found.position - 20, found.oldest)
        case _:
            found.hidden = 0


@given(story)
@settings(max_examples=60, deadline=None)
def test_waiting_records_are_never_reported_as_caught_up_and_counts_are_exact(
    steps: list[tuple[tuple[int, int, int, str], ...]],
) -> None:
    watch, parts = CaughtUpDetector(PATIENCE), [Simulated(0), Simulated(1)]
    for now_s, step in enumerate(steps):
        for part, (produced, consumed, off_ms, event) in zip(parts, step, strict=True):
            part.produce(produced, now_s, off_ms)
            tell(part, event)
            part.consume(consumed)
        away = any(event == "away" for _, _, _, event in step)
        lags = {} if away else {("samples", p.number): p.lag() for p in parts}
        found = watch.observe(lags, now_s)
        if away:
            assert found.overall.state is TrainingState.UNKNOWN and found.overall.lag_records is None
            continue
        for part in parts:
            standing = found.partitions["samples", part.number]
            assert standing.lag_records == part.stable_end - part.position
            assert standing.lost_records == part.lost
            assert standing.hidden_records == part.hidden
            if standing.state in GOOD:
                assert part.unread_for_s(now_s) <= 2 * PATIENCE.lag_ms / 1000 and part.position >= part.oldest
        if found.overall.state in GOOD:
            assert all(s.state in GOOD for s in found.partitions.values())
        assert found.overall.lost_records == sum(p.lost for p in parts)
    assert sum(found.state_seconds.values()) == len(steps) - 1


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0, -7_200_000, 7_200_000])), min_size=30, max_size=80
    )
)
@settings(max_examples=40, deadline=None)
def test_a_reader_that_keeps_up_is_soon_caught_up_and_stays_so(seconds: list[tuple[int, int]]) -> None:
    """Also where the producers' clocks jump: nothing waits, so nothing is late."""
    watch, part = CaughtUpDetector(PATIENCE), Simulated(0)
    for now_s, (produced, off_ms) in enumerate(seconds):
        part.produce(produced, now_s, off_ms)
        part.consume(1000)
        state = watch.observe({("samples", 0): part.lag()}, now_s).overall.state
        assert now_s < PATIENCE.hold_s or state in GOOD


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_direction_of_a_large_lag_follows_the_rates(arriving: int, consuming: int) -> None:
    watch, part = CaughtUpDetector(dataclasses.replace(PATIENCE, window_s=20)), Simulated(0)
    watch.observe({("samples", 0): part.lag()}, 0)
    part.produce(4000, 0, 0)
    for now_s in range(1, 40):
        part.produce(arriving, now_s, 0)
        part.consume(consuming)
        found = watch.observe({("samples", 0): part.lag()}, now_s).overall
    falling = arriving > consuming
    assert found.state is (TrainingState.FALLING_BEHIND if falling else TrainingState.CATCHING_UP)
    assert found.drain is not None and abs(found.drain.value - (consuming - arriving)) < 1e-6
    assert (found.eta.s is None) == (arriving >= consuming)

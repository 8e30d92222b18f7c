"""How fast a lag shrinks, how sure that is, and when it will be gone."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.monitoring.rates import Estimate, RateMeter, time_left


def metered(steps: list[tuple[float, float]], window_s: float = 60.0) -> RateMeter:
    """One second a step: (arrived, consumed) in it."""
    meter, arrived, consumed = RateMeter(window_s), 0.0, 0.0
    meter.update(0.0, 0, 0)
    for second, (came, went) in enumerate(steps, start=1):
        arrived, consumed = arrived + came, consumed + went
        meter.update(float(second), arrived, consumed)
    return meter


def test_a_rate_needs_two_observations_and_an_interval_four() -> None:
    assert metered([]).drain is None
    assert metered([(0, 5)]).drain == (5.0, None, None)
    assert time_left(10, metered([(0, 5)]).drain) == (2.0, None, None)
    assert metered([(0, 5)] * 3).drain == pytest.approx(Estimate(5, 5, 5))


def test_only_the_window_counts() -> None:
    meter = metered([(0, 100)] * 50 + [(0, 1)] * 50, window_s=20)
    assert meter.consumption == pytest.approx(Estimate(1, 1, 1))
    meter.clear()
    assert meter.consumption is None


@pytest.mark.parametrize(
    ("records", "drain", "expected"),
    [
        (0, None, (0.0, 0.0, 0.0)),  # there
        (50, None, (None, None, None)),  # not known yet
        (50, Estimate(-1, -2, 0.5), (None, None, None)),  # grows: never at this rate
        (50, Estimate(0, -1, 1), (None, None, None)),
        (60, Estimate(20, 10, 30), (3.0, 2.0, 6.0)),
        (60, Estimate(20, -5, 30), (3.0, 2.0, None)),  # perhaps it doesn't shrink at all: no bound above
    ],
)
def test_time_left_follows_from_the_rate_and_its_interval(
    records: int, drain: Estimate | None, expected: tuple[float | None, ...]
) -> None:
    assert time_left(records, drain) == expected


def test_the_interval_contains_the_true_rate_nearly_always() -> None:
    """Poisson arrivals at 50/s, and consumption of whole chunks of 64 or 192 at a mean of 80/s: drain is
    30."""
    random, held = np.random.default_rng(5), 0
    for _ in range(300):
        came = random.poisson(50, 60)
        went = 64 * random.poisson(80 / 128, 60) * random.choice([1, 3], 60)
        drain = metered(list(zip(came.tolist(), went.tolist(), strict=True))).drain
        assert drain is not None and drain.low is not None and drain.high is not None
        held += drain.low <= 30 <= drain.high
    assert held >= 0.9 * 300

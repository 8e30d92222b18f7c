from __future__ import annotations

import pytest

from roostream.replay.simulation import ExpectedClickRates
from roostream.replay.world import ExpectedClicks


def test_rates_are_expected_clicks_a_shown_candidate() -> None:
    tally = ExpectedClickRates()
    tally.add(ExpectedClicks(1.0, 0.5, 2.0, 10), 0.0)
    tally.add(ExpectedClicks(2.0, 0.5, 2.0, 10), 61.0)
    assert tally.total.rates() == {"served": 0.15, "random": 0.05, "best": 0.2}
    assert [m["minute"] for m in tally.by_minute()] == [0, 1]
    assert tally.by_minute()[1]["served"] == pytest.approx(0.2)


def test_the_window_forgets() -> None:
    tally = ExpectedClickRates(window=2)
    for served in (9.0, 1.0, 3.0):
        tally.add(ExpectedClicks(served, 1.0, 9.0, 10), 0.0)
    assert tally.recent.rates()["served"] == pytest.approx(0.2)
    assert tally.total.rates()["served"] == pytest.approx(13 / 30)

"""How long history takes yet follows from what is trained, and is unknown where nothing tells."""

from __future__ import annotations

import pytest

from trainer.control.controller import BackfillEta

OF = {"epoch": 1, "epochs": 2, "records": 1000, "left": 1000}


def test_eta_covers_all_epochs_at_the_rate_of_the_last_minute() -> None:
    pace = BackfillEta()
    assert pace.estimate(OF, 0.0, 0.0) == {**OF, "eta_s": [None, None, None]}, "one reading is no rate"
    told = pace.estimate(OF, 100.0, 10.0)
    assert told is not None and told["eta_s"][0] == pytest.approx(1900 / 10)
    for second in range(11, 60):
        told = pace.estimate({**OF, "left": 700}, 100.0 + 20 * (second - 10), float(second))
    assert told is not None and told["eta_s"][0] == pytest.approx((1700 - 960) / (1080 / 59), rel=1e-6)
    value, low, high = told["eta_s"]
    assert low < value < high


def test_a_commit_restarts_the_count_of_remaining_records() -> None:
    pace = BackfillEta()
    pace.estimate({**OF, "epochs": 1}, 0.0, 0.0)
    pace.estimate({**OF, "epochs": 1}, 500.0, 50.0)
    told = pace.estimate({**OF, "epochs": 1, "left": 500}, 500.0, 51.0)
    assert told is not None and told["eta_s"][0] == pytest.approx(500 / (500 / 51))


@pytest.mark.parametrize("trained", [None, 20.0])
def test_eta_is_unknown_after_a_worker_is_silent_or_restarts(trained: float | None) -> None:
    pace = BackfillEta()
    pace.estimate(OF, 0.0, 0.0)
    pace.estimate(OF, 100.0, 10.0)
    told = pace.estimate(OF, trained, 11.0)
    assert told is not None and told["eta_s"] == [None, None, None]
    assert pace.estimate(None, 30.0, 12.0) is None
    assert pace.estimate(OF, 40.0, 13.0) == {**OF, "eta_s": [None, None, None]}


def test_eta_is_unknown_without_progress_and_zero_when_done() -> None:
    pace = BackfillEta()
    for second in range(5):
        told = pace.estimate(OF, 100.0, float(second))
    assert told is not None and told["eta_s"] == [None, None, None]
    done = pace.estimate({**OF, "epoch": 2, "left": 0}, 100.0, 6.0)
    assert done is not None and done["eta_s"] == [0.0, 0.0, 0.0]

"""What the page shows of the past."""

from __future__ import annotations

from trainer.control.status_page import ChangeLog, History, Resolution


def test_a_step_is_one_point_with_its_newest_known_values() -> None:
    history = History(resolutions=(Resolution(10, 5),))
    for at_s, value in ((0, 1.0), (4, 2.0), (9, None), (10, 5.0)):
        history.add(at_s, {"ne": value})
    (grain,) = history.series()
    assert grain == {"step_s": 10, "slot": [0, 1], "at_s": [9, 10], "values": {"ne": [2.0, 5.0]}}


def test_a_coarse_line_does_not_hide_a_peak() -> None:
    history = History(frozenset({"lag_ms"}), (Resolution(60, 5),))
    for at_s, lag in ((0, 1.0), (10, 900.0), (20, 3.0)):
        history.add(at_s, {"lag_ms": lag, "ne": lag})
    assert history.series()[0]["values"] == {"lag_ms": [900.0], "ne": [3.0]}


def test_unknown_values_stay_unknown_and_steps_without_readings_are_gaps() -> None:
    history = History(resolutions=(Resolution(10, 9),))
    history.add(0, {"ne": 1.0})
    history.add(10, {"ne": None})
    history.add(50, {"ne": 2.0, "auc": 0.7})
    (grain,) = history.series()
    assert grain["slot"] == [0, 1, 5] and grain["values"] == {
        "auc": [None, None, 0.7],
        "ne": [1.0, None, 2.0],
    }


def test_memory_is_bounded_in_every_resolution() -> None:
    history = History(resolutions=(Resolution(10, 3), Resolution(60, 2)))
    for at_s in range(0, 1000, 10):
        history.add(at_s, {"n": float(at_s)})
    fine, coarse = history.series()
    assert fine["values"]["n"] == [970.0, 980.0, 990.0] and coarse["values"]["n"] == [950.0, 990.0]


def test_a_change_has_the_old_value_and_its_time() -> None:
    changes = ChangeLog()
    changes.observe(1, 1001, {"state": "catching_up", "incarnation": "1"})
    changes.observe(2, 1002, {"state": "catching_up", "incarnation": "1"})
    assert not changes.newest and changes.since_s("state") == 1
    changes.observe(3, 1003, {"state": "caught_up", "incarnation": "1"})
    assert [tuple(c) for c in changes.newest] == [(3, 1003, "state", "catching_up", "caught_up")]
    assert changes.since_s("state") == 3 and changes.since_s("incarnation") == 1

"""`delay_actions` moves the actions of a log to later times."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.replay.events import Action, Event, Request, delay_actions, delay_ms

MEAN_MS, WINDOW_MS = 300_000, 1_800_000


def log(num_requests: int) -> list[Event]:
    """Build a log with a request every 100 s, a click 1 s after it and a read 1 min after it."""
    out: list[Event] = []
    for n in range(num_requests):
        time_ms, name = 100_000 * n, f"r{n}"
        out.append(Request(name, 1, 2, time_ms, np.array([5])))
        out += [
            Action(name, 1, 2, time_ms + ms, 2 * n + k, 5, a)
            for k, (a, ms) in enumerate((("click", 1000), ("read", 60_000)))
        ]
    return out


def test_events_stay_in_time_order_and_none_is_lost() -> None:
    events = log(200)
    out = [*delay_actions(events, MEAN_MS, WINDOW_MS)]
    assert [e.time_ms for e in out] == sorted(e.time_ms for e in out)
    assert [e for e in out if isinstance(e, Request)] == [e for e in events if isinstance(e, Request)]
    assert sorted(e.event_id for e in out if isinstance(e, Action)) == list(range(400))


def test_actions_of_a_request_have_one_delay_and_stay_within_the_window() -> None:
    out = [e for e in delay_actions(log(200), MEAN_MS, WINDOW_MS) if isinstance(e, Action)]
    for click, read in (
        (c, r) for c in out for r in out if c.event_id % 2 == 0 and r.event_id == c.event_id + 1
    ):
        start_ms = 100_000 * int(click.request_id[1:])
        delay = delay_ms(click.request_id, MEAN_MS, WINDOW_MS)
        assert click.time_ms == min(start_ms + 1000 + delay, start_ms + WINDOW_MS)
        assert read.time_ms == min(start_ms + 60_000 + delay, start_ms + WINDOW_MS)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_delays_are_exponential_given_that_they_are_within_the_window(quantile: float) -> None:
    delays = np.array([delay_ms(f"r{n}", MEAN_MS, WINDOW_MS) for n in range(4000)])
    expected_ms = -MEAN_MS * np.log1p(quantile * np.expm1(-WINDOW_MS / MEAN_MS))
    assert (delays < expected_ms).mean() == pytest.approx(quantile, abs=0.03)
    assert delays.min() >= 0 and delays.max() <= WINDOW_MS

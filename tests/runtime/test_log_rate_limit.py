"""Log lines are limited to one per minute and kind."""

from __future__ import annotations

import logging

import pytest

from roostream.runtime.log_rate_limit import MAX_KINDS, LogRateLimit, LogRateLimitFilter, error_kind


class ManualClock:
    """A clock that tests set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_each_kind_is_logged_once_a_minute_with_the_number_omitted() -> None:
    clock = ManualClock()
    log_rate_limit = LogRateLimit(clock)
    assert [log_rate_limit.due("a") for _ in range(4)] == [0, None, None, None]
    assert log_rate_limit.due("b") == 0
    clock.now_s = 59.9
    assert log_rate_limit.due("a") is None
    clock.now_s = 60.0
    assert log_rate_limit.due("a") == 4 and log_rate_limit.due("b") == 0


def test_a_warning_says_how_many_were_suppressed_and_starts_anew_after_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, logger = ManualClock(), logging.getLogger("roostream.tests")
    log_rate_limit = LogRateLimit(clock)
    for clock.now_s in (0.0, 10.0, 20.0, 70.0):
        log_rate_limit.warning(logger, "store", "commit %d failed", int(clock.now_s))
    assert log_rate_limit.over("store") and not log_rate_limit.over("store")
    log_rate_limit.warning(logger, "store", "commit %d failed", 75)
    first, second, third = caplog.messages
    assert (first, third) == ("commit 0 failed", "commit 75 failed")
    assert second.startswith("commit 70 failed (and 2 more")


def test_the_number_of_kinds_is_bounded() -> None:
    log_rate_limit = LogRateLimit(ManualClock())
    for i in range(10 * MAX_KINDS):
        log_rate_limit.due(i)
    assert log_rate_limit.due(10 * MAX_KINDS - 1) is None
    assert log_rate_limit.due(0) == 0, "the oldest kinds must be dropped"


def test_lines_of_a_library_are_grouped_by_format_string() -> None:
    log_rate_limit = LogRateLimitFilter(LogRateLimit(ManualClock()))
    lines = [logging.LogRecord("x", 30, "", 0, "bad request of %s", (i,), None) for i in range(5)]
    assert [log_rate_limit.filter(line) for line in lines] == [True, False, False, False, False]


def test_errors_raised_at_one_line_are_one_kind() -> None:
    kinds = set()
    for value in ("x", "y"):
        try:
            int(value)
        except ValueError as error:
            kinds.add(error_kind(error))
    try:
        int("z")
    except ValueError as error:
        kinds.add(error_kind(error))
    assert len(kinds) == 2 and error_kind(ValueError()) not in kinds

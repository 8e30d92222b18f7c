"""`parse_time_ms` reads times as text or as a number of milliseconds."""

from __future__ import annotations

import pytest

from roostream.replay.parse_time import parse_time_ms


@pytest.mark.parametrize(
    "value",
    [
        "2023-05-23",
        "20230523",
        "2023-05-23T00:00:00",
        "2023-05-23T02:00:00+02:00",
        "1684800000000",
        1_684_800_000_000,
    ],
)
def test_all_accepted_forms_of_a_time_are_equal(value: int | str) -> None:
    assert parse_time_ms(value) == 1_684_800_000_000


def test_times_in_seconds_are_not_mistaken_for_ms() -> None:
    assert parse_time_ms(315_532_800_000) == parse_time_ms("1980-01-01")
    with pytest.raises(ValueError, match="in seconds"):
        parse_time_ms(10_413_791_999)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "expected a time such as '2023-05-23'.*got ''"),
        ("1969-12-31", "expected a time after 1970, got '1969-12-31'"),
        ("9999-12-31T23:00:00-02:00", "expected a time before the year 10000"),
        (0, "expected a time after 1970 in ms, got 0"),
        (1_684_800_000, "got 1684800000, which"),
        (300_000_000_000, "which is before 1980;"),
        (1_684_800_000_000_000, "µs: divide by 1000"),
        (20_240_601_120_000, "which is beyond the year 2299.*'2024-06-01T12:00:00'"),
        (1 << 63, "which is beyond the year 2299"),
        (10**30, "got a number of 100 bits"),
    ],
)
def test_an_invalid_time_is_refused(value: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_time_ms(value)


def test_an_early_time_may_be_given_as_text_and_digits_are_a_number() -> None:
    assert parse_time_ms("1998-04-01") == 891_388_800_000
    assert parse_time_ms("1701010112233") == 1_701_010_112_233  # ms, not a date in the year 1701

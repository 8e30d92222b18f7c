from __future__ import annotations

import pytest

from traffic.times import parse_time_ms


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
def test_one_moment_can_be_written_in_many_ways(value: int | str) -> None:
    assert parse_time_ms(value) == 1_684_800_000_000


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "expected a time such as '2023-05-23'.*got ''"),
        ("soon", "expected a time such as '2023-05-23'.*got 'soon'"),
        ("1969-12-31", "expected a time after 1970, got '1969-12-31'"),
        (0, "expected a time after 1970, got 0"),
        (1 << 53, "expected a time after 1970"),
    ],
)
def test_what_is_no_time_is_told(value: int | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_time_ms(value)

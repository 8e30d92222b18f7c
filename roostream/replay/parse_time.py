"""Parse the times of logs and command lines."""

from __future__ import annotations

import datetime

EARLIEST_MS = 978_307_200_000  # 2001 began
LATEST_MS = 253_402_300_799_999  # the last millisecond of the year 9999


def parse_time_ms(value: int | str) -> int:
    """Milliseconds since 1970 from an ISO 8601 text (without offset: UTC), or from a number of ms as an
    integer or text.

    A number that means a time before 2001 is probably seconds, one after the year 9999 µs or ns: both are
    errors. Write an earlier time as text.

    Raises:
        ValueError: another format, a time before 1970, or a number in another unit.
    """
    if isinstance(value, int):
        return _from_number(value)
    # eight digits are a date such as 20230523
    if 8 < len(value) < 32 and value.isascii() and value.isdigit():
        return _from_number(int(value))
    try:
        moment = datetime.datetime.fromisoformat(value)
    except ValueError:
        text = f"expected a time such as '2023-05-23', '2023-05-23T12:00:00' or ms, got {value[:64]!r}"
        raise ValueError(text) from None
    time_ms = round((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp() * 1000)
    if time_ms <= 0:
        raise ValueError(f"expected a time after 1970, got {value!r}")
    return time_ms


def _from_number(time_ms: int) -> int:
    if time_ms <= 0:
        raise ValueError(f"expected a time after 1970 in ms, got {shown(time_ms)}")
    if time_ms < EARLIEST_MS:
        is_seconds = EARLIEST_MS <= 1000 * time_ms <= LATEST_MS
        hint = "seems to be in seconds: multiply by 1000" if is_seconds else "is before 2001"
        write = "write a time before 2001 as text, such as '1998-04-01T12:00:00'"
        raise ValueError(f"expected ms since 1970, got {time_ms}, which {hint}; {write}")
    if time_ms > LATEST_MS:
        is_micros = time_ms <= 1000 * LATEST_MS
        hint = "seems to be in µs: divide by 1000" if is_micros else "is beyond the year 9999"
        raise ValueError(f"expected ms since 1970, got {shown(time_ms)}, which {hint}")
    return time_ms


def shown(number: int) -> str:
    """A number for a message; one beyond 20 digits is abbreviated."""
    return str(number) if abs(number) < 10**20 else f"a number of {number.bit_length()} bits"

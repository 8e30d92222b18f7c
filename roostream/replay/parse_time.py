"""Parse the times of logs and command lines."""

from __future__ import annotations

import datetime
import re

EARLIEST_MS = 315_532_800_000  # 1980 began; as seconds, the number is beyond the year 9999
LATEST_MS = 253_402_300_799_999  # the last millisecond of the year 9999
LATEST_NUMBER_MS = 10_413_791_999_999  # 2299 ends; dates in digits (20240601120000) are later in every unit
_DATE = re.compile(
    r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})"  # the date
    r"(?:[T, ]+(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,](\d{1,6})\d*)?)?)?"  # the time
    r"\s*([AaPp][Mm])?\s*(Z|UTC|GMT|[+-]\d{2}:?\d{2})?"
)


def parse_time_ms(value: int | str) -> int:
    """Milliseconds since 1970 from an ISO 8601 text (without offset: UTC), or from a number of ms as an
    integer or text.

    A number that means a time before 1980 is probably seconds, one after 2299 µs, ns or a date in digits: all
    are errors. Write such a time as text.

    Raises:
        ValueError: another format, a time before 1970, or a number in another unit.
    """
    if isinstance(value, int):
        return _from_number(value)
    # Eight digits are a date such as 20230523.
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
    if time_ms > LATEST_MS:  # by its offset
        raise ValueError(f"expected a time before the year 10000 in UTC, got {value!r}")
    return time_ms


def line_time(time_ms: int) -> int | str:
    """A time of which `parse_time_ms` makes the same number again: as text if a number could be in another
    unit."""
    if EARLIEST_MS <= time_ms <= LATEST_NUMBER_MS:
        return time_ms
    since_1970 = datetime.timedelta(milliseconds=time_ms)
    return (datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + since_1970).isoformat()


def parse_table_time_ms(text: str, day_first: bool) -> int:
    """Like `parse_time_ms`, and also times of other sites' tables: `2024/03/04 10:00`, `04.03.2024 10:00:00`,
    `3/4/24 10:00:00 AM`, `2024-03-04 10:00:00 UTC`. With a dot, the day comes before the month; with `/` or
    `-` it does if `day_first`.

    Raises:
        ValueError: as `parse_time_ms`.
    """
    try:
        return parse_time_ms(text)
    except ValueError:
        found = _DATE.fullmatch(text.strip())
        if not found:
            raise
    first, separator, second, third, hour, minute, second_of, fraction, half, zone = found.groups()
    if len(first) == 4:
        year, month, day = first, second, third
    else:
        month, day = (second, first) if day_first or separator == "." else (first, second)
        year = third
    hours = int(hour or 0)
    if half:
        hours = hours % 12 + 12 * (half.lower() == "pm")
    year = f"20{year}" if len(year) == 2 else year
    offset = "+00:00" if zone in (None, "Z", "UTC", "GMT") else zone
    return parse_time_ms(
        f"{year.zfill(4)}-{month.zfill(2)}-{day.zfill(2)}T{hours:02d}:{minute or '00'}:{second_of or '00'}"
        f".{(fraction or '0').ljust(6, '0')}{offset}"
    )


def day_and_month(text: str) -> tuple[int, int] | None:
    """The first two numbers of a time such as `3/4/2024 10:00`, whose order only other times can tell; None
    for any other time."""
    found = _DATE.fullmatch(text.strip())
    if not found or len(found[1]) == 4 or found[2] == ".":
        return None
    return int(found[1]), int(found[3])


def _from_number(time_ms: int) -> int:
    if time_ms <= 0:
        raise ValueError(f"expected a time after 1970 in ms, got {shown(time_ms)}")
    if time_ms < EARLIEST_MS:
        is_seconds = EARLIEST_MS <= 1000 * time_ms <= LATEST_NUMBER_MS
        hint = "seems to be in seconds: multiply by 1000" if is_seconds else "is before 1980"
        write = "write a time before 1980 as text, such as '1978-04-01T12:00:00'"
        raise ValueError(f"expected ms since 1970, got {time_ms}, which {hint}; {write}")
    if time_ms > LATEST_NUMBER_MS:
        is_micros = 1000 * EARLIEST_MS <= time_ms <= 1000 * LATEST_NUMBER_MS
        hint = "is beyond the year 2299; write a date as text, such as '2024-06-01T12:00:00'"
        hint = "seems to be in µs: divide by 1000" if is_micros else hint
        raise ValueError(f"expected ms since 1970, got {shown(time_ms)}, which {hint}")
    return time_ms


def shown(number: int) -> str:
    """A number for a message; one beyond 20 digits is abbreviated."""
    return str(number) if abs(number) < 10**20 else f"a number of {number.bit_length()} bits"

"""Times as people and logs write them, in one reading."""

from __future__ import annotations

import datetime


def parse_time_ms(value: int | str) -> int:
    """`"2023-05-23"`, `"2023-05-23T12:00:00"` (naive = UTC), one with an offset, or ms since 1970 as a number or text → ms.

    Raises:
        ValueError: none of these, or before 1970.
    """
    time_ms = value if isinstance(value, int) else _from_text(value)
    if not 0 < time_ms < 1 << 53:
        raise ValueError(f"expected a time after 1970, got {value!r}")
    return time_ms


def _from_text(text: str) -> int:
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        if text.isdecimal():
            return int(text)
        raise ValueError(
            f"expected a time such as '2023-05-23', '2023-05-23T12:00:00' (UTC) or ms since 1970, got {text!r}"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp() * 1000)

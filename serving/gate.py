"""Admission: what is beyond capacity is refused at once, so that what is admitted keeps its deadline (G7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from serving.errors import RequestError


class Gate:
    """Used by one event loop."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight, self.in_flight = max_in_flight, 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Raises RequestError 429 with Retry-After."""
        if self.in_flight >= self.max_in_flight:
            raise RequestError(429, f"{self.in_flight} requests are in work, the most that this process takes; try again", "", 1)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

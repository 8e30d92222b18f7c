"""Retries with capped exponential delays and jitter. Logs one line an outage, repeated at intervals, not one
a try.

Use it for idempotent calls only: after a lost response the call is made again.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock, SystemClock

log = logging.getLogger("roostream")
T = TypeVar("T")


class Backoff:
    """Retry state of one peer. Not thread-safe."""

    def __init__(
        self,
        *,
        what: str,
        timeout_s: float | None = None,
        first_s: float = 0.1,
        max_s: float = 2.0,
        clock: Clock | None = None,
        log_every_s: float = 30.0,
        expected_s: float = 0.0,
    ) -> None:
        """`expected_s`: an outage shorter than this is usual, for example at a first start, and is logged as
        information and not as a warning."""
        self.what, self.timeout_s, self.first_s, self.max_s = what, timeout_s, first_s, max_s
        self.log_every_s, self.expected_s = log_every_s, expected_s
        self.clock = clock or SystemClock()
        self._down_since_s: float | None = None
        self._logged_s = 0.0
        self._delay_s = first_s

    def until(
        self, call: Callable[[], T], errors: tuple[type[Exception], ...], stop: threading.Event | None = None
    ) -> T:
        """Call until no error of `errors` is raised, waiting after each failure. Returns the result.

        Raises:
            UnavailableError: as `wait`. Other errors of `call` pass through.
        """
        while True:
            try:
                result = call()
            except errors as error:
                self.wait(error, stop)
            else:
                self.reached()
                return result

    def reached(self) -> None:
        """The peer answered; log this if the outage was logged."""
        if self._down_since_s is not None and self._logged_s:
            log.info("%s is back after %.1f s", self.what, self.clock.monotonic_s() - self._down_since_s)
        self._down_since_s, self._logged_s, self._delay_s = None, 0.0, self.first_s

    def wait(self, error: object, stop: threading.Event | None = None) -> None:
        """Sleep before the next try.

        Raises:
            UnavailableError: the outage exceeds `timeout_s`, or `stop` was set while waiting.
        """
        now = self.clock.monotonic_s()
        if self._down_since_s is None:
            self._down_since_s = now
        away = now - self._down_since_s
        if self.timeout_s is not None and away >= self.timeout_s:
            advice = "" if "; " in str(error) else "; start it or check the address"
            raise UnavailableError(f"{self.what} has not answered for {away:.0f} s ({error}){advice}")
        if not self._logged_s or now - self._logged_s >= self.log_every_s:
            level = logging.WARNING if away >= self.expected_s else logging.INFO
            log.log(level, "waiting for %s: %s (retrying)", self.what, error)
            self._logged_s = now or 1e-9
        if self.clock.sleep(self._delay_s * random.uniform(0.5, 1.0), stop):
            raise UnavailableError(f"stopped while waiting for {self.what}")
        self._delay_s = min(self._delay_s * 2, self.max_s)

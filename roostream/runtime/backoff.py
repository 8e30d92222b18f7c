"""Waiting for something that is away: capped exponential delays with jitter, and one clear line, not one a try.

Never wrap a call in this that isn't idempotent: a lost answer looks like a lost call.
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
    """One outage after another of one peer. Not thread-safe."""

    def __init__(
        self,
        *,
        what: str,
        timeout_s: float | None = None,
        first_s: float = 0.1,
        max_s: float = 2.0,
        clock: Clock | None = None,
        say_every_s: float = 30.0,
    ) -> None:
        self.what, self.timeout_s, self.first_s, self.max_s, self.say_every_s = (
            what,
            timeout_s,
            first_s,
            max_s,
            say_every_s,
        )
        self.clock = clock or SystemClock()
        self._since: float | None = None
        self._said = 0.0
        self._delay_s = first_s

    def until(
        self, call: Callable[[], T], errors: tuple[type[Exception], ...], stop: threading.Event | None = None
    ) -> T:
        """What `call` returns once it raises none of `errors`, with a wait after each try.

        Raises:
            UnavailableError: as `wait`. Whatever else `call` raises passes through.
        """
        while True:
            try:
                found = call()
            except errors as error:
                self.wait(error, stop)
            else:
                self.reached()
                return found

    def reached(self) -> None:
        """The peer answered: say so if it had been reported away."""
        if self._since is not None and self._said:
            log.info("%s is back after %.1f s", self.what, self.clock.monotonic_s() - self._since)
        self._since, self._said, self._delay_s = None, 0.0, self.first_s

    def wait(self, error: object, stop: threading.Event | None = None) -> None:
        """Sleep before the next try.

        Raises:
            UnavailableError: the time limit of this outage has passed, or `stop` was set while waiting.
        """
        now = self.clock.monotonic_s()
        if self._since is None:
            self._since = now
        away = now - self._since
        if self.timeout_s is not None and away >= self.timeout_s:
            raise UnavailableError(
                f"{self.what} has not answered for {away:.0f} s ({error}); start it or check the address"
            )
        if not self._said or now - self._said >= self.say_every_s:
            log.warning("waiting for %s: %s (retrying)", self.what, error)
            self._said = now or 1e-9
        if self.clock.sleep(self._delay_s * random.uniform(0.5, 1.0), stop):
            raise UnavailableError(f"stopped while waiting for {self.what}")
        self._delay_s = min(self._delay_s * 2, self.max_s)

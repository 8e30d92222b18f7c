"""Seconds spent by training stage, in the loop's thread and in others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from roostream.runtime.clock import Clock

STAGES = ("wait_data", "decode", "pull", "forward", "backward", "reduce", "push", "commit")
LOOP, BESIDE = "loop", "beside"  # values of the label `thread`


class StageTimer:
    """A nested stage interrupts the outer one, so that the seconds of a thread add up. In the loop's thread,
    which creates this object, `pull` and `push` include waiting for them. Any thread may use it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._loop = threading.get_ident()
        self._seconds = {(stage, where): 0.0 for stage in STAGES for where in (LOOP, BESIDE)}
        self._lock, self._local = threading.Lock(), threading.local()

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds of the calling thread that were measured elsewhere."""
        where = LOOP if threading.get_ident() == self._loop else BESIDE
        with self._lock:
            self._seconds[stage, where] += seconds

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the time inside the `with` block for this stage."""
        began: list[tuple[str, float]] = self._local.__dict__.setdefault("began", [])
        now_s = self.clock.monotonic_s()
        if began:
            self.add(began[-1][0], now_s - began[-1][1])
        began.append((stage, now_s))
        try:
            yield
        finally:
            now_s = self.clock.monotonic_s()
            self.add(stage, now_s - began.pop()[1])
            if began:
                began[-1] = began[-1][0], now_s

    def of_loop(self, *stages: str) -> float:
        """Seconds that the loop's thread spent in these stages."""
        return sum(self._seconds[stage, LOOP] for stage in stages)

    def seconds(self) -> Mapping[tuple[str, str], float]:
        """(stage, LOOP or BESIDE) → seconds since the start; in Prometheus the labels `stage` and
        `thread`."""
        return dict(self._seconds)

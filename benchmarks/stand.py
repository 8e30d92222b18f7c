"""The process in which subjects are timed: opens them, and times a slice of one when it is told to.

Standard library only, since it also runs in the environments of peers. As a program it talks JSON, a line a call:
`{"call": "open", …}` → `{"value": …}` or `{"error": "…"}`. Whatever subjects print goes to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.question import Work

_MAX_STEPS = 1 << 24


class Slice(NamedTuple):
    """What one turn took."""

    units: float
    wall_s: float
    cpu_s: float  # of this process, all threads
    figures: Mapping[str, float] = MappingProxyType({})  # others, by their names


class Stand:
    """`open` subjects by number, `slice` one at a time, `close` all. Clocks give seconds."""

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._opened, self._kept = contextlib.ExitStack(), contextlib.ExitStack()
        self._works: list[tuple[Work, int]] = []  # with the steps of a slice

    def open(self, opens: str, arguments: list[Any], slice_s: float) -> int:
        """Set up and warm up a subject; its number. Whatever its set-up raises goes through."""
        work = self._opened.enter_context(_named(opens)(*arguments))
        work.step()  # compiles, fills caches
        steps, is_turn = 1, callable(work.units)
        while (
            not is_turn and (took_s := self._steps(work, steps).wall_s) < slice_s / 4 and steps < _MAX_STEPS
        ):
            steps *= 4 if took_s < slice_s / 32 else 2
        self._works.append((work, 1 if is_turn else max(round(steps * slice_s / max(took_s, 1e-9)), 1)))
        gc.collect()
        gc.freeze()  # collections in a slice look only at what the slice made
        return len(self._works) - 1

    def slice(self, number: int) -> Slice:
        """One turn of a subject."""
        return self._steps(*self._works[number])

    def close(self) -> None:
        """Close every subject; numbers begin anew."""
        self._works.clear()
        opened, self._opened = self._opened, contextlib.ExitStack()
        gc.unfreeze()
        opened.close()

    def keep(self, opens: str) -> None:
        """Set up what subjects of several rows use. Whatever its set-up raises goes through."""
        self._kept.enter_context(_named(opens)())

    def end(self) -> None:
        """Close every subject, and what was kept for them."""
        with self._kept:
            self.close()

    def versions(self) -> dict[str, str]:
        """Versions of what has been imported here and matters to speed."""
        known = {
            name: getattr(sys.modules.get(name), "__version__", "")
            for name in ("numpy", "numba", "torch", "grpc")
        }
        return (
            {"python": sys.version.split()[0]}
            | {name: str(version) for name, version in known.items() if version}
            | _device()
        )

    def _steps(self, work: Work, count: int) -> Slice:
        step = work.step
        cpu_s, wall_s = self._cpu(), self._wall()
        for _ in range(count):
            step()
        wall_s, cpu_s = self._wall() - wall_s, self._cpu() - cpu_s
        if work.took_s is not None:
            wall_s = work.took_s()
        units = work.units() if callable(work.units) else work.units * count
        return Slice(units, wall_s, cpu_s, dict(work.figures()))


def _device() -> dict[str, str]:
    """The CUDA device, if one was used here."""
    torch = sys.modules.get("torch")
    return (
        {"device": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_initialized() else {}
    )


def _named(opens: str) -> Callable[..., Any]:
    module, _, function = opens.partition(":")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    """Answer calls from stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stand = Stand()
    try:
        for line in sys.stdin:
            call = json.loads(line)
            try:
                answer = {"value": getattr(stand, call["call"])(*call["arguments"])}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        stand.end()  # also when it is interrupted: a subject may have processes of its own


if __name__ == "__main__":
    main()

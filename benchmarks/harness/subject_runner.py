"""The process that opens subjects and times a slice of one on request.

Standard library only, because it also runs in the environments of peers. The protocol is JSON, one line per
call: `{"call": "open", …}` → `{"value": …}` or `{"error": "…"}`. The output of subjects goes to stderr.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import operator
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.harness.benchmark import WholeTurn, Work

_MAX_STEPS = 1 << 24


class Slice(NamedTuple):
    """One turn of a subject."""

    units: float
    wall_s: float
    cpu_s: float  # of this process, all threads
    figures: Mapping[str, float] = MappingProxyType({})  # other results


class SubjectRunner:
    """`open` subjects, `slice` one at a time by its number, `close` all. Clocks return seconds."""

    def __init__(
        self, wall: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._wall, self._cpu = wall, cpu
        self._opened, self._run_setup = contextlib.ExitStack(), contextlib.ExitStack()
        self._works: list[tuple[Work | WholeTurn, int]] = []  # with the number of steps in a slice

    def open(self, setup: str, arguments: list[Any], slice_s: float) -> int:
        """Set up and warm up a subject; returns its number. Errors of the set-up propagate."""
        work = self._opened.enter_context(_import(setup)(*arguments))
        steps = 1
        if isinstance(work, WholeTurn):
            work.warm_up()
        else:
            work.step()  # compiles, fills caches
            while (took_s := self._time(work, steps).wall_s) < slice_s / 4 and steps < _MAX_STEPS:
                steps *= 4 if took_s < slice_s / 32 else 2
            steps = max(round(steps * slice_s / max(took_s, 1e-9)), 1)
        self._works.append((work, steps))
        gc.collect()
        gc.freeze()  # garbage collection in a slice then visits only objects of the slice
        return len(self._works) - 1

    def slice(self, number: int) -> Slice:
        """One turn of a subject."""
        return self._time(*self._works[number])

    def close(self) -> None:
        """Close all subjects; numbers start at 0 again."""
        self._works.clear()
        opened, self._opened = self._opened, contextlib.ExitStack()
        gc.unfreeze()
        opened.close()

    def set_up_run(self, setup: str) -> None:
        """Open the benchmark's `run_setup` until `end`. Errors of the set-up propagate."""
        self._run_setup.enter_context(_import(setup)())

    def end(self) -> None:
        """Close all subjects and the benchmark's `run_setup`."""
        with self._run_setup:
            self.close()

    def versions(self) -> dict[str, str]:
        """Versions of imported packages that matter for speed, and the CUDA device if one was used."""
        versions = {"python": sys.version.split()[0]}
        for name in ("numpy", "numba", "torch", "grpc"):
            if version := getattr(sys.modules.get(name), "__version__", ""):
                versions[name] = str(version)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            versions["device"] = torch.cuda.get_device_name()
        return versions

    def _time(self, work: Work | WholeTurn, steps: int) -> Slice:
        cpu_s, wall_s = self._cpu(), self._wall()
        if isinstance(work, WholeTurn):
            result = work.turn()
        else:
            step = work.step
            for _ in range(steps):
                step()
        wall_s, cpu_s = self._wall() - wall_s, self._cpu() - cpu_s
        if isinstance(work, WholeTurn):
            return Slice(
                result.units,
                wall_s if result.seconds is None else result.seconds,
                cpu_s,
                dict(result.figures),
            )
        return Slice(work.units * steps, wall_s, cpu_s, dict(work.figures()))


def _import(setup: str) -> Callable[..., Any]:
    module, _, function = setup.partition(":")
    return operator.attrgetter(function)(importlib.import_module(module))


def main() -> None:
    """Answer calls from stdin until end of file."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    runner = SubjectRunner()
    try:
        for line in sys.stdin:
            call = json.loads(line)
            try:
                answer = {"value": getattr(runner, call["call"])(*call["arguments"])}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        runner.end()  # also after an interrupt: a subject may have child processes


if __name__ == "__main__":
    main()

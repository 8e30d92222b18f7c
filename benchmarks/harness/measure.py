"""Runs a benchmark: fresh processes in each run, subjects in turns, medians with their spread.

1 a run starts one process per environment, and opens the benchmark's `run_setup` in ours
2 the subjects of a row take turns (A B C, B C A, …), so that noise hits all of them
3 the figure of a subject in a run is the median of its turns; a ratio divides two figures
4 over the runs: median, minimum, maximum

The clocks are in the subject runners.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, SubjectResult
from benchmarks.harness.subject_process import PeerUnavailable
from benchmarks.harness.subject_runner import Slice
from roostream.errors import RoostreamError

FORMAT = 1
MIN_RUNS = 3


class AnySubjectRunner(Protocol):
    """`SubjectRunner`, or a process that runs one."""

    def open(self, setup: str, arguments: list[Any], slice_s: float) -> int: ...

    def slice(self, number: int) -> Slice: ...

    def set_up_run(self, setup: str) -> None: ...

    def versions(self) -> dict[str, str]: ...

    def close(self) -> None: ...

    def end(self) -> None: ...


StartRunner = Callable[[str], AnySubjectRunner]
"""Maps an environment to a fresh runner. Raises PeerUnavailable if the environment can't be made."""


def measure(
    benchmark: Benchmark, start: StartRunner, *, runs: int, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The rows of the result, and the versions of packages.

    Raises:
        RoostreamError: one of our subjects failed. The failure of a peer is recorded in its row.
    """
    turns: list[dict[str, _Turns]] = []
    versions: dict[str, str] = {}
    for run in range(runs):
        say(f"{benchmark.name}: run {run + 1} of {runs}")
        runners = _Runners(start)
        try:
            if benchmark.run_setup:
                runners.of("").set_up_run(benchmark.run_setup)
            turns.append(
                {
                    row.name: _run_row(row, benchmark, runners, run)
                    for row in benchmark.rows
                    if not row.skipped
                }
            )
            versions |= runners.versions()
        finally:
            runners.end()
    rows = [_row(row, [run[row.name] for run in turns if not row.skipped]) for row in benchmark.rows]
    return {"rows": rows, "versions": versions}


class _Turns:
    """One row in one run."""

    def __init__(self) -> None:
        self.of: dict[str, list[Slice]] = {}
        self.unavailable: dict[str, str] = {}


class _Runners:
    """The processes of one run, each started on first use."""

    def __init__(self, start: StartRunner) -> None:
        self._start = start
        self._started: dict[str, AnySubjectRunner] = {}
        self._failed: dict[str, str] = {}

    def of(self, environment: str) -> AnySubjectRunner:
        if environment in self._failed:
            raise PeerUnavailable(self._failed[environment])
        if environment not in self._started:
            try:
                self._started[environment] = self._start(environment)
            except PeerUnavailable as error:
                self._failed[environment] = str(error)
                raise
        return self._started[environment]

    def close(self) -> None:
        for runner in self._started.values():
            runner.close()

    def versions(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for environment, runner in self._started.items():
            found |= {k: v for k, v in runner.versions().items() if not environment or k not in found}
        return found

    def end(self) -> None:
        for runner in self._started.values():
            runner.end()


def _run_row(row: Row, benchmark: Benchmark, runners: _Runners, run: int) -> _Turns:
    turns, opened = _Turns(), []
    for subject in row.subjects:
        try:
            runner = runners.of(subject.environment)
            arguments = [run if argument == RUN else argument for argument in subject.arguments]
            opened.append((subject, runner, runner.open(subject.setup, arguments, benchmark.slice_s)))
        except RoostreamError as error:
            if subject.role in ("ours", "stage"):
                raise
            turns.unavailable[subject.name] = str(error)
    for turn in range(benchmark.rounds):
        shift = turn % len(opened)
        for subject, runner, number in opened[shift:] + opened[:shift]:
            turns.of.setdefault(subject.name, []).append(runner.slice(number))
    runners.close()
    return turns


def _row(row: Row, runs: Sequence[_Turns]) -> dict[str, Any]:
    out: dict[str, Any] = {"name": row.name, "unit": row.unit, "shows": row.shows, "clock": row.clock}
    if row.time:
        out["time"] = row.time
    if row.skipped:
        return out | {"skipped": row.skipped, "subjects": [], "ratios": []}
    if row.derives is not None:
        found = [row.derives(_results(row, run)) for run in runs]
        out |= {"figures": {name: spread([figures[name] for figures in found]) for name in found[0]}}
    return out | {
        "subjects": [_subject(subject, runs) for subject in row.subjects],
        "ratios": [
            _ratio(row, before if other.role == "before" else row.subjects[0], other, runs)
            for before, other in zip(row.subjects, row.subjects[1:], strict=False)
            if all(other.name in run.of for run in runs)
        ],
    }


def _results(row: Row, run: _Turns) -> dict[str, SubjectResult]:
    """The results of the available subjects."""
    return {
        name: SubjectResult(
            _median_us(run, name, row.clock),
            {figure: _median(run, name, figure) for figure in turns[0].figures},
        )
        for name, turns in run.of.items()
    }


def _subject(subject: Subject, runs: Sequence[_Turns]) -> dict[str, Any]:
    """Microseconds per unit by both clocks, or why the subject was unavailable."""
    out: dict[str, Any] = {"name": subject.name, "role": subject.role}
    missing = [run.unavailable[subject.name] for run in runs if subject.name in run.unavailable]
    if missing:
        return out | {"unavailable": missing[0]}
    for clock in ("wall", "cpu"):
        out[f"{clock}_us"] = spread([_median_us(run, subject.name, clock) for run in runs])
    if figures := {
        name: spread([_median(run, subject.name, name) for run in runs])
        for name in runs[0].of[subject.name][0].figures
    }:
        out["figures"] = figures
    return out


def _ratio(row: Row, subject: Subject, other: Subject, runs: Sequence[_Turns]) -> dict[str, Any]:
    """How many times as fast `subject` is as `other`."""
    figures = [
        _median_us(run, other.name, row.clock) / max(_median_us(run, subject.name, row.clock), 1e-9)
        for run in runs
    ]
    return {"of": subject.name, "to": other.name, "times_as_fast": spread(figures)}


def _median_us(run: _Turns, name: str, clock: str) -> float:
    return statistics.median(cost_us(turn, clock) for turn in run.of[name])


def _median(run: _Turns, subject: str, figure: str) -> float:
    return statistics.median(turn.figures[figure] for turn in run.of[subject])


def cost_us(turn: Slice, clock: str) -> float:
    """Microseconds per unit."""
    return (turn.wall_s if clock == "wall" else turn.cpu_s) * 1e6 / max(turn.units, 1e-9)


def spread(figures: Sequence[float]) -> Mapping[str, Any]:
    """Median, minimum and maximum with the figures themselves, in four significant digits."""
    rounded = [float(f"{figure:.4g}") for figure in figures]
    median = float(f"{statistics.median(rounded):.4g}")
    return {"median": median, "least": min(rounded), "most": max(rounded), "runs": rounded}

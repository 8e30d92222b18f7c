"""What a benchmark declares: rows of subjects that are timed side by side. Standard library only.

A subject names a function, `"module:function"`. It is called in a fresh process (`subject_runner.py`) and
returns a context manager of `Work`. Whatever the context manager does is set-up and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Role = Literal["ours", "stage", "peer", "limit", "before"]
Shows = Literal["rate", "cost"]
Clock = Literal["wall", "cpu"]

RUN = "{run}"
"""A placeholder in a subject's arguments for the number of the run, from 0; used as a seed."""


class Work(NamedTuple):
    """A repeatable piece of work, and how many of the row's units it does."""

    step: Callable[[], object]
    # Per step; a function: of the last step, which then is a whole turn
    units: float | Callable[[], float] = 1.0
    figures: Callable[[], Mapping[str, float]] = dict  # other results of the last step
    took_s: Callable[[], float] | None = None  # seconds of the last step that count; None: all of it


class SubjectResult(NamedTuple):
    """What a subject gave in one run."""

    cost_us: float  # per unit, by the row's clock
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    """One thing that is timed."""

    name: str
    setup: str  # "module:function" → context manager of Work
    arguments: tuple[Any, ...] = ()  # of that function; plain JSON
    role: Role = "ours"
    # "" = the project's own; a name in benchmarks/environments/; "commit:<id>" = another commit
    environment: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Subjects that do the same work, so that their speeds can be divided."""

    name: str
    unit: str  # what Work.units counts: "samples", "MB"
    subjects: tuple[Subject, ...]  # the first one is compared with each of the others
    shows: Shows = "rate"  # units per second, or microseconds per unit
    clock: Clock = "wall"  # cpu: CPU time of the subject's process, if one thread does all of the work
    time: str = ""  # name of the time that the subjects measure themselves (`Work.took_s`)
    derives: Callable[[Mapping[str, SubjectResult]], Mapping[str, float]] | None = None  # figures of the row
    skipped: str = ""  # why it can't run here; "" = it can


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`roostream bench NAME`: the constant BENCHMARK of benchmarks/NAME.py, with underscores for dashes."""

    name: str
    summary: str  # one line
    rows: tuple[Row, ...]
    interpretation: str  # what the figures mean; printed on the page of results
    # "module:function" → context manager that is open during each run, for subjects of several rows
    run_setup: str = ""
    slice_s: float = 0.1  # length of a subject's turn
    rounds: int = 7  # turns of each subject in a run

"""What a benchmark declares: rows of subjects that are timed side by side. Standard library only.

A subject names a function, `"module:function"`. It is called in a fresh process (`subject_runner.py`) and
returns a context manager of `Work` or `WholeTurn`. What the context manager does is set-up and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Role = Literal["ours", "stage", "peer", "limit", "before"]
Shows = Literal["rate", "cost"]
Clock = Literal["wall", "cpu"]

RUN = "{run}"
"""A placeholder in a subject's arguments for the number of the run, from 0; used as a seed."""


class Work(NamedTuple):
    """A short step, repeated until a slice of time is full."""

    step: Callable[[], object]
    units: float = 1.0  # how many of the row's units a step does
    figures: Callable[[], Mapping[str, float]] = dict  # other results of the last step


class TurnResult(NamedTuple):
    """What one turn of a `WholeTurn` did."""

    units: float = 1.0
    seconds: float | None = None  # the part of the wall time that counts; None = all of it
    figures: Mapping[str, float] = MappingProxyType({})


class WholeTurn(NamedTuple):
    """Work that decides itself how much a turn is; called once a turn."""

    turn: Callable[[], TurnResult]
    warm_up: Callable[[], object] = lambda: None


class SubjectResult(NamedTuple):
    """A subject's result of one run."""

    cost_us: float  # per unit, by the row's clock
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    """One thing that is timed."""

    name: str
    setup: str  # "module:function" → context manager of Work or WholeTurn
    arguments: tuple[Any, ...] = ()  # of that function; plain JSON
    role: Role = "ours"
    environment: str = ""  # "" = the project's; a name in benchmarks/environments/; "commit:<id>"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Subjects that do the same work, so that their speeds can be divided."""

    name: str
    unit: str  # what is counted: "samples", "MB"
    subjects: tuple[Subject, ...]  # the first one is compared with each of the others
    shows: Shows = "rate"  # units per second, or microseconds per unit
    clock: Clock = "wall"  # cpu: CPU time of the subject's process, if one thread does all of the work
    time: str = ""  # name of the time that the subjects measure themselves (`TurnResult.seconds`)
    derives: Callable[[Mapping[str, SubjectResult]], Mapping[str, float]] | None = None  # figures of the row
    skipped: str = ""  # why it can't run here; "" = it can


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """`roostream bench NAME`: a constant of this type in a module of benchmarks/."""

    name: str
    summary: str  # one line
    rows: tuple[Row, ...]
    interpretation: str  # what the figures mean; printed on the page of results
    run_setup: str = ""  # "module:function" → context manager open during a run, for subjects of several rows
    slice_s: float = 0.1  # length of a subject's turn
    rounds: int = 7  # turns of each subject in a run

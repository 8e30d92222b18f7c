"""What a benchmark asks: rows, each of them a few subjects that are timed side by side. Declarations only, nothing is imported.

A subject names a function, `"module:function"`, that is called in a fresh process (benchmarks/stand.py) and gives a context
manager of `Work`. What stands in the context manager is set-up and is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Role = Literal["ours", "stage", "peer", "limit", "before"]
Shows = Literal["rate", "cost"]
Clock = Literal["wall", "cpu"]

RUN = "{run}"
"""Among a subject's arguments: the number of the run, from 0. What is drawn from it is another draw in each run."""


class Work(NamedTuple):
    """One repeatable piece of work, and how many of the row's units it does."""

    step: Callable[[], object]
    units: float | Callable[[], float] = (
        1.0  # of a step; a function: those of the step before, which is then a whole turn
    )
    figures: Callable[[], Mapping[str, float]] = dict  # others of the step before, by their names
    took_s: Callable[[], float] | None = (
        None  # of the step before, where what is asked about is a part of it; None: all of it
    )


class Told(NamedTuple):
    """What a subject gave in one run."""

    cost_us: float  # a unit, by the row's clock
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    """One thing that is timed."""

    name: str
    opens: str  # "module:function" → context manager of Work
    arguments: tuple[Any, ...] = ()  # of that function; plain JSON
    role: Role = "ours"
    environment: str = ""  # "" = the project's own; a name of benchmarks/environments/; "commit:<id>" = another state of ours


@dataclass(frozen=True, kw_only=True)
class Row:
    """Subjects that do the same amount of work, so that their speeds can be divided."""

    name: str
    unit: str  # what Work.units counts: "samples", "MB"
    subjects: tuple[Subject, ...]  # the first is the one that the others are compared with
    shows: Shows = "rate"  # units a second, or microseconds a unit
    clock: Clock = "wall"  # cpu: time of the subject's process, where one thread does all of the work
    time: str = ""  # what the subjects' own time is, where they tell it (`Work.took_s`) and it is no clock on the wall
    derives: Callable[[Mapping[str, Told]], Mapping[str, float]] | None = (
        None  # figures of the row, from its subjects in one run
    )
    skipped: str = ""  # why it can't be asked here; "" = it can


@dataclass(frozen=True, kw_only=True)
class Question:
    """One file in benchmarks/questions/ or a room inside it."""

    name: str
    asks: str  # one line
    rows: tuple[Row, ...]
    means: str  # what the figures mean, kept beside the code that they are about
    keeps: str = ""  # "module:function" → context manager that is open during each whole run: what subjects of several rows use
    slice_s: float = 0.1  # a subject is timed this long before the next one has its turn
    rounds: int = 7  # turns of each subject in a run

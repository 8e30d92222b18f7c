"""From a question's name to its result: a JSON document of format 1, and a table for the terminal."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks.questions
from benchmarks import machine
from benchmarks.harness import FORMAT, MIN_RUNS, measure
from benchmarks.peers import ROOT, place_of
from benchmarks.process import StandProcess
from benchmarks.question import Question, Subject
from roostream.errors import ConfigError, nearest

RESULTS = "docs/benchmarks"


def questions() -> dict[str, Question]:
    """Every question by its name, those of inner rooms too."""
    found = [
        importlib.import_module(m.name).QUESTION
        for m in pkgutil.walk_packages(benchmarks.questions.__path__, "benchmarks.questions.")
        if not m.ispkg
    ]
    return {question.name: question for question in found}


def question_named(name: str) -> Question:
    """Raises ConfigError with the nearest name."""
    known = questions()
    if name not in known:
        raise ConfigError(f"expected a benchmark of {', '.join(known)}, got {name!r}{nearest(name, known)}")
    return known[name]


def run(
    name: str, *, runs: int = MIN_RUNS, against: str = "", say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure a question here and now; `against`: a commit whose own state of it takes turns with this one.

    Raises:
        ConfigError: an unknown question, or too few runs.
        SubjectError: a subject of ours failed.
    """
    question = question_named(name)
    if runs < MIN_RUNS:
        raise ConfigError(
            f"--runs: expected at least {MIN_RUNS}, since a figure without its spread says little; got {runs}"
        )
    here, commit = machine.machine(), machine.commit(ROOT, changed_is_fine=(RESULTS,))
    if here["busy"]:
        say(
            f"this machine is busy (load {here['load_before']} on {here['cores']} cores): the result will say so"
        )
    asked = with_before(question, against) if against else question
    with tempfile.TemporaryDirectory(prefix="roostream-bench-") as made:
        measured = measure(asked, lambda environment: _stand(environment, Path(made)), runs=runs, say=say)
    return {
        "format": FORMAT,
        "question": name,
        "command": f"roostream bench {name} --runs {runs}" + (f" --against {against}" if against else ""),
        "taken": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "machine": here,
        "runs": runs,
        **measured,
    }


def _stand(environment: str, made: Path) -> StandProcess:
    """What another state of our code made is no other's."""
    its = made / f"{zlib.crc32(environment.encode()):08x}"
    its.mkdir(exist_ok=True)
    return StandProcess(place_of(environment), str(its))


def with_before(question: Question, commit: str) -> Question:
    """The question with another commit's state of our subjects right after each of them."""
    rows = []
    for row in question.rows:
        subjects: list[Subject] = []
        for subject in row.subjects:
            subjects.append(subject)
            if subject.role in ("ours", "stage"):
                name = f"{subject.name} at {commit[:12]}"
                subjects.append(
                    dataclasses.replace(subject, name=name, role="before", environment=f"commit:{commit}")
                )
        rows.append(dataclasses.replace(row, subjects=tuple(subjects)))
    return dataclasses.replace(question, rows=tuple(rows))

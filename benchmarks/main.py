"""`roostream bench`: list the benchmarks and run them.

A benchmark NAME is the constant BENCHMARK in benchmarks/NAME.py, or one of BENCHMARKS in a shared module.
A result is a JSON document of format 1.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.harness import machine
from benchmarks.harness.benchmark import Benchmark, Subject
from benchmarks.harness.measure import FORMAT, MIN_RUNS, measure
from benchmarks.harness.report import table
from benchmarks.harness.subject_process import ROOT, PeerUnavailable, SubjectProcess, interpreter_for
from roostream.cli.plan import measured
from roostream.cli.plan.plan_command import renew_tables
from roostream.errors import ConfigError, nearest
from roostream.replay.report_files import check_report, write_atomically

RESULTS = "docs/benchmarks"
_NOT_BENCHMARKS = {"main", "gpu_report", "plots", "walks"}
_MODULES = {  # benchmarks that share a module
    **dict.fromkeys(("recovery", "preemption", "goodput", "goodput-5min"), "recovery"),
    **dict.fromkeys(("placement-load", "placement-plan", "placement-profile"), "placement"),
}


def names() -> list[str]:
    modules = {m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.ispkg}
    single = modules - _NOT_BENCHMARKS - set(_MODULES.values())
    return sorted([*(name.replace("_", "-") for name in single), *_MODULES])


def find_benchmark(name: str) -> Benchmark:
    """Raises ConfigError with the nearest name."""
    if name not in names():
        raise ConfigError(
            f"expected a benchmark of {', '.join(names())}, got {name!r}{nearest(name, names())}"
        )
    module = importlib.import_module(f"benchmarks.{_MODULES.get(name, name).replace('-', '_')}")
    if name not in _MODULES:
        return module.BENCHMARK
    return next(benchmark for benchmark in module.BENCHMARKS if benchmark.name == name)


def benchmarks_by_name() -> dict[str, Benchmark]:
    return {name: find_benchmark(name) for name in names()}


def main(name: str, json_file: Path | None = None, runs: int = MIN_RUNS, against: str = "") -> int:
    """`name` is a benchmark, `all`, `list` or `report`; returns the exit code.

    Raises:
        RoostreamError: see `run`, or `json_file` cannot be written.
    """
    if name == "list":
        for benchmark in benchmarks_by_name().values():
            print(f"{benchmark.name:18} {benchmark.summary}")
        return 0
    if name == "report":
        figures = measured.write(ROOT / RESULTS / "json")
        scale = ROOT / "docs" / "operations" / "scale.md"
        text = renew_tables(scale.read_text(encoding="utf-8"), measured.read())
        scale.write_text(text, encoding="utf-8")
        for path in (figures, scale):
            print(path.relative_to(ROOT))
        return 0
    check_report(str(json_file or ""))
    results = []
    for each in names() if name == "all" else [name]:
        result = run(each, runs=runs, against=against)
        results.append(result)
        for row in result["rows"]:
            print(f"\n{each}: {row['name']}\n{table(row)}")
        if json_file is not None:  # after each one, because a later one may fail after hours
            text = json.dumps(results if name == "all" else result, indent=1, ensure_ascii=False)
            write_atomically(json_file, text + "\n")
    return 0


def run(
    name: str, *, runs: int = MIN_RUNS, against: str = "", say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run a benchmark on this machine. `against` is a commit whose state of our subjects takes turns with
    this one.

    Raises:
        ConfigError: the benchmark or the commit is unknown, or `runs` is too small.
        SubjectError: one of our subjects failed.
    """
    benchmark = find_benchmark(name)
    if runs < MIN_RUNS:
        raise ConfigError(f"--runs: expected at least {MIN_RUNS}, for a median with its spread; got {runs}")
    host, commit = machine.machine(), machine.commit(ROOT, ignored=(RESULTS,))
    if host["busy"]:
        say(f"this machine is busy (load {host['load_before']} on {host['cores']} cores); the result says so")
    if against:
        benchmark = with_before(benchmark, against)
        try:
            interpreter_for(f"commit:{against}")
        except PeerUnavailable as error:  # in a row, that only leaves the subject out
            raise ConfigError(f"--against: {error}") from None
    with tempfile.TemporaryDirectory(prefix="roostream-bench-") as fixtures:
        measured_rows = measure(
            benchmark, lambda environment: _start_runner(environment, Path(fixtures)), runs=runs, say=say
        )
    return {
        "format": FORMAT,
        "question": name,
        "command": f"roostream bench {name} --runs {runs}" + (f" --against {against}" if against else ""),
        "taken": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit,
        "machine": host,
        "runs": runs,
        **measured_rows,
    }


def _start_runner(environment: str, fixtures: Path) -> SubjectProcess:
    folder = fixtures / f"{zlib.crc32(environment.encode()):08x}"  # another commit's fixtures are not ours
    folder.mkdir(exist_ok=True)
    return SubjectProcess(interpreter_for(environment), str(folder))


def with_before(benchmark: Benchmark, commit: str) -> Benchmark:
    """The benchmark with each of our subjects followed by the same subject of another commit."""
    rows = []
    for row in benchmark.rows:
        subjects: list[Subject] = []
        for subject in row.subjects:
            subjects.append(subject)
            if subject.role in ("ours", "stage"):
                name = f"{subject.name} at {commit[:12]}"
                environment = f"commit:{commit}"
                subjects.append(
                    dataclasses.replace(subject, name=name, role="before", environment=environment)
                )
        rows.append(dataclasses.replace(row, subjects=tuple(subjects)))
    return dataclasses.replace(benchmark, rows=tuple(rows))

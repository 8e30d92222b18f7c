"""`make gpu`: runs every test and benchmark that needs a CUDA device, and writes one page.

Failed tests and benchmarks are on the page too; the exit code then is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import machine
from benchmarks.harness.machine import no_device
from benchmarks.harness.measure import MIN_RUNS
from benchmarks.harness.report import commit_of, table
from benchmarks.harness.subject_process import ROOT
from benchmarks.main import find_benchmark, run
from roostream.errors import RoostreamError, SetupError
from roostream.replay.report_files import write_atomically

REPORT = Path("build/gpu/report.md")
BENCHMARKS = ("hstu-attention", "device-step")
_TESTS = Path("build/gpu/tests.xml")
_SHOWN = 300


class PytestResult(NamedTuple):
    """The outcome of a pytest run."""

    passed: int
    skipped: Sequence[str]  # reasons
    failed: Sequence[str]  # names and shortened messages

    @property
    def passed_all(self) -> bool:
        return bool(self.passed) and not self.failed


class Parts(NamedTuple):
    """The steps that fill the page; each may raise a RoostreamError."""

    device: Callable[[], dict[str, str]]
    tests: Callable[[], PytestResult]
    benchmark: Callable[[str, int], dict[str, Any]]


def main(arguments: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Exit code: 0 = all passed, 1 = a test or benchmark failed, 2 = no device or no page."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Tests and benchmarks that need a CUDA device, as one page."
    )
    parser.add_argument("--report", type=Path, default=REPORT, help=f"default: {REPORT}")
    parser.add_argument("--runs", type=int, default=MIN_RUNS, help=f"of each benchmark, at least {MIN_RUNS}")
    given = parser.parse_args(arguments)
    parts = parts or Parts(device_of, run_tests, ask)
    try:
        device, tests = parts.device(), parts.tests()
        results = {name: parts.benchmark(name, given.runs) for name in BENCHMARKS}
        write_atomically(_with_folder(given.report), page(device, tests, results))
    except RoostreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{given.report}: {tests.passed} tests passed, "
        f"{len(tests.failed)} failed, {len(tests.skipped)} skipped"
    )
    return 0 if tests.passed_all and not any("failed" in result for result in results.values()) else 1


def _with_folder(path: Path) -> Path:
    """Create the folder of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"{path.parent}: expected a folder for the report, got {error.strerror}; choose another --report"
        ) from None
    return path


def device_of() -> dict[str, str]:
    """Name, compute capability, memory and versions. Raises SetupError without a usable device."""
    if no_device():
        raise SetupError(f"expected a CUDA device, {no_device()}; run make gpu on a machine that has one")
    import torch

    if not torch.cuda.is_available():
        raise SetupError(
            "expected a CUDA device that torch can use; check nvidia-smi and the driver's version"
        )
    device = torch.cuda.get_device_properties(0)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "absent"
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton_version}"
    return {
        "device": f"{torch.cuda.device_count()} × {device.name}",
        "compute capability": f"{device.major}.{device.minor}",
        "memory": f"{device.total_memory / (1 << 30):.1f} GiB",
        "versions": versions,
    }


def run_tests(report: Path = ROOT / _TESTS, files: Sequence[str] = ()) -> PytestResult:
    """Run every test marked gpu in its own process. `files`: () = all. Raises SetupError without a report."""
    _with_folder(report).unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "--junitxml", str(report), *files]
    subprocess.run(command, cwd=ROOT, check=False)
    if not report.is_file():
        raise SetupError("expected a report of pytest, got none; its output is above")
    return parse_junit(report.read_text(encoding="utf-8"))


def parse_junit(junit: str) -> PytestResult:
    skipped, failed, passed = [], [], 0
    for case in ElementTree.fromstring(junit).iter("testcase"):
        failures = [child for child in case if child.tag in ("failure", "error")]
        if failures:
            failed.append(
                f"{case.get('classname')}::{case.get('name')}: {_short(failures[0].get('message'))}"
            )
        elif (skip := case.find("skipped")) is not None:
            skipped.append(_short(skip.get("message")))
        else:
            passed += 1
    return PytestResult(passed, skipped, failed)


def _short(text: str | None) -> str:
    return " ".join((text or "").split())[:_SHOWN]


def ask(name: str, runs: int, measure: Callable[..., dict[str, Any]] = run) -> dict[str, Any]:
    """Run one benchmark; return its result, or the reason under `failed`, so that the report has all
    others."""
    try:
        return measure(name, runs=runs)
    except RoostreamError as error:
        return {"failed": str(error)}


def page(device: dict[str, str], tests: PytestResult, results: dict[str, dict[str, Any]]) -> str:
    """The report in Markdown."""
    host, commit = machine.machine(), machine.commit(ROOT)
    parts = [
        "# gpu",
        "What does a CUDA device do with this code: do its tests pass, and how fast is it?",
        "\n".join(
            (
                *(f"- {name}: {value}" for name, value in device.items()),
                f"- host: {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB, {host['system']}",
                f"- commit: {commit_of({'commit': commit})}",
                "- command: `make gpu`",
            )
        ),
        "## Tests",
        f"{tests.passed} passed, {len(tests.failed)} failed, {len(tests.skipped)} skipped.",
        *(f"- failed: {failed}" for failed in tests.failed),
        *(f"- skipped: {reason}" for reason in sorted(set(tests.skipped))),
    ]
    for name, result in results.items():
        parts += [f"## {name}", find_benchmark(name).summary]
        if "failed" in result:
            parts.append(f"Not run: {result['failed']}.")
            continue
        parts.append(find_benchmark(name).interpretation)
        for row in result["rows"]:
            parts += [f"### {row['name']}", table(row)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())

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
QUESTIONS = ("hstu-attention", "device-step")
_TESTS = Path("build/gpu/tests.xml")
_SHOWN = 300


class Ran(NamedTuple):
    """What pytest said."""

    passed: int
    skipped: Sequence[str]  # reasons
    failed: Sequence[str]  # names, and the beginnings of why

    @property
    def fine(self) -> bool:
        return bool(self.passed) and not self.failed


class Parts(NamedTuple):
    """What the page is made of, in their order; each may raise a RoostreamError."""

    device: Callable[[], dict[str, str]]
    tests: Callable[[], Ran]
    benchmark: Callable[[str, int], dict[str, Any]]


def main(arguments: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """0 = all is well, 1 = a test failed or a question could not be asked, 2 = there is no device, or no page
    could be made."""
    parser = argparse.ArgumentParser(
        prog="make gpu", description="Tests and benchmarks that need a CUDA device, as one page."
    )
    parser.add_argument("--report", type=Path, default=REPORT, help=f"default: {REPORT}")
    parser.add_argument("--runs", type=int, default=MIN_RUNS, help=f"of each question, at least {MIN_RUNS}")
    given = parser.parse_args(arguments)
    parts = parts or Parts(device_of, run_tests, ask)
    try:
        device, tests = parts.device(), parts.tests()
        asked = {name: parts.benchmark(name, given.runs) for name in QUESTIONS}
        write_atomically(_made(given.report), page(device, tests, asked))
    except RoostreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{given.report}: {tests.passed} tests passed, {len(tests.failed)} failed, {len(tests.skipped)} skipped"
    )
    return 0 if tests.fine and not any("failed" in result for result in asked.values()) else 1


def _made(path: Path) -> Path:
    """Its folder is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"{path.parent}: expected a folder for the report, got {error.strerror}; choose another --report"
        ) from None
    return path


def device_of() -> dict[str, str]:
    """Name, compute capability, memory, and what drives it.

    Raises:
        SetupError: this machine shows none, or torch can't use it.
    """
    if no_device():
        raise SetupError(f"expected a CUDA device, {no_device()}; run make gpu on a machine that has one")
    import torch

    if not torch.cuda.is_available():
        raise SetupError(
            "expected a CUDA device, there is one that torch can't use; look at nvidia-smi and the driver's version"
        )
    found = torch.cuda.get_device_properties(0)
    triton = sys.modules.get("triton") or _imported("triton")
    return {
        "device": f"{torch.cuda.device_count()} × {found.name}",
        "compute capability": f"{found.major}.{found.minor}",
        "memory": f"{found.total_memory / (1 << 30):.1f} GiB",
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, Triton {getattr(triton, '__version__', 'absent')}",
    }


def _imported(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


def run_tests(report: Path = ROOT / _TESTS, places: Sequence[str] = ()) -> Ran:
    """Every test marked gpu, in a process of its own. `places`: files of tests; () = all.

    Raises:
        SetupError: pytest said nothing.
    """
    _made(report).unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "--junitxml", str(report), *places]
    subprocess.run(command, cwd=ROOT, check=False)
    if not report.is_file():
        raise SetupError("expected pytest to tell what it ran, got nothing; its own words are above")
    return told(report.read_text(encoding="utf-8"))


def told(junit: str) -> Ran:
    """Of pytest's XML."""
    skipped, failed, passed = [], [], 0
    for case in ElementTree.fromstring(junit).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            failed.append(f"{case.get('classname')}::{case.get('name')}: {_short(wrong[0].get('message'))}")
        elif (left_out := case.find("skipped")) is not None:
            skipped.append(_short(left_out.get("message")))
        else:
            passed += 1
    return Ran(passed, skipped, failed)


def _short(text: str | None) -> str:
    return " ".join((text or "").split())[:_SHOWN]


def ask(name: str, runs: int, measure: Callable[..., dict[str, Any]] = run) -> dict[str, Any]:
    """Run one benchmark; return its result, or the reason under `failed`, so that the report has all
    others."""
    try:
        return measure(name, runs=runs)
    except RoostreamError as error:
        return {"failed": str(error)}


def page(device: dict[str, str], tests: Ran, asked: dict[str, dict[str, Any]]) -> str:
    """Markdown: the device, the tests, the questions."""
    here, commit = machine.machine(), machine.commit(ROOT)
    parts = [
        "# gpu",
        "What does a CUDA device do with this code: do its tests pass, and how fast is it?",
        "\n".join(
            (
                *(f"- {name}: {value}" for name, value in device.items()),
                f"- host: {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, {here['system']}",
                f"- commit: {commit_of({'commit': commit})}",
                "- command: `make gpu`",
            )
        ),
        "## Tests",
        f"{tests.passed} passed, {len(tests.failed)} failed, {len(tests.skipped)} skipped.",
        *(f"- failed: {failed}" for failed in tests.failed),
        *(f"- skipped: {reason}" for reason in sorted(set(tests.skipped))),
    ]
    for name, result in asked.items():
        parts += [f"## {name}", find_benchmark(name).summary]
        if "failed" in result:
            parts.append(f"Not asked: {result['failed']}.")
            continue
        parts.append(find_benchmark(name).interpretation)
        for row in result["rows"]:
            parts += [f"### {row['name']}", table(row)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())

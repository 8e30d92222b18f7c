"""`make gpu` prints one sentence where there is no CUDA device. With a device it always writes its report,
also after a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_report import BENCHMARKS, Parts, PytestResult, main, parse_junit
from benchmarks.harness.machine import no_device
from benchmarks.harness.subject_process import ROOT
from benchmarks.main import find_benchmark

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="test_x[1]"/>
<testcase classname="tests.a" name="test_y"><skipped message="no&#10; Triton"/></testcase>
<testcase classname="tests.b" name="test_z"><failure message="assert 1 ==&#10;2">trace</failure></testcase>
<testcase classname="tests.b" name="test_w"><error message="fixture"/></testcase>
</testsuite></testsuites>"""
DEVICE = {"device": "1 × A device", "memory": "8.0 GiB"}
needs_no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@needs_no_device
def test_without_a_device_the_command_fails_with_one_sentence() -> None:
    done = subprocess.run(
        (sys.executable, "-m", "benchmarks.gpu_report"), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: expected a CUDA device, ") and done.stderr.count("\n") == 1


@needs_no_device
@pytest.mark.parametrize("name", BENCHMARKS)
def test_without_a_device_rows_that_need_one_are_skipped(name: str) -> None:
    skipped = {row.skipped for row in find_benchmark(name).rows if "cuda" in str(row.subjects[0].arguments)}
    assert skipped == {no_device()}


def test_a_device_is_detected_by_its_device_node(tmp_path: Path) -> None:
    assert no_device(tmp_path) != ""
    (tmp_path / "nvidiactl").touch()
    assert no_device(tmp_path) != "", "this node belongs to the driver, not to a device"
    (tmp_path / "nvidia0").touch()
    assert no_device(tmp_path) == ""


def test_test_results_are_counted() -> None:
    tests = parse_junit(JUNIT)
    assert tests.passed == 1 and tests.skipped == ["no Triton"]
    assert tests.failed == ["tests.b::test_z: assert 1 == 2", "tests.b::test_w: fixture"]
    assert not tests.passed_all


@pytest.mark.parametrize(
    ("test_result", "result", "code"),
    [
        (PytestResult(3, [], []), {"rows": []}, 0),
        (PytestResult(3, [], ["tests.a::test_x: no"]), {"rows": []}, 1),
        (PytestResult(3, [], []), {"failed": "no memory"}, 1),
    ],
)
def test_the_report_is_always_written(
    tmp_path: Path, test_result: PytestResult, result: dict[str, object], code: int
) -> None:
    calls: list[tuple[str, int]] = []

    def benchmark(name: str, runs: int) -> dict[str, object]:
        calls.append((name, runs))
        return result

    target = tmp_path / "new" / "gpu.md"
    assert (
        main(["--report", str(target), "--runs", "5"], Parts(lambda: DEVICE, lambda: test_result, benchmark))
        == code
    )
    assert calls == [(name, 5) for name in BENCHMARKS]
    assert "- device: 1 × A device" in target.read_text() and "3 passed" in target.read_text()


def test_an_unwritable_report_path_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    parts = Parts(lambda: DEVICE, lambda: PytestResult(1, [], []), lambda name, runs: {"rows": []})
    assert main(["--report", str(tmp_path / "file" / "gpu.md")], parts) == 2
    assert "expected a folder for the report" in capsys.readouterr().err

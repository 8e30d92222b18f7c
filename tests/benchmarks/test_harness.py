"""The benchmark harness: the order of turns, medians and ratios, with a fake clock that only the subjects
advance; and once with real subject processes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, SubjectResult
from benchmarks.harness.fixture_cache import FOLDER, cached_bytes
from benchmarks.harness.measure import measure
from benchmarks.harness.subject_process import (
    ROOT,
    Interpreter,
    PeerUnavailable,
    SubjectError,
    SubjectProcess,
)
from benchmarks.harness.subject_runner import Slice, SubjectRunner
from tests.benchmarks.trivial import Clock

CONSTANT = "tests.benchmarks.trivial:constant_cost"


def test_fixtures_are_cached_between_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def make() -> bytes:
        calls.append(1)
        return bytes([len(calls)])

    assert (cached_bytes("a", make), cached_bytes("a", make)) == (b"\1", b"\2"), (
        "without a cache folder, each call makes a new fixture"
    )
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert (cached_bytes("a", make), cached_bytes("a", make), cached_bytes("b", make)) == (
        b"\3",
        b"\3",
        b"\4",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


class FakeRunner(SubjectRunner):
    """Runs the subjects in this process by the fake clock, and records the order of their turns."""

    def __init__(self, turns: list[int]) -> None:
        super().__init__(lambda: Clock.now_s, lambda: Clock.now_s / 2)
        self.turns = turns
        self.ended = False

    def slice(self, number: int) -> Slice:
        self.turns.append(number)
        return super().slice(number)

    def end(self) -> None:
        super().end()
        self.ended = True


def benchmark(*subjects: Subject, rounds: int = 4) -> Benchmark:
    row = Row(name="row", unit="things", subjects=subjects)
    return Benchmark(name="q", summary="?", rows=(row,), interpretation="", rounds=rounds)


def run_benchmark(config: Benchmark, runs: int = 3) -> tuple[dict[str, Any], list[list[int]]]:
    started: list[FakeRunner] = []

    def start(environment: str) -> FakeRunner:
        if environment:
            raise PeerUnavailable(f"no {environment} here")
        started.append(FakeRunner([]))
        return started[-1]

    result = measure(config, start, runs=runs)
    assert all(runner.ended for runner in started)
    return result, [runner.turns for runner in started]


def test_a_subject_may_report_units_and_figures_per_turn() -> None:
    result, _ = run_benchmark(
        benchmark(Subject("a", "tests.benchmarks.trivial:varying_units", (0.5, 1, 2, 3)), rounds=3)
    )
    (subject,) = result["rows"][0]["subjects"]
    assert subject["wall_us"]["median"] == 250_000, "the median of 1, 2 and 3 units in half a second each"
    assert subject["figures"]["twice"]["median"] == 4


def test_a_subject_may_time_a_part_of_its_step() -> None:
    result, _ = run_benchmark(benchmark(Subject("a", "tests.benchmarks.trivial:partly_timed"), rounds=1))
    (subject,) = result["rows"][0]["subjects"]
    assert subject["wall_us"]["median"] == 500_000, "only two of the seven seconds count, for four units"
    assert subject["cpu_us"]["median"] == 875_000, "CPU time is that of the whole step"


def test_run_setup_is_open_during_each_run() -> None:
    Clock.events.clear()
    config = dataclasses.replace(
        benchmark(Subject("a", "tests.benchmarks.trivial:partly_timed"), rounds=1),
        run_setup="tests.benchmarks.trivial:run_setup",
    )
    run_benchmark(config)
    assert Clock.events == ["open", "warm-up", "turn", "closed"] * 3


def test_a_figure_is_the_cost_of_a_unit_by_both_clocks() -> None:
    result, _ = run_benchmark(benchmark(Subject("a", CONSTANT, (0.002, 4))))
    (subject,) = result["rows"][0]["subjects"]
    assert subject["wall_us"]["median"] == 500 and subject["cpu_us"]["median"] == 250
    assert subject["wall_us"]["runs"] == [500, 500, 500]


def test_ratios_divide_speeds_by_the_first_subject() -> None:
    result, _ = run_benchmark(
        benchmark(Subject("a", CONSTANT, (0.001,)), Subject("b", CONSTANT, (0.003,), "peer"))
    )
    (ratio,) = result["rows"][0]["ratios"]
    assert (ratio["of"], ratio["to"], ratio["times_as_fast"]["median"]) == ("a", "b", 3.0)


def test_an_older_commit_runs_its_own_version_of_the_subject() -> None:
    subjects = (
        Subject("a", CONSTANT, (0.001,)),
        Subject("b", CONSTANT, (0.002,), "stage"),
        Subject("b before", CONSTANT, (0.008,), "before"),
    )
    ratios = run_benchmark(benchmark(*subjects))[0]["rows"][0]["ratios"]
    assert [(r["of"], r["to"], r["times_as_fast"]["median"]) for r in ratios] == [
        ("a", "b", 2.0),
        ("b", "b before", 4.0),
    ]


def test_rows_derive_figures_from_subjects() -> None:
    def derived(results: Mapping[str, SubjectResult]) -> Mapping[str, float]:
        return {"both": results["a"].cost_us + results["b"].figures["twice"]}

    subjects = (
        Subject("a", CONSTANT, (0.004, 2)),
        Subject("b", "tests.benchmarks.trivial:varying_units", (0.5, *[3.0] * 4), "peer"),
    )
    row = dataclasses.replace(benchmark(*subjects).rows[0], derives=derived)
    result, _ = run_benchmark(dataclasses.replace(benchmark(), rows=(row,)))
    assert result["rows"][0]["figures"] == {
        "both": {"median": 2006.0, "least": 2006.0, "most": 2006.0, "runs": [2006.0] * 3}
    }


def test_a_subject_may_have_another_seed_in_each_run() -> None:
    row = benchmark(Subject("a", "tests.benchmarks.trivial:varying_units", (0.5, RUN)), rounds=1).rows[0]
    result, _ = run_benchmark(dataclasses.replace(benchmark(), rows=(row,), rounds=1), runs=3)
    assert result["rows"][0]["subjects"][0]["figures"]["twice"]["runs"] == [0, 2, 4]


def test_a_skipped_row_gives_its_reason() -> None:
    config = benchmark(Subject("a", "tests.benchmarks.trivial:fails", ("opened",)))
    result, turns = run_benchmark(
        dataclasses.replace(config, rows=(dataclasses.replace(config.rows[0], skipped="no data"),))
    )
    assert (
        result["rows"][0]["skipped"] == "no data" and result["rows"][0]["subjects"] == [] and turns == []
    ), "no process was started"


def test_each_subject_is_first_equally_often() -> None:
    _, turns = run_benchmark(
        benchmark(Subject("a", CONSTANT, (0.1,)), Subject("b", CONSTANT, (0.1,)), rounds=4), runs=3
    )
    assert turns == [[0, 1, 1, 0, 0, 1, 1, 0]] * 3, "each run has new processes"


def test_an_unavailable_peer_does_not_stop_the_row() -> None:
    peer, limit = (
        Subject("b", CONSTANT, (0.1,), "peer", environment="rare"),
        Subject("c", CONSTANT, (0.05,), "limit"),
    )
    row = run_benchmark(benchmark(Subject("a", CONSTANT, (0.1,)), peer, limit))[0]["rows"][0]
    assert row["subjects"][1]["unavailable"] == "no rare here"
    assert [(r["to"], r["times_as_fast"]["median"]) for r in row["ratios"]] == [("c", 0.5)]


def test_a_subject_of_ours_that_fails_fails_the_benchmark() -> None:
    with pytest.raises(ValueError, match="broken"):
        run_benchmark(benchmark(Subject("a", "tests.benchmarks.trivial:fails", ("broken",))))


def test_subject_processes_report_errors(capfd: pytest.CaptureFixture[str]) -> None:
    runner = SubjectProcess(Interpreter(sys.executable, ROOT))
    try:
        number = runner.open("tests.benchmarks.trivial:constant_cost", [0.0, 7], 0.001)
        assert runner.slice(number).units % 7 == 0
        assert runner.versions()["python"] == sys.version.split()[0]
        with pytest.raises(SubjectError, match="ValueError: broken"):
            runner.open("tests.benchmarks.trivial:fails", ["broken"], 0.001)
        runner.close()
    finally:
        runner.end()
    assert "Traceback" in capfd.readouterr().err
    with pytest.raises((SubjectError, ValueError)):
        runner.slice(0)


def test_a_dead_subject_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    runner = SubjectProcess(Interpreter(sys.executable, ROOT))
    try:
        with pytest.raises(SubjectError, match="ended"):
            runner.open("os:_exit", [3], 0.001)
    finally:
        runner.end()

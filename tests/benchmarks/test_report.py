"""The documentation pages that are generated from published benchmark results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.benchmark import Benchmark, Row, Subject
from benchmarks.harness.report import page, pages, table
from benchmarks.harness.subject_process import ROOT
from benchmarks.main import RESULTS, benchmarks_by_name
from roostream.errors import ConfigError

BENCHMARK = Benchmark(
    name="q",
    summary="How fast?",
    rows=(Row(name="r", unit="things", subjects=(Subject("a", "m:f"),)),),
    interpretation="It depends.",
)


def figures(median: float, least: float, most: float) -> dict[str, Any]:
    return {"median": median, "least": least, "most": most, "runs": [least, median, most]}


def row(**changes: Any) -> dict[str, Any]:
    ours = {"name": "a", "role": "ours", "wall_us": figures(10, 8, 16), "cpu_us": figures(5, 4, 8)}
    limit = {"name": "b", "role": "limit", "wall_us": figures(5, 4, 8), "cpu_us": figures(5, 4, 8)}
    ratio = {"of": "a", "to": "b", "times_as_fast": figures(0.5, 0.4, 0.6)}
    return {
        "name": "r",
        "unit": "things",
        "shows": "rate",
        "clock": "wall",
        "subjects": [ours, limit],
        "ratios": [ratio],
        **changes,
    }


def result(**changes: Any) -> dict[str, Any]:
    machine = {
        "cpu": "a CPU",
        "cores": 2,
        "memory_gib": 8.0,
        "system": "Linux x86_64",
        "load_before": 0.1,
        "busy": False,
    }
    return {
        "format": 1,
        "question": "q",
        "command": "roostream bench q --runs 3",
        "taken": "2024-01-01",
        "commit": {"describe": "abc", "dirty": False},
        "machine": machine,
        "runs": 3,
        "versions": {"python": "3.11"},
        "rows": [row()],
        **changes,
    }


def test_a_figure_that_a_subject_lacks_leaves_its_cell_empty() -> None:
    first, second = row()["subjects"]
    first_figures, second_figures = (
        {"late": figures(1, 1, 1), "lost": figures(2, 2, 2)},
        {"sent": figures(4, 4, 4), "lost": figures(3, 3, 3)},
    )
    text = table(
        row(
            unit="events",
            shows="cost",
            subjects=[{**first, "figures": first_figures}, {**second, "figures": second_figures}],
        )
    )
    assert "| | late | lost | sent |" in text and "| | µs an event (wall time) |" in text
    assert "| a | 1 (1 .. 1) | 2 (2 .. 2) |  |\n| b |  | 3 (3 .. 3) | 4 (4 .. 4) |" in text


def test_derived_figures_and_skipped_rows_are_shown() -> None:
    text = table(row(figures={"bound": figures(4.5, 4.25, 5)}))
    assert text.endswith("| | | least .. most |\n|---|---:|---|\n| bound | 4.5 | 4.25 .. 5 |")
    assert table(row(skipped="no data", subjects=[], ratios=[])) == "Not asked: no data."


def test_every_published_result_has_a_page_and_a_line_in_the_index() -> None:
    results = ROOT / RESULTS / "json"
    generated = pages(benchmarks_by_name(), results)
    for path in results.glob("*.json"):
        name = json.loads(path.read_text(encoding="utf-8"))["question"]
        assert f"# {name}" in generated[f"{name}.md"] and f"]({name}.md)" in generated["runs.md"]


def test_the_newest_result_comes_first() -> None:
    text = page(BENCHMARK, [result(), result(taken="2024-02-01"), result(taken="2023-12-01")])
    taken = [line.split()[2] for line in text.splitlines() if line.startswith("## Taken")]
    assert taken == ["2024-02-01", "2024-01-01", "2023-12-01"]


def test_a_busy_machine_and_uncommitted_changes_are_marked() -> None:
    busy = result(
        machine=result()["machine"] | {"busy": True, "load_before": 3.1},
        commit={"describe": "abc", "dirty": True},
    )
    text = page(BENCHMARK, [busy])
    assert (
        "load average before: 3.1: **the machine was busy" in text
        and "changes that are not committed" in text
    )


def test_a_rate_is_units_a_second_and_a_cost_microseconds_a_unit() -> None:
    assert "| a | 100 000 | 62 500 .. 125 000 |" in table(row())
    assert "| b (limit) | 5 | 4 .. 8 | 0.5 | 0.4 .. 0.6 |" in table(row(shows="cost"))


def test_an_unavailable_peer_has_no_figures() -> None:
    unavailable = {"name": "p", "role": "peer", "unavailable": "no network"}
    assert "| p (peer) | peer unavailable: no network |" in table(
        row(subjects=[row()["subjects"][0], unavailable], ratios=[])
    )


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(result(format=99)))
    with pytest.raises(ConfigError, match=r"x\.json: expected a result of format 1"):
        pages({"q": BENCHMARK}, tmp_path)


def test_a_benchmark_without_a_result_has_no_page(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text(json.dumps(result()))
    other = BENCHMARK.__class__(name="other", summary="?", rows=BENCHMARK.rows, interpretation="")
    generated = pages({"q": BENCHMARK, "other": other}, tmp_path)
    assert list(generated) == ["runs.md", "q.md"] and "other" not in generated["runs.md"]

"""The benchmark figures on which `roostream plan` is based, each with its source in a committed report.

The reports (docs/benchmarks/json) are not part of an installed package, so `measured.json` holds a copy of
the figures. `roostream bench report` updates it, and a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from roostream.errors import ConfigError

FILE = Path(__file__).with_name("measured.json")


class FigureSource(NamedTuple):
    """The position of a figure in a report."""

    question: str
    row: str
    subject: str
    take: str  # "wall_us" or "cpu_us": microseconds per unit; else the name of another figure of the subject

    def __str__(self) -> str:
        clock = {"wall_us": "wall time", "cpu_us": "CPU time"}.get(self.take, self.take)
        return f"docs/benchmarks/{self.question}.md, {self.row!r}, {self.subject}: {clock}"


SOURCES: Mapping[str, FigureSource] = {
    "serve_20_us": FigureSource(
        "serving-request", "a request of 20 candidates", "through the endpoint, with the log", "cpu_us"
    ),
    "serve_200_us": FigureSource(
        "serving-request", "a request of 200 candidates", "through the endpoint, with the log", "cpu_us"
    ),
    "join_event_us": FigureSource(
        "joiner-core",
        "a stream of 20,000 events, 10 a request, 500 users",
        "with reading the events",
        "cpu_us",
    ),
    "step_64_of_11_us": FigureSource(
        "train-step", "a step of 64 requests as EB-NeRD's, of 11 candidates and 50 entries", "whole", "cpu_us"
    ),
    "step_512_of_5_us": FigureSource(
        "train-step", "a step of 512 requests of 5 candidates", "whole", "cpu_us"
    ),
    "one_worker_ms": FigureSource(
        "workers",
        "steps of 512 requests of 5 candidates, all workers together",
        "1 worker",
        "CPU ms a step, workers",
    ),
    "four_workers_ms": FigureSource(
        "workers",
        "steps of 512 requests of 5 candidates, all workers together",
        "4 workers",
        "CPU ms a step, workers",
    ),
    "pull_row_us": FigureSource(
        "ps-pull-push", "pull 104 k ids of 26 tables", "shard in this process", "cpu_us"
    ),
    "push_row_us": FigureSource(
        "ps-pull-push", "push and update 104 k ids of 26 tables", "shard in this process", "cpu_us"
    ),
    "call_us": FigureSource("rpc", "64 bytes there and back, one call at a time", "runtime.rpc", "cpu_us"),
    "decode_11_us": FigureSource("decode", "a poll of 64 samples of 11 candidates", "chunk", "cpu_us"),
    "decode_200_us": FigureSource("decode", "a poll of 64 samples of 200 candidates", "chunk", "cpu_us"),
    "archive_us": FigureSource(
        "archive", "4,096 samples of 20 candidates are archived", "the archiver", "cpu_us"
    ),
    "compact_us": FigureSource(
        "archive", "a day of 65,536 samples in 32 files is sealed", "in passes", "cpu_us"
    ),
    "freeze_ms": FigureSource(
        "commit", "one shard's part, 1 000 000 rows changed", "the shard", "copy, pushes wait, ms"
    ),
    "committed_mb": FigureSource("commit", "one shard's part, 1 000 000 rows changed", "the shard", "MB"),
    "commit_us": FigureSource("commit", "one shard's part, 1 000 000 rows changed", "the shard", "wall_us"),
    "cut_ms": FigureSource(
        "commit", "a commit of a running stack that holds 1 000 000 rows", "a second of training", "cut, ms"
    ),
    "worker_back_us": FigureSource(
        "recovery", "from the kill until the next step is trained", "the worker", "wall_us"
    ),
    "shard_back_us": FigureSource(
        "recovery", "from the kill until the next step is trained", "a shard", "wall_us"
    ),
}


def read() -> dict[str, float]:
    """Name → figure, from measured.json."""
    return {name: float(value) for name, value in json.loads(FILE.read_text(encoding="utf-8")).items()}


def of_reports(results: Path) -> dict[str, float]:
    """Name → figure, from the reports in a folder.

    Raises:
        ConfigError: a report or a figure is missing; names it.
    """
    return {name: _figure(results, source) for name, source in SOURCES.items()}


def write(results: Path) -> Path:
    """Update measured.json from the reports; returns its path. Raises as `of_reports`, without writing."""
    text = json.dumps(of_reports(results), indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")
    return FILE


def _figure(results: Path, source: FigureSource) -> float:
    try:
        report = json.loads((results / f"{source.question}.json").read_text(encoding="utf-8"))
        row = _named(report["rows"], source.row)
        subject = _named(row["subjects"], source.subject)
        found = subject[source.take] if source.take.endswith("_us") else subject["figures"][source.take]
        return float(found["median"])
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{source}: expected a figure in a committed report, got none ({error!r}); run the benchmark "
            "again"
        ) from None


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return {entry["name"]: entry for entry in entries}[name]

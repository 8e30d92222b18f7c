"""`roostream replay`: a real log through the whole loop, in event time; what happened as a table and as a report.

`--engine stack` sends it through Kafka, Flink and the trainer's own processes; `--engine local` through the same joiner code,
training loop and shards in this process. Samples, counts and features are the same, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from command.replay.stage import Engine, Outcome, Stage
from roo.errors import UnavailableError
from roo.schema_file import load_schema
from runtime import program
from runtime.clock import SystemClock
from traffic.config import ReplayConfig
from traffic.log import Log, open_log
from traffic.replay import paced
from traffic.report import check_report, write_report
from trainer.quality import QUALITY

_SHOWN = ("requests", *QUALITY)


def run(config: ReplayConfig) -> int:
    """The exit code: 0 = everything is accounted for, 1 = it isn't (a defect), 2 = refused or unavailable."""
    accounted = False

    def body(stop: program.Stop) -> None:
        nonlocal accounted
        report = replay(config, stop)
        accounted = bool(report["accounted"])

    code = program.run("replay", body)
    return code or (0 if accounted else 1)


def replay(config: ReplayConfig, stop: program.Stop) -> dict[str, Any]:
    """Run it, print the table, write the report, give it back.

    Raises:
        RoostreamError: bad input, or a part of the stack that is away or has failed for good. UnavailableError if `stop` was set.
    """
    check_report(config.report)
    started_s = time.monotonic()
    schema = load_schema(config.schema_path)
    source = open_log(config, schema)
    console = Console()
    with Stage(console, source.num_requests) as stage:
        stream = paced(stage.sending(source.records), config.speed_factor, SystemClock(), stop)
        outcome = _engine(config)(config, schema, stream, stage, stop)
    if stop.is_set():
        raise UnavailableError("stopped before the end of the log; there is no report")
    report = build_report(config, outcome, source, time.monotonic() - started_s)
    console.print(_table(config, report))
    if config.report:
        write_report(config.report, report)
    return report


def _engine(config: ReplayConfig) -> Engine:
    """Imported only when used: neither engine pays for the other's parts."""
    if config.engine == "stack":
        from command.replay.through_stack import replay_through_stack

        return replay_through_stack
    from command.replay.in_process import replay_in_process

    return replay_in_process


def build_report(config: ReplayConfig, outcome: Outcome, source: Log, wall_s: float) -> dict[str, Any]:
    """Keys as in docs/protocols.md, "Reports"; `features_digest` is equal for equal features, `untrained` is G2's count."""
    sums = outcome.accounts.sums(ended=True)
    skipped, first_skipped = source.skipped()
    return {
        "counts": {**sums.counts(), "untrained": outcome.untrained, "skipped_lines": skipped},
        "first_skipped_line": first_skipped,
        "accounted": sums.accounted and outcome.untrained == 0,
        "metrics": outcome.metrics.report(),
        "features_digest": f"{outcome.accounts.features_digest:016x}",
        "engine": config.engine,
        "wall_s": wall_s,
    }


def _table(config: ReplayConfig, report: Mapping[str, Any]) -> Table:
    counts = report["counts"]
    table = Table(
        title=f"replay {config.dataset} · {config.engine} · {report['wall_s']:.0f} s", title_justify="left", show_header=False
    )
    table.add_row("requests", f"{counts['requests']} → samples {counts['samples']} with {counts['candidates']} candidates")
    actions = ", ".join(f"{name} {n}" for name, n in counts["actions"].items())
    table.add_row("engagements", f"{counts['engagements']} ({actions})")
    ends = {
        "folded": "folded",
        "corrected": "corrected",
        "dead": "dead_engagements",
        "pending": "pending",
        "duplicates": "duplicates",
    }
    table.add_row("", ", ".join(f"{word} {counts[name]}" for word, name in ends.items()))
    table.add_row("closed by", ", ".join(f"{name} {n}" for name, n in counts["closed_by"].items()))
    table.add_row("dead letters", ", ".join(f"{name} {n}" for name, n in counts["dead_letters"].items()) or "none")
    if counts["skipped_lines"]:
        table.add_row("skipped lines", f"{counts['skipped_lines']}; the first: {report['first_skipped_line']}")
    table.add_row("accounted for", "yes, every event" if report["accounted"] else f"NO: {counts['overdue']} events are missing")
    table.add_row("features", str(report["features_digest"]))
    for name in ("overall", "measured"):
        for task, m in report["metrics"][name]["tasks"].items():
            values = {"requests": report["metrics"][name]["requests"], **m}
            table.add_row(f"{name}: {task}", "  ".join(f"{k} {_number(values.get(k))}" for k in _SHOWN))
    return table


def _number(value: object) -> str:
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)

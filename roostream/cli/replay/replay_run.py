"""`roostream replay`: a real log through the whole loop, in event time; what happened as a table and as a report.

`--engine stack` sends it through Kafka, Flink and the trainer's own processes; `--engine local` through the same joiner code,
training loop and shards in this process. Samples, counts and features are the same, byte for byte.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from rich.console import Console

from infra.options import to_toml_value
from roostream.cli.replay.outcome import Engine, Outcome, Stage
from roostream.cli.replay.program_settings import choices_of
from roostream.cli.replay.report_page import write_page
from roostream.cli.replay.report_table import table_of
from roostream.cli.replay.warehouse_samples import DATASET, archived_log
from roostream.errors import UnavailableError
from roostream.replay.config import ReplayConfig
from roostream.replay.log_advice import advice
from roostream.replay.replay_log import ReplayLog, open_log, paced, with_first_record
from roostream.replay.report_files import report_files, write_report
from roostream.runtime import program
from roostream.runtime.clock import SystemClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema


def run(config: ReplayConfig) -> int:
    """The exit code: 0 = everything is accounted for, 1 = it isn't (a defect), 2 = refused or unavailable."""
    accounted = False

    def body(stop: program.Stop) -> None:
        nonlocal accounted
        report = replay(config, stop)
        accounted = bool(report["accounted"])

    code = program.command_exit_code(program.run("replay", body))
    return code or (0 if accounted else 1)


def replay(config: ReplayConfig, stop: program.Stop) -> dict[str, Any]:
    """Run it, write the report, print the table, give the report back.

    Raises:
        RoostreamError: bad input, or a part of the stack that is away or has failed for good. UnavailableError if `stop` was set.
    """
    files = report_files(config.report)
    files.check()
    choices_of(config)
    started_s = time.monotonic()
    schema = load_schema(config.schema_path)
    source = archived_log(config, schema) if config.dataset == DATASET else open_log(config, schema)
    console = Console(markup=False, emoji=False, highlight=False)
    with Stage(console, source.num_requests) as stage:
        stream = paced(
            stage.sending(with_first_record(source.records)), config.speed_factor, SystemClock(), stop
        )
        outcome = _engine(config)(config, schema, stream, stage, stop)
    if stop.is_set():
        raise UnavailableError("stopped before the end of the log; there is no report")
    report = build_report(config, schema, outcome, source) | {"wall_s": time.monotonic() - started_s}
    if files.data:
        write_report(files.data, report)
    if files.page:
        write_page(files.page, f"replay {config.dataset}", report)
    console.print(table_of(config, report))
    return report


def _engine(config: ReplayConfig) -> Engine:
    """Imported only when used: neither engine pays for the other's parts."""
    if config.engine == "stack":
        from roostream.cli.replay.stack_replay import replay_through_stack

        return replay_through_stack
    from roostream.cli.replay.local_replay import replay_in_process

    return replay_in_process


def build_report(config: ReplayConfig, schema: Schema, outcome: Outcome, source: ReplayLog) -> dict[str, Any]:
    """Keys as in docs/protocols.md, "Reports"; `features_digest` is equal for equal features, `untrained` is G2's count. Of a
    warehouse's samples no event is there to be accounted for."""
    sums = outcome.accounts.sums(ended=True)
    skipped = source.skipped()
    findings, profile = outcome.findings, source.profile
    positives, model = findings.positives(), outcome.training.model or {}
    return {
        "counts": {**sums.counts(), "untrained": outcome.untrained, "skipped_lines": skipped.number},
        "first_skipped_line": skipped.first[0] if skipped.first else "",
        "first_dead_letters": findings.first_dead_letters(profile.origins.find),
        "warnings": advice(schema, profile, positives, prior=float(model.get("prior", 0.1)))
        if profile.num_impressions
        else [],
        "accounted": (sums.accounted or config.dataset == DATASET) and outcome.untrained == 0,
        "metrics": findings.metrics.report(),
        **({"metrics_as_served": outcome.served} if outcome.served is not None else {}),
        "baselines": findings.baselines.report(),
        "positives": positives,
        "log": profile.report(),
        "training": dataclasses.asdict(outcome.training),
        **({"archived": dataclasses.asdict(outcome.archived)} if outcome.archived is not None else {}),
        "settings": settings_of(config),
        "features_digest": f"{outcome.accounts.features_digest:016x}",
        "engine": config.engine,
    }


def settings_of(config: ReplayConfig) -> dict[str, Any]:
    """Everything that was given or left at its default; model and trainer beside, under `training`."""
    return {**dataclasses.asdict(config), "worker": to_toml_value(choices_of(config).worker)}

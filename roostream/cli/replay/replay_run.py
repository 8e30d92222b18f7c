"""Run a replay with one of two engines, and write its report.

`--engine stack` uses Kafka, Flink and the programs of the trainer. `--engine local` uses the same joiner
code, training loop and shards in this process. Samples, counts and features of both are equal, byte for byte.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from infra.home import Home
from infra.options import to_toml_value
from roostream.cli.output import progress_bar
from roostream.cli.replay.likely_reasons import likely_reasons
from roostream.cli.replay.outcome import Engine, Outcome, ReplayProgress, count_impressions
from roostream.cli.replay.program_settings import program_settings, with_model_settings
from roostream.cli.replay.report_page import write_page
from roostream.cli.replay.report_table import print_table
from roostream.cli.replay.warehouse_samples import DATASET, open_warehouse_log
from roostream.errors import ConfigError, UnavailableError
from roostream.models.build import build_model, load_model_config
from roostream.models.config import CustomModelConfig
from roostream.models.custom.model_checks import check_model
from roostream.replay.config import ReplayConfig
from roostream.replay.log_advice import advice
from roostream.replay.replay_log import ReplayLog, open_log, paced, with_first_record
from roostream.replay.report_files import report_files, write_report
from roostream.runtime import program
from roostream.runtime.clock import SystemClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema

log = logging.getLogger("roostream.replay")


def run(config: ReplayConfig) -> int:
    """Returns the exit code: 0 = every event is accounted for, 1 = some are not (a bug), 2 = a setting is
    wrong or something is unavailable."""
    accounted = False

    def body(stop: program.Stop) -> None:
        nonlocal accounted
        report = replay(config, stop)
        accounted = bool(report["accounted"])

    code = program.run("replay", body, is_command=True)
    return code or (0 if accounted else 1)


def replay(config: ReplayConfig, stop: program.Stop) -> dict[str, Any]:
    """Run the replay, write the report, print the table, and return the report.

    Raises:
        RoostreamError: bad input, or a program of the stack failed.
        UnavailableError: `stop` was set.
    """
    files = report_files(config.report)
    files.check()
    if config.home:
        _check_home(Home(Path(config.home)))
    started_s = time.monotonic()
    schema = load_schema(config.schema_path)
    doubts = _check_models(config, schema)
    with progress_bar("reading times"):
        source = open_warehouse_log(config, schema) if config.dataset == DATASET else open_log(config, schema)
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with ReplayProgress(console, source.num_requests) as progress:
        sent = count_impressions(with_first_record(source.records), lambda count: progress.update(sent=count))
        stream = paced(sent, config.speed_factor, SystemClock(), stop)
        outcome = _engine(config, source)(config, schema, stream, progress, stop)
    if stop.is_set():
        raise UnavailableError("stopped before the end of the log; no report was written")
    report = build_report(config, schema, outcome, source) | {"wall_s": time.monotonic() - started_s}
    report["warnings"] += doubts
    if files.data:
        write_report(files.data, report)
    if files.page:
        write_page(files.page, f"replay {config.dataset}", report)
    print_table(config, report)
    return report


def _check_home(home: Home) -> None:
    """Raises ConfigError: the home has records of another run, also of one that was interrupted. Their event
    time is past the begin of this log, and the sums would be those of both."""
    if (home.root / "kafka" / "meta.properties").exists():
        raise ConfigError(
            f"{home.root}: expected a new home, got one with the records of another run; choose another "
            f"--home, or delete that one with `roostream reset {home.option}`"
        )


def _check_models(config: ReplayConfig, schema: Schema) -> list[str]:
    """Build each model, so that a mistake ends the replay before the log is read. Returns a sentence for each
    custom model that fails a check of `roostream check-model`."""
    settings, doubts = program_settings(config).model, []
    for file in config.model or ("",) if "kind" not in settings else ():
        model = with_model_settings(load_model_config(file), settings)
        try:
            if not isinstance(model, CustomModelConfig):
                build_model(schema, model, config.seed)
                continue
            failed = [verdict for verdict in check_model(schema, model) if verdict.wrong]
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}" if file not in str(error) else str(error)) from None
        if failed:
            doubts.append(f"{file} fails `roostream check-model`: {failed[0].check}: {failed[0].wrong}")
            log.warning(doubts[-1])
    return doubts


def _engine(config: ReplayConfig, source: ReplayLog) -> Engine:
    """Import one engine, without the packages of the other."""
    if config.engine == "stack":
        from roostream.cli.replay.stack_replay import replay_on_stack

        return replay_on_stack
    from roostream.cli.replay.local_replay import replay_in_process

    return partial(replay_in_process, registry=source.registry)


def build_report(config: ReplayConfig, schema: Schema, outcome: Outcome, source: ReplayLog) -> dict[str, Any]:
    """Report with the keys of docs/protocols.md, section Reports.

    `features_digest` is equal for equal features, and `untrained` counts violations of guarantee G2. In a
    replay of a warehouse there are no events to account for.
    """
    sums = outcome.accounts.sums(ended=True)
    skipped = source.skipped()
    statistics, profile = outcome.statistics, source.profile
    positives, base_rates = statistics.positives(), statistics.base_rates()
    model = outcome.training.model or {}
    metrics, baselines = statistics.metrics.report(), statistics.baselines.report()
    warnings = []
    if profile.num_impressions:
        warnings = advice(schema, profile, positives, base_rates, float(model.get("prior", 0.1)))
        warnings += skipped.warnings()
    report: dict[str, Any] = {
        "counts": {**sums.counts(), "untrained": outcome.untrained, "skipped_lines": skipped.number},
        "first_skipped_line": skipped.first[0] if skipped.first else "",
        "first_skipped_lines": list(skipped.first),
        "first_dead_letters": statistics.first_dead_letters(profile.origins.find),
        "warnings": warnings,
        "accounted": (sums.accounted or config.dataset == DATASET) and outcome.untrained == 0,
        "metrics": metrics,
        **({"metrics_as_served": outcome.served} if outcome.served is not None else {}),
        **({"streaming": outcome.streaming} if outcome.streaming is not None else {}),
        "baselines": baselines,
        "positives": positives,
        "base_rates": base_rates,
        "log": profile.report(),
        "training": dataclasses.asdict(outcome.training),
        **({"archived": dataclasses.asdict(outcome.archived)} if outcome.archived is not None else {}),
        "settings": {  # of model and trainer: `training`
            **dataclasses.asdict(config),
            "worker": to_toml_value(program_settings(config).worker),
        },
        "features_digest": f"{outcome.accounts.features_digest:016x}",
        "engine": config.engine,
    }
    verdict = statistics.paired.verdict(config.measure_from_ms)
    reasons = likely_reasons(verdict, schema, config, report)
    if verdict.state == "behind":
        listed = " · ".join(reason.sentence() for reason in reasons)
        warnings.append(f"the model is {verdict.sentence()}. Likely reasons: {listed}")
    report |= {"verdict": {**verdict.report(), "likely_reasons": [r._asdict() for r in reasons]}}
    if outcome.others:
        report |= {"models": _compare_models(config, outcome, report)}
    return report


def _compare_models(
    config: ReplayConfig, outcome: Outcome, report: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Each model of the pass with its metrics and verdict; all but the first also against the first."""
    found = [
        {
            "model": config.first_model,
            "metrics": {when: report["metrics"][when] for when in ("overall", "measured")},
            "training": report["training"],
            "verdict": report["verdict"],
            **({"streaming": outcome.streaming} if outcome.streaming is not None else {}),
        }
    ]
    for other in outcome.others:
        metrics = other.metrics.report()
        against = other.paired.against(outcome.statistics.paired, config.first_model)
        found.append(
            {
                "model": other.file,
                "metrics": {when: metrics[when] for when in ("overall", "measured")},
                "training": dataclasses.asdict(other.training),
                "verdict": other.paired.verdict(config.measure_from_ms).report(),
                "against_first": against.verdict(config.measure_from_ms).report(),
                **({"streaming": other.streaming} if other.streaming is not None else {}),
            }
        )
    return found

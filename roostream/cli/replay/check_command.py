"""`roostream check`: check a log against a schema before training: unreadable lines, unused actions, missing
features, joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from roostream.cli.output import Row, print_rows, progress_bar
from roostream.cli.replay.outcome import LocalJoin, LocalTopics, count_impressions
from roostream.cli.replay.report_table import join_rows, number, warning_rows
from roostream.errors import ConfigError, UnavailableError
from roostream.replay.config import CheckConfig
from roostream.replay.log_advice import advice
from roostream.replay.replay_log import ReplayLog, open_log
from roostream.replay.report_files import check_report, write_report
from roostream.runtime import program
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

_QUANTILES = (50, 90, 95, 99, 100)


def run(config: CheckConfig) -> int:
    """Returns the exit code: 0 = the log can be replayed, perhaps with warnings; 1 = some lines cannot be
    used, or it was stopped; 2 = the check failed."""
    errors: list[str] = []

    def body(stop: program.Stop) -> None:
        errors.extend(check(config, stop)["errors"])

    return program.run("check", body, is_command=True) or (1 if errors else 0)


def check(config: CheckConfig, stop: program.Stop) -> dict[str, Any]:
    """Check the log, write the report, print the table, and return the report.

    Raises:
        RoostreamError: the schema, a setting or a file cannot be used.
        UnavailableError: `stop` was set.
    """
    check_report(config.report)
    replay = config.replay()
    schema = load_schema(replay.schema_path, needs_features=True)
    with progress_bar("reading times"):
        log = open_log(replay, schema)
    topics, delays = LocalTopics(schema), EngagementDelays()
    joiner = LocalJoin(replay, schema, topics)
    errors: list[str] = []
    try:
        with progress_bar("requests", log.num_requests or None) as update:
            for record in count_impressions(log.records, lambda count: update(count, None)):
                if stop.is_set():
                    raise UnavailableError("stopped before the end of the log; there is no report")
                delays.add(joiner.process(topics.append(record)))
            delays.add(joiner.end_of_input())
    except ConfigError as error:
        if not log.skipped().number:
            raise
        errors.append(str(error))  # in addition to the skipped lines, which are the cause
    report = build_report(schema, log, topics, delays, errors)
    if config.report:
        write_report(config.report, report)
    print_rows(_rows(report), f"check {config.schema}")
    return report


class EngagementDelays:
    """Seconds from requests to their engagements, including those after the close."""

    def __init__(self) -> None:
        self._seconds: Counter[int] = Counter()

    def add(self, records: Iterable[Record]) -> None:
        """Add records of any topic; only samples and corrections count."""
        for record in records:
            if record.topic in (SAMPLES, CORRECTIONS):
                message = wire.decode(record.value)[1]
                assert isinstance(message, pb.Sample)
                self._seconds.update(max(t - message.header.time_ms, 0) // 1000 for t in message.event_times)

    def report(self) -> dict[str, int]:
        """`p50` … `p100`; empty without engagements."""
        seconds_N = np.repeat(list(self._seconds), list(self._seconds.values()))
        return {
            f"p{q}": int(np.percentile(seconds_N, q, method="lower")) for q in _QUANTILES if len(seconds_N)
        }


def build_report(
    schema: Schema, log: ReplayLog, topics: LocalTopics, delays: EngagementDelays, errors: list[str]
) -> dict[str, Any]:
    """The keys of a replay's report, with `errors`, `engagement_delay_s` and `requests_in_pages`."""
    sums, skipped = topics.accounts.sums(ended=True), log.skipped()
    positives, base_rates = topics.statistics.positives(), topics.statistics.base_rates()
    warnings = [*advice(schema, log.profile, positives, base_rates), *skipped.warnings()]
    if late := sums.corrections + sums.dead_letters.get("too_late", 0):
        unknown = sums.dead_letters.get("no_request", 0)
        more = f", and perhaps some of the {unknown} with no_request" if unknown else ""
        warnings.append(
            f"{late} engagements come after the join window and are not trained; a longer --window "
            f"includes them{more}"
        )
    if left := skipped.number - len(skipped.first):
        errors = [*errors, f"and {left} more lines that cannot be used"]
    return {
        "errors": [*skipped.first, *errors],
        "warnings": warnings,
        "counts": {**sums.counts(), "skipped_lines": skipped.number},
        "first_skipped_line": skipped.first[0] if skipped.first else "",
        "first_skipped_lines": list(skipped.first),
        "first_dead_letters": topics.statistics.first_dead_letters(log.profile.origins.find),
        "positives": positives,
        "base_rates": base_rates,
        "baselines": topics.statistics.baselines.report(),
        "engagement_delay_s": delays.report(),
        "requests_in_pages": log.profile.num_impressions - sums.requests,
        "log": log.profile.report(),
    }


def _rows(report: dict[str, Any]) -> Iterator[Row]:
    yield from (("error", text) for text in report["errors"])
    yield from warning_rows(report["warnings"])
    if not report["counts"]["requests"]:
        return
    yield from join_rows(report)
    log, lengths = report["log"], report["log"]["list_lengths"]
    yield "list lengths", ", ".join(f"{name} {n}" for name, n in lengths.items())
    yield "further pages", str(report["requests_in_pages"])
    yield (
        "engaged after",
        ", ".join(f"{name} {s} s" for name, s in report["engagement_delay_s"].items()) or "never",
    )
    for name, f in log["features"].items():
        what = "entries" if f["kind"] != "float" else "values"
        span = f"{what} {number(f['min'])} to {number(f['max'])}, mean {number(f['mean'])}"
        yield f"{f['side']} {name}", f"{number(f['share'])} of rows; {span}"
    for baseline, both in report["baselines"].items():
        yield (
            f"by {baseline} alone",
            f"ne {number(both['overall']['ne'])}  request_auc {number(both['overall']['request_auc'])}",
        )

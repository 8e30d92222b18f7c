"""The table that a replay and a check print at their end. Text is never interpreted as markup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roostream.cli.output import Row, print_rows
from roostream.replay.config import ReplayConfig
from trainer.monitoring.progressive_metrics import METRIC_NAMES

_SHOWN = ("requests", *METRIC_NAMES)


def print_table(config: ReplayConfig, report: Mapping[str, Any]) -> None:
    """Print the report of a replay."""
    title = f"replay {config.dataset} · {config.engine} · {report['wall_s']:.0f} s"
    rows = [*_counts(report), *_training(report), *_metrics(report), *_verdict(report), *_models(report)]
    rows += warning_rows(report["warnings"])
    print_rows(rows, title)


def warning_rows(warnings: list[str]) -> Iterator[Row]:
    """A row for each warning."""
    yield from (("warning", text) for text in warnings)


def join_rows(report: Mapping[str, Any]) -> Iterator[Row]:
    """Rows about the log and its joins."""
    counts = report["counts"]
    yield (
        "requests",
        f"{counts['requests']} → samples {counts['samples']} with {counts['candidates']} candidates",
    )
    actions = f" ({_listed(counts['actions'])})" if counts["actions"] else ""
    yield "engagements", f"{counts['engagements']}{actions}"
    ends = {
        "folded": "folded",
        "corrected": "corrected",
        "dead": "dead_engagements",
        "pending": "pending",
        "duplicates": "duplicates",
    }
    yield "", ", ".join(f"{word} {counts[name]}" for word, name in ends.items())
    yield "closed by", _listed(counts["closed_by"])
    yield "dead letters", _listed(counts["dead_letters"]) or "none"
    for reason, first in report["first_dead_letters"].items():
        yield f"  first {reason}", f"{first['where'] or 'unknown line'}: {first['error']}"
    if counts["skipped_lines"]:
        first = [] if "errors" in report else report["first_skipped_lines"]  # `check` has them as errors
        yield "skipped lines", f"{counts['skipped_lines']}{'; the first:' if first else ''}"
        yield from (("", message) for message in first)
    yield "positives", _listed(report["positives"])


def _counts(report: Mapping[str, Any]) -> Iterator[Row]:
    yield from join_rows(report)
    yield (
        "accounted for",
        "yes, every event"
        if report["accounted"]
        else f"NO: {report['counts']['overdue']} events are missing",
    )
    yield "features", f"digest {report['features_digest']}; {coverage(report['log']['features'])}"


def coverage(features: Mapping[str, Mapping[str, Any]]) -> str:
    """The number of features, and those that are missing in some rows, if the log's rows were seen."""
    if all(f["share"] is None for f in features.values()):
        return str(len(features))
    partly = [
        f"{name} {f['share']:.0%}"
        for name, f in features.items()
        if f["share"] is not None and f["share"] < 1
    ]
    return (
        f"{len(features)}, some missing: {', '.join(partly)}" if partly else f"{len(features)}, none missing"
    )


def _training(report: Mapping[str, Any]) -> Iterator[Row]:
    training, worker = report["training"], report["settings"]["worker"]
    settings = ", ".join(
        f"{name} {worker[name]}" for name in ("batch_requests", "learning_rate", "seed") if name in worker
    )
    skipped = f", {training['non_finite']} non-finite requests" if training["non_finite"] else ""
    again = f", {number(training['rehearsed'])} requests replayed" if training["rehearsed"] else ""
    if archived := report.get("archived"):
        seals = (
            f"{archived['days']} days, {archived['files']} files, {archived['sealed']} sealed, "
            f"{archived['bytes']} bytes"
        )
        yield "archived", f"{archived['samples']} samples in {archived['archive_s']:.0f} s ({seals})"
        yield (
            "from archive",
            f"{archived['trained']} samples trained in {archived['train_s']:.0f} s, then the stream",
        )
    yield "training", f"{number(training['steps'])} steps{again}{skipped}; {settings}"
    if training["rows"] is not None:
        rows = _listed(training["rows"])
        yield "parameters", f"{training['dense_parameters']} dense; rows: {rows}"


def _metrics(report: Mapping[str, Any]) -> Iterator[Row]:
    metrics = report["metrics"]
    shown = ["overall"] if metrics["measured"] == metrics["overall"] else ["overall", "measured"]
    for name in shown:
        for k, (task, m) in enumerate(metrics[name]["tasks"].items()):
            yield f"{name}: {task}", _values({"requests": metrics[name]["requests"], **m})
            for baseline, both in report["baselines"].items() if k == 0 else ():
                yield f"  by {baseline} alone", _values(both[name])
        if "metrics_as_served" in report:
            served = report["metrics_as_served"][name]
            for task, m in served["tasks"].items():
                yield f"{name} as served: {task}", _values({"requests": served["requests"], **m})
    for task, m in report["streaming"]["mean"]["tasks"].items() if "streaming" in report else ():
        windows = report["streaming"]["mean"]["windows"]
        yield f"mean of {windows} next windows: {task}", _values({**report["streaming"]["overall"], **m})


def _verdict(report: Mapping[str, Any]) -> Iterator[Row]:
    verdict = report["verdict"]
    yield "model", verdict["sentence"]
    if verdict["state"] == "undecided":  # a model that is behind has a warning with its reasons
        yield from (("  likely reason", f"{r['fact']}; {r['change']}") for r in verdict["likely_reasons"])


def _models(report: Mapping[str, Any]) -> Iterator[Row]:
    """The models of one pass; each but the first against the first."""
    for model in report.get("models", ()):
        measured = model["metrics"]["measured"]
        yield f"model {model['model']}", _values({"requests": measured["requests"], **measured})
        if "against_first" in model:
            yield "", model["against_first"]["sentence"]


def _values(m: Mapping[str, Any]) -> str:
    shown = [*_SHOWN, *(["mae"] if "mae" in m else [])]  # of an amount
    return "  ".join(f"{k} {number(m.get(k))}" for k in shown)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def number(value: object) -> str:
    """The value as text, a float with four decimals, or with four digits below 0.001 and from 1e9 on."""
    if not isinstance(value, float):
        return "–" if value is None else str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e9 else f"{value:.4g}"

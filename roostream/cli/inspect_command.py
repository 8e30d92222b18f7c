"""`roostream inspect`: look at saved batches, at data, and at differences between serving and training."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.checkpoint.checkpoint_command import opened_store, place_options
from roostream.cli.data.dedupe_command import dedupe
from roostream.cli.data.feature_command import feature
from roostream.cli.data.session_command import inspect_session
from roostream.cli.data.warehouse_command import inspect_file, inspect_table
from roostream.cli.options import CommandGroup, json_option
from roostream.cli.output import Row, clock, print_report, progress_bar
from roostream.errors import ConfigError

if TYPE_CHECKING:
    from roostream.cli.skew.scored_lists import LoggedList


@click.group(cls=CommandGroup)
def inspect() -> None:
    """Look at saved batches, at data, and at differences between served scores and training.

    \b
    Example:
      roostream inspect batch .roostream/worker/batches/1700000000000-42.batch
      roostream inspect dedupe --schema my_site.toml monday.jsonl
      roostream inspect feature warehouse/ history
      roostream inspect skew --lists 500
    """


inspect.add_command(dedupe)
inspect.add_command(feature)
inspect.add_command(inspect_table)
inspect.add_command(inspect_file)
inspect.add_command(inspect_session)


@inspect.command("batch")
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def batch_command(file: Path, as_json: bool) -> None:
    """Describe the batch at which a worker stopped training: the reason, the records, and the values.

    \b
    Example:
      roostream inspect batch .roostream/worker/batches/1700000000000-42.batch
    """
    from roostream.cli.inspect_batch import inspected
    from trainer.saved_batch import decode

    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a batch saved by a worker, got {error.strerror}; choose a file in its batches/"
        ) from None
    found = inspected(decode(data, str(file)))
    print_report(as_json, found, rows(found), str(file))


@inspect.command("skew")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@place_options
@click.option(
    "--lists",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="number of newest lists to score again",
)
@json_option
def skew_command(files: tuple[Path, ...], home: Path, store: str, lists: int, as_json: bool) -> None:
    """Score logged lists again with the training code and the version that served them, and compare the
    scores.

    The lists are the newest samples of the stack in --home, or those in FILES: segments of a feature log, or
    saved batches. Exit code 1: a list was served with other features than those logged.

    \b
    Example:
      roostream inspect skew --lists 500
      roostream inspect skew .roostream/serving/log/* --home .roostream
    """
    from roostream.cli.skew.commit_states import CommitStates
    from roostream.cli.skew.score_comparison import compare_scores, summary
    from roostream.cli.skew.scored_lists import of_file

    commits = CommitStates(opened_store(home, store), home.expanduser().resolve())
    found = [logged for file in files for logged in of_file(file)][-lists:] if files else _newest(home, lists)
    with progress_bar("scoring lists"):
        report = summary(compare_scores(commits, found))
    print_report(as_json, report, skew_rows(report), f"{report['lists']:,} lists scored again")
    sys.exit(1 if report["verdicts"].get("skew") else 0)


def _newest(home: Path, lists: int) -> list[LoggedList]:
    """Lists from the newest samples of the running stack."""
    from infra.home import Home
    from roostream.cli.skew.scored_lists import of_topic

    stack = Home(home).read_stack()
    if not stack or not stack.get("kafka"):
        raise ConfigError(
            f"expected a running stack in {home}, got none; give its --home, or segments of serving's "
            "log as FILES"
        )
    return of_topic(stack["kafka"], stack["prefix"], int(stack["partitions"]), lists)


def skew_rows(found: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of text for `score_comparison.summary`."""
    if not found["scored_again"]:
        yield "within", "no list could be scored again"
    else:
        share = f"{found['share_within']:.2%} of {found['scored_again']:,} lists"
        yield f"within {found['tolerance']:g}", f"{share}, the largest difference {found['largest']:.3g}"
    names = {"skew": "SKEW", "rows": "rows changed"}
    for verdict, name in names.items():
        if count := found["verdicts"].get(verdict):
            yield name, f"{count:,} lists"
    for why, count in found["not_scored"].items():
        yield "not scored", f"{count:,}: {why}"
    for version, figures in found["versions"].items():
        judged = ", ".join(f"{figures[v]:,} {v}" for v in ("within", "rows", "skew") if figures[v])
        yield (
            f"version {version or '(none)'}",
            f"{figures['lists']:,} lists: {judged or 'none scored'}; largest {figures['largest']:.3g}",
        )
    for one in found["differing"][:_MAX_SHOWN]:
        at = f"rows of commit {one['rows_of_commit']}, {one['rows_changed']:,} of them changed around it"
        yield (
            f"{one['verdict']} {one['request_id']}",
            f"{one['largest']:.3g}: {one['why']} ({at}; {one['where']})",
        )


_MAX_SHOWN = 10


def rows(found: Mapping[str, Any]) -> Iterator[Row]:
    """Rows of text for a batch: the reason, the origin, then the contents."""
    yield "why", found["reason"]
    for finding in found["findings"]:
        yield "not finite", finding
    restored = (
        f"{found['manifest']} (checksum {found['manifest_checksum']})"
        if found["manifest"]
        else "the beginning"
    )
    yield (
        "when",
        f"{clock(found['time_ms'])} UTC, worker {found['worker']}, step {found['step']:,}, incarnation "
        f"{found['incarnation']}",
    )
    yield "restored", restored
    for figures in found["records"]:
        where = (
            f"{figures['topic']}-{figures['partition']} {figures['first_offset']}..{figures['last_offset']}"
        )
        yield (
            "records",
            f"{where}: {figures['count']:,}, {figures['bytes']:,} bytes, {clock(figures['first_ms'])} to "
            f"{clock(figures['last_ms'])}",
        )
    if found["left_out"]:
        yield "not saved", f"{found['left_out']:,} more records, above the limit"
    for reason, count in found["rejects"].items():
        yield "not decoded", f"{count:,}: {reason}"
    yield (
        "batch",
        f"{found['requests']:,} requests, {found['candidates']:,} candidates, {found['corrections']:,} "
        "corrections",
    )
    for task, figures in found["tasks"].items():
        yield (
            f"label {task}",
            f"mean {figures['label_mean']:.4f}, weight {figures['weight']:.6g}, the largest "
            f"{figures['largest_weight']:.6g}",
        )
    for name, figures in found["features"].items():
        yield name, _feature(figures)
    for one in found["largest"]:
        topic = "corrections" if one["correction"] else "samples"
        yield (
            "largest",
            f"{one['feature']} = {one['value']:.6g} in {topic}-{one['partition']} offset {one['offset']}",
        )


def _feature(figures: Mapping[str, Any]) -> str:
    present = f"present in {figures['present']:.0%}"
    if figures["kind"] == "float":
        return f"{_numbers(figures)}, {present}"
    weights = f"; weights {_numbers(figures['weights'])}" if "weights" in figures else ""
    return f"{figures['distinct']:,} distinct ids, longest list {figures['longest']:,}, {present}{weights}"


def _numbers(figures: Mapping[str, Any]) -> str:
    if figures["min"] is None:
        return "no values"
    extreme = f", EXTREME: {figures['extreme']:,}" if figures["extreme"] else ""
    return f"{figures['min']:.6g} to {figures['max']:.6g}, mean {figures['mean']:.6g}{extreme}"

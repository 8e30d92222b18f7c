"""`roostream inspect`: a saved batch here, what is told of data in command/data."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.checkpoint.checkpoint_command import place_options
from roostream.cli.data.dedupe_command import dedupe
from roostream.cli.data.feature_command import feature
from roostream.cli.data.session_command import inspect_session
from roostream.cli.data.warehouse_command import inspect_file, inspect_table
from roostream.cli.options import json_option
from roostream.errors import ConfigError

if TYPE_CHECKING:
    from roostream.cli.skew.scored_lists import LoggedList
    from roostream.cli.status_table import Row


@click.group()
def inspect() -> None:
    """Look at what a program has saved, at data, or whether what was scored is what was logged.

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
    """The batch at which a worker ended training: why, where its records are from, and the numbers in it.

    \b
    Example:
      roostream inspect batch .roostream/worker/batches/1700000000000-42.batch
    """
    from rich.console import Console

    from roostream.cli.inspect_batch import inspected
    from roostream.cli.status_table import render_rows
    from trainer.saved_batch import decode

    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{file}: expected a batch that a worker saved, got {error.strerror}; name a file of its batches/"
        ) from None
    told = inspected(decode(data, str(file)))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        Console().print(render_rows(list(rows(told)), str(file)))


@inspect.command("skew")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@place_options
@click.option(
    "--lists",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="newest lists that are scored again",
)
@json_option
def skew_command(files: tuple[Path, ...], home: Path, store: str, lists: int, as_json: bool) -> None:
    """Score logged lists again with training's forward pass, by the version that served each: the newest samples of the stack in
    --home, or those of FILES, segments of a feature log or saved batches. Exit code 1 if a list was scored by other features than
    were logged.

    \b
    Example:
      roostream inspect skew --lists 500
      roostream inspect skew .roostream/serving/log/* --home .roostream
    """
    from rich.console import Console

    from roostream.cli.checkpoint.checkpoint_command import opened_store
    from roostream.cli.skew.commit_states import CommitStates
    from roostream.cli.skew.score_comparison import rescored, summary
    from roostream.cli.skew.scored_lists import of_file
    from roostream.cli.status_table import render_rows

    commits = CommitStates(opened_store(home, store), home.expanduser().resolve())
    found = [logged for file in files for logged in of_file(file)][-lists:] if files else _newest(home, lists)
    told = summary(rescored(commits, found))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        Console().print(render_rows(list(skew_rows(told)), f"{told['lists']:,} lists scored again"))
    sys.exit(1 if told["verdicts"].get("skew") else 0)


def _newest(home: Path, lists: int) -> list[LoggedList]:
    """Of the samples of the stack that runs in the home."""
    from infra.home import Home
    from roostream.cli.skew.scored_lists import of_topic

    stack = Home(home).read_stack()
    if not stack or not stack.get("kafka"):
        raise ConfigError(
            f"expected a stack that runs in {home}, got none; name its --home, or segments of serving's log as FILES"
        )
    return of_topic(stack["kafka"], stack["prefix"], int(stack["partitions"]), lists)


def skew_rows(told: Mapping[str, Any]) -> Iterator[Row]:
    """Of `summary`, for people."""
    if not told["scored_again"]:
        yield "within", "no list could be scored again"
    else:
        share = f"{told['share_within']:.2%} of {told['scored_again']:,} lists"
        yield f"within {told['tolerance']:g}", f"{share}, the largest difference {told['largest']:.3g}"
    names = {"skew": "SKEW", "rows": "rows moved"}
    for verdict, name in names.items():
        if count := told["verdicts"].get(verdict):
            yield name, f"{count:,} lists"
    for why, count in told["not_scored"].items():
        yield "not scored", f"{count:,}: {why}"
    for version, its in told["versions"].items():
        judged = ", ".join(f"{its[v]:,} {v}" for v in ("within", "rows", "skew") if its[v])
        yield (
            f"version {version or '(none)'}",
            f"{its['lists']:,} lists: {judged or 'none scored'}; largest {its['largest']:.3g}",
        )
    for one in told["differing"][:_MAX_TOLD]:
        at = f"rows of commit {one['rows_of_commit']}, {one['rows_changed']:,} of them changed beside it"
        yield (
            f"{one['verdict']} {one['request_id']}",
            f"{one['largest']:.3g}: {one['why']} ({at}; {one['where']})",
        )


_MAX_TOLD = 10


def rows(told: Mapping[str, Any]) -> Iterator[Row]:
    """Of `inspected`, for people: why first, then from where, then what."""
    from roostream.cli.status_table import clock

    yield "why", told["reason"]
    for finding in told["findings"]:
        yield "not finite", finding
    restored = (
        f"{told['manifest']} (checksum {told['manifest_checksum']})" if told["manifest"] else "the beginning"
    )
    yield (
        "when",
        f"{clock(told['time_ms'])} UTC, worker {told['worker']}, step {told['step']:,}, incarnation {told['incarnation']}",
    )
    yield "restored", restored
    for its in told["records"]:
        where = f"{its['topic']}-{its['partition']} {its['first_offset']}..{its['last_offset']}"
        yield (
            "records",
            f"{where}: {its['count']:,}, {its['bytes']:,} bytes, {clock(its['first_ms'])} to {clock(its['last_ms'])}",
        )
    if told["left_out"]:
        yield "left out", f"{told['left_out']:,} records more, which were too many to be saved"
    for reason, count in told["rejects"].items():
        yield "not decoded", f"{count:,}: {reason}"
    yield (
        "batch",
        f"{told['requests']:,} requests, {told['candidates']:,} candidates, {told['corrections']:,} of the requests corrections",
    )
    for task, its in told["tasks"].items():
        yield (
            f"label {task}",
            f"mean {its['label_mean']:.4f}, weight {its['weight']:.6g}, the largest {its['largest_weight']:.6g}",
        )
    for name, its in told["features"].items():
        yield name, _feature(its)
    for one in told["largest"]:
        topic = "corrections" if one["correction"] else "samples"
        yield (
            "largest",
            f"{one['feature']} = {one['value']:.6g} in {topic}-{one['partition']} offset {one['offset']}",
        )


def _feature(its: Mapping[str, Any]) -> str:
    present = f"present in {its['present']:.0%}"
    if its["kind"] == "float":
        return f"{_numbers(its)}, {present}"
    weights = f"; weights {_numbers(its['weights'])}" if "weights" in its else ""
    return f"{its['distinct']:,} distinct ids, the longest list {its['longest']:,}, {present}{weights}"


def _numbers(its: Mapping[str, Any]) -> str:
    if its["min"] is None:
        return "no number"
    extreme = f", EXTREME: {its['extreme']:,}" if its["extreme"] else ""
    return f"{its['min']:.6g} to {its['max']:.6g}, mean {its['mean']:.6g}{extreme}"

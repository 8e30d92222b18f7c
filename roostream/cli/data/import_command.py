"""`roostream import`: import data of other sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from roostream.cli.options import CommandGroup, Duration, Location, MultiValueCommand, NonEmptyPath
from roostream.cli.output import plain, progress_bar
from roostream.errors import SetupError, needs_extra
from roostream.replay.detect_dataset import detect_replay, input_paths
from roostream.replay.import_map import load_map
from roostream.replay.table_import import import_table
from roostream.schema.schema_file import load_schema


def print_skipped(what: str, number: int, first: Sequence[str]) -> None:
    """Name the first skipped ones on standard error, if there are any."""
    if number:
        click.echo(f"{number:,} {what} were skipped; the first:", err=True)
        click.echo("\n".join(f"  {plain(message)}" for message in first), err=True)


@click.group("import", cls=CommandGroup)
def import_group() -> None:
    """Import data of other sites (docs/bring-your-own-data.md).

    \b
    Example:
      roostream import table --schema shop.toml --map map.toml --out shop.jsonl.gz impressions/*.parquet
      roostream import log --schema shop.toml --warehouse warehouse/ shop.jsonl.gz
    """


@import_group.command("table")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--schema", type=NonEmptyPath(), required=True, help="schema TOML with the features and actions"
)
@click.option("--map", "map_file", type=NonEmptyPath(), required=True, help="TOML that maps columns")
@click.option(
    "--out",
    type=NonEmptyPath(path_type=Path),
    required=True,
    help="new file for the log: OUT.jsonl or OUT.jsonl.gz",
)
@click.option("--skip-bad", is_flag=True, help="skip and count bad rows and requests")
def table(files: tuple[str, ...], schema: str, map_file: str, out: Path, skip_bad: bool) -> None:
    """Convert FILES with one row per shown item, in any order, to a log with one line per request.

    FILES end in .parquet, in .csv, .tsv or .txt, or in .jsonl (or .gz, .zst of these). Rows are grouped in
    bounded memory. The log appears when it is complete.

    \b
    Example:
      roostream import table --schema shop.toml --map map.toml --out shop.jsonl.gz impressions/*.parquet
      roostream check --schema shop.toml --log shop.jsonl.gz
    """
    loaded_schema = load_schema(schema)
    column_map = load_map(map_file, loaded_schema)
    with progress_bar("rows") as update:
        counts = import_table(files, loaded_schema, column_map, out, skip_bad=skip_bad, progress=update)
    click.echo(
        f"{out}: {counts.requests:,} requests with {counts.engagements:,} engagements from "
        f"{counts.rows:,} rows"
    )
    print_skipped("rows and requests", counts.skipped, counts.first_skipped)
    for warning in counts.warnings:
        click.echo(warning, err=True)


@import_group.command("log", cls=MultiValueCommand)
@click.argument("log", nargs=-1, required=True)
@click.option("--schema", default="", help="schema TOML; default: that of the dataset, if it has one")
@click.option(
    "--warehouse",
    type=Location(),
    required=True,
    help="warehouse to write to: a directory, or s3://bucket/prefix",
)
@click.option("--engagements", multiple=True, metavar="FILE...", help="tables: files of engagements")
@click.option(
    "--window", "window_ms", type=Duration(), default="30m", show_default=True, help="the join window"
)
@click.option(
    "--skip-bad",
    is_flag=True,
    help="skip and count bad lines, and events that cannot be joined; default: they end the import",
)
def log(
    log: tuple[str, ...],
    schema: str,
    warehouse: str,
    engagements: tuple[str, ...],
    window_ms: int,
    skip_bad: bool,
) -> None:
    """Join a log in this process and add its samples to a warehouse in one commit. The same log cannot be
    added twice. Counters and histories begin empty, so name all files of a log in one command.

    LOG is a list of files that end in .jsonl, .parquet or .csv, or the folder of EB-NeRD.

    \b
    Example:
      roostream import log --schema shop.toml --warehouse warehouse/ shop.jsonl.gz
      roostream import log --schema shop.toml --warehouse warehouse/ shown.csv --engagements done.csv
      roostream import log --warehouse warehouse/ ebnerd/
    """
    with needs_extra("`import log`", "warehouse", SetupError):
        from roostream.cli.data.log_archive import archive_log
    replay = detect_replay(log, schema, engagements=engagements, skip_bad=skip_bad)
    replay = dataclasses.replace(replay, window_ms=window_ms)
    with progress_bar("requests") as update:
        counts = archive_log(
            replay,
            input_paths(replay),
            warehouse,
            skip_bad=skip_bad,
            progress=lambda done, total: update(done, total or None),
        )
    click.echo(f"{warehouse}: {counts.samples:,} samples in {counts.files:,} files, {counts.bytes:,} bytes")
    if counts.archived_before:
        click.echo(
            f"the warehouse had {counts.archived_before:,} samples before; counters and histories of this "
            "log began without them, so import logs that follow each other with one command",
            err=True,
        )
    print_skipped("lines", counts.skipped, counts.first_skipped)
    for warning in counts.warnings:
        click.echo(warning, err=True)
    print_skipped("events that cannot be joined", counts.dead, counts.first_dead)
    if counts.late:
        click.echo(
            f"{counts.late:,} engagements after the join window are stored as corrections, which change "
            "labels with a longer window_ms in sessions with the latest labels; a longer --window joins them",
            err=True,
        )

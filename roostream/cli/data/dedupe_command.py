"""`roostream inspect dedupe`: what of a log comes again, and what of it is worth keeping once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.options import json_option

if TYPE_CHECKING:
    from rich.table import Table


@click.command("dedupe")
@click.argument("log", nargs=-1, required=True)
@click.option("--schema", default="", help="schema TOML; default: the data set's own, where it has one")
@click.option(
    "--by",
    type=click.Choice(("user", "session")),
    default="user",
    show_default=True,
    help="what is clustered by",
)
@click.option(
    "--batch",
    "batch_requests",
    type=click.IntRange(1, 1 << 16),
    default=64,
    show_default=True,
    help="requests of a batch",
)
@click.option(
    "--requests", type=click.IntRange(0), default=0, help="look at so many, from the beginning; 0 = all"
)
@json_option
def dedupe(
    log: tuple[str, ...], schema: str, by: str, batch_requests: int, requests: int, as_json: bool
) -> None:
    """How often request-only values come again within a batch, as they were logged and clustered, and which are worth it.

    LOG are files that end in .jsonl, .parquet or .csv, a folder with EB-NeRD's behaviors.parquet, or a warehouse's
    folder. It is read once, in bounded memory. Docs: docs/deduplication.md.

    \b
    Example:
      roostream inspect dedupe --schema my_site.toml monday.jsonl tuesday.jsonl.gz
      roostream inspect dedupe ebnerd/ --batch 364 --by session --json
    """
    from roostream.cli.data.console import wide_console

    told = duplicates_of(log, schema, by, batch_requests, requests)
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    console = wide_console()
    for table in tables(told):
        console.print(table)
    for sentence in told["advice"]:
        console.print(f"• {sentence}", soft_wrap=True)


def duplicates_of(
    paths: tuple[str, ...], schema: str, by: str, batch_requests: int, most: int = 0
) -> dict[str, Any]:
    """`Duplicates.report` of a log.

    Raises:
        RoostreamError: files, schema or a line can't be used.
    """
    import itertools

    from roostream.cli.data.console import counted
    from roostream.errors import ConfigError
    from roostream.replay.detect_dataset import detect_replay
    from roostream.replay.replay_log import open_log
    from roostream.replay.request_windows import request_windows
    from roostream.schema.schema_file import load_schema
    from roostream.warehouse.scan import is_warehouse
    from roostream.wire import records as wire
    from roostream.wire.duplicate_statistics import DuplicateStatistics

    if len(paths) == 1 and is_warehouse(paths[0]):
        return {"log": list(paths), "by": "user", **_of_warehouse(paths[0], batch_requests, most)}
    replay = detect_replay(paths, schema)
    its_schema = load_schema(replay.schema_path)
    if not its_schema.ro:
        raise ConfigError(
            f"{replay.schema_path}: expected at least one [[ro]] feature, got none; nothing can be shared"
        )
    opened, duplicates = open_log(replay, its_schema), DuplicateStatistics(batch_requests)
    shown = (record for record in opened.records if wire.kind_of(record.value) == wire.IMPRESSION)
    total = min(opened.num_requests or most, most or opened.num_requests) or None
    read = counted(itertools.islice(shown, most or None), "requests", total)
    for window in request_windows(read, its_schema, "session" if by == "session" else "user"):
        duplicates.add(*window)
    return {"log": list(paths), "by": by, **duplicates.report()}


def _of_warehouse(place: str, batch_requests: int, most: int) -> dict[str, Any]:
    """`Duplicates.report` of a warehouse's samples, a row group being a window; who the user is, the batch says."""
    from roostream.cli.data.feature_command import scanned
    from roostream.wire.dedup import sort_by_time, user_numbers
    from roostream.wire.duplicate_statistics import DuplicateStatistics

    duplicates = DuplicateStatistics(batch_requests)
    with scanned(place, None, None) as (_, batches):
        for _, batch in batches:
            timely = sort_by_time(batch)
            duplicates.add(timely, user_numbers(timely), timely.num_candidates_R)
            if most and duplicates.num_requests >= most:
                break
    return duplicates.report()


def tables(told: Mapping[str, Any]) -> Iterator[Table]:
    """One for each arrangement."""
    from rich.table import Table

    for name, its in told["arrangements"].items():
        order = f"clustered by {told['by']}" if name == "clustered" else "as logged"
        title = f"{order}: {told['requests']:,} requests in batches of {told['batch_requests']:,}, S = {its['session_rows']:.2f}"
        table = Table(title=title, title_justify="left")
        for column in ("feature", "kind", "l", "d", "DedupeLen", "DedupeFactor", "exact", "partial"):
            named = column in ("feature", "kind")
            table.add_column(column, justify="left" if named else "right", no_wrap=not named, overflow="fold")
        for key, of in its["features"].items():
            table.add_row(key, of["kind"], *_numbers(of))
        table.add_section()
        for key, of in its["groups"].items():
            table.add_row(key, "group", *_numbers(of))
        yield table


def _numbers(of: Mapping[str, Any]) -> Iterator[str]:
    yield f"{of['length']:.2f}"
    yield "-" if of["same"] is None else f"{of['same']:.4f}"
    yield f"{of['dedupe_len']:,.0f}"
    for name in ("dedupe_factor", "exact", "partial"):
        yield f"{of[name]:.2f}"

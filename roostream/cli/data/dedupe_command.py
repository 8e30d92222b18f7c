"""`roostream inspect dedupe`: how often values repeat within a batch, and for which features deduplication
pays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import click
import numpy as np

from roostream.cli.data.import_command import print_skipped
from roostream.cli.options import batch_option, json_option
from roostream.cli.output import counted, print_columns, print_json, print_sentences, progress_bar
from roostream.errors import ConfigError
from roostream.replay.detect_dataset import detect_replay
from roostream.replay.replay_log import open_log
from roostream.replay.request_windows import request_windows
from roostream.schema.schema_file import load_schema
from roostream.warehouse.scan import TableScan, is_warehouse
from roostream.wire import records as wire
from roostream.wire.duplicate_statistics import DuplicateStatistics

_COLUMNS = ("feature", "kind", "l", "d", "DedupeLen", "DedupeFactor", "exact", "partial")


@click.command("dedupe")
@click.argument("log", nargs=-1, required=True)
@click.option("--schema", default="", help="schema TOML; default: that of the dataset, if it has one")
@click.option(
    "--by",
    type=click.Choice(("user", "session")),
    default="user",
    show_default=True,
    help="key of the clustered order",
)
@batch_option
@click.option("--requests", type=click.IntRange(0), default=0, help="number of requests to read; 0 = all")
@click.option("--skip-bad", is_flag=True, help="skip and count bad lines; default: the first one ends it")
@json_option
def dedupe(
    log: tuple[str, ...],
    schema: str,
    by: str,
    batch_requests: int,
    requests: int,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Measure how often request features repeat within a batch, in logged and in clustered order
    (docs/deduplication.md).

    LOG is a list of files that end in .jsonl, .parquet or .csv, the folder of EB-NeRD with behaviors.parquet,
    or a warehouse, also s3://bucket/prefix. It is read once, in bounded memory.

    \b
    Example:
      roostream inspect dedupe --schema my_site.toml monday.jsonl tuesday.jsonl.gz
      roostream inspect dedupe ebnerd/ --batch 364 --by session --json
    """
    report = duplicates_of(log, schema, by, batch_requests, requests, skip_bad=skip_bad)
    if as_json:
        print_json(report)
        return
    for name, arrangement in report["arrangements"].items():
        order = f"clustered by {by}" if name == "clustered" else "as logged"
        batches = f"{report['requests']:,} requests in batches of {report['batch_requests']:,}"
        title = f"{order}: {batches}, S = {arrangement['session_rows']:.2f}"
        features = (
            (key, figures["kind"], *_table_cells(figures)) for key, figures in arrangement["features"].items()
        )
        groups = ((key, "group", *_table_cells(figures)) for key, figures in arrangement["groups"].items())
        print_columns(title, _COLUMNS, (features, groups), left=("feature", "kind"))
    print_sentences(report["advice"])
    print_skipped("lines", report.get("skipped_lines", 0), report.get("first_skipped_lines", ()))


def duplicates_of(
    paths: tuple[str, ...],
    schema: str,
    by: str,
    batch_requests: int,
    max_requests: int = 0,
    *,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """The report of duplicates in a log or a warehouse.

    Raises:
        RoostreamError: a file, the schema or a line cannot be used.
    """
    if len(paths) == 1 and is_warehouse(paths[0]):
        return {
            "log": list(paths),
            "by": by,
            **_duplicates_of_warehouse(paths[0], by, batch_requests, max_requests),
        }
    if paths[0].startswith("s3://"):
        raise ConfigError(f"{paths[0]}: expected a warehouse, found no table of samples; check the address")
    replay = detect_replay(paths, schema, skip_bad=skip_bad)
    loaded_schema = load_schema(replay.schema_path)
    if not loaded_schema.ro:
        raise ConfigError(f"{replay.schema_path}: expected at least one [[ro]] feature, got none")
    opened, duplicates = open_log(replay, loaded_schema), DuplicateStatistics(batch_requests)
    impressions = (record for record in opened.records if wire.kind_of(record.value) == wire.IMPRESSION)
    total = min(opened.num_requests or max_requests, max_requests or opened.num_requests) or None
    read = counted(itertools.islice(impressions, max_requests or None), "requests", total)
    for window in request_windows(read, loaded_schema, "session" if by == "session" else "user"):
        duplicates.add(*window)
    skipped = opened.skipped()
    return {
        "log": list(paths),
        "by": by,
        **duplicates.report(),
        "skipped_lines": skipped.number,
        "first_skipped_lines": list(skipped.first),
    }


def _duplicates_of_warehouse(
    warehouse: str, by: str, batch_requests: int, max_requests: int
) -> dict[str, Any]:
    """The same for the samples of a warehouse, in time order and clustered; each row group is a window."""
    duplicates, scan = DuplicateStatistics(batch_requests), TableScan(warehouse)
    with progress_bar("requests", scan.num_requests) as update:
        for batch, group_R in scan.grouped(scan.schema(), "session" if by == "session" else "user"):
            order_R = np.argsort(batch.time_ms_R, kind="stable")
            in_time_order = batch.take_requests(order_R)
            duplicates.add(in_time_order, group_R[order_R], in_time_order.num_candidates_R)
            update(duplicates.num_requests, None)
            if max_requests and duplicates.num_requests >= max_requests:
                break
    return duplicates.report()


def _table_cells(figures: Mapping[str, Any]) -> Iterator[str]:
    yield f"{figures['length']:.2f}"
    yield "-" if figures["same"] is None else f"{figures['same']:.4f}"
    yield f"{figures['dedupe_len']:,.0f}"
    for name in ("dedupe_factor", "exact", "partial"):
        yield f"{figures[name]:.2f}"

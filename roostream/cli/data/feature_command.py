"""`roostream inspect feature` and `roostream report table`: statistics of the samples of a warehouse by
day."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

from roostream.cli.data.table_page import table_report, write_table_page
from roostream.cli.options import CommandGroup, NonEmptyPath, batch_option, json_option, with_options
from roostream.cli.output import print_columns, print_json, print_sentences, progress_bar
from roostream.cli.replay.report_table import number
from roostream.errors import ConfigError, nearest
from roostream.schema.schema import Schema
from roostream.warehouse.column_popularity import hit_rates, recent_session_features
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.scan import TableScan
from roostream.warehouse.statistics import FeatureDays, alerts
from roostream.wire.batch import Batch
from roostream.wire.columnar import project_schema

_FIGURES = ("rows", "coverage", "length", "longest", "moved", "lengths_moved")


class Day(click.DateTime):
    """A day, as a date."""

    def __init__(self) -> None:
        super().__init__(formats=["%Y-%m-%d"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx).date()


day_options = with_options(
    *(
        click.option(
            flag, name, type=Day(), help=f"{name} day, such as 2024-05-01; default: the {name} in the table"
        )
        for flag, name in (("--from", "first"), ("--to", "last"))
    )
)


@click.command("feature")
@click.argument("warehouse", type=NonEmptyPath())
@click.argument("names", nargs=-1)
@day_options
@json_option
def feature(
    warehouse: str, names: tuple[str, ...], first: date | None, last: date | None, as_json: bool
) -> None:
    """Show coverage, list lengths and drift of features by day, how many sessions use them, and warnings.
    Default: all features.

    \b
    Example:
      roostream inspect feature warehouse/ history ctr_1h --from 2024-05-01
      roostream inspect feature s3://site/warehouse --json
    """
    report = features_of(warehouse, names, first, last)
    if as_json:
        print_json(report)
        return
    lines = (
        (name, day, *(number(figures.get(key)) for key in _FIGURES), number(report["asked"].get(name)))
        for day, features in report["days"].items()
        for name, figures in features.items()
    )
    columns = ("feature", "day", *(key.replace("_", " ") for key in _FIGURES), "asked")
    print_columns(f"version {report['version']}", columns, [lines], left=("feature",))
    print_sentences(report["alerts"])


@click.group("report", cls=CommandGroup)
def report() -> None:
    """Write pages with plots.

    \b
    Example:
      roostream report table warehouse/ --out warehouse_page/
    """


@report.command("table")
@click.argument("warehouse", type=NonEmptyPath())
@click.option(
    "--out", type=NonEmptyPath(path_type=Path), required=True, help="directory for index.html and report.json"
)
@day_options
@batch_option
def table_command(
    warehouse: str, out: Path, first: date | None, last: date | None, batch_requests: int
) -> None:
    """Write a self-contained page about the samples of a warehouse: bytes by column, coverage, list lengths
    and duplicates.

    \b
    Example:
      roostream report table warehouse/ --out warehouse_page/ --from 2024-05-01
    """
    with scanned(warehouse, first, last) as (scan, batches):
        report = {"warehouse": warehouse, **table_report(scan, batches, batch_requests)}
    write_table_page(out, report)
    click.echo(f"{out / 'index.html'}: {report['requests']:,} requests in {report['files']:,} files")


def features_of(place: str, names: tuple[str, ...], first: date | None, last: date | None) -> dict[str, Any]:
    """Statistics of features: `days` of `FeatureDays.report`, `alerts`, and `asked`, feature → share of
    sessions.

    Raises:
        RoostreamError: there is no such table, day or feature.
    """
    reader = select_features(TableScan(place, first, last).schema(), names)
    days = FeatureDays(reader)
    with scanned(place, first, last, reader) as (scan, batches):
        for file, batch in batches:
            days.add(file.day, batch)
        rates = hit_rates(recent_session_features(scan.store))
    report = days.report()
    return {"version": scan.version, "days": report, "alerts": alerts(report), "asked": rates}


def select_features(schema: Schema, names: Sequence[str]) -> Schema:
    """The schema with these features alone; no names = all. Raises ConfigError: it has no such feature."""
    known = [f.name for f in (*schema.ro, *schema.nro)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"expected features of schema {schema.name!r}, got {name!r}{nearest(name, known)}"
            )
    return project_schema(schema, frozenset(names)) if names else schema


@contextlib.contextmanager
def scanned(
    place: str, first: date | None, last: date | None, reader: Schema | None = None
) -> Iterator[tuple[TableScan, Iterator[tuple[DataFile, Batch]]]]:
    """A table and its batches, read with a progress bar."""
    scan = TableScan(place, first, last)
    with progress_bar("requests", scan.num_requests) as update:

        def batches() -> Iterator[tuple[DataFile, Batch]]:
            done = 0
            for file, batch in scan.batches(reader or scan.schema()):
                yield file, batch
                done += batch.num_requests
                update(done, None)

        yield scan, batches()

"""`roostream inspect feature` and `roostream report table`: statistics of the samples of a warehouse by
day."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.options import json_option
from roostream.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from roostream.schema.schema import Schema
    from roostream.warehouse.data_file import DataFile
    from roostream.warehouse.scan import TableScan
    from roostream.wire.batch import Batch

_DAY = click.DateTime(formats=["%Y-%m-%d"])


def days_of(command: Any) -> Any:
    """The options --from and --to."""
    for name in ("last", "first"):
        option = {"first": "--from", "last": "--to"}[name]
        command = click.option(
            option, name, type=_DAY, help=f"{name} day, such as 2024-05-01; default: the {name} in the table"
        )(command)
    return command


@click.command("feature")
@click.argument("warehouse", type=click.Path())
@click.argument("names", nargs=-1)
@days_of
@json_option
def feature(warehouse: str, names: tuple[str, ...], first: Any, last: Any, as_json: bool) -> None:
    """Show coverage, list lengths and drift of features by day, how many sessions use them, and warnings.
    Default: all features.

    \b
    Example:
      roostream inspect feature warehouse/ history ctr_1h --from 2024-05-01
      roostream inspect feature s3://site/warehouse --json
    """
    from roostream.cli.data.console import wide_console

    report = features_of(warehouse, names, _date(first), _date(last))
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    console = wide_console()
    console.print(table_of(report))
    for sentence in report["alerts"]:
        console.print(f"• {sentence}", soft_wrap=True)


@click.group("report")
def report() -> None:
    """Write pages with plots.

    \b
    Example:
      roostream report table warehouse/ --out warehouse_page/
    """


@report.command("table")
@click.argument("warehouse", type=click.Path())
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="directory for index.html and report.json",
)
@days_of
@click.option(
    "--batch",
    "batch_requests",
    type=click.IntRange(1, 1 << 16),
    default=64,
    show_default=True,
    help="requests in a batch, for the statistics of duplicates",
)
def table_command(warehouse: str, out: Path, first: Any, last: Any, batch_requests: int) -> None:
    """Write a self-contained page about the samples of a warehouse: bytes by column, coverage, list lengths
    and duplicates.

    \b
    Example:
      roostream report table warehouse/ --out warehouse_page/ --from 2024-05-01
    """
    from roostream.cli.data.table_page import table_report, write_table_page

    with scanned(warehouse, _date(first), _date(last)) as (scan, batches):
        report = {"warehouse": warehouse, **table_report(scan, batches, batch_requests)}
    write_table_page(out, report)
    click.echo(f"{out / 'index.html'}: {report['requests']:,} requests in {report['files']:,} files")


def features_of(place: str, names: tuple[str, ...], first: date | None, last: date | None) -> dict[str, Any]:
    """Statistics of features: `days` of `FeatureDays.report`, `alerts`, and `asked`, feature → share of
    sessions.

    Raises:
        RoostreamError: there is no such table, day or feature.
    """
    from roostream.warehouse.column_popularity import hit_rates, recent_session_features
    from roostream.warehouse.scan import TableScan
    from roostream.warehouse.statistics import FeatureDays, alerts
    from roostream.wire.columnar import project_schema

    schema = TableScan(place, first, last).schema()
    known = [f.name for f in (*schema.ro, *schema.nro)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"expected features of schema {schema.name!r}, got {name!r}{nearest(name, known)}"
            )
    reader = project_schema(schema, frozenset(names)) if names else schema
    days = FeatureDays(reader)
    with scanned(place, first, last, reader) as (scan, batches):
        for file, batch in batches:
            days.add(file.day, batch)
        rates = hit_rates(recent_session_features(scan.store))
    report = days.report()
    return {"version": scan.version, "days": report, "alerts": alerts(report), "asked": rates}


@contextlib.contextmanager
def scanned(
    place: str, first: date | None, last: date | None, reader: Schema | None = None
) -> Iterator[tuple[TableScan, Iterator[tuple[DataFile, Batch]]]]:
    """A table and its batches, read with a progress bar."""
    from roostream.cli.data.console import progress_bar
    from roostream.warehouse.scan import TableScan

    scan = TableScan(place, first, last)
    with progress_bar("requests", scan.num_requests) as update:

        def batches() -> Iterator[tuple[DataFile, Batch]]:
            done = 0
            for file, batch in scan.batches(reader or scan.schema()):
                yield file, batch
                done += batch.num_requests
                update(done, None)

        yield scan, batches()


def table_of(report: Mapping[str, Any]) -> Table:
    """One row per feature and day."""
    from rich.table import Table

    from roostream.cli.replay.report_table import number

    table = Table(title=f"version {report['version']}", title_justify="left")
    for column in (
        "feature",
        "day",
        "rows",
        "coverage",
        "length",
        "longest",
        "moved",
        "lengths moved",
        "asked",
    ):
        named = column in ("feature", "day")
        table.add_column(
            column, justify="left" if named else "right", no_wrap=column == "day", overflow="fold"
        )
    for day, features in report["days"].items():
        for name, figures_of in features.items():
            figures = (
                figures_of.get(key)
                for key in ("rows", "coverage", "length", "longest", "moved", "lengths_moved")
            )
            table.add_row(name, day, *map(number, figures), number(report["asked"].get(name)))
    return table


def _date(given: Any) -> date | None:
    return None if given is None else given.date()

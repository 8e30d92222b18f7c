"""`roostream inspect table` and `inspect file`: the tables and files of a warehouse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.options import json_option

if TYPE_CHECKING:
    from rich.table import Table

_TABLE = click.option(
    "--table",
    type=click.Choice(("samples", "corrections")),
    default="samples",
    show_default=True,
    help="table of the warehouse",
)


@click.command("table")
@click.argument("warehouse")
@_TABLE
@click.option("--files", "with_files", is_flag=True, help="also list every file")
@json_option
def inspect_table(warehouse: str, table: str, with_files: bool, as_json: bool) -> None:
    """Show the days of a warehouse table: files, requests, candidates, bytes, sealed files, and pinned
    versions.

    \b
    Example:
      roostream inspect table .roostream/warehouse
      roostream inspect table s3://bucket/warehouse --table corrections --json
    """
    from roostream.warehouse.describe import describe_table
    from roostream.warehouse.warehouse import Warehouse

    place = Warehouse(warehouse)
    report = describe_table(place, table)
    if with_files:
        report["paths"] = [file.path for file in place.tables[table].snapshot().files]
    _show(report, as_json, _days(report) if not as_json else None)
    if with_files and not as_json:
        click.echo("\n".join(report["paths"]))


@click.command("file")
@click.argument("warehouse")
@click.argument("path")
@_TABLE
@json_option
def inspect_file(warehouse: str, path: str, table: str, as_json: bool) -> None:
    """Show the columns of a warehouse file: bytes and encodings. PATH is one listed by `inspect table
    --files`.

    \b
    Example:
      roostream inspect file .roostream/warehouse 2026-05-18/0/ece92565177eb1d3/278139-0a1b2c3d4e5f.parquet
    """
    from roostream.warehouse.describe import describe_file
    from roostream.warehouse.warehouse import Warehouse

    report = describe_file(Warehouse(warehouse), table, path)
    _show(report, as_json, _columns(report) if not as_json else None)


def _show(report: Mapping[str, Any], as_json: bool, table: Table | None) -> None:
    from roostream.cli.data.console import wide_console

    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        wide_console().print(table)


def _days(report: Mapping[str, Any]) -> Table:
    from rich.table import Table

    out = Table(
        title=f"{report['table']}, version {report['version']}"
        + "".join(f", pinned by {pin}" for pin in report["pins"])
    )
    for name in ("day", "files", "sealed", "requests", "candidates", "bytes", "bytes per candidate"):
        out.add_column(name, justify="left" if name == "day" else "right")
    for entry in (*report["days"], {"day": "all", **report}):
        numbers = (entry[key] for key in ("files", "sealed_files", "requests", "candidates", "bytes"))
        a_candidate = entry["bytes_a_candidate"]
        out.add_row(
            entry["day"], *(f"{n:,}" for n in numbers), "" if a_candidate is None else f"{a_candidate:.1f}"
        )
    return out


def _columns(report: Mapping[str, Any]) -> Table:
    from rich.table import Table

    out = Table(title=f"{report['path']}: {report['requests']:,} requests, {report['bytes']:,} bytes")
    for name in ("column", "values", "bytes", "share", "before zstd", "encodings"):
        out.add_column(name, justify="left" if name in ("column", "encodings") else "right")
    for entry in report["columns"]:
        numbers = (
            f"{entry['values']:,}",
            f"{entry['bytes']:,}",
            f"{entry['share']:.1%}",
            f"{entry['plain_bytes']:,}",
        )
        out.add_row(entry["column"], *numbers, " ".join(entry["encodings"]))
    return out

"""`roostream inspect table` and `inspect file`: the tables and files of a warehouse."""

from __future__ import annotations

import click

from roostream.cli.options import Location, json_option
from roostream.cli.output import number, print_columns, print_json
from roostream.warehouse.describe import describe_file, describe_table
from roostream.warehouse.warehouse import Warehouse

_COUNTS = ("files", "sealed_files", "requests", "candidates", "bytes")
_TABLE = click.option(
    "--table",
    type=click.Choice(("samples", "corrections")),
    default="samples",
    show_default=True,
    help="table of the warehouse",
)


@click.command("table")
@click.argument("warehouse", type=Location())
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
    place = Warehouse(warehouse)
    report = describe_table(place, table)
    if with_files:
        report["paths"] = [file.path for file in place.tables[table].snapshot().files]
    if as_json:
        print_json(report)
        return
    lines = (
        (entry["day"], *(f"{entry[key]:,}" for key in _COUNTS), number(entry["bytes_a_candidate"], 1))
        for entry in (*report["days"], {"day": "all", **report})
    )
    pins = "".join(f", pinned by {pin}" for pin in report["pins"])
    columns = ("day", "files", "sealed", "requests", "candidates", "bytes", "bytes per candidate")
    print_columns(f"{table}, version {report['version']}{pins}", columns, [lines], left=("day",))
    if with_files:
        click.echo("\n".join(report["paths"]))


@click.command("file")
@click.argument("warehouse", type=Location())
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
    report = describe_file(Warehouse(warehouse), table, path)
    if as_json:
        print_json(report)
        return
    lines = (
        (
            entry["column"],
            *(f"{entry[key]:,}" for key in ("values", "bytes")),
            f"{entry['share']:.1%}",
            f"{entry['plain_bytes']:,}",
            " ".join(entry["encodings"]),
        )
        for entry in report["columns"]
    )
    title = f"{path}: {report['requests']:,} requests, {report['bytes']:,} bytes"
    columns = ("column", "values", "bytes", "share", "before zstd", "encodings")
    print_columns(title, columns, [lines], left=("column", "encodings"))

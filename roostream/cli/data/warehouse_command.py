"""`roostream inspect table` and `inspect file`: what lies in a warehouse."""

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
    help="which of its tables",
)


@click.command("table")
@click.argument("warehouse")
@_TABLE
@click.option("--files", "with_files", is_flag=True, help="every file of it too")
@json_option
def inspect_table(warehouse: str, table: str, with_files: bool, as_json: bool) -> None:
    """Days of a warehouse: files, requests, candidates, bytes, what is sealed, and who holds an older version.

    \b
    Example:
      roostream inspect table .roostream/warehouse
      roostream inspect table s3://bucket/warehouse --table corrections --json
    """
    from roostream.warehouse.describe import describe_table
    from roostream.warehouse.warehouse import Warehouse

    place = Warehouse(warehouse)
    told = describe_table(place, table)
    if with_files:
        told["paths"] = [file.path for file in place.tables[table].snapshot().files]
    _show(told, as_json, _days(told) if not as_json else None)
    if with_files and not as_json:
        click.echo("\n".join(told["paths"]))


@click.command("file")
@click.argument("warehouse")
@click.argument("path")
@_TABLE
@json_option
def inspect_file(warehouse: str, path: str, table: str, as_json: bool) -> None:
    """A file of a warehouse, PATH as `inspect table --files` names it: bytes and encodings of its columns as they lie.

    \b
    Example:
      roostream inspect file .roostream/warehouse 2026-05-18/0/ece92565177eb1d3/278139-0a1b2c3d4e5f.parquet
    """
    from roostream.warehouse.describe import describe_file
    from roostream.warehouse.warehouse import Warehouse

    told = describe_file(Warehouse(warehouse), table, path)
    _show(told, as_json, _columns(told) if not as_json else None)


def _show(told: Mapping[str, Any], as_json: bool, table: Table | None) -> None:
    from roostream.cli.data.console import wide_console

    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        wide_console().print(table)


def _days(told: Mapping[str, Any]) -> Table:
    from rich.table import Table

    out = Table(
        title=f"{told['table']}, version {told['version']}"
        + "".join(f", held by {pin}" for pin in told["pins"])
    )
    for name in ("day", "files", "sealed", "requests", "candidates", "bytes", "bytes a candidate"):
        out.add_column(name, justify="left" if name == "day" else "right")
    for its in (*told["days"], {"day": "all", **told}):
        numbers = (its[key] for key in ("files", "sealed_files", "requests", "candidates", "bytes"))
        a_candidate = its["bytes_a_candidate"]
        out.add_row(
            its["day"], *(f"{n:,}" for n in numbers), "" if a_candidate is None else f"{a_candidate:.1f}"
        )
    return out


def _columns(told: Mapping[str, Any]) -> Table:
    from rich.table import Table

    out = Table(title=f"{told['path']}: {told['requests']:,} requests, {told['bytes']:,} bytes")
    for name in ("column", "values", "bytes", "share", "before zstd", "encodings"):
        out.add_column(name, justify="left" if name in ("column", "encodings") else "right")
    for its in told["columns"]:
        numbers = (
            f"{its['values']:,}",
            f"{its['bytes']:,}",
            f"{its['share']:.1%}",
            f"{its['plain_bytes']:,}",
        )
        out.add_row(its["column"], *numbers, " ".join(its["encodings"]))
    return out

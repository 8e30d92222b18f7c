"""`roostream import`: other sites' data as a log of requests."""

from __future__ import annotations

from pathlib import Path

import click

from roostream.cli.options import Duration


@click.group("import")
def import_group() -> None:
    """Make other sites' data a log that everything here reads (docs/bring-your-own-data.md).

    \b
    Example:
      roostream import parquet --schema shop.toml --map shop_map.toml --out shop.jsonl.gz impressions/*.parquet
      roostream import log --schema shop.toml --warehouse warehouse/ shop.jsonl.gz
    """


@import_group.command("parquet")
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--schema", type=click.Path(), required=True, help="schema TOML: which features and actions there are"
)
@click.option("--map", "map_file", type=click.Path(), required=True, help="TOML: which column says what")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="the log: OUT.jsonl or OUT.jsonl.gz, a free name",
)
@click.option("--skip-bad", is_flag=True, help="leave requests out that can't be used, and count them")
def parquet(files: tuple[str, ...], schema: str, map_file: str, out: Path, skip_bad: bool) -> None:
    """FILES with one row an impression, in any order, become a log with one line a request. Rows of a request are brought
    together in bounded memory; the log is there only once it is whole.

    \b
    Example:
      roostream import parquet --schema shop.toml --map shop_map.toml --out shop.jsonl.gz impressions/*.parquet
      roostream check --schema shop.toml --log shop.jsonl.gz
    """
    from roostream.cli.data.console import progress_bar
    from roostream.replay.import_map import load_map
    from roostream.replay.parquet_import import import_parquet
    from roostream.schema.schema_file import load_schema

    its_schema = load_schema(schema)
    its_map = load_map(map_file, its_schema)
    with progress_bar("rows") as tell:
        told = import_parquet(files, its_schema, its_map, out, skip_bad=skip_bad, progress=tell)
    click.echo(
        f"{out}: {told.rows:,} rows became {told.requests:,} requests with {told.engagements:,} engagements"
    )
    if told.skipped:
        click.echo(f"{told.skipped:,} requests were left out; the first: {told.first_skipped}", err=True)


@import_group.command("log")
@click.argument("log", nargs=-1, required=True)
@click.option("--schema", default="", help="schema TOML; default: the data set's own, where it has one")
@click.option("--warehouse", required=True, help="where it goes: a directory, or s3://bucket/prefix")
@click.option(
    "--window", "window_ms", type=Duration(), default="30m", show_default=True, help="the join window"
)
def log(log: tuple[str, ...], schema: str, warehouse: str, window_ms: int) -> None:
    """A log joined in this process, as a warehouse's samples, clustered by user: all of it in one commit, and each log once.

    LOG is what `inspect dedupe` reads: files that end in .jsonl, .parquet or .csv, or EB-NeRD's folder.

    \b
    Example:
      roostream import log --schema shop.toml --warehouse warehouse/ shop.jsonl.gz
      roostream import log --warehouse warehouse/ ebnerd/
    """
    import dataclasses

    from roostream.cli.data.console import progress_bar
    from roostream.cli.data.log_archive import archive_log
    from roostream.replay.detect_dataset import detect_replay, input_paths

    replay = dataclasses.replace(detect_replay(log, schema), window_ms=window_ms)
    with progress_bar("requests") as tell:
        told = archive_log(replay, input_paths(replay), warehouse, lambda done, of: tell(done, of or None))
    click.echo(f"{warehouse}: {told.samples:,} samples in {told.files:,} files, {told.bytes:,} bytes")
    if told.late:
        click.echo(
            f"{told.late:,} engagements came behind the window and are in no sample; a longer --window takes them in",
            err=True,
        )

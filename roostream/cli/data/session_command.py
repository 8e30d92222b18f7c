"""`roostream inspect session` and `roostream replay session`: what a session reads, and a comparison of two
readers."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import click

from roostream.cli.data.feature_command import select_features
from roostream.cli.options import FiniteRange, Location, NonEmptyPath, json_option, refuse_given
from roostream.cli.output import clock, counted, plain, print_json
from roostream.errors import CheckpointError, ConfigError
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.warehouse.file_reader import MAX_OVER_READ, ByteRange
from roostream.warehouse.parquet_file import ROWS_OF_GROUP
from roostream.warehouse.readers.leases import ENDS, read_log
from roostream.warehouse.scan import TableScan
from roostream.warehouse.sessions.sample_table import SampleTable, TableFiles
from roostream.warehouse.sessions.session import SessionSpec, days_of
from roostream.warehouse.sessions.session_capture import (
    CapturedRead,
    CapturedSession,
    SlowedRows,
    time_readers,
)
from roostream.warehouse.sessions.session_capture import replay_session as repeat_reads
from roostream.warehouse.sessions.session_rows import TableRows
from trainer.control.reader_master import LEASES_FILE


@click.command("session")
@click.argument("warehouse", type=Location(), required=False)
@click.option(
    "--days",
    default="",
    help="days on which samples closed, such as 2024-05-01..2024-05-07; either end is optional; '' = all",
)
@click.option("--features", default="", help="names separated by commas; '' = all")
@click.option(
    "--capture",
    type=NonEmptyPath(path_type=Path),
    help="write the reads to this file, for `roostream replay session`",
)
@click.option(
    "--leases",
    metavar="STORE",
    help="instead: show which readers read what in the run with this checkpoint store",
)
@json_option
def inspect_session(
    warehouse: str | None, days: str, features: str, capture: Path | None, leases: str | None, as_json: bool
) -> None:
    """Show what a session of these days and features reads: rows by partition, splits, files, bytes and
    reads.

    \b
    Example:
      roostream inspect session .roostream/warehouse --days 2024-05-01..2024-05-07
      roostream inspect session warehouse/ --features history,ctr_1h --capture session.json
      roostream inspect session --leases .roostream/store
    """
    if (warehouse is None) == (leases is None):
        raise ConfigError("expected a warehouse, or --leases with a checkpoint store; give one of the two")
    if leases is not None:
        refuse_given(("days", "features", "capture"), "a warehouse")
        log = read_leases(leases)
        if as_json:
            print_json(log)
        else:
            click.echo(describe_leases(log))
        return
    assert warehouse is not None
    names = tuple(name.strip() for name in features.split(",") if name.strip())
    report = session_of(warehouse, days, names, capture)
    if as_json:
        print_json(report)
        return
    click.echo(
        f"version {report['version']}, session {report['digest']}: {report['requests']:,} requests in "
        f"{report['files']:,} files"
    )
    click.echo(f"{report['splits']:,} splits, {report['row_groups']:,} row groups, {report['reads']:,} reads")
    click.echo(
        f"{report['bytes']:,} bytes, {report['over_read']:.1%} more than are needed; the files have "
        f"{report['file_bytes']:,}"
    )
    for partition, rows in report["rows"].items():
        click.echo(f"partition {partition}: {rows:,}")


def read_leases(store: str) -> dict[str, Any]:
    """The log of leases that a controller keeps in its store, as printed by `--json`.

    Raises:
        CheckpointError: no session was read by reader programs.
        UnavailableError: the store cannot be read now.
    """
    try:
        body = open_checkpoint_store(store).get(LEASES_FILE)
    except CheckpointError:
        raise CheckpointError(f"{store}: expected a run with reader programs, found no leases") from None
    found = read_log(body)
    return {**found, "events": [event._asdict() for event in found["events"]]}


def describe_leases(log: dict[str, Any]) -> str:
    """The log of leases as text: the session, each reader, and the current leases."""
    session = log["session"] or {}
    state = "in training" if log["trained"] else "trained earlier"
    lines = [f"as of {clock(log['at_ms'])} UTC, incarnation {log['incarnation']}"]
    if session:
        lines += [f"session {session['digest']} of {session['table']}, version {session['version']}: {state}"]
    for reader, counts in log["readers"].items():
        ends = ", ".join(f"{counts[end]:,} {end}" for end in ENDS if counts.get(end))
        lines.append(f"reader {reader}: {counts.get('granted', 0):,} splits{f': {ends}' if ends else ''}")
    for held in log["held"]:
        where = f"split {held['split']} from {held['position']:,}, for worker {held['worker']}"
        lines.append(f"{where}: {held['reader']}, for {held['for_s']:.1f} s")
    return plain("\n".join(lines))


def session_of(
    place: str, days: str, features: tuple[str, ...], capture: Path | None = None
) -> dict[str, Any]:
    """What a session reads, as printed by `--json`.

    Raises:
        ConfigError: invalid days, or an unknown feature.
        CheckpointError: there are no samples, or a file is damaged.
        UnavailableError: the warehouse cannot be read now.
    """
    table = SampleTable(place)
    first, last = days_of(days) if days else ("", "")
    report = table.newest(
        SessionSpec(table=place, version=0, first_day=first, last_day=last, labels="as_streamed"), {}
    )
    if report is None or not sum(report.rows.values()):
        raise CheckpointError(
            f"{place}: expected samples of {days or 'some day'}, got none; choose other days"
        )
    session, files = table.open_session(report, select_features(TableScan(place).schema(), features))
    reads = tuple(
        CapturedRead(split.path, start, min(start + ROWS_OF_GROUP, split.end))
        for split in session.order.splits
        for start in range(split.start, split.end, ROWS_OF_GROUP)
    )
    if capture is not None:
        CapturedSession(version=report.version, features=features, reads=reads).write(capture)
    ranges = [files.ranges(*read) for read in counted(reads, "row groups", len(reads))]
    needed = sum(_bytes(part) for _, part in ranges)
    merged = [one for part, _ in ranges for one in part]
    paths = {split.path for split in session.order.splits}
    return {
        "version": report.version,
        "digest": report.digest,
        "requests": sum(report.rows.values()),
        "rows": {str(partition): rows for partition, rows in sorted(report.rows.items())},
        "files": len(paths),
        "file_bytes": sum(
            file.bytes
            for file in table.warehouse.samples.snapshot(report.version).files
            if file.path in paths
        ),
        "splits": len(session.order.splits),
        "row_groups": len(reads),
        "reads": len(merged),
        "bytes": _bytes(merged),
        "over_read": _bytes(merged) / needed - 1 if needed else 0.0,
    }


def _bytes(ranges: list[ByteRange]) -> int:
    return sum(end - start for start, end in ranges)


@click.command("session")
@click.argument("session", type=NonEmptyPath(path_type=Path))
@click.argument("warehouse", type=Location())
@click.option(
    "--over-read",
    type=FiniteRange(0, 10),
    default=None,
    help="second reader: maximum share of unneeded bytes in merged reads",
)
@click.option(
    "--slower",
    type=FiniteRange(0, 10),
    default=None,
    help="second reader: slow it down by this share, as a control",
)
@click.option(
    "--turns", type=click.IntRange(3, 1001), default=31, show_default=True, help="runs of each reader"
)
@json_option
def replay_session(
    session: Path, warehouse: str, over_read: float | None, slower: float | None, turns: int, as_json: bool
) -> None:
    """Repeat the reads of a captured session alternately with two readers, and compare their CPU time.

    SESSION is a file written by `roostream inspect session --capture`. Exit code 1: the readers return
    different data.

    \b
    Example:
      roostream replay session session.json warehouse/ --over-read 0
      roostream replay session session.json warehouse/ --slower 0.03   # control: a known difference
    """
    report = compare_readers(session, warehouse, over_read, slower, turns)
    if as_json:
        print_json(report)
    else:
        click.echo(
            f"{report['requests']:,} requests, {report['candidates']:,} candidates per turn, "
            f"{report['turns']} turns"
        )
        verdict = "different" if report["differs"] else "no significant difference"
        click.echo(
            f"second / first: {report['ratio']:.4f} ({report['low']:.4f} .. {report['high']:.4f}), CPU "
            f"time: {verdict}"
        )
    raise SystemExit(0 if report["reads_the_same"] else 1)


def compare_readers(
    path: Path, place: str, over_read: float | None, slower: float | None, turns: int
) -> dict[str, Any]:
    """The comparison as printed by `--json`. Without options, the second reader equals the first.

    Raises:
        ConfigError: not a captured session.
        CheckpointError: the warehouse has no longer this data.
        UnavailableError: it cannot be read now.
    """
    captured, table = CapturedSession.read(path), SampleTable(place)
    schema = select_features(TableScan(place).schema(), captured.features)
    stored = table.warehouse.samples.snapshot(captured.version).files
    first: TableRows
    second: TableRows
    first, second = (
        TableFiles(table.warehouse, stored, None, schema, over_read=share)
        for share in (MAX_OVER_READ, MAX_OVER_READ if over_read is None else over_read)
    )
    if slower is not None:
        second = SlowedRows(second, slower, time.process_time)
    seen = [repeat_reads(captured.reads, rows) for rows in (first, second)]
    comparison = time_readers(
        functools.partial(repeat_reads, captured.reads, first, digests=False),
        functools.partial(repeat_reads, captured.reads, second, digests=False),
        time.process_time,
        turns,
    )
    return {
        "requests": seen[0].requests,
        "candidates": seen[0].candidates,
        "reads_the_same": seen[0] == seen[1],
        **comparison._asdict(),
        "differs": comparison.differs,
    }

"""`roostream inspect session` and `roostream replay session`: what a session reads, and what reading it costs two readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roostream.cli.options import json_option

if TYPE_CHECKING:
    from roostream.warehouse.file_reader import ByteRange
    from roostream.warehouse.sessions.sample_table import SampleTable, TableFiles


def _features_of(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@click.command("session")
@click.argument("warehouse", required=False)
@click.option(
    "--days", default="", help="of close, as 2024-05-01..2024-05-07; either end may be left out; '' = all"
)
@click.option("--features", default="", help="names with commas between; '' = all")
@click.option(
    "--capture",
    type=click.Path(path_type=Path),
    help="file that gets the reads, for `roostream replay session`",
)
@click.option(
    "--leases",
    metavar="STORE",
    help="instead: which readers read what, in the run whose checkpoint store this is",
)
@json_option
def inspect_session(
    warehouse: str | None, days: str, features: str, capture: Path | None, leases: str | None, as_json: bool
) -> None:
    """What a session of these days and features would read: rows by partition, splits, files, bytes and reads. Or who read it.

    \b
    Example:
      roostream inspect session .roostream/warehouse --days 2024-05-01..2024-05-07
      roostream inspect session warehouse/ --features history,ctr_1h --capture session.json
      roostream inspect session --leases .roostream/store
    """
    from roostream.errors import ConfigError

    if (warehouse is None) == (leases is None):
        raise ConfigError("expected a warehouse, or --leases with a checkpoint store; give one of them")
    if leases is not None:
        its = leases_of(leases)
        click.echo(json.dumps(its, indent=2) if as_json else leases_told(its))
        return
    assert warehouse is not None
    told = session_of(warehouse, days, _features_of(features), capture)
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    click.echo(
        f"version {told['version']}, session {told['digest']}: {told['requests']:,} requests in {told['files']:,} files"
    )
    click.echo(f"{told['splits']:,} splits, {told['row_groups']:,} row groups, {told['reads']:,} reads")
    click.echo(
        f"{told['bytes']:,} bytes, {told['over_read']:.1%} more than are needed; the files have {told['file_bytes']:,}"
    )
    for partition, rows in told["rows"].items():
        click.echo(f"partition {partition}: {rows:,}")


def leases_of(store: str) -> dict[str, Any]:
    """What a controller keeps of leases in its store: as `--json` has it.

    Raises:
        CheckpointError: no session was read by programs there. UnavailableError: the store can't be read now.
    """
    from roostream.errors import CheckpointError
    from roostream.runtime.checkpoint_store import open_store
    from roostream.warehouse.readers.leases import read_log
    from trainer.control.reader_master import LEASES_FILE

    try:
        body = open_store(store).get(LEASES_FILE)
    except CheckpointError:
        raise CheckpointError(
            f"{store}: expected a run whose session was read by `reader` programs, found no leases"
        ) from None
    found = read_log(body)
    return {**found, "events": [event._asdict() for event in found["events"]]}


def leases_told(its: dict[str, Any]) -> str:
    """For people: sums, readers, and what is held."""
    from roostream.cli.status_table import clock, plain
    from roostream.warehouse.readers.leases import ENDS

    session = its["session"] or {}
    state = "trained now" if its["trained"] else "trained before"
    lines = [f"as of {clock(its['at_ms'])} UTC, incarnation {its['incarnation']}"]
    if session:
        lines += [f"session {session['digest']} of {session['table']}, version {session['version']}: {state}"]
    for reader, counts in its["readers"].items():
        ends = ", ".join(f"{counts[end]:,} {end}" for end in ENDS if counts.get(end))
        lines.append(f"reader {reader}: {counts.get('granted', 0):,} splits{f': {ends}' if ends else ''}")
    for held in its["held"]:
        where = f"split {held['split']} from {held['position']:,}, for worker {held['worker']}"
        lines.append(f"{where}: {held['reader']}, for {held['for_s']:.1f} s")
    return plain("\n".join(lines))


def session_of(
    place: str, days: str, features: tuple[str, ...], capture: Path | None = None
) -> dict[str, Any]:
    """As `--json` has it.

    Raises:
        ConfigError: days that are none, or an unknown feature. CheckpointError: there is nothing, or it is damaged.
        UnavailableError: it can't be read now.
    """
    from roostream.cli.data.console import counted
    from roostream.errors import CheckpointError, ConfigError, nearest
    from roostream.warehouse.parquet_file import ROWS_OF_GROUP
    from roostream.warehouse.scan import TableScan
    from roostream.warehouse.sessions.sample_table import SampleTable
    from roostream.warehouse.sessions.session import SessionSpec, days_of
    from roostream.warehouse.sessions.session_capture import CapturedRead, CapturedSession
    from roostream.wire.columnar import project_schema

    table = SampleTable(place)
    first, last = days_of(days) if days else ("", "")
    told = table.newest(
        SessionSpec(table=place, version=0, first_day=first, last_day=last, labels="as_streamed"), {}
    )
    if told is None or not sum(told.rows.values()):
        raise CheckpointError(f"{place}: expected samples of {days or 'some day'}, got none; name other days")
    schema = TableScan(place).schema()
    known = [f.name for f in (*schema.ro, *schema.nro)]
    for name in features:
        if name not in known:
            raise ConfigError(
                f"expected features of schema {schema.name!r}, got {name!r}{nearest(name, known)}"
            )
    session, files = table.open_session(
        told, project_schema(schema, frozenset(features)) if features else schema
    )
    reads = tuple(
        CapturedRead(split.path, start, min(start + ROWS_OF_GROUP, split.end))
        for split in session.order.splits
        for start in range(split.start, split.end, ROWS_OF_GROUP)
    )
    if capture is not None:
        CapturedSession(version=told.version, features=features, reads=reads).write(capture)
    ranges = [files.ranges(*read) for read in counted(reads, "row groups", len(reads))]
    needed = sum(_bytes(its) for _, its in ranges)
    merged = [one for its, _ in ranges for one in its]
    paths = {split.path for split in session.order.splits}
    return {
        "version": told.version,
        "digest": told.digest,
        "requests": sum(told.rows.values()),
        "rows": {str(partition): rows for partition, rows in sorted(told.rows.items())},
        "files": len(paths),
        "file_bytes": sum(
            file.bytes for file in table.warehouse.samples.snapshot(told.version).files if file.path in paths
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
@click.argument("session", type=click.Path(path_type=Path))
@click.argument("warehouse")
@click.option(
    "--over-read",
    type=click.FloatRange(0, 10),
    default=None,
    help="of the second reader: so much more than is needed",
)
@click.option(
    "--slower",
    type=click.FloatRange(0, 10),
    default=None,
    help="a control: the second reader takes this share longer",
)
@click.option("--turns", type=click.IntRange(3, 1001), default=31, show_default=True, help="of each reader")
@json_option
def replay_session(
    session: Path, warehouse: str, over_read: float | None, slower: float | None, turns: int, as_json: bool
) -> None:
    """A captured session's reads again, by the reader as it is and by another, in turns: how many times as long the other takes.

    \b
    SESSION is what `roostream inspect session --capture` wrote. Exit code 1: the two don't read the same.
    Example:
      roostream replay session session.json warehouse/ --over-read 0
      roostream replay session session.json warehouse/ --slower 0.03     # what can be seen at all
    """
    told = compare_readers(session, warehouse, over_read, slower, turns)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(
            f"{told['requests']:,} requests, {told['candidates']:,} candidates a turn, {told['turns']} turns"
        )
        verdict = "it differs" if told["differs"] else "no difference can be seen"
        click.echo(
            f"second / first: {told['ratio']:.4f} ({told['low']:.4f} .. {told['high']:.4f}), CPU time: {verdict}"
        )
    raise SystemExit(0 if told["reads_the_same"] else 1)


def compare_readers(
    path: Path, place: str, over_read: float | None, slower: float | None, turns: int
) -> dict[str, Any]:
    """As `--json` has it; where nothing is said of the second reader, it is the first.

    Raises:
        ConfigError: no captured session. CheckpointError, UnavailableError: the warehouse lacks what was read, or can't be read.
    """
    import functools
    import time

    from roostream.warehouse.scan import TableScan
    from roostream.warehouse.sessions.sample_table import SampleTable
    from roostream.warehouse.sessions.session_capture import (
        CapturedSession,
        SlowedRows,
        replay_session,
        time_readers,
    )
    from roostream.warehouse.sessions.session_rows import TableRows
    from roostream.wire.columnar import project_schema

    captured, table = CapturedSession.read(path), SampleTable(place)
    schema = TableScan(place).schema()
    schema = project_schema(schema, frozenset(captured.features)) if captured.features else schema
    first: TableRows = _files(table, captured.version, schema)
    second: TableRows = _files(table, captured.version, schema, over_read)
    if slower is not None:
        second = SlowedRows(second, slower, time.process_time)
    seen = [replay_session(captured.reads, rows) for rows in (first, second)]
    its = time_readers(
        functools.partial(replay_session, captured.reads, first, digests=False),
        functools.partial(replay_session, captured.reads, second, digests=False),
        time.process_time,
        turns,
    )
    return {
        "requests": seen[0].requests,
        "candidates": seen[0].candidates,
        "reads_the_same": seen[0] == seen[1],
        **its._asdict(),
        "differs": its.differs,
    }


def _files(table: SampleTable, version: int, schema: Any, over_read: float | None = None) -> TableFiles:
    from roostream.warehouse.file_reader import MAX_OVER_READ
    from roostream.warehouse.sessions.sample_table import TableFiles

    files = table.warehouse.samples.snapshot(version).files
    return TableFiles(
        table.warehouse, files, (), schema, over_read=MAX_OVER_READ if over_read is None else over_read
    )

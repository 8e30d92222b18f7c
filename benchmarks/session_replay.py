"""Is a warehouse reader slower than before?

Replays a captured session: all row groups of a small table in the session's order, with the reader and with a
slowed one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.common import rows_at_rest
from benchmarks.common.dataset_paths import EBNERD, absent
from benchmarks.common.public_logs import samples_of
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.warehouse.archive import take_rows
from roostream.warehouse.data_file import day_of
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, FileRows, write_rows
from roostream.warehouse.sessions.sample_table import TableFiles
from roostream.warehouse.sessions.session_capture import CapturedSession, SlowedRows, replay_session
from roostream.warehouse.sessions.session_rows import TableRows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.columnar import column_types, columns_of, project_schema, uncut_schema
from roostream.wire.decode import Decoder
from roostream.wire.records import Record


def small_table(folder: str, schema: Schema, written_by: Schema, records: list[Record]) -> Warehouse:
    """A table with a file a day of one partition, as a writer with `schema` makes it."""
    warehouse = Warehouse(folder)
    warehouse.create()
    register(warehouse.store, schema)
    batch, _ = Decoder(uncut_schema(schema), lambda fingerprint: written_by).decode(records)
    rows = FileRows(
        columns=columns_of(batch), column_types=column_types(schema), counts_R=batch.num_candidates_R
    )
    warehouse.samples.widen(rows.column_types)
    first_key = FileKey(table="samples", day=date(1970, 1, 1), partition=0, fingerprint=schema.fingerprint)
    days_R = np.array([day_of(ms).toordinal() for ms in batch.close_ms_R.tolist()])
    order = np.lexsort([batch.time_ms_R, batch.ro_lists.values_of("user")])
    files = []
    for day in np.unique(days_R).tolist():
        key = dataclasses.replace(first_key, day=date.fromordinal(day))
        files.append(write_rows(warehouse.store, take_rows(rows, order[days_R[order] == day]), key))
    warehouse.samples.commit(files, progress={"samples/benchmark/0": ProgressStep(None, len(records))})
    return warehouse


@contextlib.contextmanager
def read_again(slower: float, share: float, users: int, history: int) -> Iterator[Work]:
    """Units are requests. `slower`: share by which the reader is slowed; `share`: of the features."""
    from roostream.cli.data.session_command import session_of

    written_by, records = samples_of("EB-NeRD", users, history)
    schema = dataclasses.replace(written_by, transforms=())
    chosen = rows_at_rest.sampled(schema, share)
    with tempfile.TemporaryDirectory() as folder:
        warehouse = small_table(folder, schema, written_by, records)
        capture = session_of(folder, "", tuple(sorted(chosen)), path := Path(folder) / "session.json")
        session = CapturedSession.read(path)
        files: TableRows = TableFiles(
            warehouse, warehouse.samples.snapshot().files, None, project_schema(schema, chosen)
        )
        rows = SlowedRows(files, slower, time.process_time) if slower else files
        figures = {"reads": float(capture["reads"]), "over-read %": 100.0 * capture["over_read"] + 1e-9}
        yield Work(
            lambda: replay_session(session.reads, rows, digests=False), capture["requests"], lambda: figures
        )


_AGAIN = "benchmarks.session_replay:read_again"
_USERS, _HISTORY = 300, 50


def _row(name: str, share: float) -> Row:
    ways = (("as it is", 0.0), ("3 % slower on purpose", 0.03), ("10 % slower on purpose", 0.1))
    return Row(
        name=name,
        unit="requests",
        clock="cpu",
        subjects=tuple(
            Subject(way, _AGAIN, (slower, share, _USERS, _HISTORY), "peer" if slower else "ours")
            for way, slower in ways
        ),
        skipped=absent(EBNERD),
    )


BENCHMARK = Benchmark(
    name="session-replay",
    summary="Is a reader of the warehouse slower than it was?",
    rows=(_row("30 % of the features", 0.3), _row("a tenth of the features", 0.1)),
    rounds=31,
    interpretation="""\
The reads of a captured session on a table of 300 of EB-NeRD's users are repeated with a dummy trainer that
only counts. The other subjects are the same reader slowed on purpose: if their ratios are far from 1.03 and
1.10, this machine cannot resolve such small differences now. `--against COMMIT` compares the reader of
another commit in the same run; `roostream replay session` compares the sessions of any warehouse
(docs/warehouse.md).""",
)

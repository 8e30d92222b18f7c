"""A session of the warehouse as a worker reads it: by itself, in the thread of its source, or through `reader` programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import Partition
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.sessions.sample_table import SampleTable, TableFiles
from roostream.warehouse.sessions.session_rows import (
    LocalSessionRows,
    OpenSession,
    SessionRows,
    recent_sample_ids,
)
from roostream.wire.decode import Decoder
from trainer.batch_source import NewestIds
from trainer.pipeline.stage_timer import StageTimer
from trainer.sessions.session_source import SessionSource

OpenRows = Callable[[TableInput, OpenSession, TableFiles], SessionRows]
"""Who reads the rows of a session."""


def local_rows(told: TableInput, session: OpenSession, rows: TableFiles) -> SessionRows:
    return LocalSessionRows(session, rows)


def open_session(
    told: TableInput,
    schema: Schema,
    partitions: Sequence[Partition],
    horizon_ms: int,
    clock: Clock,
    stages: StageTimer | None = None,
    open_rows: OpenRows = local_rows,
) -> SessionSource:
    """`partitions`: of the stream that follows; `horizon_ms`: for how long ids are remembered.

    Raises:
        UnavailableError: the table can't be read now. CheckpointError: the version isn't there, or isn't what it was.
    """
    session, rows = SampleTable(told.table).opened(told, schema)
    empty, _ = Decoder(schema, lambda fingerprint: None).decode([])

    def newest(number: int) -> NewestIds:
        return NewestIds(*recent_sample_ids(session, rows, number, horizon_ms))

    return SessionSource(
        session.order,
        open_rows(told, session, rows),
        empty,
        clock,
        partitions=partitions,
        newest=newest,
        stages=stages,
    )

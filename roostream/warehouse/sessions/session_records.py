"""A session's samples as the records that they were, in the order in which the topic would have delivered
them.

Training on these records gives the same batches as live training. To train a new model, rows are read as they
are stored.
"""

from __future__ import annotations

from collections.abc import Iterator

from roostream.runtime.kafka.topics import SAMPLES
from roostream.warehouse.record_columns import rebuild_records
from roostream.warehouse.sessions.sample_table import TableFiles
from roostream.warehouse.sessions.session_rows import OpenSession, first_copies
from roostream.wire.records import Record


def session_records(
    session: OpenSession, files: TableFiles, stored_order_until: str = ""
) -> Iterator[Record]:
    """Records by (close time, partition, offset), each sample once, with labels as they were at the close.

    For days before `stored_order_until` (YYYY-MM-DD) records come file by file in the session's order.
    Memory: one day's records.

    Raises:
        CheckpointError: a file is damaged; the message names it.
        UnavailableError: it cannot be read now.
        SchemaError: the schema that wrote it is not registered.
    """
    paths = {split.path: split for split in session.order.splits}
    for day in sorted({split.day for split in session.order.splits}):
        of_day = [split for split in paths.values() if split.day == day]
        found: list[Record] = []
        for split in of_day:
            counts = first_copies({file.path: files.marks(file.path) for file in session.group(split)})[
                split.path
            ]
            records = _file_records(files, split.path, split.partition)
            found += [record for record, does_count in zip(records, counts, strict=True) if does_count]
        if day >= stored_order_until:
            found.sort(key=lambda record: (record.timestamp_ms, record.partition, record.offset))
        yield from found


def _file_records(files: TableFiles, path: str, partition: int) -> Iterator[Record]:
    writer, columns, counts_R = files.all_columns(path)
    offsets, closes = (columns[name].values.tolist() for name in ("offset", "close_ms"))
    for offset, close_ms, (key, value) in zip(
        offsets, closes, rebuild_records(writer, columns, counts_R), strict=True
    ):
        yield Record(SAMPLES, partition, offset, close_ms, key, value)

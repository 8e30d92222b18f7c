"""A session's samples as the records that they were, in the order in which a topic would have given them.

What is trained from them is what was trained live, in the same batches. Rows as they lie, by user, are for training a model anew
(warehouse/readers/).
"""

from __future__ import annotations

from collections.abc import Iterator

from roo.wire import Record
from warehouse.archive import SAMPLES
from warehouse.readers.reading import OpenSession, first_rows
from warehouse.readers.table_session import TableFiles
from warehouse.rebuild import rebuilt


def session_records(session: OpenSession, files: TableFiles) -> Iterator[Record]:
    """By (close, partition, offset), each sample once, labels as they were at the close. Memory: the records of a day.

    Raises:
        CheckpointError: a file is damaged; names it. UnavailableError: it can't be read now. SchemaError: its writer is unknown.
    """
    first_of_day = {split.day: split for split in reversed(session.order.splits)}
    paths = {split.path: split for split in session.order.splits}
    for day in sorted(first_of_day):
        of_day = [split for split in paths.values() if split.day == day]
        found: list[Record] = []
        for partition in sorted({split.partition for split in of_day}):
            its = [split for split in of_day if split.partition == partition]
            counts = first_rows({file.path: files.marks(file.path) for file in session.group(its[0])})
            for split in its:
                records = _file_records(files, split.path, partition)
                found += [record for record, does_count in zip(records, counts[split.path], strict=True) if does_count]
        yield from sorted(found, key=lambda record: (record.timestamp_ms, record.partition, record.offset))


def _file_records(files: TableFiles, path: str, partition: int) -> Iterator[Record]:
    writer, columns, counts_R = files.whole(path)
    offsets, closes = (columns[name].values.tolist() for name in ("offset", "close_ms"))
    for offset, close_ms, (key, value) in zip(offsets, closes, rebuilt(writer, columns, counts_R), strict=True):
        yield Record(SAMPLES, partition, offset, close_ms, key, value)

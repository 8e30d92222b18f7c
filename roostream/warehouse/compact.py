"""What is to be sealed and what may go, from what the logs say; and rows of many files as those of one.

A day's files of one partition are replaced by few: each sample once, by user, columns that are asked for most in front, and the
labels of now beside those of the close. Pure: no store, no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

import numpy as np

from roostream.schema.schema import Schema
from roostream.warehouse.archive import by_user, take
from roostream.warehouse.data_file import DataFile, day_bounds_ms
from roostream.warehouse.file_writer import FileRows
from roostream.warehouse.latest_labels import LATEST, Latest, overlaid
from roostream.wire.columnar import CANDIDATE, FlatColumn, Form, label_column

DayPart = tuple[date, int]
"""A day of close and a partition: what is sealed together."""
Told = tuple[date, int, str]
"""A day and partition of corrections, and the id of their topic: offsets of another one begin anew."""


class Seal(NamedTuple):
    """What is to be replaced."""

    day: date
    partition: int
    files: tuple[DataFile, ...]
    corrections: tuple[DataFile, ...]


def seals_due(
    samples: Iterable[DataFile],
    corrections: Iterable[DataFile],
    folded: Mapping[Told, int],
    seal_after_ms: int,
) -> list[Seal]:
    """Days that ended `seal_after_ms` before the newest close and have files that aren't sealed, or corrections that aren't
    folded; the oldest first. `folded`: next offset of corrections behind what sealed files hold, 0 where nothing was."""
    of: dict[DayPart, list[DataFile]] = {}
    late: dict[DayPart, list[DataFile]] = {}
    for files, known in ((samples, of), (corrections, late)):
        for file in files:
            known.setdefault((file.day, file.partition), []).append(file)
    newest_ms = max((file.last_close_ms for files in of.values() for file in files), default=0)
    out = []
    for (day, partition), files in sorted(of.items()):
        told = late.get((day, partition), [])
        behind = any(file.last_offset >= folded.get((day, partition, file.topic), 0) for file in told)
        if day_bounds_ms(day)[1] + seal_after_ms <= newest_ms and (
            behind or not all(file.sealed for file in files)
        ):
            out.append(Seal(day, partition, tuple(files), tuple(told)))
    return out


def retired_name(topic: str, partition: int) -> str:
    """Offset of a topic (its id) below which files of a partition may have been retired."""
    return f"retired/{topic or 'unknown'}/{partition}"


def cut_name(day: date) -> str:
    """Counts how often files of a day were retired while others of it stayed."""
    return f"cut/{day.isoformat()}"


def behind_by_topic(corrections: Iterable[DataFile]) -> dict[str, int]:
    """Topic → offset behind the last of its corrections in these files."""
    behind: dict[str, int] = {}
    for file in corrections:
        behind[file.topic] = max(behind.get(file.topic, 0), file.last_offset + 1)
    return behind


def retired(files: Sequence[DataFile], keep_days: int, keep_bytes: int) -> list[DataFile]:
    """Files that may go: of days older than the newest `keep_days`; then of the oldest days until at most `keep_bytes` are left;
    and of the newest day, which goes last, those that closed first, but for the newest of each partition. 0 = no bound."""
    if not files:
        return []
    newest = max(file.day for file in files)
    oldest = newest - timedelta(days=keep_days - 1) if keep_days else date.min
    out = [file for file in files if file.day < oldest]
    left = sorted((file for file in files if file.day >= oldest), key=lambda file: file.day)
    total = sum(file.bytes for file in left)
    for day in sorted({file.day for file in left} - {newest}):
        if not keep_bytes or total <= keep_bytes:
            break
        gone = [file for file in left if file.day == day]
        out, total = out + gone, total - sum(file.bytes for file in gone)
    return out + _first_closed(
        [file for file in left if file.day == newest], total - keep_bytes if keep_bytes else 0
    )


def _first_closed(files: Sequence[DataFile], excess: int) -> list[DataFile]:
    """Of one day, so many bytes or a file more, never the last of a partition."""
    last = {file.partition: file for file in sorted(files, key=lambda file: file.last_close_ms)}
    out: list[DataFile] = []
    for file in sorted(files, key=lambda file: (file.last_close_ms, file.path)):
        if excess > 0 and file is not last[file.partition]:
            out.append(file)
            excess -= file.bytes
    return out


def cut_days(files: Sequence[DataFile], gone: Sequence[DataFile]) -> list[date]:
    """Days of which some go and others stay."""
    paths = {file.path for file in gone}
    return sorted({file.day for file in gone} & {file.day for file in files if file.path not in paths})


def merged_rows(parts: Sequence[FileRows]) -> FileRows:
    """FileRows of one writer's files as one, each sample once (its lowest offset), by user."""
    forms = dict(parts[0].forms)
    columns = {name: _joined([part.columns[name] for part in parts]) for name in forms}
    rows = FileRows(columns=columns, forms=forms, counts_R=np.concatenate([part.counts_R for part in parts]))
    order = np.lexsort([columns["offset"].values, columns["sample_id"].values])
    ids = columns["sample_id"].values[order]
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    return by_user(take(rows, np.sort(order[first])))


def with_latest(rows: FileRows, writer: Schema, latest: Latest) -> FileRows:
    """With columns `latest__<label>`, if corrections say anything of these rows."""
    names = [label.name for label in writer.labels]
    if latest.is_empty or not names:
        return rows
    label_BT = np.stack([rows.columns[label_column(name)].values for name in names], axis=1)
    now_BT = overlaid(
        latest, rows.columns["sample_id"].values, rows.counts_R, rows.columns["item"].values, label_BT
    )
    if now_BT is label_BT:
        return rows
    new = {
        label_column(name, LATEST): FlatColumn(np.ascontiguousarray(now_BT[:, t]))
        for t, name in enumerate(names)
    }
    forms = dict.fromkeys(new, CANDIDATE["propensity"])
    return FileRows(columns={**rows.columns, **new}, forms={**rows.forms, **forms}, counts_R=rows.counts_R)


def cut(rows: FileRows, max_rows: int) -> list[FileRows]:
    """In pieces of at most so many rows."""
    count = len(rows.counts_R)
    return [take(rows, np.arange(at, min(at + max_rows, count))) for at in range(0, count, max_rows)]


def latest_forms(writer: Schema) -> dict[str, Form]:
    """What a sealed file may have beyond a sample's columns."""
    return {label_column(label.name, LATEST): CANDIDATE["propensity"] for label in writer.labels}


def _joined(columns: Sequence[FlatColumn]) -> FlatColumn:
    values = np.concatenate([column.values for column in columns])
    if columns[0].lengths is None:
        return FlatColumn(values)
    lengths = np.concatenate([column.lengths for column in columns if column.lengths is not None])
    present = np.concatenate(
        [
            np.ones(len(c.lengths), np.bool_) if c.present is None else c.present
            for c in columns
            if c.lengths is not None
        ]
    )
    return FlatColumn(values, lengths, present)

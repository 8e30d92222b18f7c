"""What is to be sealed and what may go, from what the logs say; and rows of many files as those of one.

A day's files of one partition are replaced by few: each sample once, by user, columns that are asked for most in front, and the
labels of now beside those of the close. Pure: no store, no table.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

import numpy as np

from roostream.errors import FencedError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.schema import Schema
from roostream.warehouse.archive import sample_forms, sort_by_user, take
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.data_file import DataFile, day_bounds_ms
from roostream.warehouse.delta_table import ProgressStep, TableSnapshot
from roostream.warehouse.file_reader import writer_of
from roostream.warehouse.latest_labels import LATEST, LatestLabels, overlay_labels, read_latest
from roostream.warehouse.parquet_file import FileKey, FileRows, write_rows
from roostream.warehouse.version_pins import pinned_versions
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.columnar import CANDIDATE, ColumnType, FlatColumn, label_column

DayPart = tuple[date, int]
"""A day of close and a partition: what is sealed together."""
CorrectionSource = tuple[date, int, str]
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
    folded: Mapping[CorrectionSource, int],
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


def partly_retired_name(day: date) -> str:
    """Counts how often files of a day were retired while others of it stayed."""
    return f"cut/{day.isoformat()}"


def next_offset_by_topic(corrections: Iterable[DataFile]) -> dict[str, int]:
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


def partly_retired_days(files: Sequence[DataFile], gone: Sequence[DataFile]) -> list[date]:
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
    return sort_by_user(take(rows, np.sort(order[first])))


def with_latest(rows: FileRows, writer: Schema, latest: LatestLabels) -> FileRows:
    """With columns `latest__<label>`, if corrections say anything of these rows."""
    names = [label.name for label in writer.labels]
    if latest.is_empty or not names:
        return rows
    label_BT = np.stack([rows.columns[label_column(name)].values for name in names], axis=1)
    now_BT = overlay_labels(
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


def latest_forms(writer: Schema) -> dict[str, ColumnType]:
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


log = logging.getLogger("roostream.compactor")
_RETIRED = "compact/retired"


def compact_name(day: date, partition: int) -> str:
    """Counts how often the files of a day and partition were replaced."""
    return f"compact/{day.isoformat()}/{partition}"


def folded_name(day: date, partition: int, topic: str) -> str:
    """Next offset of a topic of corrections (its id, "" where files don't say) behind what sealed files of a day and partition
    hold."""
    return f"folded/{day.isoformat()}/{partition}{'/' if topic else ''}{topic}"


@dataclasses.dataclass
class CompactCounts:
    """Since the start."""

    seals: int = 0
    files_replaced: int = 0
    rows: int = 0
    repeated: int = 0  # rows that were there twice
    retired: int = 0
    cut: int = 0  # of these, files of a day of which others stayed
    deleted: int = 0
    refused: int = 0


class Compactor:
    """One warehouse. One thread; several compactors may work on one warehouse."""

    def __init__(self, warehouse: Warehouse, config: CompactorConfig, clock: Clock) -> None:
        self.warehouse, self.config, self.clock = warehouse, config, clock
        self.counts = CompactCounts()

    def due(self) -> list[Seal]:
        """Step 1. UnavailableError: the warehouse can't be read now."""
        samples, corrections = (self.warehouse.tables[name].snapshot() for name in (SAMPLES, CORRECTIONS))
        return seals_due(
            samples.files, corrections.files, _folded(samples, corrections.files), self.config.seal_after_ms
        )

    def seal(self, seal: Seal) -> bool:
        """Steps 2 and 3. False: another was there first; nothing was changed.

        Raises:
            UnavailableError: the warehouse can't be read or written now. CheckpointError: a file is damaged; names it.
        """
        table, name = self.warehouse.samples, compact_name(seal.day, seal.partition)
        before = table.snapshot()
        if not {file.path for file in seal.files} <= {file.path for file in before.files}:
            return False
        made, counted = self._written(seal), before.progress(name)
        steps = {name: ProgressStep(counted, (counted or 0) + 1)}
        for topic, behind in next_offset_by_topic(seal.corrections).items():
            at = before.progress(folded := folded_name(seal.day, seal.partition, topic))
            steps[folded] = ProgressStep(at, max(behind, at or 0))
        try:
            table.commit(made, seal.files, steps)
        except FencedError as error:
            log.warning("%s", error)
            self.counts.refused += 1
            return False
        rows = sum(file.rows for file in made)
        self.counts.seals += 1
        self.counts.rows += rows
        self.counts.files_replaced += len(seal.files)
        self.counts.repeated += sum(file.rows for file in seal.files) - rows
        log.info(
            "sealed %s partition %d: %d files are %d", seal.day, seal.partition, len(seal.files), len(made)
        )
        return True

    def retire(self) -> int:
        """What is beyond the bounds leaves the tables, the oldest first; how many files. Raises UnavailableError."""
        samples = self.warehouse.samples.snapshot()
        gone = retired(samples.files, self.config.keep_days, self.config.keep_bytes)
        if not gone:
            return 0
        in_part = partly_retired_days(samples.files, gone)
        days = {file.day for file in gone} - set(in_part)
        late = self.warehouse.corrections.snapshot()
        steps = {
            name: ProgressStep(samples.progress(name), after)
            for name, after in _told_retired(samples, gone, in_part).items()
        }
        try:
            self.warehouse.samples.commit((), gone, {**_counted(samples), **steps})
            if old := [file for file in late.files if file.day in days]:
                self.warehouse.corrections.commit((), old, _counted(late))
        except FencedError as error:
            log.warning("%s", error)
            self.counts.refused += 1
            return 0
        for day in in_part:
            log.warning(
                "%s is kept in part: expected keep_bytes = %d to hold a day; raise it",
                day,
                self.config.keep_bytes,
            )
        self.counts.cut += sum(file.day in in_part for file in gone)
        self.counts.retired += len(gone)
        return len(gone)

    def vacuum(self) -> list[str]:
        """Paths that were deleted. Raises UnavailableError: the warehouse or its pins can't be read now."""
        deleted: list[str] = []
        for name, table in self.warehouse.tables.items():
            held = pinned_versions(self.warehouse.store, name, self.clock.now_ms())
            deleted += table.vacuum(self.config.vacuum_after_hours, held)
        self.counts.deleted += len(deleted)
        return deleted

    def _written(self, seal: Seal) -> list[DataFile]:
        """New files, of each writer and topic its own."""
        made: list[DataFile] = []
        order = self.warehouse.column_order()
        for fingerprint, topic in sorted({(file.fingerprint, file.topic) for file in seal.files}):
            files = [file for file in seal.files if (file.fingerprint, file.topic) == (fingerprint, topic)]
            writer = writer_of(files[0], self.warehouse.registry)
            latest = read_latest(self.warehouse, seal.corrections, [label.name for label in writer.labels])
            rows = with_latest(merged_rows([self._rows(file) for file in files]), writer, latest)
            self.warehouse.samples.widen(rows.forms)
            place = FileKey(
                table=SAMPLES,
                day=seal.day,
                partition=seal.partition,
                fingerprint=fingerprint,
                topic=topic,
                sealed=True,
            )
            made += [
                write_rows(self.warehouse.store, piece, place, order)
                for piece in cut(rows, self.config.max_rows)
            ]
        return made

    def _rows(self, file: DataFile) -> FileRows:
        forms = sample_forms(writer_of(file, self.warehouse.registry))
        columns, counts_R = self.warehouse.open_file(SAMPLES, file).columns(forms)
        return FileRows(columns=columns, forms=forms, counts_R=counts_R)


def _folded(samples: TableSnapshot, corrections: Sequence[DataFile]) -> Mapping[CorrectionSource, int]:
    told = {(file.day, file.partition, file.topic) for file in corrections}
    return {its: samples.progress(folded_name(*its)) or 0 for its in told}


def _counted(table: TableSnapshot) -> dict[str, ProgressStep]:
    """Of two that retire files of a table one is refused."""
    before = table.progress(_RETIRED)
    return {_RETIRED: ProgressStep(before, (before or 0) + 1)}


def _told_retired(
    samples: TableSnapshot, gone: Sequence[DataFile], in_part: Sequence[date]
) -> dict[str, int]:
    """What a later session has to know: whether all that it would read, and all that it could find again there, are there."""
    told = {name: (samples.progress(name) or 0) + 1 for name in map(partly_retired_name, in_part)}
    for file in gone:
        name = retired_name(file.topic, file.partition)
        told[name] = max(told.get(name, samples.progress(name) or 0), file.last_offset + 1)
    return told

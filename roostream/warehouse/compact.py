"""Compaction: the compactor seals days of a warehouse, retires old days and deletes unused files.

What is due follows from the tables' logs alone. The files of a day and partition are merged into new ones.
One commit replaces them and moves `compact/<day>/<partition>` and `folded/<day>/<partition>`, so of two
compactors one is rejected, while an archiver may append meanwhile. A sealed day holds each sample once,
ordered by user, the most popular columns first, with the latest labels beside those at the close. Readers of
older versions continue: their files stay until the vacuum's age has passed and no pin names them.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

import numpy as np

from roostream.errors import CheckpointError, FencedError, SchemaError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.schema import Schema
from roostream.warehouse.archive import sample_forms, sort_by_user, take_rows
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
"""A close day and a partition: what is sealed together."""
CorrectionSource = tuple[date, int, str]
"""Day, partition and topic id of corrections; offsets of another topic id start again."""


class Seal(NamedTuple):
    """Files of a day and partition that are to be replaced."""

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
    """What to seal, the oldest day first: days that ended `seal_after_ms` before the newest close and have
    unsealed files or corrections that are not folded in.

    `folded`: offset after the last correction that sealed files contain; 0 = none.
    """
    by_part: dict[DayPart, list[DataFile]] = {}
    corrections_by_part: dict[DayPart, list[DataFile]] = {}
    for files, group in ((samples, by_part), (corrections, corrections_by_part)):
        for file in files:
            group.setdefault((file.day, file.partition), []).append(file)
    newest_ms = max((file.last_close_ms for files in by_part.values() for file in files), default=0)
    out = []
    for (day, partition), files in sorted(by_part.items()):
        late = corrections_by_part.get((day, partition), [])
        behind = any(file.last_offset >= folded.get((day, partition, file.topic), 0) for file in late)
        if day_bounds_ms(day)[1] + seal_after_ms <= newest_ms and (
            behind or not all(file.sealed for file in files)
        ):
            out.append(Seal(day, partition, tuple(files), tuple(late)))
    return out


def retired_name(topic: str, partition: int) -> str:
    """Progress name: offset of a topic (by id) below which files of a partition may have been retired."""
    return f"retired/{topic or 'unknown'}/{partition}"


def partly_retired_name(day: date) -> str:
    """Progress name: counts how often a part of a day's files was retired."""
    return f"cut/{day.isoformat()}"


def next_offset_by_topic(corrections: Iterable[DataFile]) -> dict[str, int]:
    """Topic id → offset after its last correction in these files."""
    behind: dict[str, int] = {}
    for file in corrections:
        behind[file.topic] = max(behind.get(file.topic, 0), file.last_offset + 1)
    return behind


def newest_day(files: Sequence[DataFile]) -> date:
    """The newest day on or after which at least a tenth of an average day's rows closed. So a few samples
    with a wrong time in the future retire nothing."""
    rows_by_day: Counter[date] = Counter()
    for file in files:
        rows_by_day[file.day] += file.rows
    enough = rows_by_day.total() / len(rows_by_day) / 10
    days = sorted(rows_by_day, reverse=True)
    rows_since = itertools.accumulate(rows_by_day[day] for day in days)
    return next(day for day, rows in zip(days, rows_since, strict=True) if rows >= enough)


def files_to_retire(files: Sequence[DataFile], keep_days: int, keep_bytes: int) -> list[DataFile]:
    """Files to retire: those of days before the newest `keep_days` (see `newest_day`); then the oldest days
    until at most `keep_bytes` are left; of the newest day the files that closed first, but never the last
    file of a partition. 0 = no limit."""
    if not files:
        return []
    newest = newest_day(files)
    oldest = newest - timedelta(days=keep_days - 1) if keep_days else date.min
    out = [file for file in files if file.day < oldest]
    left = sorted((file for file in files if file.day >= oldest), key=lambda file: file.day)
    total = sum(file.bytes for file in left)
    if not keep_bytes:
        return out
    for day in sorted({file.day for file in left} - {newest}):
        if total <= keep_bytes:
            break
        gone = [file for file in left if file.day == day]
        out, total = out + gone, total - sum(file.bytes for file in gone)
    return out + _first_closed([file for file in left if file.day == newest], total - keep_bytes)


def _first_closed(files: Sequence[DataFile], excess: int) -> list[DataFile]:
    """The earliest files of one day that sum up to `excess` bytes, but never the last one of a partition."""
    last = {file.partition: file for file in sorted(files, key=lambda file: file.last_close_ms)}
    out: list[DataFile] = []
    for file in sorted(files, key=lambda file: (file.last_close_ms, file.path)):
        if excess > 0 and file is not last[file.partition]:
            out.append(file)
            excess -= file.bytes
    return out


def partly_retired_days(files: Sequence[DataFile], gone: Sequence[DataFile]) -> list[date]:
    """Days of which some files are retired and others stay."""
    paths = {file.path for file in gone}
    return sorted({file.day for file in gone} & {file.day for file in files if file.path not in paths})


def merged_rows(parts: Sequence[FileRows]) -> FileRows:
    """The rows of several files of one writer: each sample once (its lowest offset), ordered by user."""
    forms = dict(parts[0].forms)
    columns = {name: _joined([part.columns[name] for part in parts]) for name in forms}
    rows = FileRows(columns=columns, forms=forms, counts_R=np.concatenate([part.counts_R for part in parts]))
    order = np.lexsort([columns["offset"].values, columns["sample_id"].values])
    ids = columns["sample_id"].values[order]
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    return sort_by_user(take_rows(rows, np.sort(order[first])))


def with_latest(rows: FileRows, writer: Schema, latest: LatestLabels) -> FileRows:
    """The rows with columns `latest__<label>`, if corrections change any of them."""
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


def split_rows(rows: FileRows, max_rows: int) -> list[FileRows]:
    """The rows in pieces of at most `max_rows`."""
    count = len(rows.counts_R)
    return [take_rows(rows, np.arange(at, min(at + max_rows, count))) for at in range(0, count, max_rows)]


def latest_forms(writer: Schema) -> dict[str, ColumnType]:
    """Columns that a sealed file may have beyond those of a sample."""
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
    """Progress name: counts how often the files of a day and partition were replaced."""
    return f"compact/{day.isoformat()}/{partition}"


def folded_name(day: date, partition: int, topic: str) -> str:
    """Progress name: offset after the last correction of a topic that sealed files of a day and partition
    contain."""
    return f"folded/{day.isoformat()}/{partition}{'/' if topic else ''}{topic}"


@dataclasses.dataclass
class CompactCounts:
    """Counters since the start."""

    seals: int = 0
    files_replaced: int = 0
    rows: int = 0
    repeated: int = 0  # duplicate rows that were removed
    retired: int = 0
    cut: int = 0  # files of days that were retired in part
    deleted: int = 0
    refused: int = 0
    damaged: int = 0


class Compactor:
    """Compacts one warehouse. One thread; several compactors may work on the same warehouse."""

    def __init__(self, warehouse: Warehouse, config: CompactorConfig, clock: Clock) -> None:
        self.warehouse, self.config, self.clock = warehouse, config, clock
        self.counts = CompactCounts()
        self.num_due = 0

    def run_once(self, stop: threading.Event, beat: Callable[[], None] = lambda: None) -> None:
        """Seal what is due, retire and vacuum. A damaged file or a missing schema stops its own days only.
        `beat` is called after each seal.

        Raises:
            UnavailableError: the warehouse is away; finished steps stay done.
        """
        due = self.due()
        for n, seal in enumerate(due):
            if stop.is_set():
                return
            self.num_due = len(due) - n
            try:
                self.seal(seal)
            except (CheckpointError, SchemaError) as error:
                self.counts.damaged += 1
                log.error("%s partition %d is not sealed: %s", seal.day, seal.partition, error)
            beat()
        self.num_due = 0
        self.retire()
        self.vacuum()

    def due(self) -> list[Seal]:
        """Step 1.

        Raises:
            UnavailableError: the warehouse cannot be read now.
        """
        samples, corrections = (self.warehouse.tables[name].snapshot() for name in (SAMPLES, CORRECTIONS))
        return seals_due(
            samples.files, corrections.files, _folded(samples, corrections.files), self.config.seal_after_ms
        )

    def seal(self, seal: Seal) -> bool:
        """Steps 2 and 3. False: another compactor was first; nothing was changed.

        Raises:
            UnavailableError: the warehouse cannot be read or written now.
            CheckpointError: a file is damaged; the message names it.
            SchemaError: the schema that wrote a file is missing from the warehouse.
        """
        table, name = self.warehouse.samples, compact_name(seal.day, seal.partition)
        before = table.snapshot()
        if not {file.path for file in seal.files} <= {file.path for file in before.files}:
            return False
        new_files, count = self._write_sealed(seal), before.progress(name)
        steps = {name: ProgressStep(count, (count or 0) + 1)}
        for topic, behind in next_offset_by_topic(seal.corrections).items():
            at = before.progress(folded := folded_name(seal.day, seal.partition, topic))
            steps[folded] = ProgressStep(at, max(behind, at or 0))
        try:
            table.commit(new_files, seal.files, steps)
        except FencedError as error:
            log.warning("%s", error)
            self.counts.refused += 1
            return False
        rows = sum(file.rows for file in new_files)
        self.counts.seals += 1
        self.counts.rows += rows
        self.counts.files_replaced += len(seal.files)
        self.counts.repeated += sum(file.rows for file in seal.files) - rows
        replaced = f"{len(seal.files)} files were replaced by {len(new_files)}"
        log.info("sealed %s partition %d: %s", seal.day, seal.partition, replaced)
        return True

    def retire(self) -> int:
        """Remove files beyond the limits from the tables, the oldest first; return how many. Raises
        UnavailableError."""
        samples = self.warehouse.samples.snapshot()
        gone = files_to_retire(samples.files, self.config.keep_days, self.config.keep_bytes)
        if not gone:
            return 0
        in_part = partly_retired_days(samples.files, gone)
        days = {file.day for file in gone} - set(in_part)
        late = self.warehouse.corrections.snapshot()
        steps = {
            name: ProgressStep(samples.progress(name), after)
            for name, after in _retirement_progress(samples, gone, in_part).items()
        }
        try:
            self.warehouse.samples.commit((), gone, {**_retire_step(samples), **steps})
            if old := [file for file in late.files if file.day in days]:
                self.warehouse.corrections.commit((), old, _retire_step(late))
        except FencedError as error:
            log.warning("%s", error)
            self.counts.refused += 1
            return 0
        for day in in_part:
            log.warning(
                "a part of %s was retired: expected keep_bytes = %d to hold a whole day; raise it",
                day,
                self.config.keep_bytes,
            )
        self.counts.cut += sum(file.day in in_part for file in gone)
        self.counts.retired += len(gone)
        return len(gone)

    def vacuum(self) -> list[str]:
        """Delete unused files and return their paths.

        Raises:
            UnavailableError: the warehouse or its pins cannot be read now.
        """
        deleted: list[str] = []
        for name, table in self.warehouse.tables.items():
            held = pinned_versions(self.warehouse.store, name, self.clock.now_ms())
            deleted += table.vacuum(self.config.vacuum_after_hours, held)
        self.counts.deleted += len(deleted)
        return deleted

    def _write_sealed(self, seal: Seal) -> list[DataFile]:
        """The new files, one set for each writer and topic."""
        new_files: list[DataFile] = []
        order = self.warehouse.column_order()
        for fingerprint, topic in sorted({(file.fingerprint, file.topic) for file in seal.files}):
            files = [file for file in seal.files if (file.fingerprint, file.topic) == (fingerprint, topic)]
            writer = writer_of(files[0], self.warehouse.registry)
            latest = read_latest(self.warehouse, seal.corrections, [label.name for label in writer.labels])
            rows = with_latest(merged_rows([self._rows(file) for file in files]), writer, latest)
            self.warehouse.samples.widen(rows.forms)
            key = FileKey(
                table=SAMPLES,
                day=seal.day,
                partition=seal.partition,
                fingerprint=fingerprint,
                topic=topic,
                sealed=True,
            )
            new_files += [
                write_rows(self.warehouse.store, piece, key, order)
                for piece in split_rows(rows, self.config.max_rows)
            ]
        return new_files

    def _rows(self, file: DataFile) -> FileRows:
        forms = sample_forms(writer_of(file, self.warehouse.registry))
        columns, counts_R = self.warehouse.open_file(SAMPLES, file).columns(forms)
        return FileRows(columns=columns, forms=forms, counts_R=counts_R)


def _folded(samples: TableSnapshot, corrections: Sequence[DataFile]) -> Mapping[CorrectionSource, int]:
    sources = {(file.day, file.partition, file.topic) for file in corrections}
    return {source: samples.progress(folded_name(*source)) or 0 for source in sources}


def _retire_step(table: TableSnapshot) -> dict[str, ProgressStep]:
    """A progress step that lets only one of two compactors retire files of a table."""
    before = table.progress(_RETIRED)
    return {_RETIRED: ProgressStep(before, (before or 0) + 1)}


def _retirement_progress(
    samples: TableSnapshot, gone: Sequence[DataFile], in_part: Sequence[date]
) -> dict[str, int]:
    """Progress steps that tell later sessions which rows are gone."""
    steps = {name: (samples.progress(name) or 0) + 1 for name in map(partly_retired_name, in_part)}
    for file in gone:
        name = retired_name(file.topic, file.partition)
        steps[name] = max(steps.get(name, samples.progress(name) or 0), file.last_offset + 1)
    return steps

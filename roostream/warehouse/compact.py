"""Compaction: the compactor seals days of a warehouse, retires old days and deletes unused files.

What is due follows from the tables' logs alone. The files of a day and partition are merged into new ones.
One commit replaces them and moves `compact/<day>/<partition>` and `folded/<day>/<partition>`, so of two
compactors that seal the same files one is rejected, while an archiver may append meanwhile. Each takes the
partitions of a day in a random order, so that this is rare. A sealed day holds each sample once,
ordered by user, the most popular columns first, with the latest labels beside those at the close. Readers of
older versions continue: their files stay until the vacuum's age has passed and no pin names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from typing import NamedTuple

import numpy as np

from roostream.errors import CheckpointError, FencedError, SchemaError, UnavailableError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.schema import Schema
from roostream.warehouse.archive import (
    correction_types,
    merge_rows,
    sample_types,
    sort_by_user,
    split_rows,
    take_rows,
)
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.data_file import DataFile, day_bounds_ms, day_of
from roostream.warehouse.delta_table import ProgressStep, TableSnapshot
from roostream.warehouse.file_reader import SampleFile, writer_of
from roostream.warehouse.latest_labels import LATEST, LatestLabels, overlay_labels, read_latest
from roostream.warehouse.parquet_file import ROWS_OF_GROUP, FileKey, FileRows, delete_files, write_rows
from roostream.warehouse.version_pins import FOLDER_MARK, pinned_versions
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.columnar import CANDIDATE, REQUEST, ColumnType, FlatColumn, label_column

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
    now_ms: int,
) -> list[Seal]:
    """What to seal, the oldest day first: days that ended `seal_after_ms` before `newest_close_ms` and have
    unsealed files or corrections that are not folded in.

    `folded`: offset after the last correction that sealed files contain; 0 = none.
    """
    by_part: dict[DayPart, list[DataFile]] = {}
    corrections_by_part: dict[DayPart, list[DataFile]] = {}
    for files, group in ((samples, by_part), (corrections, corrections_by_part)):
        for file in files:
            group.setdefault((file.day, file.partition), []).append(file)
    newest_ms = newest_close_ms([file for files in by_part.values() for file in files], now_ms)
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
    """The newest day on or after which at least a twentieth of an average day's rows closed. So a few
    samples with a wrong time in the future retire and seal nothing."""
    rows_by_day: Counter[date] = Counter()
    for file in files:
        rows_by_day[file.day] += file.rows
    enough = rows_by_day.total() / len(rows_by_day) / 20
    days = sorted(rows_by_day, reverse=True)
    rows_since = itertools.accumulate(rows_by_day[day] for day in days)
    return next(day for day, rows in zip(days, rows_since, strict=True) if rows >= enough)


def newest_close_ms(files: Sequence[DataFile], now_ms: int) -> int:
    """The newest close time that can be believed: of the days up to `newest_day`, and not after now. So a
    few samples with a wrong time in the future end no day. 0 without files."""
    if not files:
        return 0
    newest = newest_day(files)
    return min(max(file.last_close_ms for file in files if file.day <= newest), now_ms)


def oldest_kept_day(files: Sequence[DataFile], keep_days: int, today: date) -> date:
    """Return the first day to keep, so that `keep_days` days are kept up to the newest one (`newest_day`).
    A newest day in the future counts as today. 0 = all days are kept."""
    if not keep_days or not files:
        return date.min
    newest = min(newest_day(files), today)
    return date.fromordinal(max(newest.toordinal() - keep_days + 1, 1))


def files_to_retire(
    files: Sequence[DataFile], keep_days: int, keep_bytes: int, today: date = date.max
) -> list[DataFile]:
    """Return the files to remove from the table. 0 = no limit.

    First come all files of days before the newest `keep_days` days. While more than `keep_bytes` are left,
    whole days follow, the oldest first. In the newest day (and a day after it that has just begun) single
    files follow, in the order in which they were closed. The last file of each partition stays.
    """
    if not files:
        return []
    newest = newest_day(files)
    oldest = oldest_kept_day(files, keep_days, today)
    out = [file for file in files if file.day < oldest]
    left = sorted((file for file in files if file.day >= oldest), key=lambda file: file.day)
    total = sum(file.bytes for file in left)
    if not keep_bytes:
        return out
    for day in sorted({file.day for file in left if file.day < newest}):
        if total <= keep_bytes:
            break
        gone = [file for file in left if file.day == day]
        out, total = out + gone, total - sum(file.bytes for file in gone)
    return out + _first_closed([file for file in left if file.day >= newest], total - keep_bytes)


def _first_closed(files: Sequence[DataFile], excess: int) -> list[DataFile]:
    """The earliest files that sum up to `excess` bytes, but never the last one of a partition."""
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


Run = Sequence[SampleFile]
"""Files that are ordered by user, one after the other."""


def merge_files(
    files: Sequence[SampleFile],
    column_types: Mapping[str, ColumnType],
    max_rows: int,
    merge_bytes: int,
    beat: Callable[[], None] = lambda: None,
) -> Iterator[FileRows]:
    """The rows of several files of one writer, ordered by user, in pieces: each sample once (its lowest
    offset). A piece has at most `max_rows` rows and about `merge_bytes` uncompressed bytes, so the memory of
    the merge does not grow with a day, except for 200 bytes for each row.
    For each piece the row groups that hold rows of it are read; others are skipped. `beat` is called after
    each file.

    Raises:
        UnavailableError, CheckpointError: as `SampleFile.columns`.
    """
    file_M, row_M = _rows_by_user(files, beat)
    at_once = min(max_rows, max(1, merge_bytes * len(row_M) // max(_num_bytes(files), 1)))
    for start in range(0, len(row_M), at_once):
        chosen = slice(start, start + at_once)
        yield _gather(files, column_types, file_M[chosen], row_M[chosen], beat)


def max_runs(runs: Sequence[Run], merge_bytes: int) -> int:
    """How many runs one merge should read. A piece of it reads at least a row group of each run. With more
    runs than this, these would be larger than the piece, and every row would be read for many pieces."""
    files = [file for run in runs for file in run]
    num_groups = sum(file.footer.num_row_groups for file in files)
    return max(merge_bytes * num_groups // max(_num_bytes(files), 1), _MIN_RUNS)


def _num_bytes(files: Sequence[SampleFile]) -> int:
    """Uncompressed bytes of all columns."""
    return sum(chunk.total_uncompressed_size for file in files for _, chunk in file.column_chunks())


def _rows_by_user(files: Sequence[SampleFile], beat: Callable[[], None]) -> tuple[np.ndarray, np.ndarray]:
    """(number of the file, row in it) of each sample's first copy, int64 [M], ordered as `sort_by_user`."""
    keys = {name: REQUEST[name] for name in ("sample_id", "offset", "time_ms")}
    keys |= {name: REQUEST["sample_id"] for name in ("user_id", "session_id")}
    found: dict[str, list[np.ndarray]] = {name: [] for name in keys}
    for file in files:
        columns, _ = file.columns(keys)
        file.source.fetch(())  # drops the bytes that were read
        for name in keys:
            found[name].append(columns[name].values)
        beat()
    rows = [np.arange(len(offsets)) for offsets in found["offset"]]
    key_N = {name: np.concatenate(found.pop(name)) for name in keys}
    file_N = np.repeat(np.arange(len(files)), [len(part) for part in rows])
    order = np.lexsort([key_N["offset"], key_N["sample_id"]])
    ids = key_N["sample_id"][order]
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    kept = order[first]
    by_user = np.lexsort([key_N[name][kept] for name in ("offset", "time_ms", "session_id", "user_id")])
    return file_N[kept[by_user]], np.concatenate(rows)[kept[by_user]]


def _gather(
    files: Sequence[SampleFile],
    column_types: Mapping[str, ColumnType],
    file_M: np.ndarray,
    row_M: np.ndarray,
    beat: Callable[[], None],
) -> FileRows:
    """Rows `row_M` of files `file_M`, in that order."""
    parts: list[FileRows] = []
    at_M, taken = np.empty(len(row_M), dtype=np.int64), 0
    for n in np.unique(file_M).tolist():
        group_M = np.where(file_M == n, row_M // ROWS_OF_GROUP, -1)
        for group in np.unique(group_M[group_M >= 0]).tolist():
            here_M = np.flatnonzero(group_M == group)
            columns, counts_R = files[n].columns(column_types, [group])
            rows = FileRows(columns=columns, column_types=column_types, counts_R=counts_R)
            parts.append(take_rows(rows, row_M[here_M] - group * ROWS_OF_GROUP))
            at_M[here_M] = np.arange(taken, taken + len(here_M))
            taken += len(here_M)
        files[n].source.fetch(())
        beat()
    return merge_rows(parts, at_M)


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
    column_types = dict.fromkeys(new, CANDIDATE["propensity"])
    return FileRows(
        columns={**rows.columns, **new},
        column_types={**rows.column_types, **column_types},
        counts_R=rows.counts_R,
    )


log = logging.getLogger("roostream.compactor")
_PINS_MARKED = "compact/pins_marked"
_RETIRED = "compact/retired"
RETIRED_DAYS = "retired_days"
"""Progress name: ordinal of the first day of which samples may be left; all earlier days were retired."""
_MIN_RUNS = 8  # that one merge reads
_MAX_CORRECTION_FILES = 8  # of a sealed day and partition; more are merged
_VACUUM_INTERVAL_S = 3600.0  # a vacuum lists every file of the warehouse


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
        self.rng = random.Random()
        self.counts = CompactCounts()
        self.num_due = 0
        self._next_vacuum_s = clock.monotonic_s()
        self._pins: dict[str, bytes] = {}  # as the last vacuum found them
        self._table_ids: dict[str, str] = {}  # of the warehouse that was there at first

    def run_once(self, stop: threading.Event, beat: Callable[[], None] = lambda: None) -> None:
        """Seal the days that are due, merge corrections, retire old days, and delete unused files once an
        hour. A damaged file, a missing schema or a file that cannot be read now stops only its own day.
        `beat` is called as a sign of progress, after each file that is read or deleted, and after each step.

        Raises:
            UnavailableError: the warehouse, or a file of a day that is due, cannot be used now; finished
            steps stay done.
            CheckpointError: a table's log is damaged, or another table is at its place.
        """
        self._check_tables()
        unavailable: UnavailableError | None = None
        due = sorted(self.due(), key=lambda seal: (seal.day, self.rng.random()))
        for n, seal in enumerate(due):
            if stop.is_set():
                return
            self.num_due = len(due) - n
            try:
                self.seal(seal, beat)
            except UnavailableError as error:
                unavailable = unavailable or error
            except Exception as error:
                self._damaged(f"{seal.day} partition {seal.partition} is not sealed", error)
            beat()
        self.num_due = 0
        # A full disk stops what writes. The vacuum frees space.
        vacuum = partial(self._vacuum_hourly, beat)
        for step in (lambda: self.merge_corrections(beat), self.retire, vacuum):
            try:
                step()
            except UnavailableError as error:
                unavailable = unavailable or error
            beat()
        if unavailable is not None:
            raise unavailable

    def _check_tables(self) -> None:
        """Another table at the same place is a wrong mount: nothing may be sealed or retired in it."""
        found = self.warehouse.table_ids()
        if missing := sorted(self.warehouse.tables.keys() - found.keys()):
            raise UnavailableError(
                f"{self.warehouse.location}: expected a warehouse, found no table {' and '.join(missing)}; "
                "mount it, or start an archiver, which creates it"
            )
        self._table_ids = self._table_ids or found
        if found != self._table_ids:
            raise CheckpointError(
                f"{self.warehouse.location}: expected the tables {self._table_ids}, got {found}: another "
                "warehouse was mounted there; start the compactor again if that is right"
            )

    def _damaged(self, what: str, error: Exception) -> None:
        self.counts.damaged += 1
        if isinstance(error, (CheckpointError, SchemaError)):
            log.error("%s: %s", what, error)
        else:
            log.exception("%s because of a defect", what)

    def due(self) -> list[Seal]:
        """Step 1.

        Raises:
            UnavailableError: the warehouse cannot be read now.
        """
        samples, corrections = (self.warehouse.tables[name].snapshot() for name in (SAMPLES, CORRECTIONS))
        return seals_due(
            samples.files,
            corrections.files,
            folded(samples, corrections.files),
            self.config.seal_after_ms,
            self.clock.now_ms(),
        )

    def seal(self, seal: Seal, beat: Callable[[], None] = lambda: None) -> bool:
        """Steps 2 and 3. `beat` is called after each file and piece. False: another compactor was first;
        nothing was changed.

        Raises:
            UnavailableError: the warehouse cannot be read or written now.
            CheckpointError: a file is damaged; the message names it.
            SchemaError: the schema that wrote a file is missing from the warehouse.
        """
        table, name = self.warehouse.samples, compact_name(seal.day, seal.partition)
        before = table.snapshot()
        if not {file.path for file in seal.files} <= {file.path for file in before.files}:
            return False
        new_files: list[DataFile] = []
        try:
            self._write_sealed(seal, new_files, beat)
        except BaseException:
            delete_files(self.warehouse.store, SAMPLES, new_files)
            raise
        count = before.progress(name)
        steps = {name: ProgressStep(count, (count or 0) + 1)}
        for topic, behind in next_offset_by_topic(seal.corrections).items():
            source = folded_name(seal.day, seal.partition, topic)
            at = before.progress(source)
            steps[source] = ProgressStep(at, max(behind, at or 0))
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

    def merge_corrections(self, beat: Callable[[], None] = lambda: None) -> int:
        """Merge the files of corrections of each sealed day and partition that has many; return how many were
        merged. A damaged file stops its own day only. Raises UnavailableError."""
        samples, late = (self.warehouse.tables[name].snapshot() for name in (SAMPLES, CORRECTIONS))
        newest_ms = newest_close_ms(samples.files, self.clock.now_ms())
        parts: dict[DayPart, list[DataFile]] = {}
        for file in late.files:
            if day_bounds_ms(file.day)[1] + self.config.seal_after_ms <= newest_ms:
                parts.setdefault((file.day, file.partition), []).append(file)
        merged = 0
        for (day, partition), files in parts.items():
            groups = {(file.fingerprint, file.topic) for file in files}
            if len(files) <= max(_MAX_CORRECTION_FILES, len(groups)):
                continue
            count = late.progress(name := compact_name(day, partition))
            try:
                new = self._merged_corrections(files, sorted(groups), beat)
                step = {name: ProgressStep(count, (count or 0) + 1)}
                self.warehouse.corrections.commit(new, files, step)
            except FencedError as error:
                log.warning("%s", error)
                self.counts.refused += 1
            except UnavailableError:
                raise
            except Exception as error:
                self._damaged(f"corrections of {day} partition {partition} are not merged", error)
            else:
                merged += len(files)
            beat()
        return merged

    def _merged_corrections(
        self, files: Sequence[DataFile], groups: Sequence[tuple[int, str]], beat: Callable[[], None]
    ) -> list[DataFile]:
        """The new files, one set for each writer and topic."""
        new_files: list[DataFile] = []
        try:
            for fingerprint, topic in groups:
                chosen = [file for file in files if (file.fingerprint, file.topic) == (fingerprint, topic)]
                column_types = correction_types(writer_of(chosen[0], self.warehouse.registry))
                parts = []
                for file in _with_beats(chosen, beat):
                    columns, counts_R = self.warehouse.open_file(CORRECTIONS, file).columns(column_types)
                    parts.append(FileRows(columns=columns, column_types=column_types, counts_R=counts_R))
                rows = sort_by_user(merge_rows(parts, np.arange(sum(file.rows for file in chosen))))
                key = FileKey(
                    table=CORRECTIONS,
                    day=chosen[0].day,
                    partition=chosen[0].partition,
                    fingerprint=fingerprint,
                    topic=topic,
                    sealed=True,
                )
                for part in split_rows(rows):
                    new_files.append(write_rows(self.warehouse.store, part, key))
        except BaseException:
            delete_files(self.warehouse.store, CORRECTIONS, new_files)
            raise
        return new_files

    def retire(self) -> int:
        """Remove files beyond the limits from the tables, the oldest first; return how many files of samples.
        Raises UnavailableError."""
        try:
            retired = self._retire_samples()
            self._retire_corrections()
        except FencedError as error:
            log.warning("%s", error)
            self.counts.refused += 1
            return 0
        return retired

    def _retire_samples(self) -> int:
        samples = self.warehouse.samples.snapshot()
        today = day_of(self.clock.now_ms())
        gone = files_to_retire(samples.files, self.config.keep_days, self.config.keep_bytes, today)
        if not gone:
            return 0
        in_part = partly_retired_days(samples.files, gone)
        steps = {
            name: ProgressStep(samples.progress(name), after)
            for name, after in _retirement_progress(samples, gone, in_part).items()
        }
        self.warehouse.samples.commit((), gone, {**_retire_step(samples), **steps})
        for day in in_part:
            log.warning(
                "a part of %s was retired: expected keep_bytes = %d to hold a whole day; raise it",
                day,
                self.config.keep_bytes,
            )
        self.counts.cut += sum(file.day in in_part for file in gone)
        self.counts.retired += len(gone)
        return len(gone)

    def _retire_corrections(self) -> None:
        """Corrections of days whose samples were retired, whenever they came. Corrections of a day that has
        no samples yet stay: an archiver may be about to commit those."""
        samples, late = (self.warehouse.tables[name].snapshot() for name in (SAMPLES, CORRECTIONS))
        today = day_of(self.clock.now_ms())
        limit = oldest_kept_day(samples.files, self.config.keep_days, today).toordinal()
        limit = max(limit, samples.progress(RETIRED_DAYS) or 0)
        there = {(file.day, file.partition) for file in samples.files}
        if old := [f for f in late.files if f.day.toordinal() < limit and (f.day, f.partition) not in there]:
            self.warehouse.corrections.commit((), old, _retire_step(late))

    def vacuum(self, beat: Callable[[], None] = lambda: None) -> list[str]:
        """Delete unused files and return their paths. `beat` is called after each.

        Raises:
            UnavailableError: the warehouse or its pins cannot be read now.
        """
        self._check_pins()
        deleted: list[str] = []
        for name, table in self.warehouse.tables.items():
            held = pinned_versions(self.warehouse.store, name, self.clock.now_ms(), self._pins)
            deleted += table.vacuum(self.config.vacuum_after_hours, held, beat=beat)
        self.counts.deleted += len(deleted)
        return deleted

    def _check_pins(self) -> None:
        """Check that the folder of pins is there: no pins may mean that it is not mounted. The table of
        samples remembers that the folder was marked.

        Raises:
            UnavailableError: the folder is away, or cannot be read.
        """
        store, samples = self.warehouse.store, self.warehouse.samples
        is_marked = FOLDER_MARK in store.list("pins")
        if samples.snapshot().progress(_PINS_MARKED) is None:
            try:
                if not is_marked:
                    store.put(FOLDER_MARK, b"")
                samples.commit((), (), {_PINS_MARKED: ProgressStep(None, 1)})
            except FencedError:
                pass  # another compactor was first
            except UnavailableError as error:  # a full disk, which the vacuum may clear
                log.warning("the folder of pins is not marked: %s", error)
        elif not is_marked:
            raise UnavailableError(
                f"{self.warehouse.location}: expected {FOLDER_MARK}, found none, so pins may be missing; "
                "make the folder `pins` available again, or create this empty file if it is the right folder"
            )

    def _vacuum_hourly(self, beat: Callable[[], None]) -> None:
        if self.clock.monotonic_s() >= self._next_vacuum_s:
            self.vacuum(beat)
            self._next_vacuum_s = self.clock.monotonic_s() + _VACUUM_INTERVAL_S

    def _write_sealed(self, seal: Seal, new_files: list[DataFile], beat: Callable[[], None]) -> None:
        """Append the new files to `new_files`, one set for each writer and topic."""
        order = self.warehouse.column_order()
        for fingerprint, topic in sorted({(file.fingerprint, file.topic) for file in seal.files}):
            files = [file for file in seal.files if (file.fingerprint, file.topic) == (fingerprint, topic)]
            writer = writer_of(files[0], self.warehouse.registry)
            late = _with_beats(seal.corrections, beat)
            latest = read_latest(self.warehouse, late, [label.name for label in writer.labels])
            column_types = sample_types(writer)
            key = FileKey(
                table=SAMPLES,
                day=seal.day,
                partition=seal.partition,
                fingerprint=fingerprint,
                topic=topic,
                sealed=True,
            )
            with self._merged_to_few_runs(files, column_types, key, beat) as opened:
                for merged in self._merge(opened, column_types, beat):
                    rows = with_latest(merged, writer, latest)
                    self.warehouse.samples.widen(rows.column_types)
                    for piece in split_rows(rows):
                        new_files.append(write_rows(self.warehouse.store, piece, key, order))

    def _merge(
        self, files: Sequence[SampleFile], column_types: Mapping[str, ColumnType], beat: Callable[[], None]
    ) -> Iterator[FileRows]:
        for piece in merge_files(files, column_types, self.config.max_rows, self.config.merge_bytes, beat):
            yield piece
            beat()

    @contextlib.contextmanager
    def _merged_to_few_runs(
        self,
        files: Sequence[DataFile],
        column_types: Mapping[str, ColumnType],
        key: FileKey,
        beat: Callable[[], None],
    ) -> Iterator[list[SampleFile]]:
        """Open `files`. If they are more runs than one merge should read (`max_runs`), merge them to fewer,
        longer runs first, as an external merge sort does. Longer runs are files that no log names. They are
        deleted at the end of the block, or by a vacuum if that fails."""
        opened = [self.warehouse.open_file(SAMPLES, file) for file in _with_beats(files, beat)]
        runs: list[Run] = [[file] for file in opened if not file.file.sealed]
        if sealed := [file for file in opened if file.file.sealed]:
            runs.append(sealed)  # all of one seal
        longer: list[DataFile] = []
        key = dataclasses.replace(key, sealed=False)
        try:
            while len(runs) > (at_once := max_runs(runs, self.config.merge_bytes)):
                parts = [runs[first : first + at_once] for first in range(0, len(runs), at_once)]
                runs = []
                for part in parts:
                    first_new = len(longer)
                    for merged in self._merge([file for run in part for file in run], column_types, beat):
                        for piece in split_rows(merged):
                            longer.append(write_rows(self.warehouse.store, piece, key))
                    new = _with_beats(longer[first_new:], beat)
                    runs.append([self.warehouse.open_file(SAMPLES, file) for file in new])
            yield [file for run in runs for file in run]
        finally:
            delete_files(self.warehouse.store, SAMPLES, longer)


def _with_beats(files: Iterable[DataFile], beat: Callable[[], None]) -> Iterator[DataFile]:
    """The files; `beat` is called when the next one is taken."""
    for file in files:
        yield file
        beat()


def folded(samples: TableSnapshot, corrections: Sequence[DataFile]) -> Mapping[CorrectionSource, int]:
    """For each source of these files: the offset below which the sealed files contain its corrections."""
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
    paths = {file.path for file in gone}
    oldest_left = min((file.day for file in samples.files if file.path not in paths), default=date.min)
    # Not `oldest_left` itself: samples of the days in between may still come, after their corrections.
    if whole_days := [file.day.toordinal() for file in gone if file.day < oldest_left]:
        steps[RETIRED_DAYS] = max(samples.progress(RETIRED_DAYS) or 0, max(whole_days) + 1)
    return steps

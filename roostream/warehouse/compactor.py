"""Seals days of a warehouse, retires old ones and deletes what nobody needs. Each act is one commit, or none.

1 which days and partitions are due follows from the logs alone: whoever starts anew finds the same
2 their rows are read, merged and written as new files, which nobody sees yet
3 one commit replaces the files, and moves `compact/<day>/<partition>` and `folded/<day>/<partition>`: of two compactors one is
  refused, an archiver that appends meanwhile is not; what it appended is late and found at the next look
4 days beyond what is kept leave the tables; the vacuum deletes files that no version in use names, but for pinned ones

Reads of older versions go on: their files stay until the vacuum's age has passed and no pin names them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from datetime import date

from roostream.errors import FencedError
from roostream.runtime.clock import Clock
from roostream.warehouse.archive import CORRECTIONS, SAMPLES, sample_forms
from roostream.warehouse.compact import (
    Seal,
    Told,
    behind_by_topic,
    cut,
    cut_days,
    cut_name,
    merged_rows,
    retired,
    retired_name,
    seals_due,
    with_latest,
)
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import Step, TableSnapshot
from roostream.warehouse.file_reader import writer_of
from roostream.warehouse.file_writer import FilePlace, FileRows, write_rows
from roostream.warehouse.latest_labels import read_latest
from roostream.warehouse.pins import held_versions
from roostream.warehouse.place import Warehouse

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
        steps = {name: Step(counted, (counted or 0) + 1)}
        for topic, behind in behind_by_topic(seal.corrections).items():
            at = before.progress(folded := folded_name(seal.day, seal.partition, topic))
            steps[folded] = Step(at, max(behind, at or 0))
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
        in_part = cut_days(samples.files, gone)
        days = {file.day for file in gone} - set(in_part)
        late = self.warehouse.corrections.snapshot()
        steps = {
            name: Step(samples.progress(name), after)
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
            held = held_versions(self.warehouse.store, name, self.clock.now_ms())
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
            place = FilePlace(
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


def _folded(samples: TableSnapshot, corrections: Sequence[DataFile]) -> Mapping[Told, int]:
    told = {(file.day, file.partition, file.topic) for file in corrections}
    return {its: samples.progress(folded_name(*its)) or 0 for its in told}


def _counted(table: TableSnapshot) -> dict[str, Step]:
    """Of two that retire files of a table one is refused."""
    before = table.progress(_RETIRED)
    return {_RETIRED: Step(before, (before or 0) + 1)}


def _told_retired(
    samples: TableSnapshot, gone: Sequence[DataFile], in_part: Sequence[date]
) -> dict[str, int]:
    """What a later session has to know: whether all that it would read, and all that it could find again there, are there."""
    told = {name: (samples.progress(name) or 0) + 1 for name in map(cut_name, in_part)}
    for file in gone:
        name = retired_name(file.topic, file.partition)
        told[name] = max(told.get(name, samples.progress(name) or 0), file.last_offset + 1)
    return told

"""Records of samples and corrections into files, each exactly once.

1 open the tables, read how far the partitions have come there, seek there
2 read records until there are enough bytes of them, or the oldest has waited long enough
3 write files, which nobody sees yet, and say what makes no row (dead letters)
4 one commit a table: its files, and the reader's positions. Refused (another moved one of the positions): forget all, go to 1

Whoever dies between 3 and 4 leaves files that nobody names; the vacuum deletes them. Two with the same partitions read the same
twice and land it once. Positions, not counts of records: a topic with transactions has offsets without records.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from roostream.errors import FencedError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.schema.registry import register
from roostream.schema.schema import Registry
from roostream.warehouse.archive import SAMPLES, Dead, by_day, by_writer, correction_rows, sample_rows
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import Step
from roostream.warehouse.file_writer import FilePlace, write_rows
from roostream.warehouse.place import Warehouse
from roostream.wire import records as wire
from roostream.wire.records import Record

log = logging.getLogger("roostream.archiver")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlushRule:
    """When what was read becomes files."""

    bytes: int  # of records
    after_ms: int  # since the oldest of them was read


class DeadLetters(Protocol):
    """Where records go that make no row."""

    def send(self, dead: Sequence[Dead]) -> None:
        """Returns when all are safe. UnavailableError: they aren't; send them again."""


@dataclasses.dataclass
class ArchiveCounts:
    """Since the start."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    dead: int = 0
    commits: int = 0
    refused: int = 0


@dataclasses.dataclass(frozen=True)
class _Made:
    """Files of one table that wait for their commit."""

    files: list[DataFile]
    steps: dict[str, Step]


class Archiver:
    """Of chosen partitions. `open` comes first; after a FencedError within `turn` it has opened itself anew. One thread."""

    def __init__(
        self,
        warehouse: Warehouse,
        reader: RecordConsumer,
        topic_ids: Mapping[str, str],
        registry: Registry,
        rule: FlushRule,
        dead: DeadLetters,
        clock: Clock,
    ) -> None:
        """`topic_ids`: the broker's id of each topic, since one that is made again is another. `registry`: of all writers."""
        self.warehouse, self.reader, self.topic_ids, self.rule = warehouse, reader, topic_ids, rule
        self.registry, self.dead, self.clock = registry, dead, clock
        self.counts = ArchiveCounts()
        self.num_waiting_bytes = 0
        self._waiting: list[Record] = []
        self._since_s = 0.0
        self._at: dict[Partition, int | None] = {}
        self._made: dict[str, _Made] = {}
        self._known: set[int] = set()  # schemas that the warehouse has

    def open(self) -> None:
        """Step 1. UnavailableError: the warehouse or the source is away; call again."""
        self.warehouse.create()
        found = {
            topic: self.warehouse.tables[topic].snapshot()
            for topic in {topic for topic, _ in self.reader.partitions}
        }
        self._at = {p: found[p[0]].progress(self._name(p)) for p in self.reader.partitions}
        self.reader.seek({p: at for p, at in self._at.items() if at is not None})
        self._forget()

    def turn(self, timeout_s: float, max_records: int = 1024) -> None:
        """Step 2, then 3 and 4 where they are due.

        **If it fails** (UnavailableError): nothing is lost; what was read waits, and no more is read before it is committed.
        """
        if not self.is_due():
            records = self.reader.poll(max_records, timeout_s)
            if records and not self._waiting:
                self._since_s = self.clock.monotonic_s()
            self._waiting += records
            self.num_waiting_bytes += sum(len(record.value or b"") for record in records)
        if self.is_due():
            self.flush()

    def is_due(self) -> bool:
        """Enough has been read, or for long enough."""
        waited_ms = (self.clock.monotonic_s() - self._since_s) * 1000
        return bool(self._waiting) and (
            self.num_waiting_bytes >= self.rule.bytes or waited_ms >= self.rule.after_ms
        )

    def flush(self) -> None:
        """Steps 3 and 4, of all that was read. Raises as `turn`."""
        try:
            if not self._made:
                self._made = self._files()
            for topic, made in list(self._made.items()):
                self.warehouse.tables[topic].commit(made.files, progress=made.steps)
                self._committed(topic, made)
            self._forget()
        except FencedError as error:
            log.warning("%s; reading on from there", error)
            self.counts.refused += 1
            self.open()

    def _files(self) -> dict[str, _Made]:
        """Step 3: topic → its files, and how far its partitions come by them."""
        of: dict[Partition, list[Record]] = {}
        for record in self._waiting:
            of.setdefault((record.topic, record.partition), []).append(record)
        dead: list[Dead] = []
        made: dict[str, _Made] = {}
        positions = self.reader.positions()
        for partition, records in of.items():
            table = made.setdefault(partition[0], _Made([], {}))
            table.files.extend(self._files_of(partition, records, dead))
            table.steps[self._name(partition)] = Step(self._at[partition], positions[partition])
        if dead:
            self.dead.send(dead)
            self.counts.dead += len(dead)
        return made

    def _files_of(self, partition: Partition, records: list[Record], dead: list[Dead]) -> list[DataFile]:
        topic, number = partition
        out: list[DataFile] = []
        of_writer, unreadable = by_writer(
            records, self.registry, wire.SAMPLE if topic == SAMPLES else wire.CORRECTION
        )
        dead += unreadable
        for fingerprint, of in of_writer.items():
            writer = self.registry(fingerprint)
            assert writer is not None
            rows, wrong = sample_rows(writer, of) if topic == SAMPLES else correction_rows(writer, of)
            dead += wrong
            if not len(rows.counts_R):
                continue
            if fingerprint not in self._known:
                register(self.warehouse.store, writer)
                self._known.add(fingerprint)
            self.warehouse.tables[topic].widen(rows.forms)
            for day, part in by_day(rows).items():
                place = FilePlace(
                    table=topic,
                    day=day,
                    partition=number,
                    fingerprint=fingerprint,
                    topic=self.topic_ids[topic],
                )
                out.append(write_rows(self.warehouse.store, part, place))
        return out

    def _committed(self, topic: str, made: _Made) -> None:
        del self._made[topic]
        self._at |= {p: made.steps[self._name(p)].after for p in self._at if self._name(p) in made.steps}
        self._waiting = [record for record in self._waiting if record.topic != topic]
        self.counts.commits += 1
        self.counts.files += len(made.files)
        self.counts.rows += sum(file.rows for file in made.files)
        self.counts.bytes += sum(file.bytes for file in made.files)

    def _forget(self) -> None:
        self._waiting, self._made, self.num_waiting_bytes = [], {}, 0

    def _name(self, partition: Partition) -> str:
        return progress_name(partition, self.topic_ids[partition[0]])


def progress_name(partition: Partition, topic_id: str) -> str:
    """What a partition's progress is called in its table's log."""
    topic, number = partition
    return f"{topic}/{topic_id}/{number}"

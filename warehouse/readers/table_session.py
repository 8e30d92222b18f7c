"""Sessions of a warehouse that is there: a version of its table of samples, fixed, opened, and held while it is read."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from roo.batch import Batch
from roo.columnar import REQUEST, projected
from roo.errors import CheckpointError, ConfigError
from roo.schema import Registry, Schema
from roo.schema_registry import open_registry
from runtime.checkpoint_store import CheckpointStore, open_store
from runtime.kafka.topics import SAMPLES, Progress
from runtime.work_unit import TableInput
from warehouse.data_file import DataFile
from warehouse.delta_table import TableSnapshot, WarehouseTable
from warehouse.file_reader import SampleFile, writer_of
from warehouse.layout import ROWS_OF_GROUP
from warehouse.pins import Pin, pin
from warehouse.popularity import note_asked
from warehouse.readers.reading import Marks, OpenSession
from warehouse.readers.session import SessionSpec

_OPEN_FILES = 32
_MARKS = ("sample_id", "offset", "close_ms")


class SampleTable:
    """A warehouse as its readers see it. Nothing is read before the first call. One thread."""

    def __init__(self, place: str) -> None:
        """`place`: a directory, or s3://bucket/prefix."""
        self.place = place
        self.store: CheckpointStore = open_store(place)
        self._log = WarehouseTable(place, SAMPLES)

    def newest(self, wanted: SessionSpec, topics: Mapping[str, str], begins: Progress | None = None) -> TableInput | None:
        """What a session of the newest version would be: rows that `wanted` names, of `begins` on; None: the table is empty.

        `topics`: name → id of those that are read behind it; none where no stream follows.

        Raises:
            UnavailableError: the table can't be read now. CheckpointError: there is none, or it is damaged.
            ConfigError: what is in it came from other topics, whose offsets mean nothing here.
        """
        found, begins = self._log.snapshot(), dict(begins or {})
        from_offsets = {number: at for (topic, number), at in begins.items() if topic == SAMPLES}
        spec = dataclasses.replace(wanted, table=self.place, version=found.version, from_offsets=from_offsets)
        session = OpenSession(spec, found.files, ROWS_OF_GROUP)
        ends = self._ends(found, topics)
        if not session.order.splits and not ends:
            return None
        return TableInput(
            table=self.place,
            version=found.version,
            digest=spec.digest,
            spec=spec.plain(),
            rows=session.order.rows,
            begins=begins,
            ends=ends,
            topics=dict(topics),
            last_close_ms=max((file.last_close_ms for file in found.files if spec.has_day(file.day.isoformat())), default=0),
        )

    def opened(self, told: TableInput, schema: Schema) -> tuple[OpenSession, TableFiles]:
        """The session as it was fixed, for readers with `schema`.

        Raises:
            UnavailableError: the table can't be read now. CheckpointError: the version isn't there, or isn't what it was.
        """
        spec = SessionSpec.of(told.spec)
        found = self._log.snapshot(told.version)
        session = OpenSession(spec, found.files, ROWS_OF_GROUP)
        if session.order.rows != dict(told.rows):
            raise CheckpointError(
                f"{self.place}: expected {sum(told.rows.values())} rows of version {told.version}, got "
                f"{sum(session.order.rows.values())}: another table lies there; bring back the one that training began with"
            )
        if spec.features:
            note_asked(self.store, schema, told.version, told.digest, spec.features)
            schema = projected(schema, frozenset(spec.features))
        return session, TableFiles(self.store, found.files, schema, open_registry(self.store))

    def hold(self, told: TableInput, who: str, until_ms: int) -> None:
        """Keep the session's files where they are until then, whatever replaces them. UnavailableError: it can't be said now."""
        pin(self.store, who, Pin(SAMPLES, told.version, until_ms))

    def _ends(self, found: TableSnapshot, topics: Mapping[str, str]) -> Progress:
        """Of the stream, as the archive's own progress says; where no stream follows, behind the last row of each partition."""
        if SAMPLES not in topics:
            ends: Progress = {}
            for file in found.files:
                at = SAMPLES, file.partition
                ends[at] = max(ends.get(at, 0), file.last_offset + 1)
            return ends
        partitions = range(1 + max((file.partition for file in found.files), default=0))
        said = {(SAMPLES, n): found.progress(f"{SAMPLES}/{topics[SAMPLES]}/{n}") for n in partitions}
        known = {partition: at for partition, at in said.items() if at is not None}
        if found.files and not known:
            raise ConfigError(
                f"{self.place}: expected an archive of topic {SAMPLES} with id {topics[SAMPLES]}, got one of another topic: its "
                "offsets mean nothing here; train from it without Kafka (roostream train), or begin another archive"
            )
        return known


class TableFiles:
    """See `TableRows`: the files of one version, the newest opened kept open."""

    def __init__(
        self, store: CheckpointStore, files: tuple[DataFile, ...], schema: Schema, registry: Registry, table: str = SAMPLES
    ) -> None:
        self.store, self.schema, self.registry, self.table = store, schema, registry, table
        self._files = {file.path: file for file in files}
        self._open: OrderedDict[str, SampleFile] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, path: str, start: int, end: int) -> Batch:
        with self._lock:
            file = self._opened(path)
            first, last = start // ROWS_OF_GROUP, (end - 1) // ROWS_OF_GROUP
            writer = writer_of(file.file, self.registry)
            batch = file.read(writer, self.schema, range(first, last + 1))
        from_row, to_row = start - first * ROWS_OF_GROUP, end - first * ROWS_OF_GROUP
        return batch if (from_row, to_row) == (0, batch.num_requests) else batch.take_requests(np.arange(from_row, to_row))

    def marks(self, path: str) -> Marks:
        with self._lock:
            columns, _ = self._opened(path).columns({name: REQUEST[name] for name in _MARKS})
            return Marks(*(columns[name].values for name in _MARKS))

    def _opened(self, path: str) -> SampleFile:
        if path not in self._open:
            self._open[path] = SampleFile(self.store, self.table, self._files[path])
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return self._open[path]

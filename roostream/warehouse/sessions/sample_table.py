"""Sessions of a warehouse that is there: a version of its table of samples, fixed, opened, and held while it is read."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import TypeVar

import numpy as np

from roostream.errors import CheckpointError, ConfigError
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Progress
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.archive import sample_forms
from roostream.warehouse.column_popularity import record_session_features
from roostream.warehouse.compact import partly_retired_name, retired_name
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import TableSnapshot
from roostream.warehouse.file_reader import MAX_OVER_READ, ByteRange, SampleFile, writer_of
from roostream.warehouse.latest_labels import LatestLabels, of, overlay, read_latest
from roostream.warehouse.parquet_file import ROWS_OF_GROUP
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import Marks, OpenSession
from roostream.warehouse.version_pins import Pin, pin
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.batch import Batch
from roostream.wire.columnar import REQUEST, FlatColumn, needed_columns, project_schema

_OPEN_FILES = 32
_GROUPS_KEPT = 8  # of which the corrections are known, at once
K = TypeVar("K")
V = TypeVar("V")
_MARKS = ("sample_id", "offset", "close_ms")


class SampleTable:
    """A warehouse as its readers see it. Nothing is read before the first call. One thread."""

    def __init__(self, place: str) -> None:
        """`place`: a directory, or s3://bucket/prefix."""
        self.place = place
        self.warehouse = Warehouse(place)

    def newest(
        self, wanted: SessionSpec, topics: Mapping[str, str], begins: Progress | None = None
    ) -> TableInput | None:
        """What a session of the newest version would be: rows that `wanted` names, of `begins` on; None: the table is empty.

        `topics`: name → id of those that are read behind it; none where no stream follows.

        Raises:
            UnavailableError: the table can't be read now. CheckpointError: there is none, or it is damaged; or what lies behind
                `begins` was retired in part.
            ConfigError: what is in it came from other topics, whose offsets mean nothing here.
        """
        found, begins = self.warehouse.samples.snapshot(), dict(begins or {})
        from_offsets = {number: at for (topic, number), at in begins.items() if topic == SAMPLES}
        topic = topics.get(SAMPLES, "") if from_offsets else ""
        spec = dataclasses.replace(
            wanted, table=self.place, version=found.version, from_offsets=from_offsets, topic=topic
        )
        session = OpenSession(spec, found.files, ROWS_OF_GROUP)
        self._check_kept(found, spec, session)
        ends, corrections = (
            self._ends(found, topics),
            self._corrections() if wanted.labels == "latest" else None,
        )
        if corrections is not None and topics:
            ends |= _said(corrections, CORRECTIONS, topics, found)
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
            last_close_ms=max(
                (file.last_close_ms for file in found.files if spec.has_day(file.day.isoformat())), default=0
            ),
            corrections=corrections.version if corrections is not None else -1,
        )

    def opened(self, told: TableInput, schema: Schema) -> tuple[OpenSession, TableFiles]:
        """The session as it was fixed, for readers with `schema`.

        Raises:
            UnavailableError: the table can't be read now. CheckpointError: the version isn't there, or isn't what it was.
            ConfigError: as `check_reader`.
        """
        spec = SessionSpec.of(told.spec)
        found = self.warehouse.samples.snapshot(told.version)
        session = OpenSession(spec, found.files, ROWS_OF_GROUP)
        if session.order.rows != dict(told.rows):
            raise CheckpointError(
                f"{self.place}: expected {sum(told.rows.values())} rows of version {told.version}, got "
                f"{sum(session.order.rows.values())}: another table lies there; bring back the one that training began with"
            )
        self._check_labels(spec, found, schema)
        if spec.features:
            record_session_features(self.warehouse.store, schema, told.version, told.digest, spec.features)
            schema = project_schema(schema, frozenset(spec.features))
        late = self.warehouse.corrections.snapshot(told.corrections).files if told.corrections >= 0 else ()
        return session, TableFiles(self.warehouse, found.files, late, schema)

    def check_reader(self, told: TableInput, schema: Schema) -> None:
        """Before anything is trained.

        Raises:
            UnavailableError: the table can't be read now. SchemaError: nobody registered the schema that wrote a file.
            ConfigError: none of the schema's labels is one of those that the session's samples have: it is another site's.
        """
        self._check_labels(SessionSpec.of(told.spec), self.warehouse.samples.snapshot(told.version), schema)

    def _check_labels(self, spec: SessionSpec, found: TableSnapshot, schema: Schema) -> None:
        of_schema = {file.fingerprint: file for file in found.files if spec.has_day(file.day.isoformat())}
        writers = [writer_of(file, self.warehouse.registry) for file in of_schema.values()]
        known = sorted({label.name for writer in writers for label in writer.labels})
        own = [label.name for label in schema.labels]
        if own and known and not set(own) & set(known):
            raise ConfigError(
                f"{self.place}: expected a schema with a label of its samples ({', '.join(known)}), got {schema.name!r} with "
                f"{', '.join(own)}; give the schema that they were joined by"
            )

    def hold(self, told: TableInput, who: str, until_ms: int) -> None:
        """Keep the session's files where they are until then, whatever replaces them. UnavailableError: it can't be said now."""
        pin(self.warehouse.store, who, Pin(SAMPLES, told.version, until_ms))
        if told.corrections >= 0:
            pin(self.warehouse.store, who, Pin(CORRECTIONS, told.corrections, until_ms))

    def _corrections(self) -> TableSnapshot | None:
        """None: nobody archives them."""
        return self.warehouse.corrections.snapshot() if self.warehouse.corrections.exists() else None

    def _ends(self, found: TableSnapshot, topics: Mapping[str, str]) -> Progress:
        """Of the stream, as the archive's own progress says; where no stream follows, behind the last row of each partition."""
        if SAMPLES not in topics:
            ends: Progress = {}
            for file in found.files:
                at = SAMPLES, file.partition
                ends[at] = max(ends.get(at, 0), file.last_offset + 1)
            return ends
        known = _said(found, SAMPLES, topics, found)
        if found.files and not known:
            theirs = ", ".join(sorted({file.topic for file in found.files} - {""})) or "another topic"
            raise ConfigError(
                f"{self.place}: expected an archive of topic {SAMPLES} with id {topics[SAMPLES]}, got one of {theirs}: its "
                "offsets mean nothing here; train from it without Kafka (roostream train), or begin another archive"
            )
        return known

    def _check_kept(self, found: TableSnapshot, spec: SessionSpec, session: OpenSession) -> None:
        """Of a later session: all that it would read is there, and all copies of it that an earlier one had."""
        for partition, begin in spec.from_offsets.items():
            gone = [found.progress(retired_name(topic, partition)) or 0 for topic in {spec.topic, ""}]
            if max(gone) > begin:
                raise CheckpointError(
                    f"{self.place}: expected samples of partition {partition} from offset {begin} on, got them retired up to "
                    f"{max(gone)}; the stream goes on there, raise compactor.keep_bytes and keep_days"
                )
        if spec.from_offsets:
            for day in sorted({split.day for split in session.order.splits}):
                if found.progress(partly_retired_name(date.fromisoformat(day))):
                    raise CheckpointError(
                        f"{self.place}: expected all of {day}, got a day of which keep_bytes has retired a part; the stream goes "
                        "on there, raise compactor.keep_bytes"
                    )


def _said(table: TableSnapshot, name: str, topics: Mapping[str, str], samples: TableSnapshot) -> Progress:
    """How far the archive says that it has this topic, of partitions that have samples."""
    partitions = range(1 + max((file.partition for file in samples.files), default=0))
    said = (
        {(name, n): table.progress(f"{name}/{topics[name]}/{n}") for n in partitions}
        if name in topics
        else {}
    )
    return {partition: at for partition, at in said.items() if at is not None}


class TableFiles:
    """See `TableRows`: the files of one version, the newest opened kept open; labels as these corrections leave them."""

    def __init__(
        self,
        warehouse: Warehouse,
        files: Sequence[DataFile],
        corrections: Sequence[DataFile],
        schema: Schema,
        *,
        over_read: float = MAX_OVER_READ,
    ) -> None:
        self.warehouse, self.schema, self.corrections, self.over_read = (
            warehouse,
            schema,
            corrections,
            over_read,
        )
        self._files = {file.path: file for file in files}
        self._open: OrderedDict[str, SampleFile] = OrderedDict()
        self._latest: OrderedDict[tuple[date, int], LatestLabels] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, path: str, start: int, end: int) -> Batch:
        with self._lock:
            file = self._opened(path)
            first, last = start // ROWS_OF_GROUP, (end - 1) // ROWS_OF_GROUP
            writer = writer_of(file.file, self.warehouse.registry)
            batch = file.read(writer, self.schema, range(first, last + 1))
            if self.corrections:
                batch = overlay(batch, self._latest_of(file.file))
        from_row, to_row = start - first * ROWS_OF_GROUP, end - first * ROWS_OF_GROUP
        return (
            batch
            if (from_row, to_row) == (0, batch.num_requests)
            else batch.take_requests(np.arange(from_row, to_row))
        )

    def marks(self, path: str) -> Marks:
        with self._lock:
            columns, _ = self._opened(path).columns({name: REQUEST[name] for name in _MARKS})
            return Marks(*(columns[name].values for name in _MARKS))

    def ranges(self, path: str, start: int, end: int) -> tuple[list[ByteRange], list[ByteRange]]:
        """What `batch` reads of the file, and what of it is needed. Raises as `batch`."""
        with self._lock:
            file, groups = self._opened(path), range(start // ROWS_OF_GROUP, (end - 1) // ROWS_OF_GROUP + 1)
            names = (*needed_columns(writer_of(file.file, self.warehouse.registry), self.schema), "item")
            return file.reading_plan(names, groups), file.places(names, groups)

    def whole(self, path: str) -> tuple[Schema, dict[str, FlatColumn], np.ndarray]:
        """The schema that wrote a file, all columns that it declares, and the candidates of each row. Raises as `batch`."""
        with self._lock:
            writer = writer_of(self._files[path], self.warehouse.registry)
            return writer, *self._opened(path).columns(sample_forms(writer))

    def _opened(self, path: str) -> SampleFile:
        return _kept(
            self._open,
            path,
            _OPEN_FILES,
            lambda: self.warehouse.open_file(SAMPLES, self._files[path], self.over_read),
        )

    def _latest_of(self, file: DataFile) -> LatestLabels:
        """All corrections of its day and partition, also those that a seal has folded: what they say is the same."""
        its = of(self.corrections, file.day, file.partition)
        return _kept(
            self._latest,
            (file.day, file.partition),
            _GROUPS_KEPT,
            lambda: read_latest(self.warehouse, its, self.schema.tasks),
        )


def _kept(there: OrderedDict[K, V], key: K, most: int, make: Callable[[], V]) -> V:
    """Of the newest `most` that were asked for."""
    if key not in there:
        there[key] = make()
        while len(there) > most:
            there.popitem(last=False)
    there.move_to_end(key)
    return there[key]

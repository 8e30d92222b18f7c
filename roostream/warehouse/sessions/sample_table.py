"""Opens training sessions on a warehouse. A session is the ordered list of rows of one version of the table
of samples; the version is fixed, and its files are kept while the session is read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import date

import numpy as np

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Progress
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.archive import sample_types
from roostream.warehouse.column_popularity import record_session_features
from roostream.warehouse.compact import CorrectionSource, folded, partly_retired_name, retired_name
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import TableSnapshot
from roostream.warehouse.file_reader import MAX_OVER_READ, ByteRange, check_writers, writer_of
from roostream.warehouse.latest_labels import LatestLabels, files_of_part, overlay_batch, read_latest
from roostream.warehouse.parquet_file import ROWS_OF_GROUP
from roostream.warehouse.record_columns import rebuild_records
from roostream.warehouse.sessions.session import Labels, SessionSpec
from roostream.warehouse.sessions.session_rows import OpenSession, SampleMarks, first_copies
from roostream.warehouse.statistics import SIDES
from roostream.warehouse.version_pins import VersionPin, pin_version
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.batch import Batch
from roostream.wire.columnar import REQUEST, needed_columns, project_schema
from roostream.wire.records import Record

_OPEN_FILES = 32
_MAX_GROUPS = 8  # (day, partition) groups whose corrections are cached
_MARKS = ("sample_id", "offset", "close_ms")


class SampleTable:
    """A warehouse as its readers see it. Nothing is read before the first call. One thread."""

    def __init__(self, location: str) -> None:
        """`location`: a directory, or s3://bucket/prefix."""
        self.location = location
        self.warehouse = Warehouse(location)

    def newest(
        self, wanted: SessionSpec, topics: Mapping[str, str], begins: Progress | None = None
    ) -> TableInput | None:
        """The session over the newest version: the rows that `wanted` names, from `begins` on. None: the
        table is empty.

        `topics`: name → id of the topics that are read after the session; empty if no stream follows.

        Raises:
            UnavailableError: the table cannot be read now. CheckpointError: there is no table, or none of the
            corrections that `wanted` needs, or it is damaged, or a part of the rows after `begins` was
            retired. ConfigError: its rows came from other topics, whose offsets mean nothing here.
        """
        found, begins = self.warehouse.samples.snapshot(), dict(begins or {})
        from_offsets = {number: at for (topic, number), at in begins.items() if topic == SAMPLES}
        topic = topics.get(SAMPLES, "") if from_offsets else ""
        spec = dataclasses.replace(
            wanted, table=self.location, version=found.version, from_offsets=from_offsets, topic=topic
        )
        session = OpenSession(spec, found.files, ROWS_OF_GROUP)
        self._check_not_retired(found, spec, session)
        ends = self._ends(found, topics)
        corrections = self.warehouse.corrections.snapshot() if wanted.labels == "latest" else None
        if corrections is not None and topics:
            ends |= _archived_progress(corrections, CORRECTIONS, topics, found)
        if not session.order.splits and not ends:
            return None
        return TableInput(
            table=self.location,
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

    def open_session(self, table: TableInput, schema: Schema) -> tuple[OpenSession, TableFiles]:
        """Open a session that was fixed by `newest`, for readers with `schema`.

        Raises:
            UnavailableError: the table cannot be read now.
            CheckpointError: the version is gone, or is not the one that was fixed.
            ConfigError: as `check_reader`.
        """
        spec = SessionSpec.of(table.spec)
        found = self.warehouse.samples.snapshot(table.version)
        session = OpenSession(spec, found.files, ROWS_OF_GROUP)
        if session.order.rows != dict(table.rows):
            raise CheckpointError(
                f"{self.location}: expected {sum(table.rows.values())} rows of version {table.version}, got "
                f"{sum(session.order.rows.values())}: this is another table; "
                "restore the one that training began with"
            )
        self._check_writers(spec, found, schema)
        features = spec.features or [feature.name for side in SIDES for feature in getattr(schema, side)]
        record_session_features(self.warehouse.store, schema, table.version, table.digest, features)
        if spec.features:
            schema = project_schema(schema, frozenset(spec.features))
        if table.corrections < 0:
            return session, TableFiles(self.warehouse, found.files, None, schema)
        late = self.warehouse.corrections.snapshot(table.corrections).files
        return session, TableFiles(self.warehouse, found.files, late, schema, folded=folded(found, late))

    def check_reader(self, table: TableInput, schema: Schema) -> None:
        """Check, before training, that a schema can read the session.

        Raises:
            UnavailableError: the table cannot be read now.
            SchemaError: the schema that wrote a file is not registered, or wrote a feature in another way.
            ConfigError: the schema shares no label with the session's samples: it belongs to another site.
        """
        self._check_writers(
            SessionSpec.of(table.spec), self.warehouse.samples.snapshot(table.version), schema
        )

    def _check_writers(self, spec: SessionSpec, found: TableSnapshot, schema: Schema) -> None:
        files = [file for file in found.files if spec.has_day(file.day.isoformat())]
        read = project_schema(schema, frozenset(spec.features)) if spec.features else schema
        writers = check_writers(files, self.warehouse.registry, read, self.location)
        known = sorted({label.name for writer in writers for label in writer.labels})
        own = [label.name for label in schema.labels]
        if own and known and not set(own) & set(known):
            raise ConfigError(
                f"{self.location}: expected a schema with a label of its samples ({', '.join(known)}), "
                f"got {schema.name!r} with {', '.join(own)}; use the schema that they were joined with"
            )

    def pin_session(self, table: TableInput, owner: str, until_ms: int) -> None:
        """Keep the session's files until `until_ms`, whatever replaces them; `owner` names the pin.

        Raises:
            UnavailableError: the pin cannot be written now.
        """
        pin_version(self.warehouse.store, owner, VersionPin(SAMPLES, table.version, until_ms))
        if table.corrections >= 0:
            pin_version(self.warehouse.store, owner, VersionPin(CORRECTIONS, table.corrections, until_ms))

    def _ends(self, found: TableSnapshot, topics: Mapping[str, str]) -> Progress:
        """Where the stream continues: the archive's own progress; without a stream, the offset after each
        partition's last row."""
        if SAMPLES not in topics:
            ends: Progress = {}
            for file in found.files:
                at = SAMPLES, file.partition
                ends[at] = max(ends.get(at, 0), file.last_offset + 1)
            return ends
        known = _archived_progress(found, SAMPLES, topics, found)
        if found.files and not known:
            topic_ids = ", ".join(sorted({file.topic for file in found.files} - {""})) or "another topic"
            raise ConfigError(
                f"{self.location}: expected an archive of topic {SAMPLES} with id {topics[SAMPLES]}, "
                f"got one of {topic_ids}: its offsets mean nothing here; "
                "train from it without Kafka (roostream train), or start another archive"
            )
        return known

    def _check_not_retired(self, found: TableSnapshot, spec: SessionSpec, session: OpenSession) -> None:
        """Check, for a later session, that no row that it would read has been retired."""
        for partition, begin in spec.from_offsets.items():
            gone = [found.progress(retired_name(topic, partition)) or 0 for topic in {spec.topic, ""}]
            if max(gone) > begin:
                raise CheckpointError(
                    f"{self.location}: expected samples of partition {partition} from offset {begin} on, "
                    f"got them retired up to {max(gone)}; the stream continues there; "
                    "raise compactor.keep_bytes and keep_days"
                )
        if spec.from_offsets:
            for day in sorted({split.day for split in session.order.splits}):
                if found.progress(partly_retired_name(date.fromisoformat(day))):
                    raise CheckpointError(
                        f"{self.location}: expected all of {day}, "
                        "got a day of which keep_bytes has retired a part; the stream continues there; "
                        "raise compactor.keep_bytes"
                    )


def _archived_progress(
    table: TableSnapshot, name: str, topics: Mapping[str, str], samples: TableSnapshot
) -> Progress:
    """How far the archive has come in this topic, for partitions that have samples."""
    partitions = range(1 + max((file.partition for file in samples.files), default=0))
    if name not in topics:
        return {}
    progress = {(name, n): table.progress(f"{name}/{topics[name]}/{n}") for n in partitions}
    return {partition: at for partition, at in progress.items() if at is not None}


class TableFiles:
    """Implements `TableRows` for the files of one version. Recently used files stay open."""

    def __init__(
        self,
        warehouse: Warehouse,
        files: Sequence[DataFile],
        corrections: Sequence[DataFile] | None,
        schema: Schema,
        *,
        folded: Mapping[CorrectionSource, int] | None = None,
        over_read: float = MAX_OVER_READ,
    ) -> None:
        """`corrections`: labels include those in these files; None: labels are as they were at the close.
        `folded`: offsets of corrections that sealed files contain."""
        self.warehouse, self.schema, self.corrections = warehouse, schema, corrections
        self._folded = folded or {}
        self._files = {file.path: file for file in files}
        self._open_file = functools.lru_cache(_OPEN_FILES)(
            lambda path: warehouse.open_file(SAMPLES, self._files[path], over_read)
        )
        self._latest = functools.lru_cache(_MAX_GROUPS)(self._read_latest)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """One thread at a time. A file that is missing together with its table is not damaged: the mount is
        away."""
        with self._lock:
            try:
                yield
            except CheckpointError:
                if self.warehouse.samples.exists():
                    raise
                location = self.warehouse.location
                raise UnavailableError(f"{location}: its table is not there now; mount it again") from None

    def batch(self, path: str, start: int, end: int) -> Batch:
        with self._reading():
            file = self._open_file(path)
            first, last = start // ROWS_OF_GROUP, (end - 1) // ROWS_OF_GROUP
            writer = writer_of(file.file, self.warehouse.registry)
            labels: Labels = "as_streamed" if self.corrections is None else "latest"
            batch = file.read(writer, self.schema, range(first, last + 1), labels=labels)
            if self.corrections:
                is_sealed = file.file.sealed
                batch = overlay_batch(batch, self._latest(file.file.day, file.file.partition, is_sealed))
        from_row, to_row = start - first * ROWS_OF_GROUP, end - first * ROWS_OF_GROUP
        if (from_row, to_row) == (0, batch.num_requests):
            return batch
        return batch.take_requests(np.arange(from_row, to_row))

    def marks(self, path: str) -> SampleMarks:
        with self._reading():
            columns, _ = self._open_file(path).columns({name: REQUEST[name] for name in _MARKS})
            return SampleMarks(*(columns[name].values for name in _MARKS))

    def ranges(self, path: str, start: int, end: int) -> tuple[list[ByteRange], list[ByteRange]]:
        """(ranges that `batch` reads of the file, ranges that it needs). Raises as `batch`."""
        with self._reading():
            file = self._open_file(path)
            groups = range(start // ROWS_OF_GROUP, (end - 1) // ROWS_OF_GROUP + 1)
            names = (*needed_columns(writer_of(file.file, self.warehouse.registry), self.schema), "item")
            return file.reading_plan(names, groups), file.needed_ranges(names, groups)

    def records(self, path: str) -> Iterator[Record]:
        """A file's samples as the records that they were, in the file's order. Raises as `batch`."""
        partition = self._files[path].partition
        with self._reading():
            writer = writer_of(self._files[path], self.warehouse.registry)
            columns, counts_R = self._open_file(path).columns(sample_types(writer))
        offsets, closes = (columns[name].values.tolist() for name in ("offset", "close_ms"))
        for offset, close_ms, (key, value) in zip(
            offsets, closes, rebuild_records(writer, columns, counts_R), strict=True
        ):
            yield Record(SAMPLES, partition, offset, close_ms, key, value)

    def _read_latest(self, day: date, partition: int, is_sealed: bool) -> LatestLabels:
        """All corrections of a day and partition; for a sealed file without those that it contains."""
        files = files_of_part(self.corrections or (), day, partition)
        sources = {file.topic: self._folded.get((day, partition, file.topic), 0) for file in files}
        return read_latest(self.warehouse, files, self.schema.tasks, sources if is_sealed else None)


def session_records(
    session: OpenSession, files: TableFiles, stored_order_until: str = ""
) -> Iterator[Record]:
    """A session's samples as records by (close time, partition, offset), as the topic would have delivered
    them, each sample once, with labels as they were at the close. Training on them gives the same batches as
    live training.

    For days before `stored_order_until` (YYYY-MM-DD) records come file by file in the session's order.
    Memory: one day's records.

    Raises:
        CheckpointError: a file is damaged; the message names it.
        UnavailableError: it cannot be read now.
        SchemaError: the schema that wrote it is not registered.
    """
    splits = {split.path: split for split in session.order.splits}
    for day in sorted({split.day for split in splits.values()}):
        found: list[Record] = []
        for split in (split for split in splits.values() if split.day == day):
            group = session.files_of_group(day, split.partition)
            is_first_R = first_copies({file.path: files.marks(file.path) for file in group})[split.path]
            found += itertools.compress(files.records(split.path), is_first_R)
        if day >= stored_order_until:
            found.sort(key=lambda record: (record.timestamp_ms, record.partition, record.offset))
        yield from found

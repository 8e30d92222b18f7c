"""Reading row groups of a file as a batch: only the columns that a schema needs, in few store requests.

A request to a store costs as much as many bytes. So columns that lie near each other are read in one request,
with the bytes between them, as long as those are few (DPP, VLDB 2022, §7: over-read reduced from more than
100 % to 8 %). Arrow decodes the pages and verifies their checksums.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.errors import CheckpointError, RoostreamError, SchemaError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.schema import Registry, Schema
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.parquet_file import FOOTER_KEY, FORMATS, from_arrow
from roostream.wire.batch import Batch
from roostream.wire.columnar import ColumnType, FlatColumn, batch_from_columns, needed_columns

Labels = Literal["latest", "as_streamed"]
_TAIL_BYTES = 64 << 10


MAX_OVER_READ = 0.08
SMALL_BYTES = 4096
"""Over-read that is always allowed: small files have some 70 bytes between columns, more than 8 %."""


class ByteRange(NamedTuple):
    """[start, end) of a file."""

    start: int
    end: int


def merged(
    needed: Iterable[ByteRange], over_read: float = MAX_OVER_READ, small: int = SMALL_BYTES
) -> list[ByteRange]:
    """Merge ranges into the fewest ones that over-read at most `over_read` times the needed bytes, or `small`
    bytes if that is more.

    With `over_read` 0 no hole is read. The smallest holes are filled first, the first of equal ones, until
    the budget is used. A rule by hole width alone would have to fill all or none of a row of equal holes.
    """
    ranges = _joined(needed)
    budget = max(over_read * sum(end - start for start, end in ranges), small) if over_read else 0
    filled = set()
    for hole, n in sorted((b.start - a.end, n) for n, (a, b) in enumerate(itertools.pairwise(ranges))):
        budget -= hole
        if budget < 0:
            break
        filled.add(n)
    out = ranges[:1]
    for n, one in enumerate(ranges[1:]):
        if n in filled:
            out[-1] = ByteRange(out[-1].start, one.end)
        else:
            out.append(one)
    return out


def _joined(needed: Iterable[ByteRange]) -> list[ByteRange]:
    """The ranges in order; those that touch or overlap are joined."""
    out: list[ByteRange] = []
    for one in sorted(needed):
        if out and one.start <= out[-1].end:
            out[-1] = ByteRange(out[-1].start, max(out[-1].end, one.end))
        else:
            out.append(one)
    return out


class RangedFile(io.RawIOBase):
    """An object of a store as a file. Bytes that were fetched are served from memory, others are requested.
    One thread."""

    def __init__(self, store: CheckpointStore, name: str, size: int) -> None:
        self.store, self.object, self.size = store, name, size
        self.num_requests = self.num_bytes = 0
        self.error: RoostreamError | None = None  # of the last read; Arrow hides the original error
        self._at = 0
        self._starts: list[int] = []
        self._parts: list[memoryview] = []

    def fetch(self, ranges: Iterable[ByteRange]) -> None:
        """Fetch these ranges and drop the previous ones.

        Raises:
            UnavailableError: the store is away.
            CheckpointError: the object is absent or shorter.
        """
        found = [(start, self._get(start, end - start)) for start, end in ranges]
        self._starts, self._parts = [start for start, _ in found], [memoryview(part) for _, part in found]

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> memoryview:
        """As `read`, without copying fetched bytes; Arrow calls a method of this name."""
        size = min(self.size - self._at if size is None or size < 0 else size, self.size - self._at)
        n = bisect.bisect_right(self._starts, self._at) - 1
        first = self._at - self._starts[n] if n >= 0 else 0
        data = self._parts[n][first : first + size] if n >= 0 else memoryview(b"")
        if len(data) < size:
            data = memoryview(self._get(self._at, size))
        self._at += size
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def _get(self, start: int, size: int) -> bytes:
        try:
            data = self.store.get_range(self.object, start, size)
        except RoostreamError as error:
            self.error = error
            raise
        self.num_requests, self.num_bytes = self.num_requests + 1, self.num_bytes + size
        return data


class SampleFile:
    """One file of a table. Opening it reads its footer. Not thread-safe."""

    def __init__(
        self, store: CheckpointStore, table: str, file: DataFile, *, over_read: float = MAX_OVER_READ
    ) -> None:
        """`table`: the table's folder.

        Raises:
            UnavailableError: it cannot be read now.
            CheckpointError: it is damaged, or is not what the log says; the message names it.
        """
        self.name, self.file, self._over_read = f"{table}/{file.path}", file, over_read
        self.source = RangedFile(store, self.name, file.bytes)
        with self._reporting_damage():
            self.source.fetch([ByteRange(max(file.bytes - _TAIL_BYTES, 0), file.bytes)])
            self._parquet = pq.ParquetFile(
                pa.PythonFile(self.source, mode="r"), page_checksum_verification=True
            )
        self.footer = self._parquet.metadata
        self._at: dict[str, list[int]] = {}  # column → its leaves among all
        for at in range(self.footer.num_columns):
            self._at.setdefault(self.footer.schema.column(at).path.split(".", 1)[0], []).append(at)
        self._ranges: dict[tuple[int, int], ByteRange] = {}  # by (row group, leaf)
        # Writer, reader, columns
        self._last_needed: tuple[Schema, Schema, Mapping[str, ColumnType]] | None = None
        self.footer_info = self._footer_info()
        if self.footer.num_rows != file.rows:
            raise CheckpointError(
                f"{self.name} is damaged: expected {file.rows} rows as in the log, got {self.footer.num_rows}"
            )

    @property
    def rows_of_groups(self) -> list[int]:
        """Requests of each row group."""
        return [self.footer.row_group(g).num_rows for g in range(self.footer.num_row_groups)]

    def column_chunks(self) -> Iterator[tuple[str, Any]]:
        """(column, footer entry of its chunk in a row group), in storage order."""
        for g in range(self.footer.num_row_groups):
            group = self.footer.row_group(g)
            for c in range(group.num_columns):
                chunk = group.column(c)
                yield chunk.path_in_schema.split(".", 1)[0], chunk

    def reading_plan(self, names: Iterable[str], groups: Sequence[int]) -> list[ByteRange]:
        """The byte ranges that are read for these columns of these row groups, over-read included."""
        return merged(self.needed_ranges(names, groups), self._over_read)

    def needed_ranges(self, names: Iterable[str], groups: Sequence[int]) -> list[ByteRange]:
        """The byte ranges of these columns of these row groups."""
        return list(self._column_ranges(set(names), groups))

    def read(
        self,
        writer: Schema,
        reader: Schema,
        groups: Sequence[int] | None = None,
        *,
        labels: Labels = "as_streamed",
    ) -> Batch:
        """Samples of some row groups (None: all), as `reader` reads those of `writer`, the schema of the
        file's fingerprint.

        A `reader` with fewer features (`roostream.wire.columnar.project_schema`) reads fewer columns.
        `labels` "latest": with the corrections that were folded in when the file was sealed; later ones are
        in their own table (roostream/warehouse/latest_labels.py).

        Raises:
            UnavailableError: it cannot be read now.
            CheckpointError: it is damaged; the message names it.
            SchemaError: `reader` cannot read what `writer` wrote.
        """
        if (
            self._last_needed is None
            or self._last_needed[0] is not writer
            or self._last_needed[1] is not reader
        ):
            self._last_needed = writer, reader, needed_columns(writer, reader)
        column_types = self._last_needed[2]
        now = {f"label__{name}": f"latest__{name}" for name in reader.tasks} if labels == "latest" else {}
        chosen = {name: now[name] if now.get(name) in self._at else name for name in column_types}
        columns, counts_R = self.columns(
            {chosen[name]: column_type for name, column_type in column_types.items()}, groups
        )
        return batch_from_columns(
            reader, {name: columns[chosen[name]] for name in column_types}, counts_R, self.file.partition
        )

    def columns(
        self, column_types: Mapping[str, ColumnType], groups: Sequence[int] | None = None
    ) -> tuple[dict[str, FlatColumn], np.ndarray]:
        """These columns, and the number of candidates of each request (int32 [R]). Raises as `read`."""
        chosen = list(range(self.footer.num_row_groups)) if groups is None else list(groups)
        names = list(dict.fromkeys((*column_types, "item")))
        with self._reporting_damage():
            self.source.fetch(self.reading_plan(names, chosen))
            table = self._parquet.read_row_groups(chosen, columns=names, use_threads=False)
            if missing := set(names).difference(table.column_names):
                raise CheckpointError(f"expected the columns {sorted(missing)}, got none of them")
            return from_arrow(table, column_types)

    def _column_ranges(self, names: set[str], groups: Sequence[int]) -> Iterator[ByteRange]:
        for g in groups:
            for at in sorted(at for name in names for at in self._at.get(name, ())):
                if (g, at) not in self._ranges:
                    chunk = self.footer.row_group(g).column(at)
                    start = chunk.dictionary_page_offset or chunk.data_page_offset
                    self._ranges[g, at] = ByteRange(start, start + chunk.total_compressed_size)
                yield self._ranges[g, at]

    def _footer_info(self) -> dict[str, Any]:
        with self._reporting_damage():
            info: dict[str, Any] = json.loads((self.footer.metadata or {}).get(FOOTER_KEY, b"null"))
            if not isinstance(info, dict) or info.get("format") not in FORMATS:
                got = info.get("format") if isinstance(info, dict) else info
                raise CheckpointError(
                    f"expected a file of format {' or '.join(map(str, FORMATS))}, got {got!r}"
                )
            if (topic := info.get("topic", "")) != self.file.topic:
                raise CheckpointError(
                    f"expected rows of topic {self.file.topic or 'unknown'!r} as its path says, got {topic!r}"
                )
            return info

    @contextlib.contextmanager
    def _reporting_damage(self) -> Iterator[None]:
        """Pass on that the store is away; report every other error as damage of this file."""
        self.source.error = None
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, CheckpointError) as error:
            if isinstance(self.source.error, CheckpointError):
                raise CheckpointError(f"{self.source.error}; restore it from a backup") from None
            if self.source.error is not None:
                raise self.source.error from None
            text = str(error).strip().split("\n", 1)[0]
            raise CheckpointError(f"{self.name} is damaged: {text}; restore it from a backup") from None


def writer_of(file: DataFile, registry: Registry) -> Schema:
    """The schema that wrote a file.

    Raises:
        SchemaError: it is not registered.
    """
    found = registry(file.fingerprint)
    if found is None:
        raise SchemaError(
            f"unknown schema {file.fingerprint:016x} of {file.path}; "
            "put its file back into schemas/ of the warehouse"
        )
    return found


def check_writers(
    files: Iterable[DataFile], registry: Registry, reader: Schema, location: str
) -> list[Schema]:
    """The schemas that wrote these files. Checked before reading, so that a single file cannot stop it
    midway.

    Raises:
        SchemaError: one is not registered, or `reader` cannot read what it wrote; names the days.
    """
    of_writer: dict[int, list[DataFile]] = {}
    for file in files:
        of_writer.setdefault(file.fingerprint, []).append(file)
    writers = []
    for some in of_writer.values():
        writer = writer_of(some[0], registry)
        try:
            needed_columns(writer, reader)
        except SchemaError as error:
            days = sorted({file.day.isoformat() for file in some})
            raise SchemaError(
                f"{location}: {len(some)} files of {days[0]} to {days[-1]} by schema {writer.name!r} "
                f"({writer.fingerprint:016x}) cannot be read: {error}; or choose other days or features"
            ) from None
        writers.append(writer)
    return writers

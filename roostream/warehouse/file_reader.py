"""Row groups of a file as a batch: the columns that a schema needs, in few reads.

1 the footer, in one read of the file's end  2 the columns' places, merged (roostream/warehouse/byte_ranges.py)  3 these bytes
4 Arrow decodes the pages and verifies their checksums
5 arrays to the batch that a decoder would have made of the same records
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.errors import CheckpointError, SchemaError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.schema import Registry, Schema
from roostream.warehouse import layout
from roostream.warehouse.byte_ranges import MAX_OVER_READ, ByteRange, RangedFile, merged
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.file_writer import FOOTER_KEY, FORMATS
from roostream.wire.batch import Batch
from roostream.wire.columnar import FlatColumn, Form, batch_of, needed

Labels = Literal["latest", "as_streamed"]
_TAIL_BYTES = 64 << 10


class SampleFile:
    """One file of a table. Opening it reads its footer. Not thread-safe."""

    def __init__(
        self, store: CheckpointStore, table: str, file: DataFile, *, over_read: float = MAX_OVER_READ
    ) -> None:
        """`table`: its folder.

        Raises:
            UnavailableError: it can't be read now. CheckpointError: it is damaged, or isn't what the log says; names it.
        """
        self.name, self.file, self._over_read = f"{table}/{file.path}", file, over_read
        self.source = RangedFile(store, self.name, file.bytes)
        with self._told():
            self.source.fetch([ByteRange(max(file.bytes - _TAIL_BYTES, 0), file.bytes)])
            self._parquet = pq.ParquetFile(
                pa.PythonFile(self.source, mode="r"), page_checksum_verification=True
            )
        self.footer = self._parquet.metadata
        self._at: dict[str, list[int]] = {}  # where a column's leaves are among all
        for at in range(self.footer.num_columns):
            self._at.setdefault(self.footer.schema.column(at).path.split(".", 1)[0], []).append(at)
        self._ranges: dict[tuple[int, int], ByteRange] = {}  # by (row group, leaf)
        self._asked: tuple[Schema, Schema, Mapping[str, Form]] | None = (
            None  # what was read last, and the columns that it needs
        )
        self.said = self._said()
        if self.footer.num_rows != file.rows:
            raise CheckpointError(
                f"{self.name} is damaged: expected {file.rows} rows (the table's log), got {self.footer.num_rows}"
            )

    @property
    def rows_of_groups(self) -> list[int]:
        """Requests of each row group."""
        return [self.footer.row_group(g).num_rows for g in range(self.footer.num_row_groups)]

    def reading_plan(self, names: Iterable[str], groups: Sequence[int]) -> list[ByteRange]:
        """What is read for these columns of these row groups: at most `over_read` times more than they take."""
        return merged(self.places(names, groups), self._over_read)

    def places(self, names: Iterable[str], groups: Sequence[int]) -> list[ByteRange]:
        """Where these columns of these row groups lie."""
        return list(self._places(set(names), groups))

    def read(
        self,
        writer: Schema,
        reader: Schema,
        groups: Sequence[int] | None = None,
        *,
        labels: Labels = "as_streamed",
    ) -> Batch:
        """Samples of some row groups (None: all) as `reader` reads those of `writer`, which is the schema of the file's
        fingerprint; a `reader` of fewer features (`roostream.wire.columnar.projected`) reads fewer columns. `labels` "latest": with the
        corrections that were folded in when it was sealed; others are in their own table (roostream/warehouse/latest_labels.py).

        Raises:
            UnavailableError: it can't be read now. CheckpointError: it is damaged; names it. SchemaError: what changed between
                the schemas can't be read.
        """
        if self._asked is None or self._asked[0] is not writer or self._asked[1] is not reader:
            self._asked = writer, reader, needed(writer, reader)
        forms = self._asked[2]
        now = {f"label__{name}": f"latest__{name}" for name in reader.tasks} if labels == "latest" else {}
        chosen = {name: now[name] if now.get(name) in self._at else name for name in forms}
        columns, counts_R = self.columns({chosen[name]: form for name, form in forms.items()}, groups)
        return batch_of(
            reader, {name: columns[chosen[name]] for name in forms}, counts_R, self.file.partition
        )

    def columns(
        self, forms: Mapping[str, Form], groups: Sequence[int] | None = None
    ) -> tuple[dict[str, FlatColumn], np.ndarray]:
        """These columns, and the candidates of each request (int32 [R]). Raises as `read`."""
        chosen = list(range(self.footer.num_row_groups)) if groups is None else list(groups)
        names = list(dict.fromkeys((*forms, "item")))
        with self._told():
            self.source.fetch(self.reading_plan(names, chosen))
            table = self._parquet.read_row_groups(chosen, columns=names, use_threads=False)
            if missing := set(names).difference(table.column_names):
                raise CheckpointError(f"expected the columns {sorted(missing)}, got none of them")
            return layout.from_arrow(table, forms)

    def _places(self, names: set[str], groups: Sequence[int]) -> Iterator[ByteRange]:
        for g in groups:
            for at in sorted(at for name in names for at in self._at.get(name, ())):
                if (g, at) not in self._ranges:
                    chunk = self.footer.row_group(g).column(at)
                    start = chunk.dictionary_page_offset or chunk.data_page_offset
                    self._ranges[g, at] = ByteRange(start, start + chunk.total_compressed_size)
                yield self._ranges[g, at]

    def _said(self) -> dict[str, Any]:
        with self._told():
            said: dict[str, Any] = json.loads((self.footer.metadata or {}).get(FOOTER_KEY, b"null"))
            if not isinstance(said, dict) or said.get("format") not in FORMATS:
                got = said.get("format") if isinstance(said, dict) else said
                raise CheckpointError(
                    f"expected a file of format {' or '.join(map(str, FORMATS))}, got {got!r}"
                )
            if (topic := said.get("topic", "")) != self.file.topic:
                raise CheckpointError(
                    f"expected rows of topic {self.file.topic or 'unknown'!r} (its name), got {topic!r}"
                )
            return said

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What the store said comes through; all else is damage, told with the file's name."""
        self.source.error = None
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, CheckpointError) as error:
            if self.source.error is not None:
                raise self.source.error from None
            text = str(error).strip().split("\n", 1)[0]
            raise CheckpointError(f"{self.name} is damaged: {text}; bring it back from a backup") from None


def writer_of(file: DataFile, registry: Registry) -> Schema:
    """The schema that wrote a file.

    Raises:
        SchemaError: nobody registered it.
    """
    found = registry(file.fingerprint)
    if found is None:
        raise SchemaError(
            f"unknown schema {file.fingerprint:016x} of {file.path}; put its file back into the warehouse's schemas/"
        )
    return found

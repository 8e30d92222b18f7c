"""Columns of one list a row straight from a file's pages: what most of a batch is.

Arrow gives a list's values two levels each, and decodes, copies and compares them one by one, for each column anew: that is most
of what reading costs (docs/decisions/0097). Here lengths are counted from levels once for all columns that have the same.
Only what our writers write is known: pages of the first version with checksums, zstd, lists of numbers of fixed width.
Everything else, unusual or damaged, is left to Arrow, column by column (`None`), which then reads it or says what is wrong.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roo.columnar import FlatColumn
from warehouse.byte_ranges import ByteRange
from warehouse.lists import page_kernels as k

_ZSTD = pa.Codec("zstd")
_DATA, _DICTIONARY = 0, 2  # types of a page
_PLAIN, _PLAIN_DICTIONARY, _RLE, _DELTA, _RLE_DICTIONARY, _SPLIT = 0, 2, 3, 5, 8, 9  # encodings
_TYPES = {"INT64": np.int64, "INT32": np.int32, "FLOAT": np.float32}
_MOST_LEVELS = 1 << 28  # of a column in a row group: more than a schema's caps let it have
_MOST_SEEN = 4  # that of candidates, of a sequence, of two other features
_LEVEL_BITS = 2  # of a definition: 0 to 2, or to 3


class PagedFile(Protocol):
    """A file's bytes, as `RangedFile` gives them."""

    def seek(self, offset: int, /) -> int: ...
    def read_buffer(self, size: int, /) -> memoryview: ...


class ListLeaf(NamedTuple):
    """A column of one list a row."""

    at: int  # among the file's leaves
    dtype: Any
    full: int  # level of a value: 2 where it can't be null, 3 where it could


class _FoundLists(NamedTuple):
    lengths_N: np.ndarray  # int32
    present_N: np.ndarray  # bool


class _SeenLevels(NamedTuple):
    """Of the only page of a column of a row group: the bytes of its levels, and what they mean."""

    bytes: np.ndarray  # uint8
    full: int
    lists: _FoundLists
    values: int


class _ListPage(NamedTuple):
    kind: int
    encoding: int
    levels: int  # of a dictionary: its values
    data: np.ndarray  # uint8


class _LeftToArrow(Exception):
    """Arrow is to decide."""


def leaves(footer: Any) -> dict[str, ListLeaf]:
    """The columns of a file that could be read here, by their names."""
    out = {}
    for at in range(footer.num_columns):
        leaf = footer.schema.column(at)
        name, _, rest = leaf.path.partition(".")
        known = leaf.physical_type in _TYPES and leaf.logical_type.type == "NONE" and leaf.max_definition_level in (2, 3)
        if known and leaf.max_repetition_level == 1 and rest in ("list.element", "list.item"):
            out[name] = ListLeaf(at, _TYPES[leaf.physical_type], leaf.max_definition_level)
    return out


class PageReader:
    """Columns of some row groups, one after the other. What candidates have has the same levels in every column, and so have a
    sequence's columns: alike bytes mean alike lists and aren't decoded again. Not thread-safe."""

    def __init__(self, source: PagedFile, footer: Any, groups: Sequence[int]) -> None:
        self._source, self._groups = source, [footer.row_group(g) for g in groups]
        self._seen: list[list[_SeenLevels]] = [[] for _ in groups]  # of each group, newest first

    def read(self, leaf: ListLeaf) -> FlatColumn | None:
        """A column; None where Arrow is to decide.

        Raises:
            UnavailableError: its bytes can't be read now. CheckpointError: the file ends before.
        """
        chunks = [group.column(leaf.at) for group in self._groups]
        if any(chunk.compression != "ZSTD" for chunk in chunks):
            return None
        try:
            parts = [self._part(n, leaf, chunk) for n, chunk in enumerate(chunks)]
        except _LeftToArrow:
            return None
        if len(parts) == 1:
            return parts[0]
        return FlatColumn(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))) if parts else None

    def _part(self, n: int, leaf: ListLeaf, chunk: Any) -> FlatColumn:
        """Of one row group, the n-th of those asked for."""
        rows, total = self._groups[n].num_rows, chunk.num_values
        if not 0 <= rows <= total <= _MOST_LEVELS:
            raise _LeftToArrow
        lists = _FoundLists(np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.bool_))
        values_V, row, levels, filled, known = np.empty(total, dtype=leaf.dtype), 0, 0, 0, None
        for page in _pages(self._source, chunk):
            if page.kind == _DICTIONARY:
                known = _dictionary(page, leaf)
                continue
            levels += page.levels
            if levels > total:
                raise _LeftToArrow
            if page.levels == total:
                end, lists, count = self._only(n, page, leaf, lists)
                row = rows
            else:
                end, row, count = _levels(page, leaf, row, lists)
            _values(page, end, known, values_V[filled : filled + count])
            filled += count
        if row != rows or levels != total:
            raise _LeftToArrow
        return FlatColumn(values_V[:filled], *lists)

    def _only(self, n: int, page: _ListPage, leaf: ListLeaf, lists: _FoundLists) -> tuple[int, _FoundLists, int]:
        """Where the levels of a column's only page end, its lists (`lists`, or those of an earlier column), and its values."""
        seen, own = self._seen[n], page.data[: _ends(page)[1]]
        for at, one in enumerate(seen):
            if one.full == leaf.full and np.array_equal(one.bytes, own):
                seen.insert(0, seen.pop(at))
                return len(own), one.lists, one.values
        end, row, values = _levels(page, leaf, 0, lists)
        if row != len(lists.lengths_N):
            raise _LeftToArrow
        seen.insert(0, _SeenLevels(own.copy(), leaf.full, lists, values))
        del seen[_MOST_SEEN:]
        return end, lists, values


def _pages(source: PagedFile, chunk: Any) -> Iterator[_ListPage]:
    """Those of a column of one row group, each held against its checksum."""
    own = place(chunk)
    source.seek(own.start)
    whole = source.read_buffer(own.end - own.start)
    buf = np.frombuffer(whole, dtype=np.uint8)
    told, at = np.empty(k.FIELDS, dtype=np.int64), 0
    while at < len(buf):
        at = k.header(buf, at, len(buf), told)
        kind, unpacked, packed, crc, levels, encoding, defined_by, repeated_by = told.tolist()
        if at < 0 or not 0 <= packed <= len(buf) - at or not 0 <= unpacked <= chunk.total_uncompressed_size or levels < 0:
            raise _LeftToArrow
        if kind not in (_DATA, _DICTIONARY) or (kind == _DATA and (defined_by, repeated_by) != (_RLE, _RLE)):
            raise _LeftToArrow
        page = whole[at : at + packed]
        if crc == -1 or zlib.crc32(page) != crc & 0xFFFFFFFF:
            raise _LeftToArrow
        try:
            data = _ZSTD.decompress(page, decompressed_size=unpacked)
        except (OSError, pa.ArrowException):
            raise _LeftToArrow from None
        yield _ListPage(kind, encoding, levels, np.frombuffer(data, dtype=np.uint8))
        at += packed


def place(chunk: Any) -> ByteRange:
    """Where a column of one row group lies."""
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    return ByteRange(start, start + chunk.total_compressed_size)


def _dictionary(page: _ListPage, leaf: ListLeaf) -> np.ndarray:
    if page.encoding not in (_PLAIN, _PLAIN_DICTIONARY) or len(page.data) != page.levels * leaf.dtype().itemsize:
        raise _LeftToArrow
    return page.data.view(leaf.dtype)


def _levels(page: _ListPage, leaf: ListLeaf, row: int, lists: _FoundLists) -> tuple[int, int, int]:
    """Adds a page to `lists`, of which `row` have begun; where its levels end, how many have begun then, and its values."""
    first, second = _ends(page)
    repeated_L, defined_L = np.empty(page.levels, dtype=np.uint8), np.empty(page.levels, dtype=np.uint8)
    if k.runs(page.data, 4, first, 1, repeated_L) < 0 or k.runs(page.data, first + 4, second, _LEVEL_BITS, defined_L) < 0:
        raise _LeftToArrow
    row, values = k.lists(repeated_L, defined_L, leaf.full, row, *lists)
    if row < 0:
        raise _LeftToArrow
    return second, row, values


def _ends(page: _ListPage) -> tuple[int, int]:
    """Where the levels of repetition end, and behind them those of definition."""
    first = 4 + int.from_bytes(page.data[:4].tobytes(), "little")
    second = first + 4 + int.from_bytes(page.data[first : first + 4].tobytes(), "little")
    if second > len(page.data):
        raise _LeftToArrow
    return first, second


def _values(page: _ListPage, at: int, known: np.ndarray | None, out_V: np.ndarray) -> None:
    data, end, done = page.data, len(page.data), -1
    if page.encoding == _PLAIN and end - at == out_V.nbytes:
        out_V.view(np.uint8)[:] = data[at:]
        done = 0
    elif page.encoding in (_RLE_DICTIONARY, _PLAIN_DICTIONARY) and known is not None and at < end:
        index_V = np.empty(len(out_V), dtype=np.uint32)
        if k.runs(data, at + 1, end, int(data[at]), index_V) >= 0:
            done = k.looked_up(index_V, known, out_V)
    elif page.encoding == _SPLIT and out_V.dtype == np.float32:
        done = k.joined(data, at, end, out_V.view(np.uint32))
    elif page.encoding == _DELTA and out_V.dtype == np.int64:
        done = k.summed(data, at, end, out_V)
    if done < 0:
        raise _LeftToArrow


def warm() -> None:
    """Compile every kernel into numba's cache."""
    offsets = pa.array([0, 3])
    arrays = [pa.ListArray.from_arrays(offsets, pa.array([1, 2, 3], kind)) for kind in (pa.int64(), pa.int32(), pa.float32())]
    names = ["id", "number", "float", "time", "plain"]
    encodings = {"float.list.element": "BYTE_STREAM_SPLIT", "time.list.element": "DELTA_BINARY_PACKED"}
    dictionaries = [f"{name}.list.element" for name in ("id", "number")]
    out = pa.BufferOutputStream()
    table = pa.table([arrays[0], arrays[1], arrays[2], arrays[0], arrays[0]], names)
    options = {"use_dictionary": dictionaries, "column_encoding": encodings, "write_page_checksum": True}
    pq.write_table(table, out, compression="zstd", **options)
    footer, source = pq.read_metadata(pa.BufferReader(out.getvalue())), _Bytes(out.getvalue().to_pybytes())
    for name, leaf in leaves(footer).items():
        found = PageReader(source, footer, [0]).read(leaf)
        assert found is not None and found.values.tolist() == [1, 2, 3], name


class _Bytes(io.BytesIO):
    def read_buffer(self, size: int = -1) -> memoryview:
        return memoryview(self.read(size))

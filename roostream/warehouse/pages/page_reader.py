"""Columns straight from a file's pages: all that a batch is made of.

Arrow gives a value of a list two levels, and decodes, copies and compares them one by one, for each column anew: that is most of
what reading costs (docs/decisions/0097). Here lengths are counted from levels once for all columns that have the same.
Only what our writers write is known: pages of the first version with checksums, zstd, numbers of fixed width and short texts, of
which a row has one, a list, or a list of lists.
Everything else, unusual or damaged, is left to Arrow, column by column (`None`), which then reads it or says what is wrong.

Letters: L levels, N lists of one depth, R rows (requests), V values.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.warehouse.pages import page_kernels as k
from roostream.warehouse.pages.page_footer import Chunks, ColumnChunk, Leaf, leaves
from roostream.wire.columnar import Form

_ZSTD = pa.Codec("zstd")
_DATA, _DICTIONARY = 0, 2  # types of a page
_PLAIN, _PLAIN_DICTIONARY, _RLE, _DELTA, _RLE_DICTIONARY, _SPLIT = 0, 2, 3, 5, 8, 9  # encodings
_SIZE = struct.Struct("<I")
_MAX_LEVELS = 1 << 28  # of a column in a row group: more than a schema's caps let it have
_MAX_SEEN = 6  # that of requests, of candidates and their ids, of a sequence, of two other features


class PagedFile(Protocol):
    """A file's bytes, as `RangedFile` gives them."""

    def seek(self, offset: int, /) -> int: ...
    def read_buffer(self, size: int, /) -> memoryview: ...


class FoundLists(NamedTuple):
    lengths_N: np.ndarray  # int32
    present_N: np.ndarray  # bool


class PagedColumn(NamedTuple):
    values: np.ndarray
    lists: tuple[FoundLists, ...]  # as many as the column is deep, those of rows first


class _SeenLevels(NamedTuple):
    """Of the only page of a column of a row group: the bytes of its levels, and what they mean."""

    bytes: bytes
    leaf: tuple[int, int]  # how deep, and the level of a value
    lists: tuple[FoundLists, ...]
    values: int


class ParquetPage(NamedTuple):
    kind: int
    encoding: int
    levels: int  # of a dictionary: its values
    data: np.ndarray  # uint8


class LeftToArrow(Exception):
    """Arrow is to decide."""


class PageReader:
    """Columns of some row groups, one after the other. What candidates have has the same levels in every column, and so have a
    sequence's columns: alike bytes mean alike lists and aren't decoded again. Not thread-safe."""

    def __init__(self, source: PagedFile, chunks: Chunks, groups: Sequence[int]) -> None:
        self._source, self._chunks, self._groups = source, chunks, groups
        self._rows = [chunks.rows(group) for group in groups]
        self._seen: list[list[_SeenLevels]] = [[] for _ in groups]  # of each group, newest first

    def read(self, leaf: Leaf, form: Form) -> PagedColumn | None:
        """A column; None where Arrow is to decide.

        Raises:
            UnavailableError: its bytes can't be read now. CheckpointError: the file ends before.
        """
        chunks = [self._chunks.at(group, leaf.at) for group in self._groups]
        if not chunks or not leaf.fits(form) or not all(chunk.is_zstd for chunk in chunks):
            return None
        try:
            parts = [self._part(n, leaf, chunk, np.dtype(form.dtype)) for n, chunk in enumerate(chunks)]
        except LeftToArrow:
            return None
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _part(self, n: int, leaf: Leaf, chunk: ColumnChunk, dtype: np.dtype[Any]) -> PagedColumn:
        """Of one row group, the n-th of those asked for."""
        rows, total = self._rows[n], chunk.levels
        if not 0 <= rows <= total <= _MAX_LEVELS:
            raise LeftToArrow
        values_V, levels, filled, known, found = np.empty(total, dtype=dtype), 0, 0, None, None
        for page in _pages(self._source, chunk):
            if page.kind == _DICTIONARY:
                known = texts_of(page, dtype) if leaf.dtype is np.bytes_ else _dictionary(page, leaf)
                continue
            levels += page.levels
            if levels > total:
                raise LeftToArrow
            if page.levels == total:
                seen = self._only(n, page, leaf)
                _values(page, len(seen.bytes), known, values_V[: seen.values])
                return PagedColumn(values_V[: seen.values], seen.lists)
            found = found or _Growing(leaf, rows, total)
            end, count = found.add(page)
            _values(page, end, known, values_V[filled : filled + count])
            filled += count
        if levels != total or found is None:
            raise LeftToArrow
        return PagedColumn(values_V[:filled], found.whole())

    def _only(self, n: int, page: ParquetPage, leaf: Leaf) -> _SeenLevels:
        """What the levels of a column's only page say, or said of an earlier column."""
        seen, own = self._seen[n], page.data[: _ends(page, leaf)[-1]].tobytes()
        for at, one in enumerate(seen):
            if one.leaf == (leaf.depth, leaf.full) and one.bytes == own:
                seen.insert(0, seen.pop(at))
                return one
        found = _Growing(leaf, self._rows[n], page.levels)
        _, values = found.add(page)
        seen.insert(0, _SeenLevels(own, (leaf.depth, leaf.full), found.whole(), values))
        del seen[_MAX_SEEN:]
        return seen[0]


class _Growing:
    """The lists of a column, as its pages tell of them."""

    def __init__(self, leaf: Leaf, rows: int, total: int) -> None:
        """`total`: levels, so more lists than there can be."""
        self.leaf, self._rows = leaf, rows
        self._begun_2 = np.zeros(2, dtype=np.int64)  # rows, and lists within them
        sizes = (rows, total)[: leaf.depth]
        self._lists = tuple(
            FoundLists(np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.bool_)) for size in sizes
        )

    def add(self, page: ParquetPage) -> tuple[int, int]:
        """Where the page's levels end, and its values."""
        leaf, ends = self.leaf, _ends(page, self.leaf)
        decoded = [np.empty(page.levels, dtype=np.uint8) for _ in ends[1:]]
        for n, width in enumerate(leaf.widths):
            if k.runs(page.data, ends[n] + 4, ends[n + 1], width, decoded[n]) < 0:
                raise LeftToArrow
        if leaf.depth == 0:
            values = page.levels if not decoded or bool((decoded[0] == leaf.full).all()) else -1
            self._begun_2[0] += page.levels
        elif leaf.depth == 1:
            values = k.lists(*decoded, leaf.full, self._begun_2, *self._lists[0])
        else:
            values = k.lists_of_lists(*decoded, self._begun_2, *self._lists[0], *self._lists[1])
        if values < 0:
            raise LeftToArrow
        return ends[-1], values

    def whole(self) -> tuple[FoundLists, ...]:
        """All of them, once every page was told."""
        if self._begun_2[0] != self._rows:
            raise LeftToArrow
        if self.leaf.depth < 2:
            return self._lists
        return self._lists[0], FoundLists(*(array[: self._begun_2[1]] for array in self._lists[1]))


def _joined(parts: Sequence[PagedColumn]) -> PagedColumn:
    """Of several row groups behind each other."""
    lists = [
        FoundLists(*map(np.concatenate, zip(*its, strict=True)))
        for its in zip(*(part.lists for part in parts), strict=True)
    ]
    return PagedColumn(np.concatenate([part.values for part in parts]), tuple(lists))


def _pages(source: PagedFile, chunk: ColumnChunk) -> Iterator[ParquetPage]:
    """Those of a column of one row group, each held against its checksum."""
    source.seek(chunk.place.start)
    whole = source.read_buffer(chunk.place.end - chunk.place.start)
    buf = np.frombuffer(whole, dtype=np.uint8)
    told, at = np.empty(k.FIELDS, dtype=np.int64), 0
    while at < len(buf):
        at = k.header(buf, at, len(buf), told)
        kind, unpacked, packed, crc, levels, encoding, defined_by, repeated_by = told.tolist()
        if at < 0 or not 0 <= packed <= len(buf) - at or not 0 <= unpacked <= chunk.unpacked or levels < 0:
            raise LeftToArrow
        if kind not in (_DATA, _DICTIONARY) or (kind == _DATA and (defined_by, repeated_by) != (_RLE, _RLE)):
            raise LeftToArrow
        page = whole[at : at + packed]
        if crc == -1 or zlib.crc32(page) != crc & 0xFFFFFFFF:
            raise LeftToArrow
        try:
            data = _ZSTD.decompress(page, decompressed_size=unpacked)
        except (OSError, pa.ArrowException):
            raise LeftToArrow from None
        yield ParquetPage(kind, encoding, levels, np.frombuffer(data, dtype=np.uint8))
        at += packed


def _dictionary(page: ParquetPage, leaf: Leaf) -> np.ndarray:
    if (
        page.encoding not in (_PLAIN, _PLAIN_DICTIONARY)
        or len(page.data) != page.levels * leaf.dtype().itemsize
    ):
        raise LeftToArrow
    return page.data.view(leaf.dtype)


def texts_of(page: ParquetPage, dtype: np.dtype[Any]) -> np.ndarray:
    """A dictionary's texts, cut to what `dtype` holds."""
    if page.encoding not in (_PLAIN, _PLAIN_DICTIONARY):
        raise LeftToArrow
    data, at, texts = page.data.tobytes(), 0, list[bytes]()
    while at < len(data):
        start = at + 4
        at = start + int.from_bytes(data[at:start], "little")
        texts.append(data[start:at])
    try:
        for text in texts:
            text.decode()
    except UnicodeDecodeError:
        raise LeftToArrow from None
    if at != len(data) or len(texts) != page.levels:
        raise LeftToArrow
    return np.array(texts, dtype=dtype)


def _ends(page: ParquetPage, leaf: Leaf) -> list[int]:
    """0, and where the levels of each width end."""
    ends = [0]
    for _ in leaf.widths:
        if ends[-1] + 4 > len(page.data):
            raise LeftToArrow
        ends.append(ends[-1] + 4 + int(_SIZE.unpack_from(page.data.data, ends[-1])[0]))
    if ends[-1] > len(page.data):
        raise LeftToArrow
    return ends


def _values(page: ParquetPage, at: int, known: np.ndarray | None, out_V: np.ndarray) -> None:
    data, end, done = page.data, len(page.data), -1
    is_text = out_V.dtype.kind == "S"
    if page.encoding == _PLAIN and end - at == out_V.nbytes and not is_text:
        out_V.view(np.uint8)[:] = data[at:]
        done = 0
    elif page.encoding in (_RLE_DICTIONARY, _PLAIN_DICTIONARY) and known is not None and at < end:
        index_V = np.empty(len(out_V), dtype=np.uint32)
        if k.runs(data, at + 1, end, int(data[at]), index_V) >= 0:
            done = texts_at(index_V, known, out_V) if is_text else k.looked_up(index_V, known, out_V)
    elif page.encoding == _SPLIT and out_V.dtype == np.float32:
        done = k.joined(data, at, end, out_V.view(np.uint32))
    elif page.encoding == _DELTA and out_V.dtype == np.int64:
        done = k.summed(data, at, end, out_V)
    if done < 0:
        raise LeftToArrow


def texts_at(index_V: np.ndarray, known: np.ndarray, out_V: np.ndarray) -> int:
    """As `looked_up`, of texts."""
    if len(index_V) and int(index_V.max()) >= len(known):
        return -1
    out_V[:] = known[index_V]
    return 0


def precompile() -> None:
    """Compile every kernel into numba's cache."""
    forms = {name: Form("request", "number", kind, is_list=True) for name, kind in _WARMED.items()}
    arrays = [
        pa.ListArray.from_arrays(pa.array([0, 3]), pa.array(np.array([1, 2, 3], dtype=kind)))
        for kind in _WARMED.values()
    ]
    forms["deep"] = Form("candidate", "id", "i8", is_list=True)
    arrays.append(pa.ListArray.from_arrays(pa.array([0, 1]), arrays[0]))
    encodings = {"float.list.element": "BYTE_STREAM_SPLIT", "time.list.element": "DELTA_BINARY_PACKED"}
    dictionaries = [f"{name}.list.element" for name in ("id", "number")]
    out = pa.BufferOutputStream()
    options = {"use_dictionary": dictionaries, "column_encoding": encodings, "write_page_checksum": True}
    pq.write_table(pa.table(arrays, list(forms)), out, compression="zstd", **options)
    footer, source = pq.read_metadata(pa.BufferReader(out.getvalue())), _Bytes(out.getvalue().to_pybytes())
    for name, leaf in leaves(footer).items():
        found = PageReader(source, Chunks(footer), [0]).read(leaf, forms[name])
        assert found is not None and found.values.tolist() == [1, 2, 3], name


_WARMED = {"id": "i8", "number": "i4", "float": "f4", "time": "i8", "plain": "i8"}


class _Bytes(io.BytesIO):
    def read_buffer(self, size: int = -1) -> memoryview:
        return memoryview(self.read(size))

"""Columns from pages are what Arrow reads, bit for bit, or are left to it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numba.core.registry import CPUDispatcher

from roostream.warehouse.pages import page_kernels
from roostream.warehouse.pages.page_footer import Chunks, Leaf, leaves
from roostream.warehouse.pages.page_reader import (
    FoundLists,
    LeftToArrow,
    PagedColumn,
    PageReader,
    ParquetPage,
    precompile,
    texts_at,
    texts_of,
)
from roostream.wire.columnar import Form
from tests.warehouse.sample_cases import same_bits

SPLIT = {"float.list.element": "BYTE_STREAM_SPLIT", "score": "BYTE_STREAM_SPLIT"}
DELTA = dict.fromkeys(("time.list.element", "far.list.element", "close"), "DELTA_BINARY_PACKED")
IDS = [*(f"{name}.list.element" for name in ("id", "number", "same", "deep.list.element")), "surface"]
OURS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": IDS,
    "column_encoding": {**SPLIT, **DELTA},
    "write_page_checksum": True,
    "write_statistics": ["close"],
}
FAR = "far"
"""Differences of more than 56 bits: Arrow's."""


class Bytes(io.BytesIO):
    def read_buffer(self, size: int = -1) -> memoryview:
        return memoryview(self.read(size))


def table(rows: int, seed: int, *, nullable: bool) -> pa.Table:
    """Lists of 0 to 40 values, some of them missing; two columns with the same lengths; lists of lists; and a value a row.
    `nullable`: values could be null."""
    rng = np.random.default_rng(seed)
    lengths_N, missing_N = rng.integers(0, 40, rows), rng.random(rows) < 0.1
    lengths_N[missing_N] = 0

    def lists(values: np.ndarray, missing: np.ndarray | None = missing_N) -> pa.Array:
        kind = pa.list_(pa.field("element", pa.array(values[:0]).type, nullable=nullable))
        offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(values), kind, mask=None if missing is None else pa.array(missing)
        )

    total = int(lengths_N.sum())
    floats = rng.normal(size=total).astype(np.float32)
    floats[rng.random(total) < 0.2] = np.uint32(0x7FC12345).view(np.float32)
    columns = {
        "id": lists(rng.integers(-(2**63), 2**63 - 1, 700)[rng.integers(0, 700, total)]),
        "number": lists(rng.integers(-(2**31), 2**31 - 1, 9).astype(np.int32)[rng.integers(0, 9, total)]),
        "same": lists(np.full(total, 7, dtype=np.int64)),
        "float": lists(floats),
        "time": lists(1_700_000_000_000 + np.cumsum(rng.integers(-1000, 2000, total)), None),
        "far": lists(np.cumsum(rng.integers(-(2**62), 2**62, total))),
        "plain": lists(rng.integers(-9, 9, total)),
        "position": lists(np.arange(total, dtype=np.int32), None),
        "deep": deep(rng, rows),
        "close": pa.array(1_700_000_000_000 + np.cumsum(rng.integers(0, 2000, rows))),
        "score": pa.array(rng.normal(size=rows).astype(np.float32)),
        "key": pa.array(rng.integers(-(2**63), 2**63 - 1, rows)),
        "surface": pa.array(
            [["", "front page", "ø" * 40, "x\0", "z" * 63 + "ø"][n] for n in rng.integers(0, 5, rows)]
        ),
    }
    return pa.table(list(columns.values()), list(columns))


def deep(rng: np.random.Generator, rows: int) -> pa.Array:
    """Lists of 0 to 9 lists of 0 to 3 values, of both some missing."""
    outer, gone = rng.integers(0, 9, rows), rng.random(rows) < 0.1
    outer[gone] = 0
    inner, none = rng.integers(0, 3, outer.sum()), rng.random(outer.sum()) < 0.2
    inner[none] = 0
    first = pa.ListArray.from_arrays(
        starts(inner), pa.array(rng.integers(0, 99, inner.sum())), mask=pa.array(none)
    )
    return pa.ListArray.from_arrays(starts(outer), first, mask=pa.array(gone))


def starts(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def written(of: pa.Table, **options: Any) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(of, out, **{"row_group_size": 300, **OURS, **options})
    return out.getvalue().to_pybytes()


def form(leaf: Leaf) -> Form:
    """A column's, as deep as it is."""
    dtype = "S64" if leaf.dtype is np.bytes_ else np.dtype(leaf.dtype).str[1:]
    return Form("candidate" if leaf.depth == 2 else "request", "number", dtype, is_list=leaf.depth > 0)


def by_pages(data: bytes, groups: list[int], footer: Any = None) -> dict[str, PagedColumn | None]:
    footer = footer or pq.read_metadata(pa.BufferReader(data))
    reader = PageReader(Bytes(data), Chunks(footer), groups)
    return {name: reader.read(leaf, form(leaf)) for name, leaf in leaves(footer).items()}


def by_arrow(data: bytes, groups: list[int]) -> dict[str, PagedColumn]:
    found = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read_row_groups(
        groups, use_threads=False
    )
    out = {}
    for name in found.column_names:
        array, lists = found[name].combine_chunks(), list[FoundLists]()
        array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
        while pa.types.is_list(array.type):
            lengths = np.diff(array.offsets.to_numpy()).astype(np.int32)
            lists.append(FoundLists(lengths, array.is_valid().to_numpy(zero_copy_only=False)))
            array = array.values.slice(array.offsets[0].as_py(), int(lengths.sum()))
        if pa.types.is_string(array.type):
            values = np.array([text.encode() for text in array.to_pylist()], dtype="S64")
        else:
            values = array.to_numpy(zero_copy_only=False)
        out[name] = PagedColumn(values, tuple(lists))
    return out


def same(a: PagedColumn, b: PagedColumn) -> bool:
    pairs = [
        (a.values, b.values),
        *((x, y) for its in zip(a.lists, b.lists, strict=True) for x, y in zip(*its, strict=True)),
    ]
    return all(same_bits(x, y) for x, y in pairs)


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("page_bytes", [1 << 20, 2000])
def test_columns_are_what_arrow_reads_in_every_bit(nullable: bool, page_bytes: int) -> None:
    data = written(table(1000, page_bytes, nullable=nullable), data_page_size=page_bytes, write_batch_size=64)
    for groups in ([0], [1, 3], [0, 1, 2, 3]):
        found, expected = by_pages(data, groups), by_arrow(data, groups)
        assert list(found) == list(expected)
        for name, column in found.items():
            if name == FAR:
                assert column is None
            else:
                assert column is not None and same(column, expected[name]), (name, groups)


def test_columns_with_the_same_levels_share_their_lists() -> None:
    found = by_pages(written(table(300, 1, nullable=False)), [0])
    of = {
        name: column.lists[0].lengths_N
        for name, column in found.items()
        if column is not None and column.lists
    }
    assert of["id"] is of["float"] is of["same"] and of["time"] is of["position"] is not of["id"]


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none"},
        {"compression": "lz4"},
        {"write_page_checksum": False},
        {"data_page_version": "2.0"},
    ],
    ids=str,
)
def test_what_our_writers_do_not_write_is_left_to_arrow(options: dict[str, Any]) -> None:
    assert set(by_pages(written(table(300, 1, nullable=False), **options), [0]).values()) == {None}


def test_nulls_are_left_to_arrow_and_other_shapes_are_not_asked() -> None:
    of = pa.table(
        {
            "null": [[1, None], [2]],
            "deep": [[[1]], [[2, None], [3]]],
            "flat": [1, None],
            "double": [1.0, 2.0],
            "texts": [["a"], []],
            "deeper": [[[[1]]], []],
            "parts": [{"a": 1}, {"a": 2}],
            "when": pa.array([1, 2], pa.timestamp("ms")),
            "ids": [[1], []],
        }
    )
    data = written(of, use_dictionary=False, column_encoding=None)
    left = {name: column is None for name, column in by_pages(data, [0]).items()}
    assert left == {"null": True, "deep": True, "flat": True, "ids": False}


def test_a_column_of_another_form_than_was_asked_for_is_left_to_arrow() -> None:
    data = written(table(300, 1, nullable=False))
    footer = pq.read_metadata(pa.BufferReader(data))
    reader, its = PageReader(Bytes(data), Chunks(footer), [0]), leaves(footer)
    assert reader.read(its["id"], Form("candidate", "id", "i8")) is not None
    for name, other in (
        ("id", Form("request", "id", "i8")),
        ("id", Form("candidate", "id", "i4")),
        ("deep", Form("request", "id", "i8", is_list=True)),
        ("surface", Form("request", "text", "O")),
        ("surface", Form("request", "number", "bytes")),
        ("key", Form("request", "text", "S64")),
    ):
        assert reader.read(its[name], other) is None, (name, other)
    assert PageReader(Bytes(data), Chunks(footer), []).read(its["id"], form(its["id"])) is None


def test_texts_without_a_dictionary_or_not_in_utf8_are_left_to_arrow() -> None:
    for texts, options in (
        (
            pa.array(["a" * 60, "b" * 60]),
            {"use_dictionary": False},
        ),  # 64 bytes each with their length, as S64 has
        (
            pa.array([b"\xc3", b"\xb8"]).view(pa.string()),
            {"use_dictionary": ["surface"]},
        ),  # together they would be one letter
    ):
        data = written(pa.table({"surface": texts}), column_encoding=None, **options)
        assert by_pages(data, [0]) == {"surface": None}


def test_dictionaries_of_texts_are_taken_whole_or_not_at_all() -> None:
    def page(data: bytes, levels: int, encoding: int = 0) -> ParquetPage:
        return ParquetPage(2, encoding, levels, np.frombuffer(data, dtype=np.uint8))

    two, kind = b"\x01\0\0\0a\x03\0\0\0bcd", np.dtype("S2")
    assert texts_of(page(two, 2), kind).tolist() == [b"a", b"bc"], "what is longer is cut"
    for data, levels, encoding in (
        (two, 3, 0),
        (two, 2, 8),
        (two[:-1], 2, 0),
        (two + b"\0", 2, 0),
        (b"\xff" * 4, 1, 0),
    ):
        with pytest.raises(LeftToArrow):
            texts_of(page(data, levels, encoding), kind)
    known, out = np.array([b"a", b"b"]), np.empty(2, dtype="S1")
    assert texts_at(np.array([1, 0], dtype=np.uint32), known, out) == 0 and out.tolist() == [b"b", b"a"]
    assert texts_at(np.array([1, 2], dtype=np.uint32), known, out) == -1, "more than there are"
    assert texts_at(np.empty(0, dtype=np.uint32), known[:0], out[:0]) == 0


def test_a_byte_that_changed_is_refused_or_changes_nothing() -> None:
    """Whatever a damaged page says, it isn't taken: it is left to Arrow, which refuses it by its checksum."""
    data = written(table(120, 3, nullable=False), data_page_size=500, write_batch_size=16)
    footer, expected = pq.read_metadata(pa.BufferReader(data)), by_arrow(data, [0])
    end, rng, left = len(data) - footer.serialized_size - 8, np.random.default_rng(4), 0
    for at in rng.choice(end, 400, replace=False).tolist():
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        for name, column in by_pages(bytes(bad), [0], footer).items():
            left += column is None
            assert column is None or same(column, expected[name]), (at, name)
    assert left > 400 + 200, f"{FAR!r} each time, and mostly the column that was hit"


def test_kernels_refuse_what_does_not_fit() -> None:
    rng, told = np.random.default_rng(5), np.empty(page_kernels.FIELDS, dtype=np.int64)
    for size in range(40):
        for _ in range(20):
            buf = rng.integers(0, 256, size).astype(np.uint8)
            assert -1 <= page_kernels.header(buf, 0, size, told) <= size
            out = np.empty(50, dtype=np.uint32)
            assert -1 <= page_kernels.runs(buf, 0, size, int(rng.integers(0, 40)), out) <= size
            assert page_kernels.summed(buf, 0, size, np.empty(50, dtype=np.int64)) in (-1, 0)
    levels = np.array([0, 1, 0], dtype=np.uint8), np.array([2, 2, 2], dtype=np.uint8)
    rows, begun = (np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_)), np.zeros(2, dtype=np.int64)
    assert page_kernels.lists(*levels, 2, begun, *rows) == -1, "more rows than there are"
    assert page_kernels.lists(np.ones(1, np.uint8), np.full(1, 2, np.uint8), 2, begun, *rows) == -1, (
        "a list that never began"
    )
    three = np.array([0, 2, 3], dtype=np.uint32)
    assert page_kernels.looked_up(three, np.zeros(3, np.int64), np.empty(3, np.int64)) == -1
    assert page_kernels.joined(np.zeros(9, np.uint8), 0, 9, np.empty(2, np.uint32)) == -1


@pytest.mark.parametrize(
    ("repeated", "defined", "values"),
    [
        ([0, 2, 1], [5, 5, 3], 2),
        ([0, 1], [2, 5], 1),
        ([0], [1], 0),
        ([0, 0], [5, 5], -1),  # more rows than there are
        ([0, 1, 1, 1], [5, 5, 5, 5], -1),  # more lists than there are
        ([1], [5], -1),  # a list before any row
        ([2], [5], -1),  # a value before any list
        ([0, 1], [1, 5], -1),  # a list in an empty one
        ([0, 2], [3, 5], -1),  # a value more of an empty list
        ([0, 2], [5, 3], -1),  # an empty list within a list
        ([0, 1], [5, 1], -1),  # an empty row within a row
        ([0], [4], -1),  # a null
        ([0], [6], -1),
        ([0, 3], [5, 5], -1),
    ],
)
def test_lists_of_lists_are_counted_or_refused(repeated: list[int], defined: list[int], values: int) -> None:
    """One row of three lists at most."""
    rows = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_)
    lists, begun = (np.zeros(3, dtype=np.int32), np.zeros(3, dtype=np.bool_)), np.zeros(2, dtype=np.int64)
    levels = np.array(repeated, dtype=np.uint8), np.array(defined, dtype=np.uint8)
    assert page_kernels.lists_of_lists(*levels, begun, *rows, *lists) == values


def test_warming_up_compiles_all_that_reading_needs() -> None:
    precompile()
    kernels = {name: k for name, k in vars(page_kernels).items() if isinstance(k, CPUDispatcher)}
    before = {name: len(k.signatures) for name, k in kernels.items()}
    by_pages(written(table(300, 1, nullable=False)), [0])
    assert sum(before.values()) and {name: len(k.signatures) for name, k in kernels.items()} == before

"""Columns from pages are what Arrow reads, bit for bit, or are left to it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numba.core.registry import CPUDispatcher

from roo.columnar import FlatColumn
from tests.warehouse.sample_cases import same_bits
from warehouse.lists import page_kernels
from warehouse.lists.page_reader import PageReader, leaves, warm

SPLIT = {"float.list.element": "BYTE_STREAM_SPLIT"}
DELTA = {"time.list.element": "DELTA_BINARY_PACKED", "far.list.element": "DELTA_BINARY_PACKED"}
IDS = [f"{name}.list.element" for name in ("id", "number", "same")]
OURS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": IDS,
    "column_encoding": {**SPLIT, **DELTA},
    "write_page_checksum": True,
}


class Bytes(io.BytesIO):
    def read_buffer(self, size: int = -1) -> memoryview:
        return memoryview(self.read(size))


def table(rows: int, seed: int, *, nullable: bool) -> pa.Table:
    """Lists of 0 to 40 values, some of them missing; two columns with the same lengths. `nullable`: values could be null."""
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
    }
    return pa.table(list(columns.values()), list(columns))


def written(of: pa.Table, **options: Any) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(of, out, **{"row_group_size": 300, **OURS, **options})
    return out.getvalue().to_pybytes()


def by_pages(data: bytes, groups: list[int]) -> dict[str, FlatColumn | None]:
    footer = pq.read_metadata(pa.BufferReader(data))
    reader = PageReader(Bytes(data), footer, groups)
    return {name: reader.read(leaf) for name, leaf in leaves(footer).items()}


def by_arrow(data: bytes, groups: list[int]) -> dict[str, FlatColumn]:
    found = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read_row_groups(groups, use_threads=False)
    out = {}
    for name in found.column_names:
        column = found[name].combine_chunks()
        array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        lengths = np.diff(array.offsets.to_numpy()).astype(np.int32)
        values = array.values.slice(array.offsets[0].as_py(), int(lengths.sum()))
        out[name] = FlatColumn(values.to_numpy(zero_copy_only=False), lengths, array.is_valid().to_numpy(zero_copy_only=False))
    return out


def same(a: FlatColumn, b: FlatColumn) -> bool:
    return all(x is not None and y is not None and same_bits(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("page_bytes", [1 << 20, 2000])
def test_columns_are_what_arrow_reads_in_every_bit(nullable: bool, page_bytes: int) -> None:
    data = written(table(1000, page_bytes, nullable=nullable), data_page_size=page_bytes, write_batch_size=64)
    for groups in ([0], [1, 3], [0, 1, 2, 3]):
        found, expected = by_pages(data, groups), by_arrow(data, groups)
        assert list(found) == list(expected)
        for name, column in found.items():
            if name == "far":  # differences of more than 56 bits
                assert column is None
            else:
                assert column is not None and same(column, expected[name]), (name, groups)


def test_columns_with_the_same_levels_share_their_lists() -> None:
    found = by_pages(written(table(300, 1, nullable=False)), [0])
    of = {name: column.lengths for name, column in found.items() if column is not None}
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


def test_a_null_among_values_is_left_to_arrow_and_other_shapes_are_not_asked() -> None:
    of = pa.table({"null": [[1, None], [2]], "text": [["a"], []], "plain": [1, 2], "deep": [[[1]], [[2], [3]]], "ids": [[1], []]})
    data = written(of, use_dictionary=False, column_encoding=None)
    assert {name: column is None for name, column in by_pages(data, [0]).items()} == {"null": True, "ids": False}


def test_a_byte_that_changed_is_refused_or_changes_nothing() -> None:
    """Whatever a damaged page says, it isn't taken: it is left to Arrow, which refuses it by its checksum."""
    data = written(table(120, 3, nullable=False), data_page_size=500, write_batch_size=16)
    footer, expected = pq.read_metadata(pa.BufferReader(data)), by_arrow(data, [0])
    end, rng, left = len(data) - footer.serialized_size - 8, np.random.default_rng(4), 0
    for at in rng.choice(end, 400, replace=False).tolist():
        bad = bytearray(data)
        bad[at] ^= 1 << int(rng.integers(8))
        reader = PageReader(Bytes(bytes(bad)), footer, [0])
        for name, leaf in leaves(footer).items():
            column = reader.read(leaf)
            left += column is None
            assert column is None or same(column, expected[name]), (at, name)
    assert left > 400 + 200, "'far' each time, and mostly the column that was hit"


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
    rows = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.bool_)
    assert page_kernels.lists(*levels, 2, 0, *rows)[0] == -1, "more rows than there are"
    assert page_kernels.lists(np.ones(1, np.uint8), np.full(1, 2, np.uint8), 2, 0, *rows)[0] == -1, "a list that never began"
    three = np.array([0, 2, 3], dtype=np.uint32)
    assert page_kernels.looked_up(three, np.zeros(3, np.int64), np.empty(3, np.int64)) == -1
    assert page_kernels.joined(np.zeros(9, np.uint8), 0, 9, np.empty(2, np.uint32)) == -1


def test_warming_up_compiles_all_that_reading_needs() -> None:
    warm()
    kernels = {name: k for name, k in vars(page_kernels).items() if isinstance(k, CPUDispatcher)}
    before = {name: len(k.signatures) for name, k in kernels.items()}
    by_pages(written(table(300, 1, nullable=False)), [0])
    assert sum(before.values()) and {name: len(k.signatures) for name, k in kernels.items()} == before

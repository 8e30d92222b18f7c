"""What a file's footer says of its columns: which could be read from their pages, and where each lies in each row group."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from roostream.warehouse.byte_ranges import ByteRange
from roostream.wire.columnar import Form

_TYPES = {"INT64": np.int64, "INT32": np.int32, "FLOAT": np.float32}
_FULL = ((0, 1), (2, 3), (5,))  # of each depth: levels of a value that are understood


class Leaf(NamedTuple):
    """A column of a file."""

    at: int  # among the file's leaves
    dtype: Any  # np.bytes_ of texts
    depth: int  # 0: a value a row; 1: a list of them; 2: a list of lists
    full: int  # level of a value
    widths: tuple[
        int, ...
    ]  # bits of each kind of level, of lists that go on and of what is there; none where all is there

    def fits(self, form: Form) -> bool:
        """Whether it is what a column of this form is."""
        dtype = np.dtype(form.dtype)
        is_its = dtype.kind == "S" and dtype.itemsize > 0 if self.dtype is np.bytes_ else dtype == self.dtype
        return is_its and self.depth == form.is_list + (form.of == "candidate")


class ColumnChunk(NamedTuple):
    """A column of one row group."""

    place: ByteRange
    levels: int  # values, missing ones among them
    unpacked: int  # bytes
    is_zstd: bool


class Chunks:
    """Those of a file, by row group and leaf. Each is asked for once, since Arrow makes objects for it."""

    def __init__(self, footer: Any) -> None:
        self._footer, self._groups = footer, dict[int, Any]()
        self._known: dict[tuple[int, int], ColumnChunk] = {}

    def rows(self, group: int) -> int:
        return int(self._group(group).num_rows)

    def at(self, group: int, leaf: int) -> ColumnChunk:
        if (found := self._known.get((group, leaf))) is None:
            its = self._group(group).column(leaf)
            start = its.dictionary_page_offset or its.data_page_offset
            place = ByteRange(start, start + its.total_compressed_size)
            found = ColumnChunk(place, its.num_values, its.total_uncompressed_size, its.compression == "ZSTD")
            self._known[group, leaf] = found
        return found

    def _group(self, group: int) -> Any:
        if group not in self._groups:
            self._groups[group] = self._footer.row_group(group)
        return self._groups[group]


def leaves(footer: Any) -> dict[str, Leaf]:
    """The columns of a file that could be read here, by their names."""
    out = {}
    for at in range(footer.num_columns):
        leaf = footer.schema.column(at)
        depth, full, kind = leaf.max_repetition_level, leaf.max_definition_level, leaf.physical_type
        name, *rest = leaf.path.split(".")
        if (
            depth >= len(_FULL)
            or full not in _FULL[depth]
            or rest not in (["list", "element"] * depth, ["list", "item"] * depth)
        ):
            continue
        logical, widths = (
            leaf.logical_type.type,
            tuple(level.bit_length() for level in (depth, full) if level),
        )
        if kind in _TYPES and logical == "NONE":
            out[name] = Leaf(at, _TYPES[kind], depth, full, widths)
        elif kind == "BYTE_ARRAY" and logical == "STRING" and depth == 0:
            out[name] = Leaf(at, np.bytes_, depth, full, widths)
    return out

"""Fills missing features of a block in its arrays, without decoding the present ones into values.

The result equals `roostream.wire.block.ro_columns` or `nro_columns` of present and filled values together;
tests compare.

Letters: N rows, F floats, G floats to fill, K list features, H list features to fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Feature, Schema
from roostream.wire.block import NO_COLUMNS, Columns, Side, entry_of, trim_missing


class _Fillable(NamedTuple):
    """A feature that can be filled."""

    position: int  # among the floats, or the lists, of its side
    feature: Feature
    source: str  # name of the value that fills it


class _NewFloats(NamedTuple):
    """Values of floats to fill."""

    value_GN: np.ndarray  # float64
    index_G: np.ndarray  # int64: among the floats of the side


class MissingFeatures:
    """Finds and fills the missing features of one side of a schema. `sources`: feature → name of the value
    that fills it."""

    def __init__(self, schema: Schema, side: Side, sources: Mapping[str, str]) -> None:
        self.schema, self.side = schema, side
        floats, lists = schema.floats(side), schema.lists(side)
        self._num_floats, self._num_lists = len(floats), len(lists)
        self._floats = _fillable(floats, sources)
        self._lists = _fillable(lists, sources)
        self._float_index = np.array([f.position for f in self._floats], dtype=np.int64)
        self._list_index = np.array([f.position for f in self._lists], dtype=np.int64)
        self._is_ids = np.array([f.kind == "ids" for f in lists], dtype=np.bool_)
        streams = [(1 + len(f.id_columns), int(f.kind == "weighted_ids"), len(f.time_columns)) for f in lists]
        self._streams_K3 = np.array(streams, dtype=np.int64).reshape(-1, 3)

    def any_missing(self, columns: Columns, num_rows: int) -> bool:
        """Whether some row of checked columns misses a feature that can be filled."""
        if not (self._floats or self._lists) or num_rows == 0:
            return False
        if not any(map(len, columns)):
            return True
        sizes = num_rows, self._num_floats, self._num_lists
        return bool(some_missing(columns.floats, columns.missing, sizes, self._float_index, self._list_index))

    def fill(self, columns: Columns, num_rows: int, values: Mapping[str, Any]) -> Columns | None:
        """The columns with missing features taken from `values`, by source, as `encode_ro` and `encode_nro`
        take them.

        None if that needs decoding: candidates have lists of several ids, or a value does not fit a block.

        Raises:
            WireError: a value is not of its feature's kind.
        """
        floats = self._new_floats(num_rows, values)
        if floats is None:
            return None
        if self.side == "ro":
            return self._fill_request(columns, floats, values)
        return self._fill_candidates(columns, num_rows, floats, values)

    def _new_floats(self, num_rows: int, values: Mapping[str, Any]) -> _NewFloats | None:
        """None if a value is neither a number nor an array of one number for each row."""
        given = [(f.position, value) for f in self._floats if (value := values.get(f.source)) is not None]
        if not given:
            return _NO_FLOATS
        if not all(self._is_plain(value, num_rows) for _, value in given):
            return None
        new = [value for _, value in given]
        flat = np.array(new, np.float64) if self.side == "ro" else np.concatenate(new, dtype=np.float64)
        return _NewFloats(flat.reshape(-1, num_rows), np.array([index for index, _ in given], np.int64))

    def _is_plain(self, value: Any, num_rows: int) -> bool:
        if self.side == "ro":
            return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        return isinstance(value, np.ndarray) and value.shape == (num_rows,) and value.dtype.kind in "fiu"

    def _fill_request(self, columns: Columns, new: _NewFloats, values: Mapping[str, Any]) -> Columns | None:
        floats_1F = np.empty((1, self._num_floats), np.float32)
        if not fill_floats(columns.floats, new.value_GN, new.index_G, floats_1F):
            return None
        all_missing = (1 << self._num_lists) - 1  # bit k for list k, as in `missing`
        is_blank = not any(map(len, columns))
        missing = (
            all_missing if is_blank else int.from_bytes(columns.missing.tobytes(), "little") & all_missing
        )
        lengths_K = np.zeros(self._num_lists, np.uint32) if is_blank else columns.lengths.copy()
        streams = [columns.ids, columns.weights, columns.times]
        for index, feature, source in self._lists:
            if not missing >> index & 1 or (value := values.get(source)) is None:
                continue
            entry = entry_of(feature, value)
            if entry.length > self.schema.limits.max_list:
                return None
            ids: np.ndarray = np.array([*chain.from_iterable(entry.ids)], dtype=np.uint64).view(np.int64)
            weights = np.array(entry.weights, np.float32)
            times = np.array([*chain.from_iterable(entry.times)], np.int64)
            start_3 = (lengths_K[:index].astype(np.int64) @ self._streams_K3[:index]).tolist()
            added: tuple[np.ndarray, ...] = (ids, weights, times)
            for s, (start, stream) in enumerate(zip(start_3, added, strict=True)):
                if len(stream):
                    streams[s] = np.concatenate((streams[s][:start], stream, streams[s][start:]))
            lengths_K[index] = entry.length
            missing &= ~(1 << index)
        if missing == all_missing and np.isnan(floats_1F).all():
            return NO_COLUMNS
        return Columns(
            floats_1F.ravel(), lengths_K, streams[0], streams[1], streams[2], _missing_bytes(missing)
        )

    def _fill_candidates(
        self, columns: Columns, num_rows: int, new: _NewFloats, values: Mapping[str, Any]
    ) -> Columns | None:
        """Fill blocks in which every list feature has one id in each row, or none in any."""
        given = [(f, ids) for f in self._lists if (ids := values.get(f.source)) is not None]
        if not all(f.feature.kind == "ids" and _is_flat(ids, num_rows) for f, ids in given):
            return None
        new_H = [ids.astype(np.int64, copy=False) for _, ids in given]
        new_HN = np.concatenate(new_H).reshape(-1, num_rows) if given else _NO_IDS
        index_H = np.array([f.position for f, _ in given], np.int64)
        floats_NF, size = np.empty((num_rows, self._num_floats), np.float32), num_rows * self._num_lists
        lengths, ids = np.empty(size, np.uint32), np.empty(size, np.int64)
        missing = np.zeros((size + 7) // 8, np.uint8)
        block = columns.floats, columns.lengths, columns.ids, columns.missing
        out = floats_NF, lengths, ids, missing
        num_filled = fill_rows(block, tuple(new), (new_HN, index_H), self._is_ids, out)
        if num_filled < 0:
            return None
        if num_filled == 0 and np.isnan(floats_NF).all():
            return NO_COLUMNS
        missing = NO_COLUMNS.missing if num_filled == self._num_lists else trim_missing(missing)
        return Columns(
            floats_NF.ravel(),
            lengths,
            ids[: num_filled * num_rows],
            NO_COLUMNS.weights,
            NO_COLUMNS.times,
            missing,
        )


@njit(cache=True)
def some_missing(
    floats: np.ndarray,
    missing: np.ndarray,
    sizes: tuple[int, int, int],
    float_index: np.ndarray,
    list_index: np.ndarray,
) -> bool:
    """Whether one of these floats or lists is missing in some row. `sizes`: rows, floats and lists of a
    row."""
    rows, num_floats, num_lists = sizes
    for n in range(rows):
        for f in float_index:
            if np.isnan(floats[n * num_floats + f]):
                return True
        for k in list_index:
            if is_set(missing, n * num_lists + k):
                return True
    return False


@njit(cache=True)
def is_set(bits: np.ndarray, i: int) -> bool:
    """Whether bit i is 1; bits after the last byte are 0."""
    return (i >> 3) < len(bits) and (bits[i >> 3] >> (i & 7)) & 1 == 1


@njit(cache=True)
def fill_floats(floats: np.ndarray, new_GN: np.ndarray, index_G: np.ndarray, out_NF: np.ndarray) -> bool:
    """Copy `floats` (row-major, empty = all missing) and replace NaN in the columns `index_G` by new numbers.
    False if one of these is too large for a float32."""
    rows, width = out_NF.shape
    for n in range(rows):
        for f in range(width):
            out_NF[n, f] = floats[n * width + f] if len(floats) else np.float32(np.nan)
    is_finite = True
    for g in range(len(index_G)):
        for n in range(rows):
            if np.isnan(out_NF[n, index_G[g]]):
                out_NF[n, index_G[g]] = np.float32(new_GN[g, n])
                is_finite = is_finite and not np.isinf(out_NF[n, index_G[g]])
    return is_finite


@njit(cache=True)
def find_flat(length: np.ndarray, missing: np.ndarray, is_ids_K: np.ndarray, is_given_K: np.ndarray) -> bool:
    """Set `is_given_K` for the list features that have one id in each row. False if a feature has several ids
    in a row, an empty list, or an id in some rows only. `length`: row-major over (row, list feature);
    `missing`: their bits."""
    for i in range(len(length)):
        k = i % len(is_given_K)
        if i < len(is_given_K):
            is_given_K[k] = length[i] == 1
        if (
            length[i] != np.uint32(is_given_K[k])
            or is_set(missing, i) == is_given_K[k]
            or (is_given_K[k] and not is_ids_K[k])
        ):
            return False
    return True


@njit(cache=True)
def fill_rows(
    block: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    new: tuple[np.ndarray, np.ndarray],
    new_ids: tuple[np.ndarray, np.ndarray],
    is_ids_K: np.ndarray,
    out: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """Fill a block. Returns the number of list features that then have one id in each row, or -1 if a row has
    another number of ids, or a new number is too large for a float32.

    `block` and `out`: floats, lengths, ids and missing bits; those of `out` are zeros before. `new` and
    `new_ids`: values [G, N] and ids [H, N], each with the indices of their features.
    """
    floats, lengths, ids, missing = block
    (value_GN, float_index_G), (ids_HN, list_index_H) = new, new_ids
    out_NF, out_lengths, out_ids, out_missing = out
    lists = len(is_ids_K)
    is_given_K = np.zeros(lists, np.bool_)
    filled_by_K = np.full(lists, -1)  # index h of the new ids; -1 = not filled
    if not fill_floats(floats, value_GN, float_index_G, out_NF) or not find_flat(
        lengths, missing, is_ids_K, is_given_K
    ):
        return -1
    for h in range(len(list_index_H)):
        if not is_given_K[list_index_H[h]]:
            filled_by_K[list_index_H[h]] = h
    num_read, num_written = 0, 0
    for n in range(len(out_NF)):
        for k in range(lists):
            i = n * lists + k
            is_present = is_given_K[k] or filled_by_K[k] >= 0
            out_lengths[i] = is_present
            if is_given_K[k]:
                out_ids[num_written] = ids[num_read]
                num_read += 1
            elif is_present:
                out_ids[num_written] = ids_HN[filled_by_K[k], n]
            else:
                out_missing[i >> 3] |= np.uint8(1 << (i & 7))
            num_written += is_present
    return int(np.sum(is_given_K) + np.sum(filled_by_K >= 0))


_NO_FLOATS = _NewFloats(np.zeros((0, 1)), np.zeros(0, np.int64))
_NO_IDS = np.zeros((0, 1), np.int64)


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    floats_11, no_index = np.zeros((1, 1), np.float32), np.zeros(0, np.int64)
    some_missing(floats_11.ravel(), NO_COLUMNS.missing, (1, 1, 0), no_index, no_index)
    fill_floats(floats_11.ravel(), *_NO_FLOATS, floats_11)
    block = floats_11.ravel(), np.zeros(0, np.uint32), no_index, NO_COLUMNS.missing
    fill_rows(block, tuple(_NO_FLOATS), (_NO_IDS, no_index), np.zeros(0, np.bool_), (floats_11, *block[1:]))


def _fillable(features: Sequence[Feature], sources: Mapping[str, str]) -> list[_Fillable]:
    return [_Fillable(i, f, sources[f.name]) for i, f in enumerate(features) if f.name in sources]


def _is_flat(ids: Any, num_rows: int) -> bool:
    return isinstance(ids, np.ndarray) and ids.shape == (num_rows,) and ids.dtype.kind in "iu"


def _missing_bytes(bits: int) -> np.ndarray:
    """The bits as uint8, up to the last byte that is not 0."""
    return (
        np.frombuffer(bytearray(bits.to_bytes((bits.bit_length() + 7) // 8, "little")), np.uint8)
        if bits
        else NO_COLUMNS.missing
    )

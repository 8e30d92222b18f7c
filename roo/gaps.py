"""What a block lacks, filled in its arrays: nothing that it has is taken apart.

`roo.block.ro_columns` and `nro_columns` make the same arrays of the same values, given and filled in; tests hold them equal.

Letters: N rows (n of them), F floats, G floats that are filled in, K list features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from roo.block import entry_of, flat_columns, trimmed
from roo.columns import NO_COLUMNS, Columns, Side, missing_bits
from roo.schema import Feature, Schema


class _Gap(NamedTuple):
    """A feature that can be filled in."""

    at: int  # among the floats, or the lists, of its side
    feature: Feature
    source: str  # what it is called among what is filled in


class Gaps:
    """Of one side of a schema. `sources`: feature → what fills it."""

    def __init__(self, schema: Schema, side: Side, sources: Mapping[str, str]) -> None:
        self.schema, self.side = schema, side
        floats, lists = schema.floats(side), schema.lists(side)
        self._num_floats, self._num_lists = len(floats), len(lists)
        self._floats = _places(floats, sources)
        self._lists = _places(lists, sources)
        self._float_at = np.array([place.at for place in self._floats], dtype=np.int64)
        self._list_at = np.array([place.at for place in self._lists], dtype=np.int64)
        self._is_ids = np.array([f.kind == "ids" for f in lists], dtype=np.bool_)
        streams = [(1 + len(f.id_columns), int(f.kind == "weighted_ids"), len(f.time_columns)) for f in lists]
        self._streams_K3 = np.array(streams, dtype=np.int64).reshape(-1, 3)

    def lacks(self, columns: Columns, num_rows: int) -> bool:
        """Whether some row misses a feature that can be filled in; of columns that were checked."""
        if not (self._floats or self._lists) or num_rows == 0:
            return False
        if not any(map(len, columns)):
            return True
        if self._floats and np.isnan(columns.floats.reshape(num_rows, -1)[:, self._float_at]).any():
            return True
        if not self._lists or not len(columns.missing):
            return False
        return bool(missing_bits(columns, num_rows * self._num_lists).reshape(num_rows, -1)[:, self._list_at].any())

    def filled(self, columns: Columns, num_rows: int, given: Mapping[str, Any]) -> Columns | None:
        """The columns with `given` (by source; as `encode_ro` and `encode_nro` take values) where they lacked it. None: only
        taken apart can they be filled: lists of several ids among candidates, or values that a block can't hold.

        Raises:
            WireError: a value that isn't of its feature's kind.
        """
        floats_NF = self._filled_floats(columns, num_rows, given)
        if floats_NF is None:
            return None
        return self._of_request(columns, floats_NF, given) if self.side == "ro" else self._of_rows(columns, floats_NF, given)

    def _filled_floats(self, columns: Columns, num_rows: int, given: Mapping[str, Any]) -> np.ndarray | None:
        """A copy, float32 [n x F]."""
        shape = (num_rows, self._num_floats)
        out_NF = columns.floats.reshape(shape).copy() if len(columns.floats) else np.full(shape, np.nan, dtype=np.float32)
        there = [(place.at, fresh) for place in self._floats if (fresh := given.get(place.source)) is not None]
        if there:
            if not all(self._fits(fresh, num_rows) for _, fresh in there):
                return None
            fresh_GN = np.array([fresh for _, fresh in there], dtype=np.float64).reshape(-1, num_rows)
            if not fill_missing(out_NF, fresh_GN, np.array([at for at, _ in there])):
                return None
        return out_NF

    def _fits(self, fresh: Any, num_rows: int) -> bool:
        if self.side == "ro":
            return isinstance(fresh, int | float | np.integer | np.floating) and not isinstance(fresh, bool)
        return isinstance(fresh, np.ndarray) and fresh.shape == (num_rows,) and fresh.dtype.kind in "fiu"

    def _of_request(self, columns: Columns, floats_1F: np.ndarray, given: Mapping[str, Any]) -> Columns | None:
        is_blank = not any(map(len, columns))
        lengths_K = np.zeros(self._num_lists, dtype="<u4") if is_blank else columns.lengths.copy()
        missing_K = np.ones(self._num_lists, np.bool_) if is_blank else missing_bits(columns, self._num_lists)
        streams = [columns.ids, columns.weights, columns.times]
        for at, feature, source in self._lists:
            if not missing_K[at] or (fresh := given.get(source)) is None:
                continue
            entry = entry_of(feature, fresh)
            if entry.length > self.schema.limits.max_list:
                return None
            ids: np.ndarray = np.array([*chain.from_iterable(entry.ids)], dtype=np.uint64).view(np.int64)
            weights, times = np.array(entry.weights, np.float32), np.array([*chain.from_iterable(entry.times)], np.int64)
            before_3 = (lengths_K[:at].astype(np.int64) @ self._streams_K3[:at]).tolist()
            more: tuple[np.ndarray, ...] = (ids, weights, times)
            for s, (begin, its) in enumerate(zip(before_3, more, strict=True)):
                if len(its):
                    streams[s] = np.concatenate((streams[s][:begin], its, streams[s][begin:]))
            lengths_K[at], missing_K[at] = entry.length, False
        if missing_K.all() and np.isnan(floats_1F).all():
            return NO_COLUMNS
        bits = trimmed(np.packbits(missing_K, bitorder="little"))
        return Columns(floats_1F.ravel(), lengths_K, streams[0], streams[1], streams[2], bits)

    def _of_rows(self, columns: Columns, floats_NF: np.ndarray, given: Mapping[str, Any]) -> Columns | None:
        """Every list feature has one id in each row, or none in any."""
        flat = self._flat(columns, len(floats_NF))
        if flat is None:
            return None
        for at, feature, source in self._lists:
            if flat[at] is None and (fresh := given.get(source)) is not None:
                if feature.kind != "ids" or not _is_flat(fresh, len(floats_NF)):
                    return None
                flat[at] = fresh.astype(np.int64, copy=False)
        return flat_columns(floats_NF, flat)

    def _flat(self, columns: Columns, num_rows: int) -> list[np.ndarray | None] | None:
        """Of each list feature its ids, int64 [n], or None where it is missing; None where some aren't that plain."""
        out: list[np.ndarray | None] = [None] * self._num_lists
        if not len(columns.lengths):
            return out
        is_given_K = np.empty(self._num_lists, np.bool_)
        if not find_flat(columns.lengths, columns.missing, self._is_ids, is_given_K):
            return None
        given = np.flatnonzero(is_given_K).tolist()
        for at, ids in zip(given, columns.ids.reshape(num_rows, len(given)).T, strict=True):
            out[at] = ids
        return out


@njit(cache=True)
def fill_missing(out_NF: np.ndarray, fresh_GN: np.ndarray, at_G: np.ndarray) -> bool:
    """Put numbers where `out_NF` has NaN, in the columns `at_G`; False if one is too large for a float32."""
    is_finite = True
    for g in range(len(at_G)):
        for n in range(len(out_NF)):
            if np.isnan(out_NF[n, at_G[g]]):
                out_NF[n, at_G[g]] = np.float32(fresh_GN[g, n])
                is_finite = is_finite and not np.isinf(out_NF[n, at_G[g]])
    return is_finite


@njit(cache=True)
def find_flat(length: np.ndarray, missing: np.ndarray, is_ids_K: np.ndarray, is_given_K: np.ndarray) -> bool:
    """Which list features give each row one id, the others none; False if some row has another number, or an empty list.
    `length`: row-major over (row, list feature); `missing`: their bits."""
    for i in range(len(length)):
        k = i % len(is_given_K)
        if i < len(is_given_K):
            is_given_K[k] = length[i] == 1
        is_missing = (i >> 3) < len(missing) and (missing[i >> 3] >> (i & 7)) & 1 == 1
        if length[i] != np.uint32(is_given_K[k]) or is_missing == is_given_K[k] or (is_given_K[k] and not is_ids_K[k]):
            return False
    return True


def warm() -> None:
    """Compile the kernels into numba's cache."""
    fill_missing(np.zeros((1, 1), np.float32), np.zeros((1, 1)), np.zeros(1, np.int64))
    find_flat(np.ones(1, np.uint32), np.zeros(0, np.uint8), np.ones(1, np.bool_), np.ones(1, np.bool_))


def _places(features: Sequence[Feature], sources: Mapping[str, str]) -> list[_Gap]:
    return [_Gap(at, f, sources[f.name]) for at, f in enumerate(features) if f.name in sources]


def _is_flat(fresh: Any, num_rows: int) -> bool:
    return isinstance(fresh, np.ndarray) and fresh.shape == (num_rows,) and fresh.dtype.kind in "iu"

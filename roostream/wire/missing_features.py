"""What a block lacks, filled in its arrays: nothing that it has is taken apart.

`roostream.wire.block.ro_columns` and `nro_columns` make the same arrays of the same values, given and filled in; tests hold them equal.

Letters: N rows (n of them), F floats, G floats that are filled in, K list features, H of them that are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Feature, Schema
from roostream.wire.block import entry_of, trimmed
from roostream.wire.columns import NO_COLUMNS, Columns, Side


class _Gap(NamedTuple):
    """A feature that can be filled in."""

    at: int  # among the floats, or the lists, of its side
    feature: Feature
    source: str  # what it is called among what is filled in


class _Fresh(NamedTuple):
    """Floats that are there to be filled in."""

    value_GN: np.ndarray  # float64
    at_G: np.ndarray  # int64: among the floats of the side


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
        sizes = num_rows, self._num_floats, self._num_lists
        return bool(some_missing(columns.floats, columns.missing, sizes, self._float_at, self._list_at))

    def filled(self, columns: Columns, num_rows: int, given: Mapping[str, Any]) -> Columns | None:
        """The columns with `given` (by source; as `encode_ro` and `encode_nro` take values) where they lacked it. None: only
        taken apart can they be filled: lists of several ids among candidates, or values that a block can't hold.

        Raises:
            WireError: a value that isn't of its feature's kind.
        """
        fresh = self._fresh_floats(num_rows, given)
        if fresh is None:
            return None
        return (
            self._of_request(columns, fresh, given)
            if self.side == "ro"
            else self._of_rows(columns, num_rows, fresh, given)
        )

    def _fresh_floats(self, num_rows: int, given: Mapping[str, Any]) -> _Fresh | None:
        """None: some aren't that plain."""
        there = [
            (place.at, fresh) for place in self._floats if (fresh := given.get(place.source)) is not None
        ]
        if not there:
            return _NO_FLOATS
        if not all(self._fits(fresh, num_rows) for _, fresh in there):
            return None
        values = [fresh for _, fresh in there]
        flat = np.array(values, np.float64) if self.side == "ro" else np.concatenate(values, dtype=np.float64)
        return _Fresh(flat.reshape(-1, num_rows), np.array([at for at, _ in there], np.int64))

    def _fits(self, fresh: Any, num_rows: int) -> bool:
        if self.side == "ro":
            return isinstance(fresh, int | float | np.integer | np.floating) and not isinstance(fresh, bool)
        return isinstance(fresh, np.ndarray) and fresh.shape == (num_rows,) and fresh.dtype.kind in "fiu"

    def _of_request(self, columns: Columns, fresh: _Fresh, given: Mapping[str, Any]) -> Columns | None:
        floats_1F = np.empty((1, self._num_floats), np.float32)
        if not fill_floats(columns.floats, fresh.value_GN, fresh.at_G, floats_1F):
            return None
        none_there = (1 << self._num_lists) - 1  # as `missing` has it, bit k for list k
        is_blank = not any(map(len, columns))
        missing = none_there if is_blank else int.from_bytes(columns.missing.tobytes(), "little") & none_there
        lengths_K = np.zeros(self._num_lists, np.uint32) if is_blank else columns.lengths.copy()
        streams = [columns.ids, columns.weights, columns.times]
        for at, feature, source in self._lists:
            if not missing >> at & 1 or (value := given.get(source)) is None:
                continue
            entry = entry_of(feature, value)
            if entry.length > self.schema.limits.max_list:
                return None
            ids: np.ndarray = np.array([*chain.from_iterable(entry.ids)], dtype=np.uint64).view(np.int64)
            weights, times = (
                np.array(entry.weights, np.float32),
                np.array([*chain.from_iterable(entry.times)], np.int64),
            )
            before_3 = (lengths_K[:at].astype(np.int64) @ self._streams_K3[:at]).tolist()
            more: tuple[np.ndarray, ...] = (ids, weights, times)
            for s, (begin, its) in enumerate(zip(before_3, more, strict=True)):
                if len(its):
                    streams[s] = np.concatenate((streams[s][:begin], its, streams[s][begin:]))
            lengths_K[at] = entry.length
            missing &= ~(1 << at)
        if missing == none_there and np.isnan(floats_1F).all():
            return NO_COLUMNS
        return Columns(floats_1F.ravel(), lengths_K, streams[0], streams[1], streams[2], _bytes_of(missing))

    def _of_rows(
        self, columns: Columns, num_rows: int, fresh: _Fresh, given: Mapping[str, Any]
    ) -> Columns | None:
        """Every list feature has one id in each row, or none in any."""
        there = [(place, ids) for place in self._lists if (ids := given.get(place.source)) is not None]
        if not all(place.feature.kind == "ids" and _is_flat(ids, num_rows) for place, ids in there):
            return None
        fresh_H = [ids.astype(np.int64, copy=False) for _, ids in there]
        fresh_HN = np.concatenate(fresh_H).reshape(-1, num_rows) if there else _NO_IDS
        at_H = np.array([place.at for place, _ in there], np.int64)
        floats_NF, size = np.empty((num_rows, self._num_floats), np.float32), num_rows * self._num_lists
        lengths, ids = np.empty(size, np.uint32), np.empty(size, np.int64)
        missing = np.zeros((size + 7) // 8, np.uint8)
        block = columns.floats, columns.lengths, columns.ids, columns.missing
        out = floats_NF, lengths, ids, missing
        num_given = fill_rows(block, (fresh.value_GN, fresh.at_G), (fresh_HN, at_H), self._is_ids, out)
        if num_given < 0:
            return None
        if num_given == 0 and np.isnan(floats_NF).all():
            return NO_COLUMNS
        missing = NO_COLUMNS.missing if num_given == self._num_lists else trimmed(missing)
        return Columns(
            floats_NF.ravel(),
            lengths,
            ids[: num_given * num_rows],
            NO_COLUMNS.weights,
            NO_COLUMNS.times,
            missing,
        )


@njit(cache=True)
def some_missing(
    floats: np.ndarray,
    missing: np.ndarray,
    sizes: tuple[int, int, int],
    float_at: np.ndarray,
    list_at: np.ndarray,
) -> bool:
    """Whether one of these floats or lists is missing in some row. `sizes`: rows, floats and lists of a row."""
    rows, num_floats, num_lists = sizes
    for n in range(rows):
        for at in float_at:
            if np.isnan(floats[n * num_floats + at]):
                return True
        for at in list_at:
            if is_set(missing, n * num_lists + at):
                return True
    return False


@njit(cache=True)
def is_set(bits: np.ndarray, i: int) -> bool:
    """Bit i; those behind the last byte aren't."""
    return (i >> 3) < len(bits) and (bits[i >> 3] >> (i & 7)) & 1 == 1


@njit(cache=True)
def fill_floats(given: np.ndarray, fresh_GN: np.ndarray, at_G: np.ndarray, out_NF: np.ndarray) -> bool:
    """`given`, row-major (empty = all are missing), with fresh numbers in the columns `at_G` where it has NaN; False if one of
    these is too large for a float32."""
    rows, floats = out_NF.shape
    for n in range(rows):
        for f in range(floats):
            out_NF[n, f] = given[n * floats + f] if len(given) else np.float32(np.nan)
    is_finite = True
    for g in range(len(at_G)):
        for n in range(rows):
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
    fresh: tuple[np.ndarray, np.ndarray],
    fresh_ids: tuple[np.ndarray, np.ndarray],
    is_ids_K: np.ndarray,
    out: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> int:
    """How many list features give each row one id, where the others give none; -1: some row isn't that plain, or has a number
    that no float32 holds. `block` and `out`: floats, lengths, ids and missing bits (zeros before); `fresh` and `fresh_ids`:
    [G, n] and [H, n] with their places, of ids for lists that the block lacks."""
    lists = len(is_ids_K)
    is_given_K, from_K = np.zeros(lists, np.bool_), np.full(lists, -1)
    if not fill_floats(block[0], fresh[0], fresh[1], out[0]) or not find_flat(
        block[1], block[3], is_ids_K, is_given_K
    ):
        return -1
    for h in range(len(fresh_ids[1])):
        if not is_given_K[fresh_ids[1][h]]:
            from_K[fresh_ids[1][h]] = h
    given, put = 0, 0
    for n in range(len(out[0])):
        for k in range(lists):
            is_there = is_given_K[k] or from_K[k] >= 0
            out[1][n * lists + k] = is_there
            if is_given_K[k]:
                out[2][put] = block[2][given]
                given += 1
            elif is_there:
                out[2][put] = fresh_ids[0][from_K[k], n]
            else:
                out[3][(n * lists + k) >> 3] |= np.uint8(1 << ((n * lists + k) & 7))
            put += is_there
    return int(np.sum(is_given_K) + np.sum(from_K >= 0))


_NO_FLOATS = _Fresh(np.zeros((0, 1)), np.zeros(0, np.int64))
_NO_IDS = np.zeros((0, 1), np.int64)


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    floats_11, no_places = np.zeros((1, 1), np.float32), np.zeros(0, np.int64)
    some_missing(floats_11.ravel(), NO_COLUMNS.missing, (1, 1, 0), no_places, no_places)
    fill_floats(floats_11.ravel(), *_NO_FLOATS, floats_11)
    block = floats_11.ravel(), np.zeros(0, np.uint32), no_places, NO_COLUMNS.missing
    fill_rows(block, tuple(_NO_FLOATS), (_NO_IDS, no_places), np.zeros(0, np.bool_), (floats_11, *block[1:]))


def _places(features: Sequence[Feature], sources: Mapping[str, str]) -> list[_Gap]:
    return [_Gap(at, f, sources[f.name]) for at, f in enumerate(features) if f.name in sources]


def _is_flat(fresh: Any, num_rows: int) -> bool:
    return isinstance(fresh, np.ndarray) and fresh.shape == (num_rows,) and fresh.dtype.kind in "iu"


def _bytes_of(bits: int) -> np.ndarray:
    """uint8, up to the last one that has a bit."""
    return (
        np.frombuffer(bytearray(bits.to_bytes((bits.bit_length() + 7) // 8, "little")), np.uint8)
        if bits
        else NO_COLUMNS.missing
    )

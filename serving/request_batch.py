"""Builds one unlabeled batch from the columns of one or several requests, without decoding the bytes that are
logged.

Training decodes the logged bytes with `roostream.wire.decode`. The arrays here are bit-equal to what
`Decoder.decode_request` returns for a single request, and to the arrays of the samples for several;
tests/serving checks this.

The numba kernels keep the GIL: each takes microseconds, and releasing it would cost a turn of the event loop.

Letters: R requests, B candidates, N rows of a side (R or B), F floats, K lists, C columns of lists, T labels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Feature, Label, Schema
from roostream.wire.batch import TEXT, Batch
from roostream.wire.block import NO_COLUMNS, Columns, Side, check_block, missing_bits
from roostream.wire.decode import ReadingPlans, SideLayout, side_layout
from roostream.wire.decode_scan import BLOCK_FIELDS, OK, ReadingPlan, scan_message
from roostream.wire.decode_scan import check_block as check_spans
from roostream.wire.jagged import Jagged
from roostream.wire.missing_features import is_set
from roostream.wire.proto_fields import BLOCK
from serving.json_keys import check_keys


class RequestColumns(NamedTuple):
    """The features that a request is scored with. Both sides are validated."""

    ro: Columns
    nro: Columns
    item_ids: np.ndarray  # int64 [n]
    time_ms: int


class _ServedBatch(Batch):
    """A batch without the checks of `Batch`: the kernels below guarantee consistent arrays, and the checks
    took as long as the kernels."""

    def __post_init__(self) -> None:
        pass


class _ServedLists(Jagged):
    """As `_ServedBatch`; `starts_K1` is precomputed."""

    def __post_init__(self) -> None:
        pass


class _SideReading(NamedTuple):
    """How the columns of one side become arrays."""

    layout: SideLayout
    max_K: np.ndarray  # int64: number of entries used per list
    streams_K3: np.ndarray  # int64: number of id, weight and time columns per list


def build_batch(schema: Schema, requests: Sequence[RequestColumns]) -> Batch:
    """Build a batch of at least one request: labels 0, weights 1, offset -1, as `Decoder.decode_request`
    does."""
    counts, readings = [len(r.item_ids) for r in requests], schema.derived(_readings)
    counts_R, is_alone = np.array(counts, dtype=np.int32), len(requests) == 1
    return _ServedBatch(
        schema=schema,
        **_side("ro", readings["ro"], [(r.ro, 1) for r in requests]),
        **_side("nro", readings["nro"], [(r.nro, len(r.item_ids)) for r in requests]),
        num_candidates_R=counts_R,
        request_index_B=np.zeros(counts[0], np.int64)
        if is_alone
        else np.repeat(np.arange(len(requests)), counts_R),
        item_B=requests[0].item_ids if is_alone else np.concatenate([r.item_ids for r in requests]),
        time_ms_R=np.array([r.time_ms for r in requests], dtype=np.int64),
        **_unlabelled(len(requests), sum(counts), len(schema.labels)),
    )


@functools.lru_cache(maxsize=256)
def _unlabelled(r: int, b: int, t: int) -> dict[str, Any]:
    """Fields that serving has no values for; shared between batches and read-only."""
    unknown_BT, none_R = np.full((b, t), np.nan, dtype=np.float32), np.zeros(r, dtype=np.int64)
    arrays: dict[str, np.ndarray] = {
        "label_BT": np.zeros((b, t), dtype=np.float32),
        "label_before_BT": unknown_BT,
        "weight_BT": np.ones((b, t), dtype=np.float32),
        "position_B": np.full(b, -1, dtype=np.int32),
        "propensity_B": np.ones(b, dtype=np.float32),
        "served_score_BT": unknown_BT,
        "close_ms_R": none_R,
        "oldest_engagement_ms_R": none_R,
        "sample_id_R": none_R,
        "surface_R": np.zeros(r, dtype=TEXT),
        "correction_R": np.zeros(r, dtype=np.bool_),
        "partition_R": np.zeros(r, dtype=np.int32),
        "offset_R": np.full(r, -1),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def _readings(schema: Schema) -> dict[Side, _SideReading]:
    sides: tuple[Side, ...] = ("ro", "nro")
    return {side: _reading(schema, side) for side in sides}


def _reading(schema: Schema, side: Side) -> _SideReading:
    lists = schema.lists(side)
    streams = [(1 + len(f.id_columns), int(f.kind == "weighted_ids"), len(f.time_columns)) for f in lists]
    return _SideReading(
        layout=side_layout(schema, side),
        max_K=np.array([f.max_len or schema.limits.max_list for f in lists], dtype=np.int64),
        streams_K3=np.array(streams, dtype=np.int64).reshape(-1, 3),
    )


def _side(side: Side, reading: _SideReading, given: list[tuple[Columns, int]]) -> dict[str, Any]:
    """The fields of `Batch` for one side; `given` has the columns and number of rows of each request."""
    layout = reading.layout
    num_floats, num_lists, num_rows = len(layout.default_F), len(layout.keys), sum(rows for _, rows in given)
    columns = _joined(given, num_floats, num_lists)
    float_NF = np.empty((num_rows, num_floats), np.float32)
    present_NF = np.empty((num_rows, num_floats), np.bool_)
    lengths_KN = np.empty((num_lists, num_rows), np.int32)
    present_KN = np.empty((num_lists, num_rows), np.bool_)
    values = np.empty(len(columns.ids), np.int64)
    weights = np.ones(len(columns.ids) if layout.is_weighted else 0, np.float32)
    entries = np.empty(len(columns.ids) + len(columns.times), np.int64)
    ends_C1 = np.zeros(len(layout.columns) + 1, np.int64)
    starts_K1 = np.zeros(num_lists + 1, np.int64)
    layout_side(
        (columns.floats, columns.lengths, columns.ids, columns.weights, columns.times, columns.missing),
        (layout.default_F, reading.max_K, reading.streams_K3),
        (float_NF, present_NF),
        (lengths_KN, present_KN),
        (values, weights, entries),
        (starts_K1, ends_C1),
    )
    ends, total = ends_C1.tolist(), int(starts_K1[-1])
    letter = "R" if side == "ro" else "B"
    lists = _ServedLists(
        keys=layout.keys,
        lengths_KN=lengths_KN,
        values=values[:total],
        present_KN=present_KN,
        weights=weights[:total] if layout.is_weighted else None,
        columns={name: entries[ends[c] : ends[c + 1]] for c, name in enumerate(layout.columns)},
    )
    vars(lists)["starts_K1"] = starts_K1
    return {
        f"{side}_float_{letter}F": float_NF,
        f"{side}_present_{letter}F": present_NF,
        f"{side}_lists": lists,
    }


def _joined(given: list[tuple[Columns, int]], num_floats: int, num_lists: int) -> Columns:
    """Concatenate the columns of all requests."""
    whole = [_whole(columns, rows, num_floats, num_lists) for columns, rows in given]
    if len(whole) == 1:
        return whole[0]
    joined = [np.concatenate(parts) for parts in zip(*(columns[:-1] for columns in whole), strict=True)]
    bits = [missing_bits(columns, rows * num_lists) for columns, (_, rows) in zip(whole, given, strict=True)]
    return Columns._make((*joined, np.packbits(np.concatenate(bits), bitorder="little")))


def _whole(columns: Columns, rows: int, num_floats: int, num_lists: int) -> Columns:
    """An empty block means that all features are missing; make that explicit."""
    if any(map(len, columns)):
        return columns
    floats, lengths = np.full(rows * num_floats, np.nan, np.float32), np.zeros(rows * num_lists, np.uint32)
    return columns._replace(
        floats=floats, lengths=lengths, missing=np.full((rows * num_lists + 7) // 8, 255, np.uint8)
    )


@njit(cache=True)
def layout_side(
    block: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    reading: tuple[np.ndarray, np.ndarray, np.ndarray],
    floats: tuple[np.ndarray, np.ndarray],
    shape: tuple[np.ndarray, np.ndarray],
    out: tuple[np.ndarray, np.ndarray, np.ndarray],
    ends: tuple[np.ndarray, np.ndarray],
) -> None:
    """Fill the arrays of one side. `block`: columns of a block; `reading`: default_F, max_K, streams_K3;
    `floats`: values and presence [N, F]; the others as in `split_lists`.
    """
    fill_floats(block[0], reading[0], floats[0], floats[1])
    split_lists(block[1], block[5], reading[1], reading[2], (block[2], block[3], block[4]), shape, out, ends)


@njit(cache=True)
def fill_floats(given: np.ndarray, default_F: np.ndarray, out_NF: np.ndarray, present_NF: np.ndarray) -> None:
    """Copy floats; NaN means missing and becomes the default."""
    floats = len(default_F)
    for n in range(len(out_NF)):
        for f in range(floats):
            x = given[n * floats + f]
            present_NF[n, f] = x == x
            out_NF[n, f] = x if x == x else default_F[f]


@njit(cache=True)
def split_lists(
    lengths: np.ndarray,
    missing: np.ndarray,
    max_K: np.ndarray,
    streams_K3: np.ndarray,
    streams: tuple[np.ndarray, np.ndarray, np.ndarray],
    shape: tuple[np.ndarray, np.ndarray],
    out: tuple[np.ndarray, np.ndarray, np.ndarray],
    ends: tuple[np.ndarray, np.ndarray],
) -> None:
    """Transpose lists from row-major to feature-major order, with at most `max_K` entries each.

    `lengths`, `missing` and `streams` (ids, weights, times) are those of a block. `out`: values, weights
    (prefilled with 1; may be empty) and the entries of all columns, column c from ends_C1[c] to ends_C1[c +
    1]. `ends`: zeros for start_K1, where the ids of each list begin, and for ends_C1.
    """
    lengths_KN, present_KN = shape
    values, weights, entries = out
    start_K, ends_C1 = ends
    lists, rows = lengths_KN.shape
    place_K = np.zeros(lists, np.int64)
    c = 0
    for k in range(lists):
        total = 0
        for n in range(rows):
            kept = min(np.int64(lengths[n * lists + k]), max_K[k])
            lengths_KN[k, n] = kept
            present_KN[k, n] = not is_set(missing, n * lists + k)
            total += kept
        start_K[k + 1] = start_K[k] + total
        place_K[k] = c
        for _ in range(streams_K3[k, 0] - 1 + streams_K3[k, 2]):
            ends_C1[c + 1] = ends_C1[c] + total
            c += 1
    done_K = np.zeros(lists, np.int64)
    at_ids, at_weights, at_times = 0, 0, 0
    for n in range(rows):
        for k in range(lists):
            length, kept, done = np.int64(lengths[n * lists + k]), lengths_KN[k, n], done_K[k]
            for i in range(kept):
                values[start_K[k] + done + i] = streams[0][at_ids + i]
            for s in range(1, streams_K3[k, 0]):
                to = ends_C1[place_K[k] + s - 1] + done
                for i in range(kept):
                    entries[to + i] = streams[0][at_ids + s * length + i]
            for i in range(kept if streams_K3[k, 1] else 0):
                weights[start_K[k] + done + i] = streams[1][at_weights + i]
            for s in range(streams_K3[k, 2]):
                to = ends_C1[place_K[k] + streams_K3[k, 0] - 1 + s] + done
                for i in range(kept):
                    entries[to + i] = streams[2][at_times + s * length + i]
            done_K[k] += kept
            at_ids += length * streams_K3[k, 0]
            at_weights += length * streams_K3[k, 1]
            at_times += length * streams_K3[k, 2]


def checked(schema: Schema, side: Side, block: bytes, num_rows: int) -> Columns:
    """Validate a block of a client and copy its columns, which may be unaligned. Raises WireError as
    `check_block`."""
    return Columns._make(np.array(c) for c in check_block(schema, side, block, num_rows, schema.limits))


def fast_checked_columns(
    schema: Schema, ro: bytes, nro: bytes, num_rows: int
) -> tuple[Columns, Columns] | None:
    """Validate both blocks with training's kernels. Return None if a block is invalid or not in the canonical
    form of our encoders; `checked` then explains the error or reads the other form.
    """
    plans, limits = schema.derived(_plans), schema.limits
    if num_rows > limits.max_candidates:
        return None
    buf = np.frombuffer(b"".join((ro, nro, b"\0")), np.uint8)
    spans_2 = np.zeros((2, len(BLOCK_FIELDS), 2), np.int64)
    if not locate_block_columns(
        buf, len(ro), num_rows, plans["ro"], plans["nro"], BLOCK_FIELDS, limits.max_list, spans_2
    ):
        return None
    return _columns_at(buf, spans_2[0]), _columns_at(buf, spans_2[1])


@njit(cache=True)
def locate_block_columns(
    buf: np.ndarray,
    ro_bytes: int,
    num_rows: int,
    ro: ReadingPlan,
    nro: ReadingPlan,
    fields: np.ndarray,
    max_list: int,
    spans_2: np.ndarray,
) -> bool:
    """Locate the columns of both blocks in `buf` and write them to `spans_2` (zeros before). Return False if
    a block is invalid or not in canonical form. `buf` has both blocks, one after the other, and one extra
    byte.
    """
    if not scan_message(buf, 0, ro_bytes, fields, spans_2[0]) or not scan_message(
        buf, ro_bytes, len(buf) - 1, fields, spans_2[1]
    ):
        return False
    if check_spans(buf, spans_2[0], 1, ro, 0, max_list) != OK:
        return False
    return check_spans(buf, spans_2[1], num_rows, nro, 0, max_list) == OK


def _plans(schema: Schema) -> dict[str, ReadingPlan]:
    plans = ReadingPlans(schema, lambda fingerprint: None)
    return {"ro": plans.of_side["ro"], "nro": plans.of_side["nro"]}


def _columns_at(buf: np.ndarray, spans: np.ndarray) -> Columns:
    parts = zip(NO_COLUMNS, spans[BLOCK.floats :].tolist(), strict=True)
    return Columns._make(
        [buf[begin:end].view(none.dtype).copy() if end > begin else none for none, (begin, end) in parts]
    )


def read_request(schema: Schema, ro: bytes, nro: bytes, item_ids: np.ndarray, time_ms: int) -> RequestColumns:
    """Build `RequestColumns` from the blocks of an impression. Raises WireError as `check_block`."""
    both = fast_checked_columns(schema, ro, nro, len(item_ids))
    both = both or (checked(schema, "ro", ro, 1), checked(schema, "nro", nro, len(item_ids)))
    return RequestColumns(*both, item_ids, time_ms)


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    schema = Schema(ro=(Feature(name="x"),), labels=(Label(name="click", action="click"),))
    build_batch(schema, [read_request(schema, b"", b"", np.zeros(1, np.int64), 0)])
    check_keys(b"{}")

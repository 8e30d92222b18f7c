"""Where every field of every sample of a poll lies, before anything is taken from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from roo import wire_kernels as w
from roo.decode_kernels import check_parts

HEADER, SAMPLE_ID, CLOSE_MS, RO, ITEM_IDS, PARTS, WEIGHT, EVENT_TIMES, UNTRAINABLE = 1, 2, 4, 5, 6, 7, 12, 17, 21
_H_TIME_MS, _H_SCHEMA = 5, 6
_PART_NRO, _PART_NUM_ROWS, _PART_ROWS = 1, 2, 3


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """N samples, P parts in the samples' order; a span is [start, end) in `buf`, zero = absent."""

    buf: np.ndarray  # uint8
    index_N: np.ndarray  # int64: which record each sample is
    spans_N: np.ndarray  # int64 [N, 22, 2]: fields of Sample
    ok_N: np.ndarray  # bool: in our writers' form; otherwise nothing else here is said of it
    schema_N: np.ndarray  # int64 bits: fingerprint of the writer
    time_ms_N: np.ndarray  # int64
    ro_spans_N: np.ndarray  # int64 [N, 7, 2]: fields of the RO block
    sample_P: np.ndarray  # int64: the sample of each part
    nro_spans_P: np.ndarray  # int64 [P, 7, 2]
    select_P: np.ndarray  # int64 [P, 2]: span of the selected rows, empty = all
    rows_P: np.ndarray  # int64: rows in the part's block
    used_P: np.ndarray  # int64: rows in use
    status_P: np.ndarray  # int64: decode_kernels.OK or what is wrong with rows and selection


def join(values: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """One buffer (uint8, one byte longer than the values) and where each value starts (int64 [values + 1])."""
    starts = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(np.fromiter(map(len, values), dtype=np.int64, count=len(values)), out=starts[1:])
    return np.frombuffer(b"".join((*values, b"\0")), dtype=np.uint8), starts


def scan(buf: np.ndarray, starts: np.ndarray, index_N: np.ndarray, max_rows: int) -> Scan:
    """The samples among the records of `join`; each starts after its type and version byte."""
    spans_N, ok_N = _scan(buf, starts[index_N] + 2, starts[index_N + 1], w.SAMPLE)
    headers_N, header_ok_N = _scan(buf, *_bounds(spans_N, HEADER), w.HEADER)
    ro_N, ro_ok_N = _scan(buf, *_bounds(spans_N, RO), w.BLOCK)
    ok_N &= header_ok_N & ro_ok_N
    spans_N[~ok_N, PARTS] = 0
    sample_P = np.repeat(np.arange(len(index_N)), spans_N[:, PARTS, 1])
    starts_P, ends_P = np.zeros((2, len(sample_P)), dtype=np.int64)
    w.split_parts(buf, field(spans_N, PARTS), len(buf), starts_P, ends_P)
    parts_P, part_ok_P = _scan(buf, starts_P, ends_P, w.PART)
    nro_P, nro_ok_P = _scan(buf, *_bounds(parts_P, _PART_NRO), w.BLOCK)
    ok_N[sample_P[~(part_ok_P & nro_ok_P)]] = False
    rows_P = w.read_varint(buf, field(parts_P, _PART_NUM_ROWS)) & 0xFFFFFFFF
    used_P, status_P = np.zeros((2, len(sample_P)), dtype=np.int64)
    check_parts(buf, field(parts_P, _PART_ROWS), rows_P, max_rows, used_P, status_P)
    schema_N, time_ms_N = w.read_i64(buf, field(headers_N, _H_SCHEMA)), w.read_i64(buf, field(headers_N, _H_TIME_MS))
    return Scan(
        buf=buf,
        index_N=index_N,
        spans_N=spans_N,
        ok_N=ok_N,
        schema_N=schema_N,
        time_ms_N=time_ms_N,
        ro_spans_N=ro_N,
        sample_P=sample_P,
        nro_spans_P=nro_P,
        select_P=field(parts_P, _PART_ROWS),
        rows_P=rows_P,
        used_P=used_P,
        status_P=status_P,
    )


def field(spans: np.ndarray, number: int) -> np.ndarray:
    """int64 [N, 2]: one field's spans, contiguous whatever N is, so that each kernel is compiled for one layout only."""
    return np.ascontiguousarray(spans[:, number])


def _bounds(spans: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(spans[:, number, 0]), np.ascontiguousarray(spans[:, number, 1])


def _scan(buf: np.ndarray, starts: np.ndarray, ends: np.ndarray, fields: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    spans, ok = np.zeros((len(starts), len(fields), 2), dtype=np.int64), np.zeros(len(starts), dtype=np.bool_)
    w.scan(buf, starts, ends, fields, spans, ok)
    return spans, ok

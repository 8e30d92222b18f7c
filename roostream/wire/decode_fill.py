"""From bytes to arrays: how each writer's blocks are read, where every field of a poll lies, and the arrays filled from it.

Plans   how blocks of any known schema are read as the schema in use: `reading_plan` of each writer, stacked for the kernels
Scan    where every field of every sample, header, part and block lies, before anything is taken from it
fill    the arrays of a batch, from checked samples
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.errors import SchemaError
from roostream.schema.schema import Feature, Registry, Schema, reading_plan
from roostream.wire import proto_kernels as w
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import TEXT, Batch
from roostream.wire.columns import Side
from roostream.wire.decode_kernels import (
    Blocks,
    Candidates,
    Lists,
    Plan,
    check_parts,
    fill_candidates,
    fill_lists,
    fill_rows,
    oldest_i64,
)
from roostream.wire.jagged import Jagged
from roostream.wire.proto_fields import HEADER, PART, SAMPLE, forms

_FIRST = np.zeros(1, dtype=np.int64)
_SAMPLE, _HEADER, _PART, BLOCK_FIELDS = (
    forms(m.DESCRIPTOR) for m in (pb.Sample, pb.Header, pb.Part, pb.Block)
)


class Layout(NamedTuple):
    """What of a side's arrays depends on the schema in use only."""

    default_F: np.ndarray  # float32
    keys: tuple[str, ...]  # list features
    columns: tuple[
        str, ...
    ]  # C of them, `feature.column`: of each list its ids columns, then its time columns
    place_C2: np.ndarray  # int64: (k, c) of each: the c-th column of list k
    max_columns: int
    is_weighted: bool


def layout_of(schema: Schema, side: Side) -> Layout:
    """Worked out once a decoder."""
    lists = schema.lists(side)
    columns_K = [(*f.id_columns, *f.time_columns) for f in lists]
    return Layout(
        default_F=np.array([f.default for f in schema.floats(side)], dtype=np.float32),
        keys=tuple(f.name for f in lists),
        columns=tuple(
            f"{f.name}.{name}" for f, names in zip(lists, columns_K, strict=True) for name in names
        ),
        place_C2=np.array(
            [(k, c) for k, names in enumerate(columns_K) for c in range(len(names))], np.int64
        ).reshape(-1, 2),
        max_columns=max(map(len, columns_K), default=0),
        is_weighted=any(f.kind == "weighted_ids" for f in lists),
    )


class Plans:
    """The writers met so far, numbered; the schema in use is number 0. Not thread-safe."""

    def __init__(self, schema: Schema, registry: Registry) -> None:
        self.schema, self.registry = schema, registry
        self._writers: list[Schema] = []
        self._numbers: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        self.num_labels_S = np.zeros(0, dtype=np.int64)
        self.num_skipped_S = np.zeros(0, dtype=np.int64)
        self.layouts: dict[Side, Layout] = {"ro": layout_of(schema, "ro"), "nro": layout_of(schema, "nro")}
        self._add(schema)

    def number_of(self, fingerprint: int) -> int:
        """The writer's number.

        Raises:
            SchemaError: no such schema is registered, or its change can't be read; says which and what to do.
        """
        if fingerprint in self._refused:
            raise SchemaError(self._refused[fingerprint])
        if fingerprint not in self._numbers:
            writer = self.registry(fingerprint)
            if writer is None:
                raise SchemaError(
                    f"unknown schema {fingerprint:016x}; register the schema that wrote these records"
                )
            try:
                self._add(writer, fingerprint)
            except SchemaError as error:
                self._refused[fingerprint] = str(error)
                raise
        return self._numbers[fingerprint]

    def _add(self, writer: Schema, fingerprint: int | None = None) -> None:
        """Raises SchemaError, and then nothing has changed."""
        reading_plan(writer, self.schema)
        self._writers.append(writer)
        self._numbers[writer.fingerprint if fingerprint is None else fingerprint] = len(self._writers) - 1
        plans = [reading_plan(w, self.schema) for w in self._writers]
        self.label_to_ST = _padded([p["label"] for p in plans], -2)
        self.num_labels_S = np.array([len(w.labels) for w in self._writers], dtype=np.int64)
        groups = ("ro_float", "ro_list", "nro_float", "nro_list")
        self.num_skipped_S = np.array([sum(p[g].count(-1) for g in groups) for p in plans], dtype=np.int64)
        self._sides = {side: self._side(side, plans) for side in ("ro", "nro")}

    def side(self, side: Side) -> Plan:
        return self._sides[side]

    def _side(self, side: Side, plans: list[dict[str, list[int]]]) -> Plan:
        lists = [w.lists(side) for w in self._writers]
        cap = self.schema.limits.max_list
        return Plan(
            num_floats_S=np.array([len(p[f"{side}_float"]) for p in plans], dtype=np.int64),
            num_lists_S=np.array([len(fs) for fs in lists], dtype=np.int64),
            float_to_SF=_padded([p[f"{side}_float"] for p in plans], -1),
            list_to_SK=_padded([p[f"{side}_list"] for p in plans], -1),
            streams_SK3=np.stack(
                [_padded([[_streams(f)[i] for f in fs] for fs in lists], 0) for i in range(3)], axis=2
            ),
            max_len_K=np.array([f.max_len or cap for f in self.schema.lists(side)], dtype=np.int64),
        )


def _streams(f: Feature) -> tuple[int, int, int]:
    """How many arrays of a list's length it puts into `ids`, `weights` and `times`."""
    return 1 + len(f.id_columns), int(f.kind == "weighted_ids"), len(f.time_columns)


def _padded(rows: list[list[int]], fill: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """N samples, P parts in the samples' order; a span is [start, end) in `buf`, zero = absent."""

    buf: np.ndarray  # uint8
    index_N: np.ndarray  # int64: which record each sample is
    spans_N: np.ndarray  # int64 [N, 22, 2]: fields of Sample
    ok_N: np.ndarray  # bool: in our writers' form; otherwise nothing else here is said of it
    schema_N: np.ndarray  # int64 bits: fingerprint of the writer
    time_ms_N: np.ndarray  # int64
    surface_N: np.ndarray  # int64 [N, 2]: spans
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
    spans_N, ok_N = _scan(buf, starts[index_N] + 2, starts[index_N + 1], _SAMPLE)
    headers_N, header_ok_N = _scan(buf, *_bounds(spans_N, SAMPLE.header), _HEADER)
    ro_N, ro_ok_N = _scan(buf, *_bounds(spans_N, SAMPLE.ro), BLOCK_FIELDS)
    ok_N &= header_ok_N & ro_ok_N
    spans_N[~ok_N, SAMPLE.parts] = 0
    sample_P = np.repeat(np.arange(len(index_N)), spans_N[:, SAMPLE.parts, 1])
    starts_P, ends_P = np.zeros((2, len(sample_P)), dtype=np.int64)
    w.split_parts(buf, field(spans_N, SAMPLE.parts), len(buf), starts_P, ends_P)
    parts_P, part_ok_P = _scan(buf, starts_P, ends_P, _PART)
    nro_P, nro_ok_P = _scan(buf, *_bounds(parts_P, PART.nro), BLOCK_FIELDS)
    ok_N[sample_P[~(part_ok_P & nro_ok_P)]] = False
    rows_P = w.read_varint(buf, field(parts_P, PART.num_rows)) & 0xFFFFFFFF
    used_P, status_P = np.zeros((2, len(sample_P)), dtype=np.int64)
    check_parts(buf, field(parts_P, PART.rows), rows_P, max_rows, used_P, status_P)
    schema_N, time_ms_N = (
        w.read_i64(buf, field(headers_N, HEADER.schema)),
        w.read_i64(buf, field(headers_N, HEADER.time_ms)),
    )
    return Scan(
        buf=buf,
        index_N=index_N,
        spans_N=spans_N,
        ok_N=ok_N,
        schema_N=schema_N,
        time_ms_N=time_ms_N,
        surface_N=field(headers_N, HEADER.surface),
        ro_spans_N=ro_N,
        sample_P=sample_P,
        nro_spans_P=nro_P,
        select_P=field(parts_P, PART.rows),
        rows_P=rows_P,
        used_P=used_P,
        status_P=status_P,
    )


def field(spans: np.ndarray, number: int) -> np.ndarray:
    """int64 [N, 2]: one field's spans, contiguous whatever N is, so that each kernel is compiled for one layout only."""
    return np.ascontiguousarray(spans[:, number])


def _bounds(spans: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(spans[:, number, 0]), np.ascontiguousarray(spans[:, number, 1])


def _scan(
    buf: np.ndarray, starts: np.ndarray, ends: np.ndarray, fields: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    spans, ok = np.zeros((len(starts), len(fields), 2), dtype=np.int64), np.zeros(len(starts), dtype=np.bool_)
    w.scan(buf, starts, ends, fields, spans, ok)
    return spans, ok


def ro_blocks(scan: Scan, plan_N: np.ndarray) -> Blocks:
    n = len(plan_N)
    none = np.zeros((n, 2), dtype=np.int64)
    return Blocks(scan.ro_spans_N, np.ones(n, dtype=np.int64), none, np.arange(n), plan_N)


def nro_blocks(scan: Scan, plan_N: np.ndarray) -> Blocks:
    """`out_M` counts the rows of all samples before; see `fill`."""
    return Blocks(
        scan.nro_spans_P, scan.rows_P, scan.select_P, _starts(scan.used_P)[:-1], plan_N[scan.sample_P]
    )


def fill(plans: Plans, scan: Scan, plan_N: np.ndarray, kept_R: np.ndarray) -> dict[str, Any]:
    """Batch's fields, but for schema, correction_R, partition_R and offset_R.

    `kept_R`: the samples (positions in N, ascending) that passed every check.
    """
    spans_R = scan.spans_N[kept_R]
    counts_R = (spans_R[:, SAMPLE.item_ids, 1] - spans_R[:, SAMPLE.item_ids, 0]) // 8
    out_R = _starts(counts_R)
    r, b, t = len(kept_R), int(out_R[-1]), len(plans.schema.labels)
    ro = ro_blocks(scan, plan_N).take(kept_R)._replace(out_M=np.arange(r))
    is_kept_N = np.zeros(len(plan_N), dtype=np.bool_)
    is_kept_N[kept_R] = True
    kept_P = np.flatnonzero(is_kept_N[scan.sample_P])
    nro = nro_blocks(scan, plan_N).take(kept_P)._replace(out_M=_starts(scan.used_P[kept_P])[:-1])
    weight_R = w.read_u32(scan.buf, field(spans_R, SAMPLE.weight)).view(np.float32)
    weight_R[weight_R == 0] = 1.0
    out = _candidates(b, t)
    fill_candidates(
        scan.buf, spans_R, weight_R.view(np.uint32), plans.label_to_ST[plan_N[kept_R]], out_R, out
    )
    return {
        **_side(plans, "ro", scan.buf, ro, r),
        **_side(plans, "nro", scan.buf, nro, b),
        "num_candidates_R": counts_R.astype(np.int32),
        "request_index_B": np.repeat(np.arange(r), counts_R),
        "item_B": out.item_B,
        "label_BT": out.label_BT.view(np.float32),
        "label_before_BT": out.before_BT.view(np.float32),
        "weight_BT": out.weight_BT.view(np.float32),
        "position_B": out.position_B,
        "propensity_B": out.propensity_B.view(np.float32),
        "served_score_BT": out.score_BT.view(np.float32),
        "time_ms_R": scan.time_ms_N[kept_R],
        "close_ms_R": w.read_i64(scan.buf, field(spans_R, SAMPLE.close_ms)),
        "oldest_engagement_ms_R": oldest_i64(scan.buf, field(spans_R, SAMPLE.event_times)),
        "sample_id_R": w.read_i64(scan.buf, field(spans_R, SAMPLE.sample_id)),
        "surface_R": _texts(scan.buf, scan.surface_N[kept_R]),
    }


def _texts(buf: np.ndarray, spans_R: np.ndarray) -> np.ndarray:
    """bytes S64 [R]; what is longer is cut."""
    starts, ends = spans_R.T.tolist() if len(spans_R) else ([], [])
    return np.array([buf[start:end].tobytes() for start, end in zip(starts, ends, strict=True)], dtype=TEXT)


def scan_blocks(ro: bytes, nro: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One request's blocks in one buffer, their fields' spans (int64 [2, 7, 2]), and whether each has our writers' form."""
    buf, starts = join((ro, nro))
    return buf, *_scan(buf, starts[:-1], starts[1:], BLOCK_FIELDS)


def block_of(spans_1: np.ndarray, num_rows: int) -> Blocks:
    """One block of the schema in use, all its rows in use."""
    return Blocks(spans_1, np.full(1, num_rows), np.zeros((1, 2), dtype=np.int64), _FIRST, _FIRST)


def fill_request(
    plans: Plans, buf: np.ndarray, ro: Blocks, nro: Blocks, item_B: np.ndarray, time_ms: int
) -> Batch:
    """The batch of one request without labels, from its checked blocks."""
    b, t = len(item_B), len(plans.schema.labels)
    unknown_BT, none_R = np.full((b, t), np.nan, dtype=np.float32), np.zeros(1, dtype=np.int64)
    return Batch(
        schema=plans.schema,
        **_side(plans, "ro", buf, ro, 1),
        **_side(plans, "nro", buf, nro, b),
        num_candidates_R=np.full(1, b, dtype=np.int32),
        request_index_B=np.zeros(b, dtype=np.int64),
        item_B=item_B,
        label_BT=np.zeros((b, t), dtype=np.float32),
        label_before_BT=unknown_BT,
        weight_BT=np.ones((b, t), dtype=np.float32),
        position_B=np.full(b, -1, dtype=np.int32),
        propensity_B=np.ones(b, dtype=np.float32),
        served_score_BT=unknown_BT,
        time_ms_R=np.full(1, time_ms),
        close_ms_R=none_R,
        oldest_engagement_ms_R=none_R,
        sample_id_R=none_R,
        surface_R=np.zeros(1, dtype=TEXT),
        correction_R=np.zeros(1, dtype=np.bool_),
        partition_R=np.zeros(1, dtype=np.int32),
        offset_R=np.full(1, -1),
    )


def _candidates(b: int, t: int) -> Candidates:
    """B candidates with what absent columns mean: no label, no score, no place, shown without exploration."""

    def bits(shape: tuple[int, ...], value: float) -> np.ndarray:
        return np.full(shape, value, dtype=np.float32).view(np.uint32)

    return Candidates(
        item_B=np.zeros(b, dtype=np.int64),
        label_BT=bits((b, t), 0),
        before_BT=bits((b, t), np.nan),
        weight_BT=bits((b, t), 0),
        score_BT=bits((b, t), np.nan),
        position_B=np.full(b, -1, dtype=np.int32),
        propensity_B=bits((b,), 1),
    )


def _side(plans: Plans, side: Side, buf: np.ndarray, blocks: Blocks, rows: int) -> dict[str, Any]:
    """A side's fields of Batch, `rows` rows of them, from checked blocks."""
    layout, plan = plans.layouts[side], plans.side(side)
    float_NF = np.empty((rows, len(layout.default_F)), dtype=np.float32)
    float_NF[:] = layout.default_F
    present_NF = np.zeros(float_NF.shape, dtype=np.bool_)
    lengths_KN = np.zeros((len(layout.keys), rows), dtype=np.int32)
    present_KN = np.zeros(lengths_KN.shape, dtype=np.bool_)
    fill_rows(buf, blocks, plan, float_NF.view(np.uint32), present_NF, lengths_KN, present_KN)
    lists = _lists(layout, plan, buf, blocks, lengths_KN, present_KN)
    letter = "R" if side == "ro" else "B"
    return {
        f"{side}_float_{letter}F": float_NF,
        f"{side}_present_{letter}F": present_NF,
        f"{side}_lists": lists,
    }


def _lists(
    layout: Layout,
    plan: Plan,
    buf: np.ndarray,
    blocks: Blocks,
    lengths_KN: np.ndarray,
    present_KN: np.ndarray,
) -> Jagged:
    """The side's list features; `lengths_KN` and `present_KN` are filled already."""
    starts = _starts(lengths_KN.ravel())
    list_C, column_C = layout.place_C2.T
    ends = _starts(lengths_KN.sum(axis=1, dtype=np.int64)[list_C])
    base_KC = np.zeros((len(layout.keys), layout.max_columns), dtype=np.int64)
    base_KC[list_C, column_C] = ends[:-1]
    out = Lists(
        lengths_KN=lengths_KN,
        starts_KN=starts[:-1].reshape(lengths_KN.shape),
        base_KC=base_KC,
        values=np.zeros(starts[-1], dtype=np.int64),
        weights=np.ones(starts[-1] if layout.is_weighted else 0, dtype=np.float32).view(np.uint32),
        columns=np.zeros(ends[-1], dtype=np.int64),
    )
    fill_lists(buf, blocks, plan, out)
    return Jagged(
        keys=layout.keys,
        lengths_KN=lengths_KN,
        values=out.values,
        present_KN=present_KN,
        weights=out.weights.view(np.float32) if layout.is_weighted else None,
        columns={name: out.columns[ends[n] : ends[n + 1]] for n, name in enumerate(layout.columns)},
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: 0 and the running sums."""
    out = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return out

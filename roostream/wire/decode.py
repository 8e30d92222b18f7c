"""Decodes the records of one poll into one columnar batch of the schema in use, whatever known schema wrote
them.

1 collect the payloads into one buffer (the only Python loop over samples)
2 scan: find the fields of every sample, header, part and block (decode_scan.py)
3 samples that are not in our writers' form: protobuf parses and rewrites them, or rejects them
4 check shapes, limits and numbers: a failing record becomes a reject with a dead letter's reason
5 fill the arrays of the batch

Letters: R requests or samples kept, B candidates, N rows of a side (R or B), K list features, C columns of
lists, F floats, T labels, S writers' schemas, M blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numba import njit

from roostream.errors import CheckpointError, SchemaError, WireError
from roostream.schema.ids import unsigned
from roostream.schema.schema import Feature, Label, Registry, Schema, reading_plan
from roostream.wire import decode_scan as scan
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import TEXT, Batch
from roostream.wire.block import Side, canonical
from roostream.wire.decode_scan import (
    OK,
    Blocks,
    ReadingPlan,
    SampleScan,
    field,
    i64,
    is_blank,
    is_given,
    is_missing,
    join_values,
    offsets,
    read_i64,
    read_u32,
    read_varint,
    scan_samples,
    u32,
)
from roostream.wire.jagged import Jagged
from roostream.wire.proto_fields import BLOCK, SAMPLE
from roostream.wire.records import Record

_ERRORS = {
    scan.BAD_SHAPE: (
        "bad_shape",
        "expected columns whose lengths agree with candidates, features and each other; got other lengths",
    ),
    scan.NON_FINITE: (
        "non_finite",
        "expected finite numbers (NaN only for a missing float); got an infinity or NaN",
    ),
    scan.BAD_NUMBER: (
        "bad_number",
        f"expected list weights within ±{wire.MAX_WEIGHT:.0f}, a sample weight in 0..{wire.MAX_WEIGHT:.0f} "
        "and propensities in (0, 1]; got other numbers",
    ),
    scan.OVERSIZED: ("oversized", "expected candidates and lists within the schema's limits; got more"),
}
_FIRST = np.zeros(1, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Reject:
    """A record that cannot be trained on."""

    index: int  # into the records given
    reason: str  # one of wire.REASONS
    error: str


_Rejects = dict[int, tuple[str, str]]
"""Index of a record → (reason, error)."""


class Decoder:
    """Decodes samples with any schema that `registry` finds by its fingerprint. Not thread-safe: use one per
    thread."""

    def __init__(self, schema: Schema, registry: Registry) -> None:
        self.schema = schema
        self.plans = ReadingPlans(schema, registry)

    def decode(self, records: Sequence[Record], *, corrections: bool = False) -> tuple[Batch, list[Reject]]:
        """Decode the samples of one poll and, if asked, its trainable corrections.

        Returns the batch and the rejects, both in the records' order. Each record becomes a request of the
        batch, a reject, or a skipped correction; nothing that a record contains raises.
        """
        rejects: _Rejects = {}
        values = [record.value or b"" for record in records]
        found, is_correction_N = self._scan(values, rejects)
        plan_N = self._plan_numbers(found, rejects)
        is_untrainable_N = read_varint(found.buf, field(found.spans_N, SAMPLE.untrainable)) != 0
        status_N = self._check(found, plan_N, is_correction_N & is_untrainable_N)
        for n in np.flatnonzero(status_N > 0):
            rejects[int(found.index_N[n])] = _ERRORS[int(status_N[n])]
        self._check_times(records, found, is_correction_N, status_N, rejects)
        is_trainable_N = ~is_correction_N
        if corrections:
            is_trainable_N |= ~is_untrainable_N
        kept_R = np.flatnonzero((status_N == OK) & is_trainable_N)
        index_R = found.index_N[kept_R]
        batch = Batch(
            schema=self.schema,
            correction_R=is_correction_N[kept_R],
            partition_R=np.array([record.partition for record in records], dtype=np.int32)[index_R],
            offset_R=np.array([record.offset for record in records], dtype=np.int64)[index_R],
            **_fill_samples(self.plans, found, plan_N, kept_R),
        )
        return batch, [Reject(i, *rejects[i]) for i in sorted(rejects)]

    def decode_request(self, ro: bytes | None, nro: bytes, item_ids: np.ndarray, time_ms: int) -> Batch:
        """Decode one request for scoring: R = 1, B = len(item_ids), labels 0, weights 1, offset -1.

        Its blocks, in the schema in use, are read by the same kernels as a sample's, so serving scores what
        training will read.

        Raises:
            WireError: `undecodable`, `bad_shape`, `non_finite`, `bad_number` or `oversized`.
        """
        limits, n = self.schema.limits, len(item_ids)
        if n > limits.max_candidates:
            raise WireError("oversized", f"expected at most {limits.max_candidates} candidates, got {n}")
        buf, spans_2, ok_2 = scan.scan_blocks((ro or b"", nro))
        if not ok_2.all():
            buf, spans_2, _ = scan.scan_blocks((canonical(ro or b""), canonical(nro)))
        blocks: dict[Side, Blocks] = {}
        for i, (side, num_rows) in enumerate(zip(_SIDES, (1, n), strict=True)):
            spans_1 = spans_2[i : i + 1]
            block = Blocks(spans_1, np.full(1, num_rows), np.zeros((1, 2), dtype=np.int64), _FIRST, _FIRST)
            status = np.zeros(1, dtype=np.int64)
            scan.check_blocks(buf, block, self.plans.of_side[side], limits.max_list, status)
            if status[0]:
                reason, error = _ERRORS[int(status[0])]
                raise WireError(reason, f"{side} block: {error}")
            blocks[side] = block
        return _fill_request(self.plans, buf, blocks, item_ids, time_ms)

    def _scan(self, values: list[bytes], rejects: _Rejects) -> tuple[SampleScan, np.ndarray]:
        """The scan of all samples and corrections, now in our writers' form, and bool [N]: which are
        corrections."""
        buf, starts = join_values(values)
        index_N = self._admit(buf, starts, rejects)
        is_correction_N = buf[starts[index_N]] == wire.CORRECTION
        max_rows = self.schema.limits.max_candidates
        found = scan_samples(buf, starts, index_N, max_rows)
        if found.ok_N.all():
            return found, is_correction_N
        for i in map(int, index_N[~found.ok_N]):
            try:
                values[i] = rewrite_sample(values[i])
            except WireError as error:
                rejects[i] = (error.reason, str(error))
        kept_N = np.array([int(i) not in rejects for i in index_N], dtype=bool)
        found = scan_samples(*join_values(values), index_N[kept_N], max_rows)
        assert found.ok_N.all()
        return found, is_correction_N[kept_N]

    def _admit(self, buf: np.ndarray, starts: np.ndarray, rejects: _Rejects) -> np.ndarray:
        """Indices of the records with the type byte of a sample or correction that are not too large."""
        size, start = starts[1:] - starts[:-1], starts[:-1]
        kind = np.where(size > 0, buf[start], 0)
        version = np.where(size > 1, buf[np.minimum(start + 1, len(buf) - 1)], 0)
        is_known = ((kind == wire.SAMPLE) | (kind == wire.CORRECTION)) & (version == wire.VERSION)
        max_bytes = self.schema.limits.max_sample_bytes
        for i in np.flatnonzero(~is_known | (size > max_bytes)):
            if size[i] < 2:
                rejects[int(i)] = ("undecodable", f"expected a record of 2 bytes or more, got {size[i]}")
            elif not is_known[i]:
                text = f"expected a sample of version {wire.VERSION}, got type {kind[i]} version {version[i]}"
                rejects[int(i)] = ("unknown_type", text)
            else:
                rejects[int(i)] = ("oversized", f"expected at most {max_bytes} bytes, got {size[i]}")
        return np.flatnonzero(is_known & (size <= max_bytes))

    def _plan_numbers(self, found: SampleScan, rejects: _Rejects) -> np.ndarray:
        """int64 [N]: the number of each sample's writer in `plans`, -1 = unreadable."""
        fingerprints, inverse = np.unique(found.schema_N, return_inverse=True)
        numbers = np.full(len(fingerprints), -1, dtype=np.int64)
        for i, fingerprint in enumerate(fingerprints):
            try:
                numbers[i] = self.plans.number_of(unsigned(int(fingerprint)))
            except (SchemaError, CheckpointError) as error:
                for n in found.index_N[inverse == i]:
                    rejects[int(n)] = ("unknown_schema", str(error))
        return numbers[inverse]

    def _check(self, found: SampleScan, plan_N: np.ndarray, is_bare_N: np.ndarray) -> np.ndarray:
        """int64 [N]: OK or the first error; -1 for samples of an unreadable writer. `is_bare_N`: corrections
        that may lack features, because they are not trained."""
        limits, plans = self.schema.limits, self.plans
        status_N = np.where(plan_N < 0, -1, OK)
        used_N = np.bincount(found.sample_P, weights=found.used_P, minlength=len(plan_N)).astype(np.int64)
        num_items_N = np.diff(field(found.spans_N, SAMPLE.item_ids), axis=1)[:, 0] // 8
        used_N = np.where(is_bare_N & (used_N == 0), num_items_N, used_N)
        num_labels_N = plans.num_labels_S[plan_N]
        scan.check_samples(found.buf, found.spans_N, num_labels_N, used_N, limits.max_candidates, status_N)
        ro, nro = found.ro_blocks(plan_N), found.nro_blocks(plan_N)
        scan.check_blocks(found.buf, ro, plans.of_side["ro"], limits.max_list, status_N)
        status_P = np.where(plan_N[found.sample_P] < 0, -1, found.status_P)
        scan.check_blocks(found.buf, nro, plans.of_side["nro"], limits.max_list, status_P)
        for p in np.flatnonzero(status_P > 0):
            status_N[found.sample_P[p]] = status_N[found.sample_P[p]] or status_P[p]
        return status_N

    def _check_times(
        self,
        records: Sequence[Record],
        found: SampleScan,
        is_correction_N: np.ndarray,
        status_N: np.ndarray,
        rejects: _Rejects,
    ) -> None:
        """The timestamp of a sample's record is its close time: partitions are merged, rows stamped and ids
        forgotten by it. The timestamp of a correction is when it was due, and in older records the joiner's
        clock."""
        timestamp_N = np.array([record.timestamp_ms for record in records], dtype=np.int64)[found.index_N]
        close_ms_N = read_i64(found.buf, field(found.spans_N, SAMPLE.close_ms))
        for n in np.flatnonzero((status_N == OK) & ~is_correction_N & (close_ms_N != timestamp_N)):
            error = f"expected the record's timestamp {timestamp_N[n]}, got close time {close_ms_N[n]}"
            rejects[int(found.index_N[n])] = ("bad_time", error)
            status_N[n] = scan.BAD_SHAPE


def rewrite_sample(value: bytes) -> bytes:
    """A sample in our writers' form, without unknown fields and without the texts that a batch does not have.

    Raises:
        WireError: `undecodable`.
    """
    sample = pb.Sample()
    try:
        sample.ParseFromString(value[2:])
    except DecodeError as error:
        raise WireError("undecodable", f"expected a Sample: {error}") from None
    sample.DiscardUnknownFields()  # type: ignore[attr-defined]
    for text in ("request_id", "model_version"):
        sample.header.ClearField(text)
    sample.actions[:] = [""] * len(sample.actions)
    if sample.HasField("ro"):
        sample.ro = canonical(sample.ro)
    for part in sample.parts:
        part.nro = canonical(part.nro)
    return value[:2] + sample.SerializeToString(deterministic=True)


# ---- how each writer's blocks are read ----


class SideLayout(NamedTuple):
    """The parts of a side's arrays that depend on the schema in use only."""

    default_F: np.ndarray  # float32
    keys: tuple[str, ...]  # list features
    columns: tuple[str, ...]  # C names `feature.column`: the ids columns of each list, then its time columns
    list_and_column_C2: np.ndarray  # int64: (k, c), the c-th column of list k
    max_columns: int
    is_weighted: bool


def side_layout(schema: Schema, side: Side) -> SideLayout:
    """How the decoded features of a side are laid out."""
    lists = schema.lists(side)
    columns_K = [(*f.id_columns, *f.time_columns) for f in lists]
    pairs = [(k, c) for k, names in enumerate(columns_K) for c in range(len(names))]
    return SideLayout(
        default_F=np.array([f.default for f in schema.floats(side)], dtype=np.float32),
        keys=tuple(f.name for f in lists),
        columns=tuple(f"{f.name}.{c}" for f, names in zip(lists, columns_K, strict=True) for c in names),
        list_and_column_C2=np.array(pairs, np.int64).reshape(-1, 2),
        max_columns=max(map(len, columns_K), default=0),
        is_weighted=any(f.kind == "weighted_ids" for f in lists),
    )


class ReadingPlans:
    """The reading plans of all writers met so far, stacked for the kernels; the schema in use is number 0.
    Not thread-safe."""

    def __init__(self, schema: Schema, registry: Registry) -> None:
        self.schema, self.registry = schema, registry
        self._writers: list[Schema] = []
        self._numbers: dict[int, int] = {}
        self._errors: dict[int, str] = {}
        self.layouts: dict[Side, SideLayout] = {side: side_layout(schema, side) for side in _SIDES}
        self._add(schema, schema.fingerprint)

    def number_of(self, fingerprint: int) -> int:
        """The number of a writer's schema.

        Raises:
            SchemaError: the schema is not registered, or its change cannot be read; says which and what to
            do.
        """
        if fingerprint in self._errors:
            raise SchemaError(self._errors[fingerprint])
        if fingerprint not in self._numbers:
            writer = self.registry(fingerprint)
            if writer is None:
                text = f"unknown schema {fingerprint:016x}; register the schema that wrote these records"
                raise SchemaError(text)
            try:
                self._add(writer, fingerprint)
            except SchemaError as error:
                self._errors[fingerprint] = str(error)
                raise
        return self._numbers[fingerprint]

    def _add(self, writer: Schema, fingerprint: int) -> None:
        """Raises SchemaError and changes nothing if the writer cannot be read."""
        reading_plan(writer, self.schema)
        self._numbers[fingerprint] = len(self._writers)
        self._writers.append(writer)
        plans = [reading_plan(w, self.schema) for w in self._writers]
        self.label_to_ST = _padded([p["label"] for p in plans], -2)
        self.num_labels_S = np.array([len(w.labels) for w in self._writers], dtype=np.int64)
        self.of_side: dict[Side, ReadingPlan] = {side: self._stacked(side, plans) for side in _SIDES}

    def _stacked(self, side: Side, plans: list[dict[str, list[int]]]) -> ReadingPlan:
        lists = [w.lists(side) for w in self._writers]
        streams = [_padded([[_streams(f)[i] for f in fs] for fs in lists], 0) for i in range(3)]
        max_list = self.schema.limits.max_list
        return ReadingPlan(
            num_floats_S=np.array([len(p[f"{side}_float"]) for p in plans], dtype=np.int64),
            num_lists_S=np.array([len(fs) for fs in lists], dtype=np.int64),
            float_to_SF=_padded([p[f"{side}_float"] for p in plans], -1),
            list_to_SK=_padded([p[f"{side}_list"] for p in plans], -1),
            streams_SK3=np.stack(streams, axis=2),
            max_len_K=np.array([f.max_len or max_list for f in self.schema.lists(side)], dtype=np.int64),
        )


_SIDES: tuple[Side, ...] = ("ro", "nro")


def _streams(f: Feature) -> tuple[int, int, int]:
    """Number of arrays of a list's length that the feature adds to `ids`, `weights` and `times`."""
    return 1 + len(f.id_columns), int(f.kind == "weighted_ids"), len(f.time_columns)


def _padded(rows: list[list[int]], fill: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows), default=0)), fill, dtype=np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


# ---- filling a batch from checked messages ----


def _fill_samples(
    plans: ReadingPlans, found: SampleScan, plan_N: np.ndarray, kept_R: np.ndarray
) -> dict[str, Any]:
    """Batch's fields but schema, correction_R, partition_R and offset_R; `kept_R`: the samples that passed
    all checks."""
    buf, spans_R = found.buf, found.spans_N[kept_R]
    counts_R = (spans_R[:, SAMPLE.item_ids, 1] - spans_R[:, SAMPLE.item_ids, 0]) // 8
    out_R = offsets(counts_R)
    r, b, t = len(kept_R), int(out_R[-1]), len(plans.schema.labels)
    ro = found.ro_blocks(plan_N).take(kept_R)._replace(out_M=np.arange(r))
    is_kept_N = np.zeros(len(plan_N), dtype=np.bool_)
    is_kept_N[kept_R] = True
    kept_P = np.flatnonzero(is_kept_N[found.sample_P])
    nro = found.nro_blocks(plan_N).take(kept_P)._replace(out_M=offsets(found.used_P[kept_P])[:-1])
    weight_R = read_u32(buf, field(spans_R, SAMPLE.weight)).view(np.float32)
    weight_R[weight_R == 0] = 1.0
    out = Candidates(
        item_B=np.zeros(b, dtype=np.int64),
        label_BT=_float_bits((b, t), 0),
        before_BT=_float_bits((b, t), np.nan),
        weight_BT=_float_bits((b, t), 0),
        score_BT=_float_bits((b, t), np.nan),
        position_B=np.full(b, -1, dtype=np.int32),
        propensity_B=_float_bits((b,), 1),
    )
    label_to_RT = plans.label_to_ST[plan_N[kept_R]]
    fill_candidates(buf, spans_R, weight_R.view(np.uint32), label_to_RT, out_R, out)
    return {
        **_fill_side(plans, "ro", buf, ro, r),
        **_fill_side(plans, "nro", buf, nro, b),
        "num_candidates_R": counts_R.astype(np.int32),
        "request_index_B": np.repeat(np.arange(r), counts_R),
        "item_B": out.item_B,
        "label_BT": out.label_BT.view(np.float32),
        "label_before_BT": out.before_BT.view(np.float32),
        "weight_BT": out.weight_BT.view(np.float32),
        "position_B": out.position_B,
        "propensity_B": out.propensity_B.view(np.float32),
        "served_score_BT": out.score_BT.view(np.float32),
        "time_ms_R": found.time_ms_N[kept_R],
        "close_ms_R": read_i64(buf, field(spans_R, SAMPLE.close_ms)),
        "oldest_engagement_ms_R": oldest_i64(buf, field(spans_R, SAMPLE.event_times)),
        "sample_id_R": read_i64(buf, field(spans_R, SAMPLE.sample_id)),
        "surface_R": _texts(buf, found.surface_N[kept_R]),
    }


def _float_bits(shape: tuple[int, ...], value: float) -> np.ndarray:
    return np.full(shape, value, dtype=np.float32).view(np.uint32)


def _texts(buf: np.ndarray, spans_R: np.ndarray) -> np.ndarray:
    """bytes S64 [R]; longer texts are cut between two letters."""
    starts, ends = spans_R.T.tolist() if len(spans_R) else ([], [])
    texts = [buf[start:end].tobytes() for start, end in zip(starts, ends, strict=True)]
    limit = np.dtype(TEXT).itemsize
    whole = [t if len(t) <= limit else t[:limit].decode("utf-8", "ignore").encode() for t in texts]
    return np.array(whole, dtype=TEXT)


def _fill_request(
    plans: ReadingPlans, buf: np.ndarray, blocks: dict[Side, Blocks], item_B: np.ndarray, time_ms: int
) -> Batch:
    """The batch of one request without labels, from its checked blocks."""
    b, t = len(item_B), len(plans.schema.labels)
    unknown_BT, none_R = np.full((b, t), np.nan, dtype=np.float32), np.zeros(1, dtype=np.int64)
    return Batch(
        schema=plans.schema,
        **_fill_side(plans, "ro", buf, blocks["ro"], 1),
        **_fill_side(plans, "nro", buf, blocks["nro"], b),
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


def _fill_side(plans: ReadingPlans, side: Side, buf: np.ndarray, blocks: Blocks, rows: int) -> dict[str, Any]:
    """A side's fields of Batch, of `rows` rows, from checked blocks."""
    layout, plan = plans.layouts[side], plans.of_side[side]
    float_NF = np.empty((rows, len(layout.default_F)), dtype=np.float32)
    float_NF[:] = layout.default_F
    present_NF = np.zeros(float_NF.shape, dtype=np.bool_)
    lengths_KN = np.zeros((len(layout.keys), rows), dtype=np.int32)
    present_KN = np.zeros(lengths_KN.shape, dtype=np.bool_)
    fill_rows(buf, blocks, plan, float_NF.view(np.uint32), present_NF, lengths_KN, present_KN)

    starts = offsets(lengths_KN.ravel())
    list_C, column_C = layout.list_and_column_C2.T
    ends = offsets(lengths_KN.sum(axis=1, dtype=np.int64)[list_C])
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
    letter = "R" if side == "ro" else "B"
    return {
        f"{side}_float_{letter}F": float_NF,
        f"{side}_present_{letter}F": present_NF,
        f"{side}_lists": Jagged(
            keys=layout.keys,
            lengths_KN=lengths_KN,
            values=out.values,
            present_KN=present_KN,
            weights=out.weights.view(np.float32) if layout.is_weighted else None,
            columns={name: out.columns[ends[n] : ends[n + 1]] for n, name in enumerate(layout.columns)},
        ),
    }


# ---- kernels: fill ----


@njit(cache=True, nogil=True)
def fill_rows(
    buf: np.ndarray,
    blocks: Blocks,
    plan: ReadingPlan,
    float_NF: np.ndarray,
    present_NF: np.ndarray,
    lengths_KN: np.ndarray,
    present_KN: np.ndarray,
) -> None:
    """Fill floats (uint32 bits, prefilled with the defaults), list lengths (cut to max_len) and presence."""
    for m in range(len(blocks.rows_M)):
        spans, s, taken = blocks.spans_M[m], blocks.plan_M[m], 0
        if is_blank(spans):
            continue
        floats, lists = plan.num_floats_S[s], plan.num_lists_S[s]
        for row in range(blocks.rows_M[m]):
            if not selected(buf, blocks.select_M[m], row, taken):
                continue
            b = blocks.out_M[m] + taken
            taken += 1
            for f in range(floats):
                bits, to = u32(buf, spans[BLOCK.floats, 0] + 4 * (row * floats + f)), plan.float_to_SF[s, f]
                if to >= 0 and bits & 0x7FFFFFFF <= 0x7F800000:
                    float_NF[b, to] = bits
                    present_NF[b, to] = True
            for k in range(lists):
                to = plan.list_to_SK[s, k]
                if to >= 0:
                    lengths_KN[to, b] = min(
                        u32(buf, spans[BLOCK.lengths, 0] + 4 * (row * lists + k)), plan.max_len_K[to]
                    )
                    present_KN[to, b] = not is_missing(buf, spans[BLOCK.missing], row * lists + k)


@njit(cache=True, nogil=True)
def selected(buf: np.ndarray, select: np.ndarray, row: int, taken: int) -> bool:
    """Whether `row` is in use, after `taken` earlier rows in use."""
    at = select[0] + 4 * taken
    return select[1] == select[0] or (at < select[1] and u32(buf, at) == row)


class Lists(NamedTuple):
    """Where list entries go. Those of feature k in row n begin at starts_KN[k, n] of values and weights.
    Those of its column c (ids columns, then time columns) begin at base_KC[k, c] plus the same distance from
    the feature's start."""

    lengths_KN: np.ndarray  # int32
    starts_KN: np.ndarray  # int64
    base_KC: np.ndarray  # int64
    values: np.ndarray  # int64
    weights: np.ndarray  # uint32 bits
    columns: np.ndarray  # int64


@njit(cache=True, nogil=True)
def fill_lists(buf: np.ndarray, blocks: Blocks, plan: ReadingPlan, out: Lists) -> None:
    """Fill the entries of lists."""
    for m in range(len(blocks.rows_M)):
        spans, s, taken = blocks.spans_M[m], blocks.plan_M[m], 0
        if is_blank(spans):
            continue
        lists = plan.num_lists_S[s]
        at_ids, at_weights, at_times = spans[BLOCK.ids, 0], spans[BLOCK.weights, 0], spans[BLOCK.times, 0]
        for row in range(blocks.rows_M[m]):
            use = selected(buf, blocks.select_M[m], row, taken)
            b = blocks.out_M[m] + taken
            taken += use
            for k in range(lists):
                length = u32(buf, spans[BLOCK.lengths, 0] + 4 * (row * lists + k))
                streams = plan.streams_SK3[s, k]
                if use and plan.list_to_SK[s, k] >= 0:
                    fill_list(
                        buf, at_ids, at_weights, at_times, length, streams, out, plan.list_to_SK[s, k], b
                    )
                at_ids += 8 * length * streams[0]
                at_weights += 4 * length * streams[1]
                at_times += 8 * length * streams[2]


@njit(cache=True, nogil=True)
def fill_list(
    buf: np.ndarray,
    ids: int,
    weights: int,
    times: int,
    length: int,
    streams: np.ndarray,
    out: Lists,
    k: int,
    b: int,
) -> None:
    """Copy the first `lengths_KN[k, b]` of a list's `length` entries."""
    count, start = out.lengths_KN[k, b], out.starts_KN[k, b]
    copy_i64(buf, ids, count, out.values, start)
    if streams[1]:
        for i in range(count):
            out.weights[start + i] = u32(buf, weights + 4 * i)
    distance = start - out.starts_KN[k, 0]
    for c in range(streams[0] - 1):
        copy_i64(buf, ids + 8 * length * (c + 1), count, out.columns, out.base_KC[k, c] + distance)
    for c in range(streams[2]):
        copy_i64(
            buf, times + 8 * length * c, count, out.columns, out.base_KC[k, streams[0] - 1 + c] + distance
        )


@njit(cache=True, nogil=True)
def copy_i64(buf: np.ndarray, at: int, count: int, out: np.ndarray, start: int) -> None:
    """Copy `count` little-endian int64 values at byte `at` to `out[start:]`."""
    for i in range(count):
        out[start + i] = i64(buf, at + 8 * i)


class Candidates(NamedTuple):
    """Columns of candidates, prefilled with the values of absent columns; floats as uint32 bits."""

    item_B: np.ndarray
    label_BT: np.ndarray
    before_BT: np.ndarray
    weight_BT: np.ndarray
    score_BT: np.ndarray
    position_B: np.ndarray
    propensity_B: np.ndarray


@njit(cache=True, nogil=True)
def fill_candidates(
    buf: np.ndarray,
    spans_R: np.ndarray,
    weight_R: np.ndarray,
    label_to_RT: np.ndarray,
    out_R: np.ndarray,
    out: Candidates,
) -> None:
    """Fill columns from checked samples; `label_to_RT`: writer's label → reader's, -1 = dropped, -2 = no
    label."""
    for r in range(len(spans_R)):
        spans, start = spans_R[r], spans_R[r, :, 0]
        labels = 0
        while labels < label_to_RT.shape[1] and label_to_RT[r, labels] > -2:
            labels += 1
        for i in range((spans[SAMPLE.item_ids, 1] - spans[SAMPLE.item_ids, 0]) // 8):
            b = out_R[r] + i
            out.item_B[b] = i64(buf, start[SAMPLE.item_ids] + 8 * i)
            if is_given(spans, SAMPLE.positions):
                out.position_B[b] = u32(buf, start[SAMPLE.positions] + 4 * i)
            if is_given(spans, SAMPLE.propensities):
                out.propensity_B[b] = u32(buf, start[SAMPLE.propensities] + 4 * i)
            for t in range(labels):
                at, to = 4 * (i * labels + t), label_to_RT[r, t]
                if to < 0:
                    continue
                out.weight_BT[b, to] = weight_R[r]
                out.label_BT[b, to] = u32(buf, start[SAMPLE.labels] + at)
                if is_given(spans, SAMPLE.labels_before):
                    out.before_BT[b, to] = u32(buf, start[SAMPLE.labels_before] + at)
                if is_given(spans, SAMPLE.scores):
                    out.score_BT[b, to] = u32(buf, start[SAMPLE.scores] + at)


@njit(cache=True, nogil=True)
def oldest_i64(buf: np.ndarray, spans_N: np.ndarray) -> np.ndarray:
    """The smallest entry of each sfixed64 column; 0 for an empty one."""
    out = np.zeros(len(spans_N), dtype=np.int64)
    for n in range(len(spans_N)):
        for at in range(spans_N[n, 0], spans_N[n, 1], 8):
            if at == spans_N[n, 0] or i64(buf, at) < out[n]:
                out[n] = i64(buf, at)
    return out


def precompile() -> None:
    """Compile every kernel into numba's cache."""
    schema = Schema(ro=(Feature(name="x"),), labels=(Label(name="click", action="click"),))
    Decoder(schema, lambda _: None).decode([], corrections=True)

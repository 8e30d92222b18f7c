"""The arrays of a batch, filled from checked samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from roo import wire_kernels as w
from roo.columns import Side
from roo.decode_kernels import Blocks, Candidates, Lists, Plan, fill_candidates, fill_lists, fill_rows, oldest_i64
from roo.decode_scan import CLOSE_MS, EVENT_TIMES, ITEM_IDS, SAMPLE_ID, WEIGHT, Scan, field
from roo.jagged import Jagged
from roo.plan import Layout, Plans


def ro_blocks(scan: Scan, plan_N: np.ndarray) -> Blocks:
    n = len(plan_N)
    none = np.zeros((n, 2), dtype=np.int64)
    return Blocks(scan.ro_spans_N, np.ones(n, dtype=np.int64), none, np.arange(n), plan_N)


def nro_blocks(scan: Scan, plan_N: np.ndarray) -> Blocks:
    """`out_M` counts the rows of all samples before; see `fill`."""
    return Blocks(scan.nro_spans_P, scan.rows_P, scan.select_P, _starts(scan.used_P)[:-1], plan_N[scan.sample_P])


def fill(plans: Plans, scan: Scan, plan_N: np.ndarray, kept_R: np.ndarray) -> dict[str, Any]:
    """Batch's fields, but for schema, correction_R, partition_R and offset_R.

    `kept_R`: the samples (positions in N, ascending) that passed every check.
    """
    spans_R = scan.spans_N[kept_R]
    counts_R = (spans_R[:, ITEM_IDS, 1] - spans_R[:, ITEM_IDS, 0]) // 8
    out_R = _starts(counts_R)
    r, b, t = len(kept_R), int(out_R[-1]), len(plans.schema.labels)
    ro = ro_blocks(scan, plan_N).take(kept_R)._replace(out_M=np.arange(r))
    is_kept_N = np.zeros(len(plan_N), dtype=np.bool_)
    is_kept_N[kept_R] = True
    kept_P = np.flatnonzero(is_kept_N[scan.sample_P])
    nro = nro_blocks(scan, plan_N).take(kept_P)._replace(out_M=_starts(scan.used_P[kept_P])[:-1])
    weight_R = w.read_u32(scan.buf, field(spans_R, WEIGHT)).view(np.float32)
    weight_R[weight_R == 0] = 1.0
    out = _candidates(b, t)
    fill_candidates(scan.buf, spans_R, weight_R.view(np.uint32), plans.label_to_ST[plan_N[kept_R]], out_R, out)
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
        "close_ms_R": w.read_i64(scan.buf, field(spans_R, CLOSE_MS)),
        "oldest_engagement_ms_R": oldest_i64(scan.buf, field(spans_R, EVENT_TIMES)),
        "sample_id_R": w.read_i64(scan.buf, field(spans_R, SAMPLE_ID)),
    }


def _candidates(b: int, t: int) -> Candidates:
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
    layout, plan = plans.layouts[side], plans.side(side)
    float_NF = np.empty((rows, len(layout.default_F)), dtype=np.float32)
    float_NF[:] = layout.default_F
    present_NF = np.zeros(float_NF.shape, dtype=np.bool_)
    lengths_KN = np.zeros((len(layout.keys), rows), dtype=np.int32)
    present_KN = np.zeros(lengths_KN.shape, dtype=np.bool_)
    fill_rows(buf, blocks, plan, float_NF.view(np.uint32), present_NF, lengths_KN, present_KN)
    lists = _lists(layout, plan, buf, blocks, lengths_KN, present_KN)
    letter = "R" if side == "ro" else "B"
    return {f"{side}_float_{letter}F": float_NF, f"{side}_present_{letter}F": present_NF, f"{side}_lists": lists}


def _lists(layout: Layout, plan: Plan, buf: np.ndarray, blocks: Blocks, lengths_KN: np.ndarray, present_KN: np.ndarray) -> Jagged:
    starts = _starts(lengths_KN.ravel())
    totals_K = lengths_KN.sum(axis=1, dtype=np.int64)
    ends = np.cumsum([0, *(totals_K[k] for _, k, _ in layout.columns)])
    base_KC = np.zeros((len(layout.keys), layout.most_columns), dtype=np.int64)
    for n, (_, k, c) in enumerate(layout.columns):
        base_KC[k, c] = ends[n]
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
        columns={name: out.columns[ends[n] : ends[n + 1]] for n, (name, _, _) in enumerate(layout.columns)},
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: 0 and the running sums."""
    out = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=out[1:])
    return out

"""The schema's transforms: floats derived from floats, one code path for training and serving.

    log1p        sign(x) · log(1 + |x|)
    log          log(max(x, 1e-9))
    clip         x limited to [low, high]
    standardize  (x - mean) / std
    rank         rank of x among its request's candidates, 0 = smallest, 1 = largest; ties share their mean.
                 A request with one candidate, or with equal ones only, gives 0.5
    share        max(x, 0) / sum of max(x, 0) over the request's candidates; 0 if that sum is 0

Inputs are the batch's floats, in which a missing float has its feature's default. Each request is computed
alone, in float64 and in the order of its candidates, and rounded once. So a request gives the same bits alone
and in any batch. Letters: N rows of a side, G output floats, O operations.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.dedup import Inverse

_LOG1P, _CLIP, _STANDARDIZE, _LOG, _RANK, _SHARE = range(6)
_OPS = {
    "log1p": _LOG1P,
    "clip": _CLIP,
    "standardize": _STANDARDIZE,
    "log": _LOG,
    "rank": _RANK,
    "share": _SHARE,
}
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class _Steps(NamedTuple):
    """The transforms of a side, as numbers for the kernel."""

    names: tuple[str, ...]  # of the output columns
    steps_O3: np.ndarray  # int64: operation, column in, column out
    settings_O2: np.ndarray  # float64: low and high of a clip; mean and std of a standardize


def apply_transforms(batch: Batch, unique: Inverse | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Apply the schema's transforms to the floats of a batch with R requests and B candidates.

    Returns float32 [R, G_ro] of the requests and float32 [B, G_nro] of the candidates; `output_names` has
    their columns. With `unique`, requests with equal features are computed once, which changes no bit.
    """
    starts_R1 = np.zeros(batch.num_requests + 1, dtype=np.int64)
    np.cumsum(batch.num_candidates_R, out=starts_R1[1:])
    ro, nro = batch.schema.derived(_steps_of_sides)
    float_UF = batch.ro_float_RF if unique is None else batch.ro_float_RF[unique.first_U]
    out_UG = _run(ro, float_UF, np.zeros(1, dtype=np.int64))
    return out_UG if unique is None else out_UG[unique.row_N], _run(nro, batch.nro_float_BF, starts_R1)


def output_names(schema: Schema, side: Side) -> tuple[str, ...]:
    """Declared floats, then derived floats in order; a transform with its own input as output keeps the
    position."""
    return schema.derived(_steps_of_sides)[0 if side == "ro" else 1].names


def _steps_of_sides(schema: Schema) -> tuple[_Steps, _Steps]:
    return _steps_of(schema, "ro"), _steps_of(schema, "nro")


def _steps_of(schema: Schema, side: Side) -> _Steps:
    """The operations of a side as numbers for the kernel, and the names of its output columns."""
    names = [f.name for f in schema.floats(side)]
    steps, settings = [], []
    for t in schema.transforms:
        if t.input not in names:
            continue
        if t.output not in names:
            names.append(t.output)
        steps.append((_OPS[t.op], names.index(t.input), names.index(t.output)))
        settings.append((t.low, t.high) if t.op == "clip" else (t.mean, t.std))
    return _Steps(
        names=tuple(names),
        steps_O3=np.array(steps, dtype=np.int64).reshape(-1, 3),
        settings_O2=np.array(settings, dtype=np.float64).reshape(-1, 2),
    )


def _run(steps: _Steps, float_NF: np.ndarray, starts_R1: np.ndarray) -> np.ndarray:
    out_NG = np.zeros((len(float_NF), len(steps.names)), dtype=np.float32)
    out_NG[:, : float_NF.shape[1]] = float_NF
    if len(steps.steps_O3):
        run_steps(out_NG, steps.steps_O3, steps.settings_O2, starts_R1)
    return out_NG


@njit(cache=True, nogil=True)
def run_steps(
    out_NG: np.ndarray, steps_O3: np.ndarray, settings_O2: np.ndarray, starts_R1: np.ndarray
) -> None:
    """Apply every operation in order, in place."""
    for o in range(len(steps_O3)):
        op, source, to = steps_O3[o]
        a, b = settings_O2[o]
        if op not in (_RANK, _SHARE):
            for n in range(len(out_NG)):
                out_NG[n, to] = elementwise(op, np.float64(out_NG[n, source]), a, b)
        else:
            for r in range(len(starts_R1) - 1):
                column = out_NG[starts_R1[r] : starts_R1[r + 1], source].astype(np.float64)
                within = rank(column) if op == _RANK else share(column)
                out_NG[starts_R1[r] : starts_R1[r + 1], to] = within


@njit(cache=True, nogil=True)
def elementwise(op: int, x: float, a: float, b: float) -> float:
    """log1p, clip(a, b), standardize(a, b) or log, limited to the finite range of float32."""
    if op == _LOG1P:
        y = math.copysign(math.log1p(abs(x)), x)
    elif op == _CLIP:
        y = min(max(x, a), b)
    elif op == _STANDARDIZE:
        y = (x - a) / b
    else:
        y = math.log(max(x, 1e-9))
    return min(max(y, -_MAX_FLOAT32), _MAX_FLOAT32)


@njit(cache=True, nogil=True)
def rank(x_n: np.ndarray) -> np.ndarray:
    """float64 [n]: the rank of each candidate's value among those of its request, from 0 = smallest to 1 =
    largest. Equal values share their mean rank; a single candidate has 0.5."""
    n = len(x_n)
    out = np.full(n, 0.5)
    order = np.argsort(x_n)
    first = 0
    while n > 1 and first < n:
        last = first
        while last + 1 < n and x_n[order[last + 1]] == x_n[order[first]]:
            last += 1
        for i in range(first, last + 1):
            out[order[i]] = 0.5 * (first + last) / (n - 1)
        first = last + 1
    return out


@njit(cache=True, nogil=True)
def share(x_n: np.ndarray) -> np.ndarray:
    """float64 [n]: the shares of one request's candidates."""
    total = 0.0
    for x in x_n:
        total += max(x, 0.0)
    out = np.zeros(len(x_n))
    for i in range(len(x_n) if total > 0 else 0):
        out[i] = max(x_n[i], 0.0) / total
    return out


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    steps = np.array([[op, 0, 0] for op in range(6)], dtype=np.int64)
    run_steps(np.ones((2, 1), dtype=np.float32), steps, np.ones((6, 2)), np.array([0, 2], dtype=np.int64))

"""The schema's transforms: floats derived from floats, one code path for training and serving.

    log1p        sign(x) · log(1 + |x|)
    clip         x limited to [low, high]
    standardize  (x - mean) / std
    rank         place of x among its request's candidates, 0 = smallest, 1 = largest, ties share the mean of their places;
                 a request whose candidates are all equal, or that has one candidate, gives 0.5
    share        max(x, 0) / sum of max(x, 0) over the request's candidates; 0 where that sum is 0

Inputs are the batch's floats, where a missing one already is its feature's default. Everything is computed in float64, each
request on its own and in candidate order, and rounded once: a request gives the same bits alone and in any batch.
Letters: N rows of a side, G floats out, O operations.
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

_OPS = {"log1p": 0, "clip": 1, "standardize": 2, "rank": 3, "share": 4}
_MOST = float(np.finfo(np.float32).max)


class _Steps(NamedTuple):
    names: tuple[str, ...]
    steps_O3: np.ndarray  # int64: operation, column in, column out
    settings_O2: np.ndarray  # float64


def apply_transforms(batch: Batch, unique: Inverse | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(RO floats f4[R, G_ro], NRO floats f4[B, G_nro]); columns are `output_names`. `unique`: requests with equal RO features are
    worked out once; the bits are the same."""
    starts_R1 = np.zeros(batch.num_requests + 1, dtype=np.int64)
    np.cumsum(batch.num_candidates_R, out=starts_R1[1:])
    ro, nro = batch.schema.derived(_programs)
    once_UF = batch.ro_float_RF if unique is None else batch.ro_float_RF[unique.first_U]
    once_UG = _run(ro, once_UF, np.zeros(1, dtype=np.int64))
    return once_UG if unique is None else once_UG[unique.row_N], _run(nro, batch.nro_float_BF, starts_R1)


def output_names(schema: Schema, side: Side) -> tuple[str, ...]:
    """Declared floats (a transform onto its own input replaces the value, not the place), then derived ones in order."""
    return schema.derived(_programs)[0 if side == "ro" else 1].names


def _programs(schema: Schema) -> tuple[_Steps, _Steps]:
    return _program(schema, "ro"), _program(schema, "nro")


def _program(schema: Schema, side: Side) -> _Steps:
    """The side's operations as numbers that the kernel reads, and its columns' names."""
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


def _run(program: _Steps, float_NF: np.ndarray, starts_R1: np.ndarray) -> np.ndarray:
    out_NG = np.zeros((len(float_NF), len(program.names)), dtype=np.float32)
    out_NG[:, : float_NF.shape[1]] = float_NF
    if len(program.steps_O3):
        run_steps(out_NG, program.steps_O3, program.settings_O2, starts_R1)
    return out_NG


@njit(cache=True, nogil=True)
def run_steps(
    out_NG: np.ndarray, steps_O3: np.ndarray, settings_O2: np.ndarray, starts_R1: np.ndarray
) -> None:
    """Every operation in order, in place."""
    for o in range(len(steps_O3)):
        op, source, to = steps_O3[o]
        a, b = settings_O2[o]
        if op <= 2:
            for n in range(len(out_NG)):
                out_NG[n, to] = elementwise(op, np.float64(out_NG[n, source]), a, b)
        else:
            for r in range(len(starts_R1) - 1):
                column = out_NG[starts_R1[r] : starts_R1[r + 1], source].astype(np.float64)
                within = rank(column) if op == 3 else share(column)
                out_NG[starts_R1[r] : starts_R1[r + 1], to] = within


@njit(cache=True, nogil=True)
def elementwise(op: int, x: float, a: float, b: float) -> float:
    """log1p, clip(a, b) or standardize(a, b), kept within float32's finite range."""
    if op == 0:
        y = math.copysign(math.log1p(abs(x)), x)
    elif op == 1:
        y = min(max(x, a), b)
    else:
        y = (x - a) / b
    return min(max(y, -_MOST), _MOST)


@njit(cache=True, nogil=True)
def rank(x_n: np.ndarray) -> np.ndarray:
    """See the module."""
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
    """See the module."""
    total = 0.0
    for x in x_n:
        total += max(x, 0.0)
    out = np.zeros(len(x_n))
    for i in range(len(x_n) if total > 0 else 0):
        out[i] = max(x_n[i], 0.0) / total
    return out


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    steps = np.array([[op, 0, 0] for op in range(5)], dtype=np.int64)
    run_steps(np.ones((2, 1), dtype=np.float32), steps, np.ones((5, 2)), np.array([0, 2], dtype=np.int64))

"""Slices of candidates: by surface, by candidate age, or by any declared feature.

    surface          of the request, as the caller named it
    candidate_age    of the NRO feature with `online = "age_s"`: steps from 10 minutes to a week
    a float feature  steps of powers of two
    an ids feature   its first id

Letters: R requests, B candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from roostream.errors import ConfigError, nearest
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch

SURFACE, CANDIDATE_AGE = "surface", "candidate_age"
MAX_SLICES = 8
OTHER, MISSING = "other", "missing"
_AGES = ((600, "<10m"), (3600, "<1h"), (21_600, "<6h"), (86_400, "<1d"), (604_800, "<7d"), (np.inf, ">=7d"))

Labelled = tuple[np.ndarray, Sequence[str]]  # int64 [B] numbers, and the name of each number


class Slicer:
    """One slice: maps each candidate of a batch to a named value."""

    def __init__(self, name: str, values: Callable[[Batch], Labelled]) -> None:
        self.name, self.values = name, values


def build_slicers(schema: Schema, names: Sequence[str]) -> list[Slicer]:
    """One slicer for each of `names`, in order.

    Raises:
        ConfigError: too many names, or an unknown one; suggests the nearest.
    """
    if len(names) > MAX_SLICES or len(set(names)) < len(names):
        raise ConfigError(
            f"expected slices to name at most {MAX_SLICES} different ones, got {', '.join(names)}"
        )
    return [Slicer(name, _values(schema, name)) for name in names]


def _values(schema: Schema, name: str) -> Callable[[Batch], Labelled]:
    if name == SURFACE:
        return _surface
    if name == CANDIDATE_AGE:
        return _age(schema)
    sides: tuple[Literal["ro", "nro"], ...] = ("ro", "nro")
    for side in sides:
        for column, feature in enumerate(schema.floats(side)):
            if feature.name == name:
                return lambda batch: _steps(*_float(batch, side, column))
        if any(feature.name == name for feature in schema.lists(side)):
            return lambda batch: _first_id(batch, side, name)
    known = [SURFACE, CANDIDATE_AGE, *(f.name for f in (*schema.ro, *schema.nro))]
    raise ConfigError(
        f"expected slices of surface, candidate_age or declared features, got {name!r}{nearest(name, known)}"
    )


def _surface(batch: Batch) -> Labelled:
    texts, number_R = np.unique(batch.surface_R, return_inverse=True)
    names = [text.decode("utf-8", "replace") or MISSING for text in texts.tolist()]
    return number_R[batch.request_index_B], names


def _age(schema: Schema) -> Callable[[Batch], Labelled]:
    found = next((f for f in schema.nro if f.online == "age_s" and not f.is_list), None)
    if found is None:
        raise ConfigError(
            'expected an NRO float with online = "age_s" for the slice candidate_age, the schema has none'
        )
    name, column = found.name, schema.floats("nro").index(found)
    if any(t.output == name and t.op != "log1p" for t in schema.transforms):
        raise ConfigError(
            f"expected {name!r} as it is, or its log1p, for the slice candidate_age; give the transform an "
            "output"
        )
    is_log = any(t.output == name for t in schema.transforms)
    bounds = np.array([age for age, _ in _AGES[:-1]], dtype=np.float64)
    names = [*(label for _, label in _AGES), MISSING]

    def values(batch: Batch) -> Labelled:
        value_B, present_B = _float(batch, "nro", column)
        seconds_B = np.expm1(value_B.astype(np.float64)) if is_log else value_B
        return np.where(present_B, np.searchsorted(bounds, seconds_B, side="right"), len(_AGES)), names

    return values


def _float(batch: Batch, side: Literal["ro", "nro"], column: int) -> tuple[np.ndarray, np.ndarray]:
    if side == "nro":
        return batch.nro_float_BF[:, column], batch.nro_present_BF[:, column]
    index_B = batch.request_index_B
    return batch.ro_float_RF[index_B, column], batch.ro_present_RF[index_B, column]


def _steps(value_B: np.ndarray, present_B: np.ndarray) -> Labelled:
    """0, and [2^k, 2^(k+1)) of either sign, from 2^-4 to 2^20."""
    exponent_B = np.clip(np.frexp(value_B)[1] - 1, -4, 20)
    code_B = np.where(value_B == 0, 0, (exponent_B + 5) * np.sign(value_B)).astype(np.int64)
    code_B[~present_B] = 99
    codes, number_B = np.unique(code_B, return_inverse=True)
    return number_B, [_step_name(code) for code in codes.tolist()]


def _step_name(code: int) -> str:
    if code == 99:
        return MISSING
    low = 2.0 ** (abs(code) - 5)
    return "0" if code == 0 else f"{low:g}.." if code > 0 else f"-{low:g}.."


def _first_id(batch: Batch, side: Literal["ro", "nro"], name: str) -> Labelled:
    lists = batch.ro_lists if side == "ro" else batch.nro_lists
    length_N, value = lists.lengths_KN[lists.index(name)], lists.values_of(name)
    starts_N = np.cumsum(length_N, dtype=np.int64) - length_N
    ids, number_N = np.zeros(0, dtype=np.int64), np.zeros(len(length_N), dtype=np.int64)
    has_N = length_N > 0
    ids, number_N[has_N] = np.unique(value[starts_N[has_N]], return_inverse=True)
    number_N[~has_N] = len(ids)
    names = [*map(str, ids.tolist()), MISSING]
    return (number_N[batch.request_index_B] if side == "ro" else number_N), names

"""Which one number, had it another value, would give the scores that were served. Pure.

Tried of every float: missing, and the value that fits best, of a request-only one for the list, else of one candidate (the eight
that differ most). What is named has been scored with that value, and gives all served scores to the tolerance; where none does,
nothing is named.

Letters: n candidates, F floats of a side, G values of a grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup
from serving.scorer import Version, probabilities

_FIRST_G = np.sinh(np.linspace(-14.5, 14.5, 59))  # ±1,000,000, dense around 0: the model reads asinh
_ROUNDS, _EACH = 8, 9
_MAX_CANDIDATES = 8
_NOTHING = "no single float, missing or of another value, gives the scores that were served"


def explained(
    version: Version, batch: Batch, lookup: Lookup, rows: Mapping[str, np.ndarray], tolerance: float
) -> str:
    """A sentence, of the first feature that does."""
    trial = _Trial(version, batch, lookup, rows)
    for side, at, name in _floats(batch):
        if trial.difference(trial.batch_with(side, at, None, None)).max(initial=0) <= tolerance:
            return f"its scores are those without {name!r}, which the log has"
    worst_n = np.argsort(-trial.difference(batch), kind="stable")[:_MAX_CANDIDATES].tolist()
    for side, at, name in _floats(batch):
        for row in [0] if side == "ro" else worst_n:
            value = trial.fitting(side, at, row, tolerance)
            if value is not None:
                logged = _arrays(batch, side)[0][row, at]
                whose = "" if side == "ro" else f" of item {batch.item_B[row]}"
                return f"its scores are those of {name!r}{whose} = {value:.4g}; the log has {logged:.4g}"
    return _NOTHING


class _Trial:
    def __init__(
        self, version: Version, batch: Batch, lookup: Lookup, rows: Mapping[str, np.ndarray]
    ) -> None:
        self.version, self.batch, self.lookup, self.rows = version, batch, lookup, rows

    def difference(self, batch: Batch) -> np.ndarray:
        """float32 [n]: of the candidates' scores from those served."""
        score_nT = probabilities(self.version.forward(batch, self.lookup, self.rows))
        return np.abs(score_nT - batch.served_score_BT).max(axis=1, initial=0)

    def batch_with(self, side: str, at: int, row: int | None, value: float | None) -> Batch:
        """The list with another value of one float, in all rows (None) or one; None = missing, which reads as its default."""
        value_NF, present_NF = (array.copy() for array in _arrays(self.batch, side))
        default = self.batch.schema.floats("ro" if side == "ro" else "nro")[at].default
        rows = slice(None) if row is None else row
        value_NF[rows, at] = default if value is None else value
        present_NF[rows, at] = value is not None
        if side == "ro":
            return dataclasses.replace(self.batch, ro_float_RF=value_NF, ro_present_RF=present_NF)
        return dataclasses.replace(self.batch, nro_float_BF=value_NF, nro_present_BF=present_NF)

    def fitting(self, side: str, at: int, row: int, tolerance: float) -> float | None:
        """The value of one row that gives the served scores; None where none does."""
        grid_G = _FIRST_G
        for _ in range(_ROUNDS):
            differs = [
                float(self.difference(self.batch_with(side, at, row, float(x))).max(initial=0))
                for x in grid_G
            ]
            nearest = int(np.argmin(differs))
            if differs[nearest] <= tolerance / 4:
                break
            low, high = grid_G[max(nearest - 1, 0)], grid_G[min(nearest + 1, len(grid_G) - 1)]
            grid_G = np.sinh(np.linspace(np.arcsinh(low), np.arcsinh(high), _EACH))
        return float(grid_G[nearest]) if differs[nearest] <= tolerance else None


def _arrays(batch: Batch, side: str) -> tuple[np.ndarray, np.ndarray]:
    return (
        (batch.ro_float_RF, batch.ro_present_RF)
        if side == "ro"
        else (batch.nro_float_BF, batch.nro_present_BF)
    )


def _floats(batch: Batch) -> Iterator[tuple[str, int, str]]:
    """(side, column, name)."""
    for side in ("ro", "nro"):
        for at, feature in enumerate(batch.schema.floats("ro" if side == "ro" else "nro")):
            yield side, at, feature.name

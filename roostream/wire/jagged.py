"""List features of a batch, in the layout of TorchRec's KeyedJaggedTensor.

K features of N rows (R requests or B candidates), feature-major; for example K = 2, N = 3:

    key      row 0   row 1   row 2          lengths_KN = [[2, 0, 1],
    history  [8, 3]  []      [5]                          [1, 1, 0]]
    topics   [4]     [9]     (missing)      values     = [8, 3, 5, 4, 9]
                                            present_KN = [[T, T, T], [T, T, F]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Jagged:
    """List features of N rows. Construction asserts the invariants, since only our own code builds it."""

    keys: tuple[str, ...]  # K features
    lengths_KN: np.ndarray  # int32 [K, N]
    values: np.ndarray  # int64 [sum of lengths]: ids, by feature, then by row
    present_KN: np.ndarray  # bool [K, N]: False = missing (and then length 0)
    weights: np.ndarray | None = None  # float32, aligned with values; 1 for features without weights
    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """`feature.column` → int64 [total length of that feature]: ids or times in ms, aligned with
    `values_of(feature)`."""

    def __post_init__(self) -> None:
        assert (
            self.lengths_KN.dtype == np.int32
            and self.lengths_KN.ndim == 2
            and len(self.keys) == self.lengths_KN.shape[0]
        )
        assert self.values.dtype == np.int64 and self.values.ndim == 1
        assert self.present_KN.dtype == np.bool_ and self.present_KN.shape == self.lengths_KN.shape
        starts = self.starts_K1.tolist()
        assert starts[-1] == len(self.values), (starts[-1], len(self.values))
        assert self.weights is None or (
            self.weights.dtype == np.float32 and len(self.weights) == len(self.values)
        )
        for name, column in self.columns.items():
            k = self.index(name.split(".", 1)[0])
            assert len(column) == starts[k + 1] - starts[k], name

    @property
    def num_rows(self) -> int:
        return int(self.lengths_KN.shape[1])

    @cached_property
    def starts_K1(self) -> np.ndarray:
        """int64 [K + 1]: feature k has values[starts_K1[k] : starts_K1[k + 1]]."""
        return _starts(self.lengths_KN)

    def index(self, key: str) -> int:
        return self.keys.index(key)

    def total_of(self, key: str) -> int:
        k = self.index(key)
        return int(self.starts_K1[k + 1] - self.starts_K1[k])

    def values_of(self, key: str) -> np.ndarray:
        """int64 view of the ids of feature `key`."""
        k = self.index(key)
        return self.values[self.starts_K1[k] : self.starts_K1[k + 1]]

    def weights_of(self, key: str) -> np.ndarray | None:
        k = self.index(key)
        return None if self.weights is None else self.weights[self.starts_K1[k] : self.starts_K1[k + 1]]

    def offsets_of(self, key: str) -> np.ndarray:
        """int64 [N + 1]: row n of feature `key` is values_of(key)[offsets[n] : offsets[n + 1]]."""
        out = np.zeros(self.num_rows + 1, dtype=np.int64)
        np.cumsum(self.lengths_KN[self.index(key)], out=out[1:])
        return out

    @cached_property
    def _offsets_KN1(self) -> np.ndarray:
        """int64 [K, N + 1]: `offsets_of` every feature."""
        out = np.zeros((len(self.keys), self.num_rows + 1), dtype=np.int64)
        np.cumsum(self.lengths_KN, axis=1, out=out[:, 1:])
        return out

    def rows_between(self, start: int, end: int) -> Jagged:
        """A copy of the rows `start` up to `end`, in time proportional to these rows after the first call."""
        bounds_K2 = self._offsets_KN1[:, [start, end]] + self.starts_K1[:-1, None]
        spans = [slice(*bounds) for bounds in bounds_K2.tolist()]
        ranges_of = {
            key: slice(*bounds)
            for key, bounds in zip(self.keys, self._offsets_KN1[:, [start, end]].tolist(), strict=True)
        }
        return Jagged(
            keys=self.keys,
            lengths_KN=self.lengths_KN[:, start:end].copy(),
            values=np.concatenate([self.values[span] for span in spans]) if spans else self.values.copy(),
            present_KN=self.present_KN[:, start:end].copy(),
            weights=None
            if self.weights is None or not spans
            else np.concatenate([self.weights[span] for span in spans]),
            columns={
                name: column[ranges_of[name.split(".", 1)[0]]].copy() for name, column in self.columns.items()
            },
        )

    def take_rows(self, rows_M: np.ndarray) -> Jagged:
        """The rows `rows_M` (int64 [M], repeats allowed), in that order."""
        lengths_KM = np.ascontiguousarray(self.lengths_KN[:, rows_M])
        ends_KN = np.cumsum(self.lengths_KN, dtype=np.int64).reshape(self.lengths_KN.shape)
        index_L = ranges((ends_KN - self.lengths_KN)[:, rows_M].ravel(), lengths_KM.ravel())
        columns, starts_K1 = dict[str, np.ndarray](), _starts(lengths_KM)
        for name, column in self.columns.items():
            k = self.index(name.split(".", 1)[0])
            columns[name] = column[index_L[starts_K1[k] : starts_K1[k + 1]] - self.starts_K1[k]]
        return Jagged(
            keys=self.keys,
            lengths_KN=lengths_KM,
            values=self.values[index_L],
            present_KN=np.ascontiguousarray(self.present_KN[:, rows_M]),
            weights=None if self.weights is None else self.weights[index_L],
            columns=columns,
        )

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """The rows of at least one part, one part after the other; all have the same features and columns."""
        keys, first = parts[0].keys, parts[0]
        weighted = first.weights is not None
        values = [part.values_of(key) for key in keys for part in parts]
        weights = [weights for key in keys for part in parts if (weights := part.weights_of(key)) is not None]
        return Jagged(
            keys=keys,
            lengths_KN=np.concatenate([part.lengths_KN for part in parts], axis=1),
            values=np.concatenate(values) if values else first.values,
            present_KN=np.concatenate([part.present_KN for part in parts], axis=1),
            weights=(np.concatenate(weights) if weights else first.weights) if weighted else None,
            columns={name: np.concatenate([part.columns[name] for part in parts]) for name in first.columns},
        )


def _starts(lengths_KN: np.ndarray) -> np.ndarray:
    out = np.zeros(len(lengths_KN) + 1, dtype=np.int64)
    np.cumsum(lengths_KN.sum(axis=1, dtype=np.int64), out=out[1:])
    return out


def ranges(starts_M: np.ndarray, lengths_M: np.ndarray) -> np.ndarray:
    """Concatenated arange(start, start + length) of all pairs."""
    ends = np.cumsum(lengths_M, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts_M - (ends - lengths_M), lengths_M)

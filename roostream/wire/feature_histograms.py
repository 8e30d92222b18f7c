"""Histograms of features, and the population stability index (PSI) between two of them.

    psi        Σ (p − q) ln(p / q) over the bins; above PSI_SHIFTED it has shifted (Siddiqi 2006, §7.2)
    floats     bins of signed powers of two, and one for missing
    ids        buckets of a hash of a list's first id, and one for missing or empty
    lengths    bins of powers of two of a list's length

Letters: N rows, F features, H bins.
"""

from __future__ import annotations

import numpy as np

from roostream.wire.jagged import Jagged

BINS = 64
PSI_SHIFTED = 0.25
REFERENCE_DECAY = 0.9  # factor of the reference before a window is added
_HASH = np.uint64(0x9E3779B97F4A7C15)


def mix_ids(id_U: np.ndarray) -> np.ndarray:
    """uint64 [U]: hashed ids (the last steps of splitmix64)."""
    x_U = id_U.astype(np.uint64) * _HASH
    x_U = (x_U ^ (x_U >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hash_U: np.ndarray = x_U ^ (x_U >> np.uint64(31))
    return hash_U


class Histograms:
    """F histograms of H bins."""

    def __init__(self, num_features: int) -> None:
        self.counts_FH = np.zeros((num_features, BINS))

    def add(self, bin_NF: np.ndarray) -> None:
        """Add N rows, given their int64 bins."""
        index = bin_NF + BINS * np.arange(bin_NF.shape[1])
        self.counts_FH += np.bincount(index.ravel(), minlength=self.counts_FH.size).reshape(
            self.counts_FH.shape
        )

    def psi_F(self, reference: Histograms) -> np.ndarray:
        """PSI of each feature against the reference. Half a count is added to every used bin, and the
        expected difference of two samples of one distribution, (bins − 1) (1/n + 1/m), is subtracted."""
        used_FH = (self.counts_FH > 0) | (reference.counts_FH > 0)
        p_FH, q_FH = ((h.counts_FH + 0.5) * used_FH for h in (self, reference))
        noise_F = (used_FH.sum(axis=1) - 1) * sum(
            1 / np.maximum(h.counts_FH.sum(axis=1), 1) for h in (self, reference)
        )
        p_FH, q_FH = (x / np.maximum(x.sum(axis=1, keepdims=True), 1e-9) for x in (p_FH, q_FH))
        ratio_FH = np.log(np.where(used_FH, p_FH, 1.0) / np.where(used_FH, q_FH, 1.0))
        psi_F: np.ndarray = np.maximum(((p_FH - q_FH) * ratio_FH).sum(axis=1) - noise_F, 0.0)
        return psi_F

    def fold(self, window: Histograms) -> None:
        """Add a window to this reference, whose older counts decay."""
        self.counts_FH = self.counts_FH * REFERENCE_DECAY + window.counts_FH


def float_bins(value_NF: np.ndarray, present_NF: np.ndarray) -> np.ndarray:
    """int64 [N, F]: 0 = missing, 32 = zero, less = negative, more = positive powers of two from 2^-9 to
    2^20."""
    exponent_NF = np.clip(np.frexp(value_NF)[1], -9, 20) + 10
    bin_NF: np.ndarray = np.where(present_NF, 32 + np.sign(value_NF).astype(np.int64) * exponent_NF, 0)
    return bin_NF


def list_bins(lists: Jagged, max_features: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """int64 [N, F] bins of the first id (0 = missing or empty) and of the length, for the first
    `max_features` features (None = all)."""
    first_NF, length_NF = (
        np.zeros((lists.num_rows, len(lists.keys[:max_features])), dtype=np.int64) for _ in range(2)
    )
    for k, key in enumerate(lists.keys[:max_features]):
        length_N = lists.lengths_KN[k]
        starts_N, has_N = np.cumsum(length_N, dtype=np.int64) - length_N, length_N > 0
        first_NF[has_N, k] = 1 + (
            mix_ids(lists.values_of(key)[starts_N[has_N]]) % np.uint64(BINS - 1)
        ).astype(np.int64)
        length_NF[:, k] = np.frexp(length_N.astype(np.float64))[1]
    return first_NF, length_NF

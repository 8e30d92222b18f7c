"""How much two versions differ on a request. Letters: n candidates, T tasks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

TOP = 10


class Differences(NamedTuple):
    mean_abs: float  # of probabilities, over candidates and tasks
    rank_correlation: float  # Spearman's, of the task that orders; 1 for a single candidate
    top_overlap: float  # share of one's first TOP slots that is in the other's


def differences(one_nT: np.ndarray, other_nT: np.ndarray, task: int) -> Differences:
    """Of float32 probabilities; equal scores keep the request's order, as in an answer."""
    one, other = _ranks(one_nT[:, task]), _ranks(other_nT[:, task])
    top = min(TOP, len(one))
    overlap = int(((one < top) & (other < top)).sum()) / top
    return Differences(
        float(np.abs(one_nT - other_nT).mean(dtype=np.float64)), _spearman(one, other), overlap
    )


def _ranks(scores_n: np.ndarray) -> np.ndarray:
    """int64 [n]: slot of each candidate."""
    rank_n = np.empty(len(scores_n), dtype=np.int64)
    rank_n[np.argsort(-scores_n, kind="stable")] = np.arange(len(scores_n))
    return rank_n


def _spearman(one_n: np.ndarray, other_n: np.ndarray) -> float:
    """1 − 6 Σ d² / (n (n² − 1)), of ranks without ties."""
    n = len(one_n)
    return 1.0 if n < 2 else float(1 - 6 * int(((one_n - other_n) ** 2).sum()) / (n * (n * n - 1)))

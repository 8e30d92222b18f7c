"""ROC AUC over all candidates, and AUC, MRR and NDCG@10 within each request.

Tied scores get the expected value under a random order of the tie, so no metric depends on how a sort breaks
ties.

Letters: N scores added, S distinct scores (or blocks of equal scores within a request), R requests, B
candidates, M requests that have at least one positive and one negative.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_FULL_BITS = 32


class ScoreHistogram:
    """The weight of positives and negatives at every distinct score: exact AUC in bounded memory (20 bytes a
    score).

    Beyond `max_scores` distinct scores, the lowest bits of all scores are dropped one by one until they fit.
    Scores that become equal count as ties; `auc_error()` bounds the effect.
    """

    def __init__(self, max_scores: int = 1 << 18) -> None:
        self._max_scores = max_scores
        self._dropped_bits = 0
        # Rising; bits of the float32, mapped so that integers sort like the floats.
        self._score_S = np.zeros(0, dtype=np.uint32)
        self._positive_S: np.ndarray = np.zeros(0, dtype=np.float64)
        self._negative_S: np.ndarray = np.zeros(0, dtype=np.float64)
        self._pending: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_pending = 0

    def add(self, score_N: np.ndarray, positive_N: np.ndarray, weight_N: np.ndarray) -> None:
        """Add float scores, bool labels and float weights, all [N]."""
        self.add_sides(
            ordered(score_N), np.where(positive_N, weight_N, 0.0), np.where(positive_N, 0.0, weight_N)
        )

    def add_sides(self, ordered_N: np.ndarray, positive_N: np.ndarray, negative_N: np.ndarray) -> None:
        """As `add`, with scores from `ordered` and the weights of positives and negatives. Keeps the
        arrays."""
        self._pending.append((ordered_N, positive_N, negative_N))
        self._num_pending += len(ordered_N)
        if self._num_pending >= max(
            4096, len(self._score_S) // 2
        ):  # amortized: each score is merged O(log) times
            self._merge_pending()

    def merge(self, other: ScoreHistogram) -> None:
        """Add the counts of another process."""
        other._merge_pending()
        self._dropped_bits = max(self._dropped_bits, other._dropped_bits)
        self._pending.append((other._score_S, other._positive_S, other._negative_S))
        self._num_pending += len(other._score_S)

    def auc(self) -> float | None:
        """P(positive scores higher than negative) + ½ P(equal), by weight; None unless both kinds exist."""
        self._merge_pending()
        return auc_of_counts(self._positive_S, self._negative_S)

    def auc_error(self) -> float:
        """Upper bound of the error of `auc`; 0 if it is exact."""
        self._merge_pending()
        positive, negative = self._positive_S.sum(), self._negative_S.sum()
        if self._dropped_bits == 0 or positive == 0 or negative == 0:
            return 0.0
        return float(0.5 * (self._positive_S * self._negative_S).sum() / (positive * negative))

    def state(self) -> dict[str, np.ndarray]:
        self._merge_pending()
        return {
            "score": self._score_S,
            "positive": self._positive_S,
            "negative": self._negative_S,
            "dropped_bits": np.array([self._dropped_bits], dtype=np.int64),
        }

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Replace everything by a `state`."""
        self._pending, self._num_pending = [], 0
        self._score_S = state["score"].astype(np.uint32)
        self._positive_S, self._negative_S = (state[k].astype(np.float64) for k in ("positive", "negative"))
        self._dropped_bits = int(state["dropped_bits"][0])

    def _merge_pending(self) -> None:
        if not self._pending:
            return
        parts = [(self._score_S, self._positive_S, self._negative_S), *self._pending]
        self._pending, self._num_pending = [], 0
        score, positive, negative = (np.concatenate(x) for x in zip(*parts, strict=True))
        self._keep(score, positive, negative)
        while len(self._score_S) > self._max_scores and self._dropped_bits < _FULL_BITS - 1:
            self._dropped_bits += 1
            self._keep(self._score_S, self._positive_S, self._negative_S)

    def _keep(self, score_N: np.ndarray, positive_N: np.ndarray, negative_N: np.ndarray) -> None:
        mask = np.uint32((0xFFFFFFFF << self._dropped_bits) & 0xFFFFFFFF)
        masked_N = score_N & mask
        order_N = np.argsort(masked_N, kind="stable")  # a stable sort merges runs that are already sorted
        sorted_N = masked_N[order_N]
        start_S = np.flatnonzero(np.r_[True, sorted_N[1:] != sorted_N[:-1]])[: len(sorted_N)]
        self._score_S = sorted_N[start_S]
        self._positive_S = np.add.reduceat(positive_N[order_N], start_S) if len(start_S) else np.zeros(0)
        self._negative_S = np.add.reduceat(negative_N[order_N], start_S) if len(start_S) else np.zeros(0)


def auc_of_counts(positive_S: np.ndarray, negative_S: np.ndarray) -> float | None:
    """AUC from the weights of positives and negatives at rising scores; None unless both kinds exist."""
    pairs = positive_S.sum() * negative_S.sum()
    below_S = np.cumsum(negative_S) - negative_S
    return float((positive_S * (below_S + 0.5 * negative_S)).sum() / pairs) if pairs else None


def ratio(a: float, b: float) -> float | None:
    """a / b; None if b is 0."""
    return float(a / b) if b else None


def normalized_entropy(log_loss: float, weight: float, base_rate: float | None) -> float | None:
    """Mean log loss / entropy of the base rate (He et al. 2014); None where the entropy is 0."""
    if base_rate is None or base_rate in (0.0, 1.0):
        return None
    entropy = -(base_rate * np.log(base_rate) + (1 - base_rate) * np.log(1 - base_rate))
    return ratio(log_loss / weight, float(entropy))


def ordered(score_N: np.ndarray) -> np.ndarray:
    """float32 → uint32 with the same order (-0 counts as 0)."""
    bits = (score_N.astype(np.float32) + np.float32(0.0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


NDCG_AT = 10
_IDEAL = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(NDCG_AT) + 2.0))])


@dataclasses.dataclass(frozen=True, eq=False)
class RequestScores:
    """Ranking metrics of each request that has a positive and a negative candidate."""

    auc_M: np.ndarray
    mrr_M: np.ndarray  # mean over the positives of 1 / rank, as EB-NeRD and MIND define it
    ndcg_M: np.ndarray  # at NDCG_AT, gain 1 a positive
    request_M: np.ndarray  # int64, from `request_index_B`


def score_requests(score_B: np.ndarray, positive_B: np.ndarray, request_index_B: np.ndarray) -> RequestScores:
    """Rank metrics of each request with a positive and a negative.

    `request_index_B`: int64, equal for the candidates of a request; `positive_B`: bool.
    """
    if not len(score_B):
        return RequestScores(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    order_B = np.lexsort((-score_B, request_index_B))
    score_B, request_B = score_B[order_B], request_index_B[order_B]
    positive_B = positive_B[order_B].astype(np.float64)
    new_request_B = np.r_[True, request_B[1:] != request_B[:-1]]
    start_R = np.flatnonzero(new_request_B)
    start_S = np.flatnonzero(new_request_B | np.r_[True, score_B[1:] != score_B[:-1]])
    size_S = np.diff(np.r_[start_S, len(score_B)])
    request_S = np.cumsum(new_request_B)[start_S] - 1
    positive_S = np.add.reduceat(positive_B, start_S)
    negative_S = size_S - positive_S

    def sum_per_request(value_S: np.ndarray) -> np.ndarray:
        return np.bincount(request_S, weights=value_S, minlength=len(start_R))

    positive_R, negative_R = sum_per_request(positive_S), sum_per_request(negative_S)
    rank_B = np.arange(len(score_B)) - start_R[np.cumsum(new_request_B) - 1]  # from 0
    discount_B = np.where(rank_B < NDCG_AT, 1 / np.log2(rank_B + 2.0), 0.0)
    # Negatives ranked higher.
    seen_S = np.cumsum(negative_S) - negative_S - (np.cumsum(negative_R) - negative_R)[request_S]
    worse_R = sum_per_request(positive_S * (seen_S + 0.5 * negative_S))
    reciprocal_R = sum_per_request(positive_S * np.add.reduceat(1.0 / (rank_B + 1), start_S) / size_S)
    gain_R = sum_per_request(positive_S * np.add.reduceat(discount_B, start_S) / size_S)
    counts_R = (positive_R > 0) & (negative_R > 0)
    positive_M = positive_R[counts_R]
    return RequestScores(
        auc_M=1 - worse_R[counts_R] / (positive_M * negative_R[counts_R]),
        mrr_M=reciprocal_R[counts_R] / positive_M,
        ndcg_M=gain_R[counts_R] / _IDEAL[np.minimum(positive_M, NDCG_AT).astype(np.int64)],
        request_M=request_B[start_R][counts_R],
    )

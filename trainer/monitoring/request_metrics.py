"""Metrics of one request's order, over many requests at once.

Letters: R requests, B candidates, S blocks (runs of equal score within a request), M requests that count: those with at
least one positive and one negative. Equal scores get what is expected under a random order among them, exactly; so no
metric depends on how a sort breaks ties.
"""

from __future__ import annotations

import dataclasses

import numpy as np

NDCG_AT = 10
_IDEAL = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(NDCG_AT) + 2.0))])


@dataclasses.dataclass(frozen=True, eq=False)
class RequestScores:
    auc_M: np.ndarray
    mrr_M: np.ndarray  # mean over the positives of 1 / rank, as EB-NeRD and MIND define it
    ndcg_M: np.ndarray  # at NDCG_AT, gain 1 a positive
    request_M: np.ndarray  # int64, as `request_index_B` names it


def score_requests(score_B: np.ndarray, positive_B: np.ndarray, request_index_B: np.ndarray) -> RequestScores:
    """`request_index_B`: int64, equal for the candidates of a request; `positive_B`: bool."""
    if not len(score_B):
        return RequestScores(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    order_B = np.lexsort((-score_B, request_index_B))
    score_B, positive_B, request_B = (
        score_B[order_B],
        positive_B[order_B].astype(np.float64),
        request_index_B[order_B],
    )
    new_request_B = np.r_[True, request_B[1:] != request_B[:-1]]
    start_R = np.flatnonzero(new_request_B)
    start_S = np.flatnonzero(new_request_B | np.r_[True, score_B[1:] != score_B[:-1]])
    size_S = np.diff(np.r_[start_S, len(score_B)])
    request_S = np.cumsum(new_request_B)[start_S] - 1
    positive_S = np.add.reduceat(positive_B, start_S)
    negative_S = size_S - positive_S

    def a_request(value_S: np.ndarray) -> np.ndarray:
        return np.bincount(request_S, weights=value_S, minlength=len(start_R))

    positive_R, negative_R = a_request(positive_S), a_request(negative_S)
    rank_B = np.arange(len(score_B)) - start_R[np.cumsum(new_request_B) - 1]  # from 0
    discount_B = np.where(rank_B < NDCG_AT, 1 / np.log2(rank_B + 2.0), 0.0)
    seen_S = (
        np.cumsum(negative_S) - negative_S - (np.cumsum(negative_R) - negative_R)[request_S]
    )  # negatives ranked above
    worse_R = a_request(positive_S * (seen_S + 0.5 * negative_S))
    reciprocal_R = a_request(positive_S * np.add.reduceat(1.0 / (rank_B + 1), start_S) / size_S)
    gain_R = a_request(positive_S * np.add.reduceat(discount_B, start_S) / size_S)
    counts_R = (positive_R > 0) & (negative_R > 0)
    positive_M = positive_R[counts_R]
    return RequestScores(
        auc_M=1 - worse_R[counts_R] / (positive_M * negative_R[counts_R]),
        mrr_M=reciprocal_R[counts_R] / positive_M,
        ndcg_M=gain_R[counts_R] / _IDEAL[np.minimum(positive_M, NDCG_AT).astype(np.int64)],
        request_M=request_B[start_R][counts_R],
    )

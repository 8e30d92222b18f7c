"""Rank of the next item among all items that the user has not seen, and metrics of the ranks.

    HR@k = share of ranks ≤ k        NDCG@k = mean of 1 / log2(1 + rank) where rank ≤ k, else 0        MRR =
                                     mean of 1 / rank

Letters: R users, I items of the corpus, X pairs (user, seen item).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CUTS = (10, 50)


def ranks(score_RI: Tensor, answer_R: Tensor, seen_X: tuple[Tensor, Tensor]) -> Tensor:
    """int64 [R], 1 = best. Ties count against the answer, and NaN counts as better. A seen answer is ranked
    too."""
    ranked_RI = torch.ones_like(score_RI, dtype=torch.bool)
    ranked_RI[seen_X] = False
    ranked_RI.scatter_(1, answer_R[:, None], True)
    return (ranked_RI & ~(score_RI < score_RI.gather(1, answer_R[:, None]))).sum(dim=1)


def ranking_figures(rank_R: np.ndarray, cuts: Sequence[int] = CUTS) -> dict[str, float]:
    """HR and NDCG at each cut, and MRR."""
    gain_R = 1 / np.log2(1 + rank_R)
    metrics = {}
    for k in cuts:
        metrics[f"HR@{k}"] = float((rank_R <= k).mean())
        metrics[f"NDCG@{k}"] = float(np.where(rank_R <= k, gain_R, 0.0).mean())
    return metrics | {"MRR": float((1 / rank_R).mean())}

"""Where the item that came next stands among all items that its user had not seen, and what is told of it.

    HR@k = share of ranks ≤ k        NDCG@k = mean of 1 / log2(1 + rank) where rank ≤ k, else 0        MRR = mean of 1 / rank

Letters: R users, I items of the corpus, X pairs of a user and what he saw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CUTS = (10, 50)


def ranks(score_RI: Tensor, answer_R: Tensor, seen_X: tuple[Tensor, Tensor]) -> Tensor:
    """int64 [R], 1 = the best. Of equal scores the answer's is the worst, and what is no number counts as better: a model that
    gives all items the same puts every answer last. An answer among the seen is asked for all the same."""
    asked_RI = torch.ones_like(score_RI, dtype=torch.bool)
    asked_RI[seen_X] = False
    asked_RI.scatter_(1, answer_R[:, None], True)
    return (asked_RI & ~(score_RI < score_RI.gather(1, answer_R[:, None]))).sum(dim=1)


def ranking_figures(rank_R: np.ndarray, cuts: Sequence[int] = CUTS) -> dict[str, float]:
    """HR, NDCG at each cut, and MRR over all; names as printed."""
    gain_R = 1 / np.log2(1 + rank_R)
    told = {}
    for k in cuts:
        told[f"HR@{k}"] = float((rank_R <= k).mean())
        told[f"NDCG@{k}"] = float(np.where(rank_R <= k, gain_R, 0.0).mean())
    return told | {"MRR": float((1 / rank_R).mean())}

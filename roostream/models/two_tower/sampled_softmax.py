"""A softmax over the items of the batch, in place of one over all items.

    loss of positive p = log Σ_c w_c e^(s_pc - q_c) - s_pp

s_pc is the score of candidate c's item for p's request, q_c the logarithm of how often that item is expected
in the batch. So each item of the corpus counts once in expectation, and popular items are not penalized for
being shown often (Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations",
RecSys 2019, §3). With the batch's own counts it is the softmax over the batch's distinct items. p's own item
is included.

Negatives are mixed (Yang et al., "Mixed negative sampling", WWW 2020): as they were shown, so by popularity,
and each distinct item of the batch `uniform` times more. A candidate whose item occurs n_c times in the batch
has weight w_c = 1 + uniform / n_c; its item is expected e_c + uniform times, e_c of them by popularity.

Letters: P positives, B candidates of the batch, which are negatives of every positive.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_expected(item_B: Tensor, popularity_B: Tensor | None, uniform: float) -> tuple[Tensor, Tensor]:
    """Return (log w_B, q_B). `popularity_B`: positive, proportional to how often an item is shown; None = as
    often as in this batch.

    Expected counts by popularity add up to B over the batch's distinct items, as counts do. Synchronizes with
    a CUDA device.
    """
    _, which_B, count_I = torch.unique(item_B, return_inverse=True, return_counts=True)
    count_B = count_I[which_B]
    if popularity_B is None:
        count_B = count_B.to(torch.get_default_dtype())
        expected_B = count_B
    else:
        count_B = count_B.to(popularity_B.dtype)
        expected_B = popularity_B * (len(item_B) / (popularity_B / count_B).sum())
    return torch.log1p(uniform / count_B), torch.log(expected_B + uniform)


def sampled_softmax(
    score_PB: Tensor, positive_P: Tensor, log_weight_B: Tensor, log_expected_B: Tensor
) -> Tensor:
    """[P]: the loss of each positive. `positive_P`: int64, its place in B."""
    pool_PB = score_PB + (log_weight_B - log_expected_B).to(score_PB.dtype)
    return torch.logsumexp(pool_PB, dim=1) - score_PB.gather(1, positive_P[:, None])[:, 0]

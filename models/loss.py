"""The multi-task loss.

Letters: B candidates, T tasks. Every task is a binary event, whatever its label's fold: a folded label counts as
positive when it is above 0 (an `any` label is 0 or 1; of a `count`, `sum`, `max` or `last` the model learns the
probability that there was something). A label with `threshold` says from which value on an engagement counts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def loss(logits_BT: Tensor, label_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """Binary cross-entropy: the weighted mean over candidates of each task, summed over tasks → scalar.

    Weight 0 leaves a candidate's label out; a task whose weights are all 0 (or B = 0) contributes 0. Weighted means are
    the same for a batch and for its expansion to impressions (G10).
    """
    positive_BT = (label_BT > 0).to(logits_BT.dtype)
    each_BT = F.binary_cross_entropy_with_logits(logits_BT, positive_BT, reduction="none")
    total_T = weight_BT.sum(dim=0)
    return ((each_BT * weight_BT).sum(dim=0) / torch.where(total_T > 0, total_T, 1.0)).sum()

"""Online Newton steps (Hazan, Agarwal & Kale 2007) for the linear part of a model.

    A <- k A + Σ |e_b| x_b x_bᵀ / 2,    w <- w - (A + λ I)⁻¹ Σ e_b x_b

e_b is the derivative of the loss by the logit of candidate b, the sums are over a batch. λ is the precision
of a prior around 0, so columns of which little is known stay near 0. k forgets: a step counts e⁻¹ after
`MEMORY_STEPS` steps.

|e| / 2 is the curvature p (1 - p) of log loss on average over clicks of probability p. A step is the weighted
least squares fit of -2 sign(e_b), so it moves no batch by more than about 2 logits, also if it contains no
click and its columns are large. The outer products e² x xᵀ of the usual online Newton step do not have this
limit.

Letters: F columns, T tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roostream.models.linear_part import LinearPart

PRIOR = 10.0
MEMORY_STEPS = 2000


def scale_gradients(part: LinearPart, total_T: Tensor) -> None:
    """Turn the gradients of a mean over candidates into those of their sum. `total_T`: the number of
    candidates, or the sum of their weights, by which the mean divides."""
    if part.weight.grad is not None and part.curvature.grad is not None:
        total_T = total_T.to(part.weight)
        part.weight.grad.mul_(total_T[:, None])
        part.curvature.grad.mul_(total_T[:, None, None])


@torch.no_grad()
def step(part: LinearPart) -> None:
    """Apply the sums that the gradients hold. Nothing changes without gradients."""
    if part.weight.grad is None or part.curvature.grad is None:
        return
    part.curvature.mul_(1 - 1 / MEMORY_STEPS).add_(part.curvature.grad)
    prior_FF = PRIOR * torch.eye(part.weight.shape[1], dtype=torch.float64, device=part.weight.device)
    change_TF = torch.linalg.solve(part.curvature.double() + prior_FF, part.weight.grad.double())
    part.weight.sub_(change_TF.to(part.weight.dtype))


def is_finite(part: LinearPart) -> bool:
    """Whether the gradients can be applied."""
    return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in part.parameters())

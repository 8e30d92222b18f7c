"""Online Newton steps (Hazan, Agarwal & Kale 2007) for the linear part of a model.

    A <- k A + Σ |e_b| x_b x_bᵀ / 2,    w <- w - (A + λ I)⁻¹ Σ e_b x_b

Its share in the scores is trained alike, with one column: the linear logit minus the network's. So is the
calibration, with two: the mixed logit and a constant. Both forget sooner, because which of the two models is
better, and how cautious they are, changes with the data seen. Share and scale stay within bounds.

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
from torch import Tensor, nn

from roostream.models.linear_part import MAX_SCALE, MAX_SHARE, MIN_SCALE, LinearPart

PRIOR = 10.0
MEMORY_STEPS = 2000
SHARE_PRIOR = 20.0
SHARE_MEMORY_STEPS = 50
CALIBRATION_PRIOR = 50.0
CALIBRATION_MEMORY_STEPS = 150
_RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def scale_gradients(part: LinearPart, total_T: Tensor) -> None:
    """Turn the gradients of a mean over candidates into those of their sum. `total_T`: the number of
    candidates, or the sum of their weights, by which the mean divides."""
    for parameter in part.parameters():
        if parameter.grad is not None:
            of_task = total_T.to(parameter).view(-1, *[1] * (parameter.dim() - 1))
            parameter.grad.mul_(of_task)


@torch.no_grad()
def step(part: LinearPart) -> None:
    """Apply the sums that the gradients hold. A parameter without a gradient does not change."""
    _step(part.weight, part.curvature, PRIOR, MEMORY_STEPS)
    _step(part.share, part.share_curvature, SHARE_PRIOR, SHARE_MEMORY_STEPS)
    _step(part.calibration, part.calibration_curvature, CALIBRATION_PRIOR, CALIBRATION_MEMORY_STEPS)
    part.share.clamp_(0.0, MAX_SHARE)
    part.calibration[:, 0].clamp_(MIN_SCALE, MAX_SCALE)


def _step(weight_TF: nn.Parameter, curvature_TFF: nn.Parameter, prior: float, memory_steps: int) -> None:
    if weight_TF.grad is None or curvature_TFF.grad is None:
        return
    curvature_TFF.mul_(1 - 1 / memory_steps).add_(curvature_TFF.grad)
    prior_FF = prior * torch.eye(weight_TF.shape[1], dtype=torch.float64, device=weight_TF.device)
    factor_TFF = _cholesky(curvature_TFF.double() + prior_FF)
    change_TF1 = torch.cholesky_solve(weight_TF.grad.double()[..., None], factor_TFF)
    weight_TF.sub_(change_TF1[..., 0].to(weight_TF.dtype))


def _cholesky(matrix_TFF: Tensor) -> Tensor:
    """Return the Cholesky factor of each matrix, float64 [T, F, F].

    Curvatures are sums in float32. Their rounding errors exceed the prior where columns are large and nearly
    collinear, such as a price in cents and its hinges. A matrix that is not positive definite for this reason
    gets a diagonal that is larger by the smallest of `_RIDGES` that repairs it, which makes its step smaller.
    """
    factor_TFF, info_T = torch.linalg.cholesky_ex(matrix_TFF)
    for ridge in _RIDGES:
        if not info_T.any():
            break
        added_TF = ridge * (info_T > 0)[:, None] * matrix_TFF.diagonal(dim1=1, dim2=2)
        factor_TFF, info_T = torch.linalg.cholesky_ex(matrix_TFF + torch.diag_embed(added_TF))
    return factor_TFF


def is_finite(part: LinearPart) -> bool:
    """Whether the gradients can be applied."""
    return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in part.parameters())

"""Logits that are linear in a candidate's floats, added to those of a network.

The network needs thousands of requests to find what a linear model finds in some hundreds. The linear part
is therefore trained by online Newton steps (trainer/dense_part/newton.py), the network by Adam, both on the
loss of their sum.

Letters: B candidates, F floats of a candidate and a constant, T tasks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MAX_WIDTH = 256
"""A candidate with more floats gets no linear part, because a step takes the cube of their number."""


class LinearPart(nn.Module):
    """[B, F - 1] → [B, T]. Untrained it adds 0.

    After `backward`, `curvature.grad` is not a derivative. It is Σ |e| x xᵀ / 2 over the candidates, with the
    derivative e of the loss by the candidate's logit, which a Newton step adds to `curvature`.
    """

    def __init__(self, width: int, num_tasks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_tasks, width + 1))
        self.curvature = nn.Parameter(torch.zeros(num_tasks, width + 1, width + 1))

    def adjust_initial_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.curvature)

    def forward(self, x_BG: Tensor) -> Tensor:
        x_BF = torch.cat([x_BG, x_BG.new_ones(len(x_BG), 1)], dim=1)
        logits_BT: Tensor = _Linear.apply(x_BF, self.weight, self.curvature)
        return logits_BT

    def as_linear(self) -> nn.Linear:
        """The same as a layer, for the compiled scorer."""
        layer = nn.Linear(self.weight.shape[1] - 1, len(self.weight))
        with torch.no_grad():
            layer.weight.copy_(self.weight[:, :-1])
            layer.bias.copy_(self.weight[:, -1])
        return layer


class _Linear(torch.autograd.Function):
    """x w, with the curvature of the batch as gradient of `curvature`."""

    @staticmethod
    def forward(ctx: Any, x_BF: Tensor, weight_TF: Tensor, curvature_TFF: Tensor) -> Tensor:
        ctx.save_for_backward(x_BF)
        return nn.functional.linear(x_BF, weight_TF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        (x_BF,) = ctx.saved_tensors
        gradient_BT = gradients[0].to(x_BF.dtype)
        outer = [(x_BF * (g_B.abs() / 2)[:, None]).T @ x_BF for g_B in gradient_BT.unbind(dim=1)]
        return None, gradient_BT.T @ x_BF, torch.stack(outer)

"""Adam (Kingma & Ba 2015, algorithm 1) for the dense weights.

Ours, since constructing any optimizer of torch.optim imports torch._dynamo: several seconds of every worker's restart. The
arithmetic is torch.optim.Adam's, with one count of steps for all weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

SLOTS = ("exp_avg", "exp_avg_sq")


class DenseAdam:
    """m = β1 m + (1-β1) g;  v = β2 v + (1-β2) g²;  w -= lr · m̂ / (√v̂ + ε), with m̂ = m/(1-β1ᵗ), v̂ = v/(1-β2ᵗ).

    The gradients of all weights together are first scaled down to a Euclidean norm of `clip_norm` (Pascanu et al. 2013,
    algorithm 1), so that v never exceeds its square.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        learning_rate: float,
        clip_norm: float = math.inf,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
    ) -> None:
        self.parameters = dict(parameters)
        self.learning_rate, self.beta1, self.beta2, self.epsilon = learning_rate, beta1, beta2, epsilon
        self.clip_norm = clip_norm
        self.num_steps = 0
        self.slots: dict[str, dict[str, Tensor]] = {
            name: {slot: torch.zeros_like(parameter, requires_grad=False) for slot in SLOTS}
            for name, parameter in self.parameters.items()
        }

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> bool:
        """Weights without a gradient stay as they are, and so does what is remembered of them. False: a square of a gradient
        isn't finite; nothing was changed."""
        names = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        gradients = [g for g in (self.parameters[name].grad for name in names) if g is not None]
        if not self._clip(gradients):
            return False
        self.num_steps += 1
        if not names:
            return True
        weights: list[Tensor] = [self.parameters[name] for name in names]
        means, squares = ([self.slots[name][slot] for name in names] for slot in SLOTS)
        torch._foreach_lerp_(means, gradients, 1 - self.beta1)
        torch._foreach_mul_(squares, self.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - self.beta2)
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_div_(denominators, math.sqrt(1 - self.beta2**self.num_steps))
        torch._foreach_add_(denominators, self.epsilon)
        torch._foreach_addcdiv_(weights, means, denominators, value=-self.learning_rate / (1 - self.beta1**self.num_steps))
        return True

    def _clip(self, gradients: list[Tensor]) -> bool:
        if not gradients:
            return True
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if norm > self.clip_norm and math.isfinite(norm):
            torch._foreach_mul_(gradients, self.clip_norm / norm)
        return math.isfinite(norm)

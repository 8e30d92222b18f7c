"""Adam (Kingma & Ba 2015, algorithm 1) for the dense weights.

Ours, since constructing any optimizer of torch.optim imports torch._dynamo: several seconds of every worker's restart. The
arithmetic is torch.optim.Adam's, with one count of steps for all weights.

Letters: P numbers of all weights together, S those of neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from trainer.dense_part.flat_weights import ALIGNED, FlatWeights, aligned, part_of_all
from trainer.dense_part.weight_average import WeightAverage

SLOTS = ("exp_avg", "exp_avg_sq")


class DenseAdam:
    """m = β1 m + (1-β1) g;  v = β2 v + (1-β2) g²;  w -= lr · m̂ / (√v̂ + ε), with m̂ = m/(1-β1ᵗ), v̂ = v/(1-β2ᵗ).

    The gradients of all weights together are first scaled down to a Euclidean norm of `clip_norm` (Pascanu et al. 2013,
    algorithm 1), so that v never exceeds its square.

    The weights become parts of one tensor, in place (flat_weights.py). `average`, where there is one, follows every step.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        learning_rate: float | Callable[[int], float],
        clip_norm: float = math.inf,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
    ) -> None:
        """`learning_rate`: a number, or what it is behind so many steps."""
        self._flat = FlatWeights(parameters)
        self.parameters, self._weight_P = self._flat.parameters, self._flat.weight_P
        self.average: WeightAverage | None = None
        self.learning_rate = learning_rate if callable(learning_rate) else lambda _: learning_rate
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.clip_norm = clip_norm
        self.num_steps = 0
        self._state = {slot: torch.zeros_like(self._weight_P) for slot in SLOTS}
        self._room_P, self._gap = torch.empty_like(self._weight_P), self._weight_P.new_zeros(ALIGNED)
        self.slots: dict[str, dict[str, Tensor]] = {
            name: {slot: part_of_all(self._state[slot], at, parameter) for slot in SLOTS}
            for name, at, parameter in self._flat.places()
        }

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def norm(self) -> float:
        """Of all gradients together; 0 of none, NaN or infinite where a square isn't finite."""
        gradients = [p.grad.detach() for p in self.parameters.values() if p.grad is not None]
        return (
            float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))) if gradients else 0.0
        )

    @torch.no_grad()
    def step(self) -> bool:
        """Weights without a gradient stay as they are, and so does what is remembered of them. False: a square of a gradient
        isn't finite; nothing was changed."""
        spans = self._gradients()
        if not self._clip([gradient_S for _, gradient_S in spans]):
            return False
        rate = self.learning_rate(self.num_steps)
        self.num_steps += 1
        for at, gradient_S in spans:
            self._descend(at, gradient_S, rate)
        if self.average is not None:
            self.average.follow(self._weight_P, self.num_steps)
        return True

    def _gradients(self) -> list[tuple[slice, Tensor]]:
        """Neighbours that have a gradient, as one: where they lie, and their gradients behind each other. Mostly one span."""
        out: list[tuple[slice, Tensor]] = []
        for has_one, members in itertools.groupby(
            self._flat.places(), key=lambda place: place[2].grad is not None
        ):
            if has_one:
                places = list(members)
                gradient_S = torch.cat(
                    [piece for _, _, parameter in places for piece in self._pieces(parameter)]
                )
                out.append((slice(places[0][1], places[0][1] + len(gradient_S)), gradient_S))
        return out

    def _pieces(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        assert parameter.grad is not None
        yield parameter.grad.reshape(-1)
        if left := aligned(parameter.numel()) - parameter.numel():
            yield self._gap[:left]

    def _descend(self, at: slice, gradient_S: Tensor, rate: float) -> None:
        mean_S, square_S = (self._state[slot][at] for slot in SLOTS)
        mean_S.lerp_(gradient_S, 1 - self.beta1)
        square_S.mul_(self.beta2).addcmul_(gradient_S, gradient_S, value=1 - self.beta2)
        below_S = _square_root(square_S, self._room_P[at])
        below_S.div_(math.sqrt(1 - self.beta2**self.num_steps)).add_(self.epsilon)
        self._weight_P[at].addcdiv_(mean_S, below_S, value=-rate / (1 - self.beta1**self.num_steps))

    def _clip(self, gradients: list[Tensor]) -> bool:
        norm = math.hypot(*(float(torch.linalg.vector_norm(gradient_S)) for gradient_S in gradients))
        if norm > self.clip_norm and math.isfinite(norm):
            for gradient_S in gradients:
                gradient_S.mul_(self.clip_norm / norm)
        return math.isfinite(norm)


def _square_root(of_S: Tensor, out_S: Tensor) -> Tensor:
    """The same bits either way. On a CPU torch asks a library that takes them one by one on some processors."""
    if of_S.device.type != "cpu":
        return torch.sqrt(of_S, out=out_S)
    np.sqrt(of_S.numpy(), out=out_S.numpy())
    return out_S

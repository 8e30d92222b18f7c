"""Adam (Kingma & Ba 2015, algorithm 1) for the dense weights, and an average of the weights.

Not torch.optim: constructing one of its optimizers imports torch._dynamo, which costs several seconds at each
restart of a worker. The arithmetic equals torch.optim.Adam's, with one step count for all weights.

The average follows Polyak & Juditsky 1992, with an exponential window as in Izmailov et al. 2018:

    a <- d a + (1 - d) w    after step t of the optimizer, d = min(1 - 1/steps, t / (t + 9))

It removes the noise of single batches and lags by about `steps` steps. At first d is small, so the average
covers about the last tenth of all steps and never the initial values.

Letters: P numbers of all weights together, S numbers of adjacent weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from roostream.models.linear_part import LinearPart
from roostream.models.model import Model
from trainer.dense_part import newton

SLOTS = ("exp_avg", "exp_avg_sq")


class DenseAdam:
    """m = β1 m + (1-β1) g;  v = β2 v + (1-β2) g²;  w -= lr · m̂ / (√v̂ + ε), with m̂ = m/(1-β1ᵗ), v̂ =
    v/(1-β2ᵗ).

    First, all gradients together are scaled down to a Euclidean norm of `clip_norm` (Pascanu et al. 2013,
    algorithm 1).

    The weights become views of one tensor, in place. `average`, if set, follows every step. The parameters of
    `linear` parts are trained by Newton steps instead (newton.py).
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
        linear: Sequence[LinearPart] = (),
    ) -> None:
        """`learning_rate`: a number, or a function of the number of steps taken."""
        self._flat, self._linear = FlatWeights(parameters), tuple(linear)
        self._by_newton = {id(p) for part in self._linear for p in part.parameters()}
        self.parameters, self._weight_P = self._flat.parameters, self._flat.weight_P
        self.average: WeightAverage | None = None
        self.learning_rate = learning_rate if callable(learning_rate) else lambda _: learning_rate
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.clip_norm = clip_norm
        self.num_steps = 0
        self._state = {slot: torch.zeros_like(self._weight_P) for slot in SLOTS}
        self._room_P, self._gap = torch.empty_like(self._weight_P), self._weight_P.new_zeros(ALIGNED)
        self.slots: dict[str, dict[str, Tensor]] = {
            name: {slot: view_in_flat(self._state[slot], at, parameter) for slot in SLOTS}
            for name, at, parameter in self._flat.places()
            if id(parameter) not in self._by_newton
        }

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def norm(self) -> float:
        """Norm of all gradients together; 0 without gradients, NaN or infinite if a square is not finite."""
        gradients = [p.grad.detach() for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return 0.0
        norms = torch._foreach_norm(gradients)  # noqa: SLF001 (torch has no public equivalent)
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    @torch.no_grad()
    def step(self) -> bool:
        """Update all weights that have a gradient. False: a squared gradient is not finite; nothing was
        changed."""
        spans = self._gradients()
        if not all(newton.is_finite(part) for part in self._linear):
            return False
        if not self._clip([gradient_S for _, gradient_S in spans]):
            return False
        rate = self.learning_rate(self.num_steps)
        self.num_steps += 1
        for at, gradient_S in spans:
            self._descend(at, gradient_S, rate)
        for part in self._linear:
            newton.step(part)
        if self.average is not None:
            self.average.follow(self._weight_P, self.num_steps)
        return True

    def _gradients(self) -> list[tuple[slice, Tensor]]:
        """Adjacent weights that have gradients, as (place, concatenated gradients); usually one span."""
        out: list[tuple[slice, Tensor]] = []
        for has_one, members in itertools.groupby(
            self._flat.places(),
            key=lambda place: place[2].grad is not None and id(place[2]) not in self._by_newton,
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
    """Both ways give the same bits. On some CPUs torch's square root is not vectorized, numpy's is."""
    if of_S.device.type != "cpu":
        return torch.sqrt(of_S, out=out_S)
    np.sqrt(of_S.numpy(), out=out_S.numpy())
    return out_S


ALIGNED = 16  # float32 of a cache line


class FlatWeights:
    """Weights of a module as views of one tensor, so that an update takes a few kernels.

    Made in place: names and shapes stay, but the module must not be moved to another device or type
    afterwards.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = dict(parameters)
        self._starts = list(
            itertools.accumulate((aligned(p.numel()) for p in self.parameters.values()), initial=0)
        )
        like = next(iter(self.parameters.values()), torch.zeros(0))
        self.weight_P = torch.zeros(self._starts[-1], dtype=like.dtype, device=like.device)
        for _, at, parameter in self.places():
            view_in_flat(self.weight_P, at, parameter).copy_(parameter.detach())
            parameter.data = view_in_flat(self.weight_P, at, parameter)

    def places(self) -> Iterator[tuple[str, int, nn.Parameter]]:
        """(name, start, weight) of each weight."""
        for (name, parameter), at in zip(self.parameters.items(), self._starts, strict=False):
            yield name, at, parameter


def aligned(count: int) -> int:
    """Size reserved for a weight of `count` numbers.

    Each weight starts at the alignment that torch would give it alone, so its products have the same bits as
    in serving (guarantee G9).
    """
    return -(-count // ALIGNED) * ALIGNED


def view_in_flat(flat_P: Tensor, at: int, like: Tensor) -> Tensor:
    """The part of `flat_P` from `at` on, in the shape of `like`."""
    return flat_P[at : at + like.numel()].view_as(like)


_YOUNG = 9


class WeightAverage:
    """`model` holds the average; only `follow` and a restore write its weights. Training is not affected."""

    def __init__(self, model: Model, steps: int) -> None:
        """`model`: built like the trained one; its weights become views of one tensor."""
        self.model, self.steps = model.eval(), steps
        self._average_P = FlatWeights(model.named_parameters()).weight_P

    @torch.no_grad()
    def follow(self, weight_P: Tensor, num_steps: int) -> None:
        """Update after step `num_steps` (from 1) of the optimizer, which led to `weight_P`."""
        kept = min(1 - 1 / self.steps, num_steps / (num_steps + _YOUNG))
        self._average_P.lerp_(weight_P, 1 - kept)

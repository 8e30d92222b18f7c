"""Weights of a module as parts of one tensor, so that what is done to all of them is a few kernels, not a few a weight.

Letters: P numbers of all weights together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

ALIGNED = 16  # float32 of a cache line


class FlatWeights:
    """Made in place: the module that the weights belong to, its names and shapes stay as they are, but it must not be moved to
    another device or type afterwards."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = dict(parameters)
        self._starts = list(
            itertools.accumulate((aligned(p.numel()) for p in self.parameters.values()), initial=0)
        )
        like = next(iter(self.parameters.values()), torch.zeros(0))
        self.weight_P = torch.zeros(self._starts[-1], dtype=like.dtype, device=like.device)
        for _, at, parameter in self.places():
            part_of_all(self.weight_P, at, parameter).copy_(parameter.detach())
            parameter.data = part_of_all(self.weight_P, at, parameter)

    def places(self) -> Iterator[tuple[str, int, nn.Parameter]]:
        """Each weight, and where it begins."""
        for (name, parameter), at in zip(self.parameters.items(), self._starts, strict=False):
            yield name, at, parameter


def aligned(count: int) -> int:
    """Room of a weight of `count` numbers: each begins where torch would have put it alone, so that its products have the same
    bits in serving (G9), where it lies alone."""
    return -(-count // ALIGNED) * ALIGNED


def part_of_all(flat_P: Tensor, at: int, like: Tensor) -> Tensor:
    """The part of `flat_P` from `at` on, in the shape of `like`."""
    return flat_P[at : at + like.numel()].view_as(like)

"""Helpers for tests of single layers in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roostream.models.layers import init_parameters


def build_float64(module: nn.Module) -> nn.Module:
    """Initialize the module, move every parameter off its initial value and convert it to float64."""
    init_parameters(module, seed=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    return module.double()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_gradients(module: nn.Module, call, *inputs: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Check the gradients of the inputs and of all parameters against finite differences."""
    parameters = tuple(module.parameters())
    leaves = tuple(x.requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(lambda *_: call(*leaves), (*leaves, *parameters))

"""Layers in float64, off their initial values, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roostream.models.layers import init_parameters


def built(module: nn.Module) -> nn.Module:
    init_parameters(module, seed=2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    return module.double()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_gradients(module: nn.Module, call, *inputs: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Of inputs and parameters."""
    parameters = tuple(module.parameters())
    leaves = tuple(x.requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(lambda *_: call(*leaves), (*leaves, *parameters))

"""MLP, and initial values that depend only on the seed and a parameter's name.

Letters: N rows, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roostream.schema.ids import hash64

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class Mlp(nn.Module):
    """Linear + ReLU for each width, [N, width in] → [N, width]; identity without layers. Rows are
    independent."""

    def __init__(self, width_in: int, layers: Sequence[int]) -> None:
        super().__init__()
        widths = (width_in, *layers)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.width = widths[-1]

    def forward(self, x_ND: Tensor) -> Tensor:
        for layer in self.layers:
            x_ND = torch.relu_(layer(x_ND))
        return x_ND


def module_key(name: str) -> str:
    """The key in a ModuleDict of a part that is named after a feature or column.

    torch refuses keys that are attributes of the dict, such as `items` or `type`. These are upper-case here,
    which no name of a schema is."""
    return name.upper() if hasattr(nn.ModuleDict(), name) else name


def init_parameters(model: nn.Module, seed: int) -> None:
    """Same seed, name and shape → same bits, in every process. A new module does not change the values of
    others.

    Matrices are uniform with variance 1 / fan-in (the last dimension), vectors and single numbers 0, gains of
    norms 1. Then `adjust_initial_parameters()` is called on modules that have it.
    """
    gains = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, _NORMS)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() <= 1 or not parameter.numel():
                parameter.fill_(1.0 if name in gains else 0.0)
                continue
            generator = torch.Generator().manual_seed(hash64(f"{seed}/{name}") >> 1)
            bound = (3.0 / parameter.shape[-1]) ** 0.5
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * (2 * bound) - bound)
        for module in model.modules():
            adjust = getattr(module, "adjust_initial_parameters", None)
            if callable(adjust):
                adjust()

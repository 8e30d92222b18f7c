"""Modules from rows to rows: dense, of tensors alone, without a loop over requests. What a compiler can take whole."""

from __future__ import annotations

from torch import nn

from roostream.models.interaction.cross_net import CrossNet
from roostream.models.interaction.dhen import Dhen
from roostream.models.layers import Mlp
from roostream.models.ranker import Heads
from roostream.models.user_arch import LinearCompression

_KINDS = (Mlp, CrossNet, Dhen, Heads, LinearCompression)


def row_modules(model: nn.Module) -> list[nn.Module]:
    """Those of `model`, outermost ones alone. Without parameters there is nothing to compute."""
    out: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, _KINDS):
            out += [child] if any(True for _ in child.parameters()) else []
        else:
            out += row_modules(child)
    return out

"""DCNv2 and DHEN equal their formulas. Gradients are checked in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roostream.models.interaction_layers import CrossNet, CrossTokens, Dhen, DotProducts, MixTokens
from tests.models.layer_checks import assert_gradients, build_float64, randn

NAMES = ("cross", "dot", "mix")


@pytest.mark.parametrize("rank", [0, 2, 99])
def test_cross_net_equals_dcnv2(rank: int) -> None:
    net, x = build_float64(CrossNet(5, 3, rank)), randn(4, 5)
    assert isinstance(net, CrossNet)
    expected = x
    for i, layer in enumerate(net.layers):
        assert isinstance(layer, nn.Linear)
        down = net.down[i].weight if 0 < rank < 5 else None
        weight = layer.weight if down is None else layer.weight @ down
        expected = x * (expected @ weight.T + layer.bias) + expected
    torch.testing.assert_close(net(x), expected)
    assert_gradients(net, net, x)


def test_dhen_equals_its_formula() -> None:
    net, x = build_float64(Dhen(7, 2, NAMES, tokens=3, token_width=2, rank=2)), randn(5, 7)
    assert isinstance(net, Dhen)
    below = net.tokens(x).view(5, 3, 2)
    for layer in net.layers:
        kinds = layer.interactions
        crossed, dotted, mixed = kinds["cross"], kinds["dot"], kinds["mix"]
        flat = below.reshape(5, 6)
        low_rank = crossed.cross.layers[0].weight @ crossed.cross.down[0].weight
        expected = below + (flat * (flat @ low_rank.T + crossed.cross.layers[0].bias) + flat).view(5, 3, 2)
        products = torch.stack(
            [(below[:, i] * below[:, j]).sum(dim=1) for i in range(3) for j in range(3)], dim=1
        )
        expected = expected + (products @ dotted.out.weight.T + dotted.out.bias).view(5, 3, 2)
        across = torch.stack(
            [sum(mixed.across.weight[k, j] * below[:, j] for j in range(3)) for k in range(3)], dim=1
        )
        expected = expected + across @ mixed.each.weight.T + mixed.each.bias
        below = F.layer_norm(expected, (2,), layer.norm.weight, layer.norm.bias)
    torch.testing.assert_close(net(x), below.reshape(5, 6))
    assert net.width == 6


@pytest.mark.parametrize(
    "module",
    [CrossTokens(3, 2, 2), DotProducts(3, 2), MixTokens(3, 2)],
    ids=lambda module: type(module).__name__,
)
def test_gradients_of_each_interaction(module: nn.Module) -> None:
    net = build_float64(module)
    assert_gradients(net, net, randn(4, 3, 2))

"""Layers and attention: against plain references, and their gradients in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.attention import ListAttention, TargetAttention, attend
from models.build import build_model
from models.candidate_groups import build_groups
from models.config import RankerConfig
from models.inputs import build_inputs
from models.layers import CrossNet, Mlp, init_parameters
from models.parts import pool
from models.ranker import Heads
from roo.lookup import build_lookup
from tests.models.model_cases import make_batch, make_rows, make_schema


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


@pytest.mark.parametrize("rank", [0, 2, 99])
def test_cross_net_is_dcnv2(rank: int) -> None:
    net, x = built(CrossNet(5, 3, rank)), randn(4, 5)
    assert isinstance(net, CrossNet)
    expected = x
    for i, layer in enumerate(net.layers):
        assert isinstance(layer, nn.Linear)
        down = net.down[i].weight if 0 < rank < 5 else None
        weight = layer.weight if down is None else layer.weight @ down
        expected = x * (expected @ weight.T + layer.bias) + expected
    torch.testing.assert_close(net(x), expected)
    assert_gradients(net, net, x)


def test_mlp_gradients_and_the_identity() -> None:
    net = built(Mlp(4, (5, 3)))
    assert_gradients(net, net, randn(6, 4))
    x = randn(2, 4)
    assert Mlp(4, ())(x) is x and Mlp(4, ()).width == 4


def test_heads_gradients() -> None:
    net = built(Heads(4, (3,), [0.1, 0.1]))
    assert_gradients(net, net, randn(5, 4))


def reference_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """One query [D], keys and values [N, D]: written out."""
    if len(k) == 0:
        return torch.zeros_like(q)
    out = []
    for qh, kh, vh in zip(q.chunk(heads), k.chunk(heads, dim=1), v.chunk(heads, dim=1), strict=True):
        out.append(torch.softmax(kh @ qh / len(qh) ** 0.5, dim=0) @ vh)
    return torch.cat(out)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("counts", [[3, 1, 0, 18, 2], [4, 4], [1], [0, 0], [0, 70, 1]], ids=str)
def test_target_attention_equals_each_candidate_on_its_own(counts: list[int], heads: int) -> None:
    module = built(TargetAttention(3, 5, 4, heads))
    assert isinstance(module, TargetAttention)
    lengths = [(2 * r + 3) % 5 for r in range(len(counts))]  # some histories are empty
    lengths[-1] = 0
    longest = max(lengths)
    entry, query = randn(len(counts), longest, 5, seed=1), randn(sum(counts), 3, seed=2)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    got = module(query, entry, None if mask.all() else mask, build_groups(np.array(counts, dtype=np.int32)))
    key, value = module.key_value(entry).chunk(2, dim=-1)
    owner = np.repeat(np.arange(len(counts)), counts)
    expected = [
        reference_attention(module.query(query[b]), key[r, : lengths[r]], value[r, : lengths[r]], heads)
        for b, r in enumerate(owner)
    ]
    torch.testing.assert_close(got, torch.stack(expected) if expected else torch.zeros(0, 4, dtype=torch.float64))


@pytest.mark.parametrize("counts", [[3, 1, 0, 18, 2], [4, 4], [1], [70, 2]], ids=str)
def test_list_attention_equals_each_request_on_its_own(counts: list[int]) -> None:
    module, x = built(ListAttention(4, 2)), randn(sum(counts), 4)
    assert isinstance(module, ListAttention)
    got = module(x, build_groups(np.array(counts, dtype=np.int32)))
    expected = []
    for part in x.split(counts):
        q, k, v = module.query_key_value(module.norm(part)).chunk(3, dim=-1)
        expected += [part[i] + module.out(reference_attention(q[i], k, v, 2)) for i in range(len(part))]
    torch.testing.assert_close(got, torch.stack(expected))


def test_attention_gradients_with_padding_and_an_empty_history() -> None:
    counts = np.array([2, 0, 3], dtype=np.int32)
    groups = build_groups(counts)
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    target = built(TargetAttention(3, 2, 4, 2))
    assert_gradients(target, lambda q, e: target(q, e, mask, groups), randn(5, 3), randn(3, 2, 2, seed=1))
    list_ = built(ListAttention(4, 2))
    assert_gradients(list_, lambda x: list_(x, groups), randn(5, 4))


def test_padding_has_no_influence_and_no_gradient() -> None:
    q, k, v = randn(1, 2, 4), randn(1, 3, 4, seed=1), randn(1, 3, 4, seed=2).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    out = attend(q, k, v, mask, 2)
    assert torch.equal(out, attend(q, torch.cat([k[:, :2], 1e6 + 0 * k[:, 2:]], dim=1), v, mask, 2))
    out.sum().backward()
    assert v.grad is not None and (v.grad[:, 2] == 0).all()


def test_rows_columns_and_times_of_the_history_all_learn() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [3, 2])
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, make_rows(schema, lookup), train=True)
    model = build_model(schema, RankerConfig(), 0)
    model.candidate_parts["attention_history"](inputs, pool(inputs)).square().sum().backward()
    times = [p.grad for name, p in model.named_parameters() if ".times." in name]
    assert times and all(g is not None and g.abs().sum() > 0 for g in times)
    for table in ("item", "action"):
        gradient = inputs.rows[schema.table_by_name[table].stack].grad
        assert gradient is not None and gradient.abs().sum() > 0

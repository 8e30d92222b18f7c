"""Layers and attention: against plain references, and their gradients in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from models.attention import (
    Attended,
    ListAttention,
    Squares,
    TargetAttention,
    _heads,
    _plain,
    _plain_back,
    attend,
    attend_back,
)
from models.build import build_model
from models.candidate_groups import build_groups
from models.config import RankerConfig
from models.inputs import build_inputs
from models.layers import Mlp
from models.parts import pool
from models.ranker import Heads
from roo.lookup import build_lookup
from tests.models.layer_checks import assert_gradients, built, randn
from tests.models.model_cases import make_batch, make_rows, make_schema


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
    groups = build_groups(np.array(counts, dtype=np.int32))
    order = groups.request_order
    got = module(query, entry[order], None if mask.all() else mask[order], groups)
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
    mask = torch.tensor([[True, False], [False, False]])
    target = built(TargetAttention(3, 2, 4, 2))
    assert_gradients(target, lambda q, e: target(q, e, mask, groups), randn(5, 3), randn(2, 2, 2, seed=1))
    list_ = built(ListAttention(4, 2))
    assert_gradients(list_, lambda x: list_(x, groups), randn(5, 4))


def attended_both_ways(of: Squares, mask: Tensor | None) -> tuple[Tensor, Squares]:
    """What two heads give, and the gradients of its sum of squares."""
    attended = attend(of, mask, 2)
    out = attended.out_GHKC.transpose(1, 2).reshape(of.q_GKD.shape)
    to = Squares(*(torch.full_like(x, torch.nan) for x in of))
    attend_back(of, attended, 2 * out, to)
    return out, to


def test_padding_has_no_influence_and_no_gradient() -> None:
    of = Squares(randn(2, 2, 4), randn(2, 3, 4, seed=1), randn(2, 3, 4, seed=2))
    mask = torch.tensor([[True, True, False], [False, False, False]])
    out, to = attended_both_ways(of, mask)
    far = of.k_GND.clone()
    far[0, 2] += 1e6
    assert torch.equal(out, attended_both_ways(of._replace(k_GND=far), mask)[0])
    assert not to.k_GND[0, 2].any() and not to.v_GND[0, 2].any() and to.v_GND[0, :2].all()
    assert not out[1].any() and not any(x[1].any() for x in to), "who has nothing to attend to gives 0"


@pytest.mark.parametrize("mask", [None, torch.tensor([[True, True, False], [True, False, False]])], ids=["whole", "padded"])
def test_attention_without_a_kernel_of_its_own_is_the_same_both_ways(mask: Tensor | None) -> None:
    of = Squares(*(_heads(randn(2, n, 4, seed=n), 2) for n in (2, 3, 3)))
    bias = None if mask is None else torch.zeros(2, 1, 1, 3, dtype=torch.float64).masked_fill(~mask[:, None, None, :], -1e300)
    out, total = _plain(of, bias)
    gradient = randn(2, 2, 2, 2, seed=9)
    got = _plain_back(of, Attended(out, total, bias, None), gradient)
    leaves = [x.detach().requires_grad_() for x in of]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=None if mask is None else mask[:, None, None, :]
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(list(got), list(torch.autograd.grad(expected, leaves, gradient)))


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

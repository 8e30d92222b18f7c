"""Layers and attention equal plain reference implementations. Gradients are checked in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from roostream.models.attention import (
    ListAttention,
    QueriesKeysValues,
    TargetAttention,
    attend,
    attend_to_each_other,
    attend_to_histories,
    padded_to_each_other,
    padded_to_histories,
)
from roostream.models.build import build_model
from roostream.models.candidate_groups import CandidateGroups, build_groups
from roostream.models.config import RankerConfig
from roostream.models.feature_encoders import pool_features
from roostream.models.inputs import Sequence
from roostream.models.layers import Mlp
from roostream.models.ranker import Heads
from tests.models.layer_checks import assert_gradients, build_float64, randn
from tests.models.model_cases import inputs_of, make_batch, make_schema


def test_mlp_gradients_and_the_identity() -> None:
    net = build_float64(Mlp(4, (5, 3)))
    assert_gradients(net, net, randn(6, 4))
    x = randn(2, 4)
    assert Mlp(4, ())(x) is x and Mlp(4, ()).width == 4


def test_heads_gradients() -> None:
    net = build_float64(Heads(4, (3,), [0.1, 0.1]))
    assert_gradients(net, net, randn(5, 4))


def reference_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Compute multi-head attention of one query [D] over keys and values [N, D], head by head."""
    if len(k) == 0:
        return torch.zeros_like(q)
    out = []
    for qh, kh, vh in zip(q.chunk(heads), k.chunk(heads, dim=1), v.chunk(heads, dim=1), strict=True):
        out.append(torch.softmax(kh @ qh / len(qh) ** 0.5, dim=0) @ vh)
    return torch.cat(out)


def histories(lengths: list[int], groups: CandidateGroups) -> Sequence:
    """Build a sequence that has lengths but no feature values."""
    offset_R1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Sequence(
        length_R=torch.tensor(lengths),
        offset_R1=torch.from_numpy(offset_R1),
        index_L=torch.zeros(0),
        column_L={},
        bucket_L={},
        host_length_R=np.array(lengths, dtype=np.int64),
        gap_ms_L={},
        groups=groups,
    )


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("counts", [[3, 1, 0, 18, 2], [4, 4], [0, 0], [0, 70, 1]], ids=str)
def test_target_attention_equals_the_formula_of_each_candidate(counts: list[int], heads: int) -> None:
    module = build_float64(TargetAttention(3, 5, 4, heads))
    assert isinstance(module, TargetAttention)
    lengths = [(2 * r + 3) % 5 for r in range(len(counts))]  # some histories are empty
    lengths[-1] = 0
    entry, query = randn(sum(lengths), 5, seed=1), randn(sum(counts), 3, seed=2)
    groups = build_groups(np.array(counts, dtype=np.int32))
    got = module(query, entry, histories(lengths, groups), groups)
    owner = np.repeat(np.arange(len(counts)), counts)
    parts = [module.key_value(part).chunk(2, dim=-1) for part in entry.split(lengths)]
    expected = [
        reference_attention(module.query(query[b]), parts[r][0], parts[r][1], heads)
        for b, r in enumerate(owner)
    ]
    torch.testing.assert_close(
        got, torch.stack(expected) if expected else torch.zeros(0, 4, dtype=torch.float64)
    )


@pytest.mark.parametrize("counts", [[3, 1, 0, 18, 2], [4, 4], [70, 2]], ids=str)
def test_list_attention_equals_the_formula_of_each_request(counts: list[int]) -> None:
    module, x = build_float64(ListAttention(4, 2)), randn(sum(counts), 4)
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
    sequence = histories([2, 3, 0], groups)
    target = build_float64(TargetAttention(3, 2, 4, 2))
    assert_gradients(target, lambda q, e: target(q, e, sequence, groups), randn(5, 3), randn(5, 2, seed=1))
    list_ = build_float64(ListAttention(4, 2))
    assert_gradients(list_, lambda x: list_(x, groups), randn(5, 4))


HISTORY_LENGTHS = [5, 3, 21, 0, 40]
CANDIDATE_COUNTS = [3, 0, 18, 2, 1]


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_attention_in_segments_equals_padded_attention(heads: int) -> None:
    groups = build_groups(np.array(CANDIDATE_COUNTS))
    sequence = histories(HISTORY_LENGTHS, build_groups(np.array(CANDIDATE_COUNTS)))
    query_and_entries = (
        randn(sum(CANDIDATE_COUNTS), 20).requires_grad_(),
        randn(sum(HISTORY_LENGTHS), 40, seed=1).requires_grad_(),
    )
    qkv_BD = randn(sum(CANDIDATE_COUNTS), 60, seed=2).requires_grad_()
    got = (
        attend_to_histories(*query_and_entries, sequence, groups, heads),
        attend_to_each_other(qkv_BD, groups, heads),
    )
    expected = (
        padded_to_histories(*query_and_entries, sequence, groups, heads),
        padded_to_each_other(qkv_BD, groups, heads),
    )
    gradient = randn(sum(CANDIDATE_COUNTS), 20, seed=3)
    for segmented, padded, leaves in zip(got, expected, (query_and_entries, (qkv_BD,)), strict=True):
        torch.testing.assert_close(segmented, padded)
        torch.testing.assert_close(
            torch.autograd.grad(segmented, leaves, gradient), torch.autograd.grad(padded, leaves, gradient)
        )


def test_a_segment_has_the_same_bits_in_any_batch() -> None:
    qkv_BD = randn(sum(CANDIDATE_COUNTS), 3 * 36).float()
    gradient = randn(sum(CANDIDATE_COUNTS), 36, seed=1).float()

    def output_and_gradient(qkv_BD: Tensor, counts: list[int], gradient: Tensor) -> list[Tensor]:
        leaf = qkv_BD.clone().requires_grad_()
        out = attend_to_each_other(leaf, build_groups(np.array(counts)), 2)
        return [out.detach(), *torch.autograd.grad(out, leaf, gradient)]

    together = output_and_gradient(qkv_BD, CANDIDATE_COUNTS, gradient)
    ends = np.cumsum(CANDIDATE_COUNTS)
    for count, end in zip(CANDIDATE_COUNTS, ends, strict=True):
        segment = slice(end - count, end)
        for alone, in_batch in zip(
            output_and_gradient(qkv_BD[segment], [count], gradient[segment]), together, strict=True
        ):
            assert torch.equal(alone, in_batch[segment])


def test_nan_stays_within_its_segment() -> None:
    qkv_BD = randn(5, 12).float()
    qkv_BD[3, 4] = torch.nan  # a key
    out = attend_to_each_other(qkv_BD, build_groups(np.array([2, 3])), 2)
    assert torch.isfinite(out[:2]).all() and torch.isnan(out[2:, :2]).all()


def test_padding_has_no_influence_and_no_gradient() -> None:
    qkv = QueriesKeysValues(
        *(x.requires_grad_() for x in (randn(2, 2, 4), randn(2, 3, 4, seed=1), randn(2, 3, 4, seed=2)))
    )
    mask = torch.tensor([[True, True, False], [False, False, False]])
    out = attend(qkv, mask, 2)
    gradient = QueriesKeysValues(*torch.autograd.grad(out, qkv, 2 * out.detach()))
    changed_k_GND = qkv.k_GND.detach().clone()
    changed_k_GND[0, 2] += 1e6
    assert torch.equal(out, attend(qkv._replace(k_GND=changed_k_GND), mask, 2))
    assert not gradient.k_GND[0, 2].any() and not gradient.v_GND[0, 2].any() and gradient.v_GND[0, :2].all()
    assert not out[1].any() and not any(x[1].any() for x in gradient), "a query without entries gives 0"


def test_rows_columns_and_times_of_a_history_learn() -> None:
    schema = make_schema("everything")
    batch = make_batch(schema, [3, 2])
    inputs = inputs_of(batch, train=True)
    model = build_model(schema, RankerConfig(), 0)
    model.candidate_parts["attention_history"](inputs, pool_features(inputs)).square().sum().backward()
    times = [p.grad for name, p in model.named_parameters() if ".times." in name]
    assert times and all(g is not None and g.abs().sum() > 0 for g in times)
    for table in ("item", "action"):
        gradient = inputs.rows[schema.table_by_name[table].stack].grad
        assert gradient is not None and gradient.abs().sum() > 0

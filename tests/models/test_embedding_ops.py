"""Gathering and pooling of embedding rows by index, and the gradients of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from roostream.models.embedding_ops import gather_rows, pool_bags

INDEX = torch.tensor([3, 0, 3, 1, 3])
OFFSET = torch.tensor([0, 2, 2, 5])  # the second bag is empty
WEIGHT = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5], dtype=torch.float64)


def table(rows: int, width: int, seed: int = 0) -> Tensor:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.requires_grad_()


def test_rows_of_several_tables_are_gathered_side_by_side() -> None:
    first, second, other = table(4, 3), table(6, 2, seed=1), torch.tensor([5, 5, 0, 1, 2])
    torch.testing.assert_close(
        gather_rows([(first, INDEX), (second, other)]), torch.cat([first[INDEX], second[other]], dim=1)
    )
    assert torch.autograd.gradcheck(lambda a, b: gather_rows([(a, INDEX), (b, other)]), (first, second))


def test_only_learned_tables_get_gradients() -> None:
    learned, fixed = table(4, 3), table(4, 2).detach()
    gather_rows([(fixed, INDEX), (learned, INDEX)]).sum().backward()
    assert fixed.grad is None and learned.grad is not None
    assert learned.grad.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [3.0] * 3], (
        "the gradient of a row is the sum over all its uses"
    )


def test_a_gradient_may_be_a_view() -> None:
    rows = table(4, 3)
    torch.cat([rows[:1].expand(5, 3), gather_rows([(rows, INDEX)])], dim=1).square().sum().backward()
    expected = table(4, 3)
    torch.cat([expected[:1].expand(5, 3), expected[INDEX]], dim=1).square().sum().backward()
    torch.testing.assert_close(rows.grad, expected.grad)


@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["mean", "sum by weight"])
def test_bags_equal_those_of_embedding_bag(weight: Tensor | None) -> None:
    rows = table(4, 3)
    mode = "mean" if weight is None else "sum"
    expected = F.embedding_bag(
        INDEX, rows, OFFSET, mode=mode, per_sample_weights=weight, include_last_offset=True
    )
    torch.testing.assert_close(pool_bags(rows, INDEX, OFFSET, weight), expected)
    assert torch.autograd.gradcheck(lambda r: pool_bags(r, INDEX, OFFSET, weight), (rows,))


def test_empty_tables_and_bags() -> None:
    none, empty = torch.zeros(0, 2, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    assert gather_rows([(none, empty)]).shape == (0, 2)
    out = pool_bags(none, empty, torch.tensor([0, 0, 0]), None)
    assert out.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    out.sum().backward()
    assert none.grad is not None and none.grad.shape == (0, 2)

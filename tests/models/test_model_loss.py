"""The multi-task loss."""

from __future__ import annotations

import pytest
import torch

from models.loss import loss


def test_a_weighted_mean_for_each_task_summed_over_tasks() -> None:
    logits = torch.tensor([[0.5, -1.0], [2.0, 0.0], [-0.3, 1.0]])
    label = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.5, 3.0]])
    expected = 0.0
    for t in range(2):
        p = torch.sigmoid(logits[:, t])
        each = -(label[:, t] * p.log() + (1 - label[:, t]) * (1 - p).log())
        expected += float((each * weight[:, t]).sum() / weight[:, t].sum())
    assert float(loss(logits, label, weight)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("label", [1.0, 0.5, 30.0])
def test_any_label_above_zero_is_a_positive(label: float) -> None:
    ones = torch.ones(1, 1)
    assert float(loss(ones, label * ones, ones)) == float(loss(ones, ones, ones))


def test_weight_zero_leaves_a_label_out_and_no_weight_at_all_is_zero() -> None:
    logits = torch.tensor([[3.0], [1.0]], requires_grad=True)
    label = torch.tensor([[0.0], [1.0]])
    alone = loss(logits[1:], label[1:], torch.ones(1, 1))
    torch.testing.assert_close(loss(logits, label, torch.tensor([[0.0], [1.0]])), alone)
    nothing = loss(logits, label, torch.zeros(2, 1))
    nothing.backward()
    assert nothing.item() == 0 and logits.grad is not None and (logits.grad == 0).all()
    assert float(loss(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2))) == 0


def test_gradients_are_right_in_float64() -> None:
    logits = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    label = (torch.arange(10).view(5, 2) % 3 == 0).double()
    weight = torch.arange(10).view(5, 2).double()
    assert torch.autograd.gradcheck(lambda x: loss(x, label, weight), (logits,))

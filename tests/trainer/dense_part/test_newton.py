"""Newton steps equal their formula, whatever the batch is divided into, and learn a linear rule quickly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roostream.models.linear_part import LinearPart
from roostream.models.loss import loss
from roostream.models.model import Targets
from trainer.dense_part import newton
from trainer.dense_part.adam import DenseAdam

WIDTH, TASKS = 3, 2
RULE_T = np.array([[2.0, -1.0, 0.0], [0.0, 1.0, 1.0]]).T


def batch(seed: int, size: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats [B, F] and labels [B, T] of a linear rule."""
    rng = np.random.default_rng(seed)
    x_BF = rng.normal(size=(size, WIDTH))
    label_BT = rng.random((size, TASKS)) < 1 / (1 + np.exp(-x_BF @ RULE_T))
    return torch.tensor(x_BF, dtype=torch.float32), torch.tensor(label_BT, dtype=torch.float32)


def differentiate(
    part: LinearPart, x_BF: torch.Tensor, label_BT: torch.Tensor, total_T: torch.Tensor | None = None
) -> None:
    targets = Targets(label_BT=label_BT, weight_BT=torch.ones_like(label_BT), total_T=total_T)
    loss(part(x_BF), targets).backward()  # type: ignore[no-untyped-call]
    newton.scale_gradients(part, torch.full((TASKS,), float(len(x_BF))) if total_T is None else total_T)


def made() -> tuple[LinearPart, DenseAdam]:
    part = LinearPart(WIDTH, TASKS)
    return part, DenseAdam(part.named_parameters(), learning_rate=0.1, linear=[part])


def train(seeds: range) -> LinearPart:
    part, optimizer = made()
    for seed in seeds:
        optimizer.zero_grad()
        differentiate(part, *batch(seed))
        assert optimizer.step()
    return part


def test_steps_equal_the_formula() -> None:
    weight_TF = np.zeros((TASKS, WIDTH + 1))
    curvature_TFF = np.zeros((TASKS, WIDTH + 1, WIDTH + 1))
    for seed in range(5):
        x_BG, label_BT = (part.numpy().astype(np.float64) for part in batch(seed))
        x_BF = np.c_[x_BG, np.ones(len(x_BG))]
        error_BT = 1 / (1 + np.exp(-x_BF @ weight_TF.T)) - label_BT
        for t in range(TASKS):
            gradient_BF = x_BF * error_BT[:, t, None]
            curvature_TFF[t] *= 1 - 1 / newton.MEMORY_STEPS
            curvature_TFF[t] += (x_BF * np.abs(error_BT[:, t, None]) / 2).T @ x_BF
            with_prior_FF = curvature_TFF[t] + newton.PRIOR * np.eye(WIDTH + 1)
            weight_TF[t] -= np.linalg.solve(with_prior_FF, gradient_BF.sum(axis=0))
    part = train(range(5))
    np.testing.assert_allclose(part.weight.detach().numpy(), weight_TF, rtol=1e-4)
    np.testing.assert_allclose(part.curvature.detach().numpy(), curvature_TFF, rtol=1e-4, atol=1e-4)


def test_gradients_of_parts_add_up_to_those_of_the_batch() -> None:
    whole, parts = LinearPart(WIDTH, TASKS), LinearPart(WIDTH, TASKS)
    x_BF, label_BT = batch(0)
    differentiate(whole, x_BF, label_BT)
    sums = [torch.zeros_like(p) for p in parts.parameters()]
    for rows in (slice(0, 13), slice(13, None)):
        parts.zero_grad()
        differentiate(parts, x_BF[rows], label_BT[rows], torch.full((TASKS,), 40.0))
        sums = [total + p.grad for total, p in zip(sums, parts.parameters(), strict=True)]
    for p, total in zip(whole.parameters(), sums, strict=True):
        torch.testing.assert_close(p.grad, total)


def test_a_batch_of_rare_clicks_without_one_moves_no_logit_far() -> None:
    """Columns are large and alike, as logarithms of ages are, and the network already says 5 %."""
    part, optimizer = made()
    x_BF = 10 + torch.tensor(np.random.default_rng(0).normal(size=(200, WIDTH)), dtype=torch.float32)
    targets = Targets(label_BT=torch.zeros(200, TASKS), weight_BT=torch.ones(200, TASKS))
    loss(part(x_BF) - 3.0, targets).backward()  # type: ignore[no-untyped-call]
    newton.scale_gradients(part, torch.full((TASKS,), 200.0))
    assert optimizer.step()
    moved_BT = part(x_BF).detach()
    assert bool((moved_BT < 0).all()) and float(moved_BT.min()) > -2.5


def test_a_linear_rule_is_found_within_thirty_small_batches() -> None:
    weight_TF = train(range(30)).weight.detach().numpy()
    np.testing.assert_allclose(weight_TF[:, :-1], RULE_T.T, atol=0.4)


@pytest.mark.parametrize("name", ["weight", "curvature"])
def test_a_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    part, optimizer = made()
    differentiate(part, *batch(0))
    part.get_parameter(name).grad.fill_(float("inf"))  # type: ignore[union-attr]
    assert not optimizer.step()
    assert optimizer.num_steps == 0 and not any(p.any() for p in part.parameters())


def test_parameters_without_a_gradient_are_left_alone() -> None:
    part, optimizer = made()
    assert optimizer.step()
    assert not any(p.any() for p in part.parameters())
    assert optimizer.slots == {}, "Adam keeps no state of them"

"""The Newton steps of the linear part equal their formula, do not depend on how a batch is divided, and learn
a linear rule quickly."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from roostream.models.linear_part import MAX_SHARE, LinearPart
from roostream.models.loss import loss
from roostream.models.model import Targets
from trainer.dense_part import newton
from trainer.dense_part.adam import DenseAdam

WIDTH, TASKS = 3, 2
RULE_T = np.array([[2.0, -1.0, 0.0], [0.0, 1.0, 1.0]]).T


def batch(seed: int, size: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw floats [B, F], and labels [B, T] that follow a linear rule."""
    rng = np.random.default_rng(seed)
    x_BF = rng.normal(size=(size, WIDTH))
    label_BT = rng.random((size, TASKS)) < 1 / (1 + np.exp(-x_BF @ RULE_T))
    return torch.tensor(x_BF, dtype=torch.float32), torch.tensor(label_BT, dtype=torch.float32)


def backward(
    part: LinearPart,
    x_BF: torch.Tensor,
    label_BT: torch.Tensor,
    total_T: torch.Tensor | None = None,
    network_BT: torch.Tensor | None = None,
) -> None:
    """Compute the gradients of the linear part. The network's logits are 0 unless they are given."""
    targets = Targets(label_BT=label_BT, weight_BT=torch.ones_like(label_BT), total_T=total_T)
    network_BT = torch.zeros_like(label_BT) if network_BT is None else network_BT
    loss_of = functools.partial(loss, targets=targets)
    part.loss(x_BF, part.mixed(network_BT, x_BF), loss_of).backward()  # type: ignore[no-untyped-call]
    newton.scale_gradients(part, torch.full((TASKS,), float(len(x_BF))) if total_T is None else total_T)


def linear_part(constant: float = 0.0) -> LinearPart:
    part = LinearPart(WIDTH, [[0.0] * WIDTH + [constant]] * TASKS)
    with torch.no_grad():
        part.adjust_initial_parameters()
    return part


def part_and_optimizer(constant: float = 0.0) -> tuple[LinearPart, DenseAdam]:
    part = linear_part(constant)
    return part, DenseAdam(part.named_parameters(), learning_rate=0.1, linear=[part])


def train(seeds: range, network: Callable[[torch.Tensor], torch.Tensor] | None = None) -> LinearPart:
    """Train a linear part on one batch for each seed. `network` maps floats to the logits of the network."""
    part, optimizer = part_and_optimizer()
    for seed in seeds:
        optimizer.zero_grad()
        x_BF, label_BT = batch(seed)
        backward(part, x_BF, label_BT, network_BT=network(x_BF) if network else None)
        assert optimizer.step()
    return part


def sigmoid(logit_B: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-logit_B)))


class ReferenceNewton:
    """The formula in trainer/dense_part/newton.py for one task, in numpy."""

    def __init__(self, first: list[float], prior: float, memory_steps: int) -> None:
        self.weight_F, self.curvature_FF = np.array(first), np.zeros((len(first), len(first)))
        self.prior_FF, self.kept = prior * np.eye(len(first)), 1 - 1 / memory_steps

    def step(self, x_BF: np.ndarray, error_B: np.ndarray) -> None:
        self.curvature_FF = self.kept * self.curvature_FF + (x_BF.T * np.abs(error_B) / 2) @ x_BF
        self.weight_F = self.weight_F - np.linalg.solve(self.curvature_FF + self.prior_FF, x_BF.T @ error_B)


def test_steps_equal_the_formula() -> None:
    network_GT = np.array([[1.0, 0.5, 0.0], [0.5, -1.0, 1.0]]).T
    linear = [ReferenceNewton([0.0] * (WIDTH + 1), newton.PRIOR, newton.MEMORY_STEPS) for _ in range(TASKS)]
    shares = [ReferenceNewton([0.5], newton.SHARE_PRIOR, newton.SHARE_MEMORY_STEPS) for _ in range(TASKS)]
    calibrations = [
        ReferenceNewton([0.0, 0.0], newton.CALIBRATION_PRIOR, newton.CALIBRATION_MEMORY_STEPS)
        for _ in range(TASKS)
    ]
    for seed in range(5):
        x_BG, label_BT = (part.numpy().astype(np.float64) for part in batch(seed))
        x_BF = np.c_[x_BG, np.ones(len(x_BG))]
        for t in range(TASKS):
            network_B, linear_B = x_BG @ network_GT[:, t], x_BF @ linear[t].weight_F
            mixed_B = network_B + shares[t].weight_F * (linear_B - network_B)
            column_B2 = np.c_[mixed_B, np.ones(len(x_BG))]
            score_B = mixed_B + column_B2 @ calibrations[t].weight_F
            linear[t].step(x_BF, sigmoid(linear_B) - label_BT[:, t])
            shares[t].step((linear_B - network_B)[:, None], sigmoid(mixed_B) - label_BT[:, t])
            calibrations[t].step(column_B2, sigmoid(score_B) - label_BT[:, t])
    rule = torch.tensor(network_GT, dtype=torch.float32)
    part = train(range(5), lambda x_BF: x_BF @ rule)
    for parameter, expected in (
        (part.weight, [each.weight_F for each in linear]),
        (part.curvature, [each.curvature_FF for each in linear]),
        (part.share, [each.weight_F for each in shares]),
        (part.share_curvature, [each.curvature_FF for each in shares]),
        (part.calibration, [each.weight_F for each in calibrations]),
        (part.calibration_curvature, [each.curvature_FF for each in calibrations]),
    ):
        np.testing.assert_allclose(parameter.detach().numpy(), np.array(expected), rtol=1e-3, atol=1e-4)


def test_gradients_of_parts_add_up_to_those_of_the_batch() -> None:
    whole, parts = linear_part(), linear_part()
    x_BF, label_BT = batch(0)
    network_BT = torch.randn(label_BT.shape, generator=torch.Generator().manual_seed(0))
    backward(whole, x_BF, label_BT, network_BT=network_BT)
    sums = [torch.zeros_like(p) for p in parts.parameters()]
    for rows in (slice(0, 13), slice(13, None)):
        parts.zero_grad()
        total_T = torch.full((TASKS,), 40.0)
        backward(parts, x_BF[rows], label_BT[rows], total_T, network_BT[rows])
        sums = [total + p.grad for total, p in zip(sums, parts.parameters(), strict=True)]
    for p, total in zip(whole.parameters(), sums, strict=True):
        torch.testing.assert_close(p.grad, total)


def test_a_batch_without_positives_changes_logits_moderately() -> None:
    """Columns are large and similar, like logarithms of ages. Both parts already predict 5 %."""
    part, optimizer = part_and_optimizer(constant=-3.0)
    x_BF = 10 + torch.tensor(np.random.default_rng(0).normal(size=(200, WIDTH)), dtype=torch.float32)
    backward(part, x_BF, torch.zeros(200, TASKS), network_BT=torch.full((200, TASKS), -3.0))
    assert optimizer.step()
    change_BT = part(x_BF).detach() + 3.0
    assert bool((change_BT < 0).all()) and float(change_BT.min()) > -2.5


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 40.0])
def test_logits_stay_moderate_with_a_single_label_constant_and_huge_columns(
    size: int, label: float, scale: float
) -> None:
    """The first column is 89, the asinh of the largest float32."""
    part, optimizer = part_and_optimizer()
    for seed in range(100):
        optimizer.zero_grad()
        x_BF = scale * batch(seed, size)[0]
        x_BF[:, 0] = 89.0
        backward(part, x_BF, torch.full((size, TASKS), label), network_BT=torch.zeros(size, TASKS))
        assert optimizer.step()
        scores_BT = part.mixed(torch.zeros(size, TASKS), x_BF).detach()
        assert float(scores_BT.abs().max()) < 15
    assert bool(((part.share >= 0) & (part.share <= MAX_SHARE)).all())


def test_rounding_errors_of_collinear_columns_end_no_training() -> None:
    """A float and its hinges are collinear above the knots. Their curvature is a sum in float32, so after
    enough candidates it is no longer positive definite."""
    part, optimizer = part_and_optimizer()
    rng = np.random.default_rng(3)
    for _ in range(150):
        x_BF = torch.tensor(rng.uniform(8, 12, (20_000, 1)), dtype=torch.float32) - torch.tensor(
            [0.0, 1.0, 4.0]
        )
        label_BT = torch.tensor(rng.random((20_000, TASKS)) < 0.5, dtype=torch.float32)
        optimizer.zero_grad()
        backward(part, x_BF, label_BT)
        assert optimizer.step()
        assert float(part(x_BF).detach().abs().max()) < 1
    smallest_T = torch.linalg.eigvalsh(part.curvature.detach().double())[:, 0]
    assert float(smallest_T.min()) < -newton.PRIOR, "the test must reach an indefinite matrix"


def test_the_better_predictor_gets_the_larger_share() -> None:
    rule = torch.tensor(RULE_T, dtype=torch.float32)
    constant_network = train(range(60), lambda x_BF: torch.zeros(len(x_BF), TASKS))
    perfect_network = train(range(60), lambda x_BF: x_BF @ rule)
    inverted_network = train(range(60), lambda x_BF: -x_BF @ rule)
    assert bool((constant_network.share > 0.8).all()) and bool((inverted_network.share > 0.6).all())
    assert bool((perfect_network.share < constant_network.share - 0.2).all())


def test_calibration_corrects_logits_that_are_too_small_and_too_low() -> None:
    rule = torch.tensor(RULE_T, dtype=torch.float32)
    part = linear_part()
    optimizer = DenseAdam(part.named_parameters(), learning_rate=0.1, linear=[part])
    for seed in range(100):
        optimizer.zero_grad()
        x_BF, label_BT = batch(seed)
        with torch.no_grad():  # the linear part has the logits of the network
            part.weight[:, :-1], part.weight[:, -1] = rule.T / 1.5, -0.5
        backward(part, x_BF, label_BT, network_BT=x_BF @ rule / 1.5 - 0.5)
        assert optimizer.step()
    np.testing.assert_allclose(part.calibration.detach().numpy(), [[0.5, 0.75]] * TASKS, atol=0.2)


def test_the_network_learns_from_its_own_loss_alone() -> None:
    part = train(range(10))
    x_BF, label_BT = batch(11)
    network_BT = torch.randn(label_BT.shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = Targets(label_BT=label_BT, weight_BT=torch.ones_like(label_BT))
    loss_of = functools.partial(loss, targets=targets)
    (mixed,) = torch.autograd.grad(part.loss(x_BF, part.mixed(network_BT, x_BF), loss_of), network_BT)
    (alone,) = torch.autograd.grad(loss_of(network_BT), network_BT)
    torch.testing.assert_close(mixed, alone, rtol=1e-4, atol=1e-6)


def test_a_linear_rule_is_found_within_thirty_small_batches() -> None:
    weight_TF = train(range(30)).weight.detach().numpy()
    np.testing.assert_allclose(weight_TF[:, :-1], RULE_T.T, atol=0.4)


@pytest.mark.parametrize("name", ["weight", "curvature", "share", "calibration_curvature"])
def test_a_gradient_that_is_not_finite_changes_nothing(name: str) -> None:
    part, optimizer = part_and_optimizer()
    backward(part, *batch(0))
    part.get_parameter(name).grad.fill_(float("inf"))  # type: ignore[union-attr]
    assert not optimizer.step()
    assert optimizer.num_steps == 0 and not part.weight.any() and not part.curvature.any()


def test_parameters_without_a_gradient_are_left_alone() -> None:
    part, optimizer = part_and_optimizer()
    before = {name: p.detach().clone() for name, p in part.named_parameters()}
    assert optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in part.named_parameters())
    assert optimizer.slots == {}, "Adam must keep no state for them"

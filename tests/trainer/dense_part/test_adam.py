"""`DenseAdam` computes the same steps as torch.optim.Adam without importing torch.optim."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from trainer.dense_part.adam import DenseAdam


def test_steps_equal_those_of_torch_optim() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    reference_model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    reference_model.load_state_dict(model.state_dict())
    optimizer = DenseAdam(model.named_parameters(), learning_rate=2e-3)
    reference_optimizer = torch.optim.Adam(reference_model.parameters(), lr=2e-3)
    for _ in range(50):
        x, y = torch.randn(16, 5), torch.randn(16, 1)
        for each_model, each_optimizer in ((model, optimizer), (reference_model, reference_optimizer)):
            each_optimizer.zero_grad()
            ((each_model(x) - y) ** 2).mean().backward()
            each_optimizer.step()
    for a, b in zip(model.parameters(), reference_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_learning_rate_may_depend_on_the_step() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = DenseAdam([("weight", weight)], learning_rate=lambda num_steps: 0.5 if num_steps else 0.1)
    steps = []
    for _ in range(2):
        before = weight.item()
        weight.grad = torch.tensor([3.0])
        assert optimizer.step()
        steps.append(before - weight.item())
    assert steps == pytest.approx([0.1, 0.5], rel=1e-5), (
        "with a constant gradient, a step equals the learning rate"
    )


def test_gradients_are_clipped_to_their_common_norm() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    optimizer = DenseAdam([("a", a), ("b", b)], learning_rate=0.1, clip_norm=1.5)
    a.grad, b.grad = torch.tensor([2.0, 1.0]), torch.tensor([2.0])
    assert optimizer.step()
    torch.testing.assert_close(optimizer.slots["a"]["exp_avg"], torch.tensor([0.1, 0.05]))
    torch.testing.assert_close(optimizer.slots["b"]["exp_avg"], torch.tensor([0.1]))
    a.grad, b.grad = torch.tensor([0.5, 0.0]), torch.tensor([0.0])
    assert optimizer.step()
    # The norm is below the limit, so this gradient is not clipped.
    torch.testing.assert_close(optimizer.slots["a"]["exp_avg"], torch.tensor([0.09 + 0.05, 0.045]))


def test_the_norm_is_that_of_all_gradients() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    optimizer = DenseAdam([("a", a), ("b", b)], learning_rate=0.1)
    assert optimizer.norm() == 0.0
    a.grad = torch.tensor([2.0, 1.0])
    assert optimizer.norm() == pytest.approx(math.sqrt(5))
    b.grad = torch.tensor([2.0])
    assert optimizer.norm() == pytest.approx(3.0)
    b.grad = torch.tensor([math.nan])
    assert math.isnan(optimizer.norm())


@pytest.mark.parametrize("size", [1e18, 1e20, math.inf, math.nan])
def test_a_gradient_without_a_finite_square_changes_nothing(size: float) -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = DenseAdam([("weight", weight), ("other", other)], learning_rate=0.1, clip_norm=10.0)
    weight.grad, other.grad = torch.tensor([size, 1.0]), torch.ones(2)
    stepped = optimizer.step()
    assert stepped == (size == 1e18), "a gradient whose square overflows must be refused"
    assert stepped or (optimizer.num_steps == 0 and (weight == 1).all() and (other == 1).all())
    for slots in optimizer.slots.values():
        assert slots["exp_avg"].abs().max() <= 1.01 and slots["exp_avg_sq"].max() <= 0.11


def test_weights_are_aligned_views_of_one_tensor() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    DenseAdam(module.named_parameters(), learning_rate=0.1)
    weights = list(module.parameters())
    assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
    assert all(w.data_ptr() % 64 == 0 and w.is_contiguous() for w in weights)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_weight_without_a_gradient_stays() -> None:
    weights = [nn.Parameter(torch.full((n,), 1.0)) for n in (3, 20, 1)]
    alone = [nn.Parameter(torch.full((n,), 1.0)) for n in (3, 1)]
    optimizer = DenseAdam(zip("abc", weights, strict=True), learning_rate=0.1)
    reference = torch.optim.Adam(alone, lr=0.1)
    for step in range(1, 4):
        for weight in (weights[0], weights[2], *alone):
            weight.grad = torch.full_like(weight, 0.5 * step)
        assert optimizer.step()
        reference.step()
    torch.testing.assert_close(
        [weights[0], weights[2]], [nn.Parameter(w.detach()) for w in alone], rtol=1e-5, atol=1e-7
    )
    assert (weights[1] == 1).all() and not any(state.any() for state in optimizer.slots["b"].values())


def test_programs_import_no_more_than_they_need() -> None:
    """The restart of a worker must not import torch._dynamo or TorchRec. The controller must not import
    torch."""
    code = """
import sys
import trainer.control.controller_program
assert not {"torch", "numba", "pandas"} & sys.modules.keys(), "controller"
from tests.trainer import samples
from tests.trainer.loops import build
assert build(samples.records([1, 2])).train_all().pushes() == {1: 1, 2: 1}
import trainer.worker_program
assert not {"torch._dynamo", "triton", "torchrec", "fastapi", "pyflink"} & sys.modules.keys(), "worker"
import serving.scorer
assert not {"torch._dynamo", "triton"} & sys.modules.keys(), "scorer"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr

"""Adam gives torch's numbers without torch.optim's imports."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from trainer.adam import DenseAdam


def test_steps_are_those_of_torch_optim() -> None:
    torch.manual_seed(3)
    mine = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    theirs = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1))
    theirs.load_state_dict(mine.state_dict())
    ours, reference = DenseAdam(mine.named_parameters(), learning_rate=2e-3), torch.optim.Adam(theirs.parameters(), lr=2e-3)
    for _ in range(50):
        x, y = torch.randn(16, 5), torch.randn(16, 1)
        for model, optimizer in ((mine, ours), (theirs, reference)):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_weight_without_a_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = DenseAdam([("used", used), ("unused", unused)], learning_rate=0.1)
    optimizer.step()
    used.sum().backward()
    optimizer.step()
    assert (unused == 1).all() and (used != 1).all() and optimizer.num_steps == 2
    optimizer.zero_grad()
    assert used.grad is None


def test_programs_import_no_more_than_they_need() -> None:
    """A worker's restart must not pay for torch._dynamo or TorchRec, nor the controller for torch at all."""
    code = """
import sys
import trainer.main, trainer.controller_program
assert not {"torch", "numba", "pandas"} & sys.modules.keys(), "controller"
from tests.trainer import samples
from tests.trainer.loops import build
assert build(samples.records([1, 2])).train_all().pushes() == {1: 1, 2: 1}
import trainer.worker_program
assert not {"torch._dynamo", "torchrec", "fastapi", "pyflink"} & sys.modules.keys(), "worker"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr

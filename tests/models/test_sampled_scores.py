"""`sampled_scores` computes dot products with sampled rows. Values and gradients are equal with and without
the compiled kernels."""

from __future__ import annotations

import pytest
import torch

from roostream.models import sampled_scores as module
from roostream.models.sampled_scores import sampled_scores
from tests.models.layer_checks import randn

INDEX = torch.tensor([[0, 4, 4], [3, 0, 1]])


@pytest.mark.parametrize("width", [1, 16, 40])
def test_kernels_equal_copies_in_values_and_gradients(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    results = []
    for compiled in (module.COMPILED, False):
        monkeypatch.setattr(module, "COMPILED", compiled)
        u_PD, v_ID = randn(2, width).requires_grad_(), randn(5, width, seed=1).requires_grad_()
        out_PC = sampled_scores(u_PD, v_ID, INDEX)
        (out_PC * randn(2, 3, seed=2)).sum().backward()  # type: ignore[no-untyped-call]
        results.append((out_PC, u_PD.grad, v_ID.grad))
    for kernel_result, copy_result in zip(*results, strict=True):
        torch.testing.assert_close(kernel_result, copy_result)
    assert results[0][2] is not None and not results[0][2][2].any(), "the third row was not sampled"


def test_vectors_may_be_transposed() -> None:
    u_PD, v_ID = randn(4, 2).T.requires_grad_(), randn(4, 5).T.requires_grad_()
    (gradient_PD,) = torch.autograd.grad(sampled_scores(u_PD, v_ID, INDEX).sum(), u_PD)
    torch.testing.assert_close(gradient_PD, v_ID[INDEX].sum(dim=1))

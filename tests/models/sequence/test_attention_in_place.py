"""HSTU's attention directly on jagged sequences: outputs and gradients equal those of the padded
reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roostream.models.sequence.hstu_attention import attention_in_place, pointwise_attention
from roostream.models.sequence.jagged_sequences import (
    build_history_sequences,
    build_jagged_sequences,
)
from tests.models.layer_checks import randn

MAX_HISTORY, HEADS = 20, 2
LENGTHS, TARGETS = np.array([3, 0, 18, 24, 1]), np.array([2, 3, 0, 1, 4], dtype=np.int32)
BATCHES = {
    "histories and targets": build_jagged_sequences(LENGTHS, None, TARGETS, MAX_HISTORY),
    "histories alone": build_history_sequences(np.array([4, 1, 0, 19])),
    "nothing": build_history_sequences(np.zeros(2, dtype=np.int64)),
}


@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_and_its_gradients_equal_the_reference(name: str, width: int) -> None:
    sequences, results = BATCHES[name], []
    for attend in (attention_in_place, pointwise_attention):
        x_SD3 = randn(int(sequences.tokens_R.sum()), 3 * HEADS * width).requires_grad_()
        bias_P = randn(2 * MAX_HISTORY + 1, seed=1).requires_grad_()
        out_SD = attend(x_SD3, sequences, bias_P, None, HEADS, MAX_HISTORY + 1.0)
        (out_SD * randn(*out_SD.shape, seed=2)).sum().backward()  # type: ignore[no-untyped-call]
        results.append((out_SD, x_SD3.grad, torch.zeros_like(bias_P) if bias_P.grad is None else bias_P.grad))
    for in_place, reference in zip(*results, strict=True):
        torch.testing.assert_close(in_place, reference)


def test_float32_is_computed_in_float32() -> None:
    sequences = BATCHES["histories and targets"]
    x_SD3, bias_P = randn(int(sequences.tokens_R.sum()), 12).float(), randn(2 * MAX_HISTORY + 1).float()
    out_SD = attention_in_place(x_SD3, sequences, bias_P, None, HEADS, MAX_HISTORY + 1.0)
    assert out_SD.dtype == torch.float32
    torch.testing.assert_close(
        out_SD, pointwise_attention(x_SD3, sequences, bias_P, None, HEADS, MAX_HISTORY + 1.0)
    )

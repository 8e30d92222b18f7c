"""HSTU's attention where sequences lie: what the reference gives, both ways, and the reference where it can't
be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roostream.models.sequence import hstu_attention as module
from roostream.models.sequence.hstu_attention import attention_in_place, pointwise_attention
from roostream.models.sequence.jagged_sequences import (
    JaggedSequences,
    build_history_sequences,
    build_jagged_sequences,
)
from tests.models.layer_checks import randn

MOST, HEADS = 20, 2
LENGTHS, TARGETS = np.array([3, 0, 18, 24, 1]), np.array([2, 3, 0, 1, 4], dtype=np.int32)
BATCHES = {
    "histories and targets": build_jagged_sequences(LENGTHS, None, TARGETS, MOST),
    "histories alone": build_history_sequences(np.array([4, 1, 0, 19])),
    "nothing": build_history_sequences(np.zeros(2, dtype=np.int64)),
}


@pytest.mark.parametrize("width", [1, 7, 16])
@pytest.mark.parametrize("name", BATCHES)
def test_it_is_the_reference_and_so_are_its_gradients(name: str, width: int) -> None:
    sequences, found = BATCHES[name], []
    for attend in (attention_in_place, pointwise_attention):
        x_SD3 = randn(int(sequences.tokens_R.sum()), 3 * HEADS * width).requires_grad_()
        bias_P = randn(2 * MOST + 1, seed=1).requires_grad_()
        out_SD = attend(x_SD3, sequences, bias_P, None, HEADS, MOST + 1.0)
        (out_SD * randn(*out_SD.shape, seed=2)).sum().backward()  # type: ignore[no-untyped-call]
        found.append((out_SD, x_SD3.grad, torch.zeros_like(bias_P) if bias_P.grad is None else bias_P.grad))
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference)


def test_gradients_are_right_in_float64() -> None:
    sequences = build_jagged_sequences(LENGTHS[:2], None, TARGETS[:2], MOST)
    x_SD3, bias_P = randn(8, 3 * HEADS * 2).requires_grad_(), randn(2 * MOST + 1, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, b: attention_in_place(x, sequences, b, None, HEADS, MOST + 1.0), (x_SD3, bias_P)
    )


def test_float32_is_computed_in_float32() -> None:
    sequences = BATCHES["histories and targets"]
    x_SD3, bias_P = randn(int(sequences.tokens_R.sum()), 12).float(), randn(2 * MOST + 1).float()
    out_SD = attention_in_place(x_SD3, sequences, bias_P, None, HEADS, MOST + 1.0)
    assert out_SD.dtype == torch.float32
    torch.testing.assert_close(out_SD, pointwise_attention(x_SD3, sequences, bias_P, None, HEADS, MOST + 1.0))


@pytest.mark.parametrize("why", ["times", "bfloat16", "no compiler"])
def test_what_it_cannot_do_the_reference_does(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    asked: list[JaggedSequences] = []

    def reference(x_SD3: torch.Tensor, sequences: JaggedSequences, *others: object) -> torch.Tensor:
        asked.append(sequences)
        return x_SD3

    monkeypatch.setattr(module, "pointwise_attention", reference)
    monkeypatch.setattr(module, "COMPILED", why != "no compiler")
    dtype = torch.bfloat16 if why == "bfloat16" else torch.float32
    times = torch.zeros(129) if why == "times" else None
    attention_in_place(torch.zeros(1, 6, dtype=dtype), BATCHES["nothing"], torch.zeros(41), times, 1, 1.0)
    assert asked == [BATCHES["nothing"]]

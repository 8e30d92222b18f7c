"""Compares HSTU's Triton attention kernel with the reference implementation.

As a program, `python -m tests.trainer.device.kernel_checks`, it prints the errors on a CPU in Triton's
interpreter. That needs a process of its own, because the interpreter has to be chosen before Triton is
imported.
"""

from __future__ import annotations

import json

import numpy as np
import torch

from roostream.models.sequence.hstu_attention import pointwise_attention
from roostream.models.sequence.jagged_sequences import build_jagged_sequences
from trainer.device.hstu_attention import kernel_attention

CASES = {
    "histories and targets of all lengths": ([3, 0, 4, 60], [2, 1, 0, 5], 3),
    "blocks that end where sequences do": ([32, 31], [32, 1], 16),
    "no token at all": ([4, 0], [0, 0], 4),
}
MAX_HISTORY, HEADS = 50, 2


def relative_errors(case: str, dtype: torch.dtype, device: str, *, times: bool) -> dict[str, float]:
    """Compute the error of the output and of each gradient, relative to the norm of the reference. The
    reference computes the same inputs in float32."""
    lengths, targets, width = CASES[case]
    rng, size = np.random.default_rng(1), 3 * HEADS * width
    gap_ms_L = np.exp(rng.uniform(0, 25, sum(lengths))).astype(np.int64) if times else None
    sequences = build_jagged_sequences(
        np.array(lengths), gap_ms_L, np.array(targets, dtype=np.int32), MAX_HISTORY, device
    )
    tokens, results = len(sequences.source_S), []
    for attend in (pointwise_attention, kernel_attention):
        torch.manual_seed(0)
        x_SD3 = torch.randn(tokens, size).to(device, dtype).requires_grad_()
        biases = [torch.randn(n).to(device).requires_grad_() for n in (2 * MAX_HISTORY + 1, 129)]
        input_SD3 = x_SD3.float() if attend is pointwise_attention else x_SD3
        out_SD = attend(
            input_SD3, sequences, biases[0], biases[1] if times else None, HEADS, MAX_HISTORY + 1.0
        )
        (out_SD.float() * torch.randn(tokens, size // 3).to(device)).sum().backward()
        leaves = {"x": x_SD3, "position": biases[0], "time": biases[1]}
        zero = torch.zeros(1, device=device)
        results.append(
            {"out": out_SD.detach().float()}
            | {n: (zero if x.grad is None else x.grad.float()) for n, x in leaves.items()}
        )
    reference, kernel = results
    return {n: float((kernel[n] - x).norm() / x.norm().clamp_min(1e-9)) for n, x in reference.items()}


def main() -> None:
    first, *_ = CASES
    runs = [(case, torch.float32, True) for case in CASES]
    runs += [(first, torch.float32, False), (first, torch.bfloat16, True)]
    results = {}
    for case, dtype, times in runs:
        results[f"{case}, {dtype}, times {times}"] = relative_errors(case, dtype, "cpu", times=times)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

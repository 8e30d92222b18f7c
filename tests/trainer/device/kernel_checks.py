"""HSTU's attention by kernels beside the reference. Run by itself, `python -m
tests.trainer.device.kernel_checks`, it prints how far apart they are on a CPU, in Triton's interpreter, which
must be chosen before Triton is imported."""

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


def distances(case: str, dtype: torch.dtype, device: str, *, times: bool) -> dict[str, float]:
    """Of outputs and of each gradient, relative to the norm of the reference's, which is of the same numbers
    in float32."""
    lengths, targets, width = CASES[case]
    rng, size = np.random.default_rng(1), 3 * HEADS * width
    gap_ms_L = np.exp(rng.uniform(0, 25, sum(lengths))).astype(np.int64) if times else None
    sequences = build_jagged_sequences(
        np.array(lengths), gap_ms_L, np.array(targets, dtype=np.int32), MAX_HISTORY, device
    )
    tokens, found = len(sequences.source_S), []
    for attend in (pointwise_attention, kernel_attention):
        torch.manual_seed(0)
        x_SD3 = torch.randn(tokens, size).to(device, dtype).requires_grad_()
        biases = [torch.randn(n).to(device).requires_grad_() for n in (2 * MAX_HISTORY + 1, 129)]
        given_SD3 = x_SD3.float() if attend is pointwise_attention else x_SD3
        out_SD = attend(
            given_SD3, sequences, biases[0], biases[1] if times else None, HEADS, MAX_HISTORY + 1.0
        )
        (out_SD.float() * torch.randn(tokens, size // 3).to(device)).sum().backward()
        leaves = {"x": x_SD3, "position": biases[0], "time": biases[1]}
        zero = torch.zeros(1, device=device)
        found.append(
            {"out": out_SD.detach().float()}
            | {n: (zero if x.grad is None else x.grad.float()) for n, x in leaves.items()}
        )
    reference, ours = found
    return {n: float((ours[n] - x).norm() / x.norm().clamp_min(1e-9)) for n, x in reference.items()}


def main() -> None:
    first, *_ = CASES
    runs = [(case, torch.float32, True) for case in CASES]
    runs += [(first, torch.float32, False), (first, torch.bfloat16, True)]
    found = {}
    for case, dtype, times in runs:
        found[f"{case}, {dtype}, times {times}"] = distances(case, dtype, "cpu", times=times)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

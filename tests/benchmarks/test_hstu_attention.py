"""The subjects of the attention benchmark do the same work: our kernels (in Triton's interpreter) and
FlexAttention have the same mask and biases as the reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from benchmarks.hstu_attention import AttentionCase, Shape, causal, flex, reference

SHAPE = Shape(3, 12, 2, 2, 4)


def test_units_count_the_products_of_pairs_that_attend() -> None:
    case = AttentionCase(SHAPE, torch.float32, "cpu")
    num_pairs = sum(
        int(pairs.sees_GNN[g, :n, :n].sum())
        for pairs in case.sequences.pairs
        for g, n in enumerate(_tokens(case))
    )
    assert len(case.sequences.pairs) == 1
    assert case.gflop() == pytest.approx(num_pairs * 2 * 4 * 2 * 2 / 1e9)
    assert AttentionCase(SHAPE, torch.float32, "cpu", backward=True).gflop() == 3 * case.gflop()


def _tokens(case: AttentionCase) -> list[int]:
    return [int(case.sequences.tokens_R[r]) for r in case.sequences.groups.request_order]


@pytest.mark.slow  # torch compiles for 13 s
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_has_our_mask_and_biases() -> None:
    """FlexAttention's output equals a softmax over the pairs that the reference attends to."""
    case = AttentionCase(SHAPE, torch.float32, "cpu")
    with torch.no_grad():
        out_RHNC = flex(case)()
        (group,), (pairs,) = case.sequences.groups.groups, case.sequences.pairs
        x = (
            group.of_slots(case.sequences.groups.pad(case.x_SD3))
            .view(*group.shape_GK, 3, 2, 4)
            .permute(2, 0, 3, 1, 4)
        )
        assert pairs.bucket_GNN is not None
        bias_GNN = case.position_bias_P[pairs.offset_GNN + 12] + case.time_bias_T[pairs.bucket_GNN]
        score = (x[0] @ x[1].transpose(-1, -2) + bias_GNN[:, None]).masked_fill(
            ~pairs.sees_GNN[:, None], -torch.inf
        )
        expected: Tensor = score.softmax(dim=-1) @ x[2]
    for g, n in enumerate(_tokens(case)):
        torch.testing.assert_close(out_RHNC[g, :, :n], expected[g, :, :n], rtol=1e-3, atol=1e-4)


def test_outputs_have_the_shapes_of_one_batch() -> None:
    case = AttentionCase(SHAPE, torch.float32, "cpu")
    assert reference(case)().shape == (int(case.sequences.tokens_R.sum()), 8)
    assert causal(case)().shape == (3, 2, 128, 4)


KERNEL_STEPS = """
from benchmarks.hstu_attention import attention
for block in (0, 16):
    with attention("kernel", True, "float32", "cpu", [2, 9, 2, 1, 4], block) as work:
        work.step()
        print(work.units, work.figures()["ms"] > 0)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this platform"
)
def test_our_kernels_take_a_step_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", KERNEL_STEPS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = run.stdout.split("\n")
    assert lines[0] == lines[1] and lines[0].endswith("True")

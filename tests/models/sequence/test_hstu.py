"""HSTU over histories and targets equals a slow reference that computes one sequence at a time. Gradients are
checked in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from roostream.models.layers import init_parameters
from roostream.models.sequence.hstu import Hstu, HstuLayer
from roostream.models.sequence.jagged_sequences import JaggedSequences, build_jagged_sequences

D, HEADS, MAX_HISTORY = 4, 2, 6
# Lengths of the histories; entries are newest first. HSTU reads the newest six entries of the fourth history.
HISTORY = np.array([3, 0, 5, 9, 2, 1], dtype=np.int64)
TARGETS = np.array([2, 3, 0, 1, 20, 1], dtype=np.int32)


def build_hstu(layers: int = 2, *, times: bool = True) -> Hstu:
    module = Hstu(D, HEADS, layers, MAX_HISTORY, times=times)
    init_parameters(module, seed=3)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * torch.sin(torch.arange(parameter.numel()) * 1.7 + i).view(parameter.shape))
    return module.double()


def make_tokens(seed: int = 0, num_targets: np.ndarray = TARGETS) -> tuple[Tensor, Tensor, np.ndarray]:
    """Draw tokens of all entries [L, D] and all targets [B, D], and the time from each entry to its request,
    in ms."""
    random = np.random.default_rng(seed)
    length = int(HISTORY.sum())
    gap_ms = (
        np.concatenate([np.sort(random.integers(0, 10**8, n)) for n in HISTORY])
        if length
        else np.zeros(0, np.int64)
    )
    entry, target = random.normal(size=(length, D)), random.normal(size=(int(num_targets.sum()), D))
    return torch.from_numpy(entry), torch.from_numpy(target), gap_ms


def run(module: Hstu, entry_LD: Tensor, target_BD: Tensor, sequences: JaggedSequences) -> Tensor:
    x_SD = torch.cat([entry_LD, target_BD])[sequences.source_S]
    return module(x_SD, sequences)[sequences.token_B]


def reference_layer(
    layer: HstuLayer, x_ND: Tensor, position: list[int], time_ms: list[int] | None, h: int
) -> Tensor:
    """Apply the layer to one sequence, pair by pair. `time_ms`: the time of each token, then of the
    request."""

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-6)

    rows = []
    mixed = [F.silu(layer.gates_values_queries_keys.weight @ norm(x)) for x in x_ND]
    u, v, q, k = ([m[part * D : (part + 1) * D] for m in mixed] for part in range(4))
    for i in range(len(x_ND)):
        seen = torch.zeros(D, dtype=torch.float64)
        for j in range(len(x_ND)):
            if not (j == i or (j < i and j < h)):
                continue
            for head in range(HEADS):
                head_slice = slice(head * D // HEADS, (head + 1) * D // HEADS)
                s = (
                    q[i][head_slice] @ k[j][head_slice]
                    + layer.position_bias[position[j] - position[i] + MAX_HISTORY]
                )
                if time_ms is not None and layer.time_bias is not None:
                    following = time_ms[i + 1] if i + 1 < h else time_ms[-1]
                    seconds = max(abs(following - time_ms[j]) / 1000, 1.0)
                    s = s + layer.time_bias[min(max(math.floor(math.log(seconds) / 0.301), 0), 128)]
                seen[head_slice] += s * torch.sigmoid(s) / (MAX_HISTORY + 1) * v[j][head_slice]
        rows.append(layer.out(u[i] * norm(seen)) + x_ND[i])
    return torch.stack(rows)


def reference(module: Hstu, entry_LD: Tensor, target_BD: Tensor, gap_ms: np.ndarray | None) -> Tensor:
    """Compute each target in a separate sequence after its request's history, as training on impressions
    would."""
    out, first, b = [], 0, 0
    for length, m in zip(HISTORY, TARGETS, strict=True):
        newest_first = list(range(first, first + min(length, MAX_HISTORY)))
        oldest_first = newest_first[::-1]
        for target in range(b, b + m):
            x = torch.cat([entry_LD[oldest_first], target_BD[target : target + 1]])
            h = len(oldest_first)
            times = None if gap_ms is None else [-int(gap_ms[e]) for e in oldest_first] + [0, 0]
            for layer in module.layers:
                assert isinstance(layer, HstuLayer)
                x = reference_layer(layer, x, [*range(h), h], times, h)
            out.append(x[-1])
        first, b = first + length, b + m
    return torch.stack(out)


@pytest.mark.parametrize("times", [True, False])
def test_one_pass_equals_a_sequence_for_each_target(times: bool) -> None:
    module, (entry, target, gap_ms) = build_hstu(times=times), make_tokens()
    gaps = gap_ms if times else None
    with torch.no_grad():
        got = run(module, entry, target, build_jagged_sequences(HISTORY, gaps, TARGETS, MAX_HISTORY))
        torch.testing.assert_close(got, reference(module, entry, target, gaps))


def test_tokens_are_the_newest_entries_in_time_order() -> None:
    sequences = build_jagged_sequences(np.array([2, 1, 3]), None, np.array([1, 2, 1], dtype=np.int32), 2)
    assert sequences.source_S.tolist() == [1, 0, 6, 2, 7, 8, 4, 3, 9]
    assert sequences.token_B.tolist() == [2, 4, 5, 8]
    (pairs,) = sequences.pairs
    assert pairs.bucket_GNN is None
    assert pairs.offset_GNN[1].tolist() == [[0, 1, 1], [-1, 0, 0], [-1, 0, 0]], (
        "both targets have the position of a second entry"
    )
    assert pairs.sees_GNN[1].tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def test_a_request_gives_the_same_in_any_batch() -> None:
    module, (entry, target, gap_ms) = build_hstu(), make_tokens()
    together = run(module, entry, target, build_jagged_sequences(HISTORY, gap_ms, TARGETS, MAX_HISTORY))
    starts, firsts = np.cumsum(HISTORY) - HISTORY, np.cumsum(TARGETS) - TARGETS
    for r, (length, m) in enumerate(zip(HISTORY, TARGETS, strict=True)):
        entries_slice, targets_slice = slice(starts[r], starts[r] + length), slice(firsts[r], firsts[r] + m)
        sequences = build_jagged_sequences(
            HISTORY[r : r + 1], gap_ms[entries_slice], TARGETS[r : r + 1], MAX_HISTORY
        )
        torch.testing.assert_close(
            run(module, entry[entries_slice], target[targets_slice], sequences),
            together[targets_slice],
            rtol=0,
            atol=1e-12,
        )


def test_a_target_changes_its_own_output_only() -> None:
    module, (entry, target, gap_ms) = build_hstu(), make_tokens()
    sequences = build_jagged_sequences(HISTORY, gap_ms, TARGETS, MAX_HISTORY)
    changed = target.clone()
    changed[9] += 1
    before, after = run(module, entry, target, sequences), run(module, entry, changed, sequences)
    moved = (before != after).any(dim=1)
    assert moved.nonzero().flatten().tolist() == [9]


def test_gradients_are_right_in_float64() -> None:
    module, (entry, target, gap_ms) = build_hstu(1), make_tokens()
    lengths, counts = HISTORY[:2] + 1, TARGETS[:2]
    sequences = build_jagged_sequences(lengths, gap_ms[: lengths.sum()], counts, MAX_HISTORY)
    leaves = (entry[: lengths.sum()].requires_grad_(), target[: counts.sum()].requires_grad_())
    assert torch.autograd.gradcheck(
        lambda *_: run(module, *leaves, sequences), (*leaves, *module.parameters())
    )


@pytest.mark.parametrize("counts", [[0], [0, 0]], ids=str)
def test_requests_without_targets_have_no_output(counts: list[int]) -> None:
    sequences = build_jagged_sequences(
        np.array([2] * len(counts)), None, np.array(counts, dtype=np.int32), MAX_HISTORY
    )
    entry = torch.zeros(2 * len(counts), D, dtype=torch.float64)
    assert run(build_hstu(times=False), entry, entry[:0], sequences).shape == (0, D)


def test_initial_weights_are_normal() -> None:
    module = Hstu(64, 2, 1, MAX_HISTORY)
    init_parameters(module, seed=3)
    weight = dict(module.named_parameters())["layers.0.gates_values_queries_keys.weight"]
    assert weight.std().item() == pytest.approx(0.02, rel=0.05) and abs(weight.mean().item()) < 1e-3
    assert (weight.abs() > 0.04).float().mean().item() == pytest.approx(0.0455, rel=0.2), (
        "4.55 % of a normal distribution is beyond two standard deviations"
    )


def test_one_pass_for_all_targets_saves_the_flops_of_the_paper() -> None:
    """The ROO paper (§3.3) counts (h + m)² D + (h + m) D² for requests and m (h² D + h D²) for impressions:
    9.82 times fewer for h = 1000, m = 10, D = 256. The test counts on meta tensors. This implementation has
    two products of tokens and five weight matrices, and each impression has one target token."""
    module = Hstu(256, 4, 1, 1000, times=False).to("meta")

    def flops(lengths: list[int], counts: list[int]) -> int:
        sequences = build_jagged_sequences(
            np.array(lengths), None, np.array(counts, dtype=np.int32), 1000, "meta"
        )
        with FlopCounterMode(display=False) as counter:
            module(torch.empty(sum(lengths) + sum(counts), 256, device="meta"), sequences)
        return counter.get_total_flops()

    request, impressions = flops([1000], [10]), flops([1000] * 10, [1] * 10)
    assert request == 2 * (2 * 1010**2 * 256 + 5 * 1010 * 256**2)
    assert impressions == 10 * 2 * (2 * 1001**2 * 256 + 5 * 1001 * 256**2)
    assert impressions / request == pytest.approx(9.82, abs=0.05)

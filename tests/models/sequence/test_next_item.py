"""Next-item prediction at every entry of a history, with HSTU and with SASRec: no output depends on later
entries. Gradients are checked in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roostream.models.layers import init_parameters
from roostream.models.sequence.hstu import Hstu
from roostream.models.sequence.jagged_sequences import build_history_sequences
from roostream.models.sequence.next_item import NextItem, SasRec, SasRecLayer
from tests.models.layer_checks import assert_gradients, randn

D, HEADS, MAX_HISTORY, ITEMS = 4, 2, 20, 7
LENGTHS = np.array([3, 1, 18, 2], dtype=np.int64)  # two padding groups: up to 16 entries, and longer
ENCODERS = {
    "hstu": lambda: Hstu(D, HEADS, 2, MAX_HISTORY, times=False),
    "sasrec": lambda: SasRec(D, HEADS, 2),
}
each_encoder = pytest.mark.parametrize("name", ENCODERS)


def build_next_item(name: str) -> NextItem:
    module = NextItem(ENCODERS[name](), ITEMS, D, MAX_HISTORY)
    init_parameters(module, seed=3)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.add_(0.3 * torch.sin(torch.arange(parameter.numel()) * 1.7 + i).view(parameter.shape))
    return module.double()


def random_items(seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, ITEMS, int(LENGTHS.sum())))


def reference_layer(block: SasRecLayer, x_ND: Tensor) -> Tensor:
    """Apply the layer to one history, token by token and head by head."""

    def norm(x: Tensor) -> Tensor:
        return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)

    normed = [norm(x) * block.attention_norm.weight + block.attention_norm.bias for x in x_ND]
    q, k, v = ([block.queries_keys_values.weight[p * D : (p + 1) * D] @ x for x in normed] for p in range(3))
    rows = []
    for i in range(len(x_ND)):
        seen = []
        for head in range(HEADS):
            head_slice = slice(head * D // HEADS, (head + 1) * D // HEADS)
            weight = torch.stack(
                [q[i][head_slice] @ k[j][head_slice] / math.sqrt(D / HEADS) for j in range(i + 1)]
            ).softmax(dim=0)
            seen.append(torch.stack([w * v[j][head_slice] for j, w in enumerate(weight)]).sum(dim=0))
        x = x_ND[i] + block.out.weight @ torch.cat(seen)
        inner = (
            block.inner.weight @ (norm(x) * block.network_norm.weight + block.network_norm.bias)
            + block.inner.bias
        )
        rows.append(x + block.outer.weight @ F.relu(inner) + block.outer.bias)
    return torch.stack(rows)


def test_sasrec_equals_its_formula() -> None:
    encoder, x_SD = build_next_item("sasrec").encoder, randn(int(LENGTHS.sum()), D)
    assert isinstance(encoder, SasRec)
    expected = []
    for x_ND in x_SD.split(LENGTHS.tolist()):
        for block in encoder.layers:
            assert isinstance(block, SasRecLayer)
            x_ND = reference_layer(block, x_ND)
        expected.append(encoder.norm(x_ND))
    torch.testing.assert_close(encoder(x_SD, build_history_sequences(LENGTHS)), torch.cat(expected))


@each_encoder
@pytest.mark.parametrize("place", [4, 21])
def test_an_entry_changes_later_outputs_of_its_own_history_only(name: str, place: int) -> None:
    module, item_S, sequences = build_next_item(name), random_items(), build_history_sequences(LENGTHS)
    changed = item_S.clone()
    changed[place] = (changed[place] + 1) % ITEMS
    moved = (module(item_S, sequences) != module(changed, sequences)).any(dim=1)
    ends = np.cumsum(LENGTHS)
    assert moved.nonzero().flatten().tolist() == list(range(place, int(ends[ends > place][0])))


@each_encoder
def test_a_history_gives_the_same_in_any_batch(name: str) -> None:
    module, item_S = build_next_item(name), random_items()
    together = module(item_S, build_history_sequences(LENGTHS))
    for length, own_item_S, output_SD in zip(
        LENGTHS, item_S.split(LENGTHS.tolist()), together.split(LENGTHS.tolist()), strict=True
    ):
        torch.testing.assert_close(
            module(own_item_S, build_history_sequences(np.array([length]))), output_SD, rtol=0, atol=1e-12
        )


@each_encoder
def test_vectors_have_length_1(name: str) -> None:
    module = build_next_item(name)
    for vectors in (module(random_items(), build_history_sequences(LENGTHS)), module.item_vectors()):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors), dtype=torch.float64))


def test_an_empty_history_has_no_output() -> None:
    none = np.zeros(1, dtype=np.int64)
    for name in ENCODERS:
        assert build_next_item(name)(
            torch.zeros(0, dtype=torch.int64), build_history_sequences(none)
        ).shape == (0, D)


@pytest.mark.parametrize("corrected", [False, True])
def test_the_loss_equals_its_formula_without_the_next_item_as_negative(corrected: bool) -> None:
    module, u_SD = build_next_item("sasrec"), randn(2, D)
    item_SC = torch.tensor([[3, 1, 3, 6], [0, 0, 2, 2]])
    v_ID, q = module.item_vectors().detach(), math.log(3 / (ITEMS - 1)) if corrected else 0.0
    expected = []
    for u, (after, *negatives) in zip(u_SD, item_SC.tolist(), strict=True):
        s = [float(u @ v / 0.5) for v in v_ID]
        pool = math.exp(s[after]) + sum(math.exp(s[n] - q) for n in negatives if n != after)
        expected.append(math.log(pool) - s[after])
    assert module.loss(u_SD, item_SC, 0.5, corrected=corrected).item() == pytest.approx(sum(expected) / 2)


@each_encoder
def test_gradients_are_right_in_float64(name: str) -> None:
    module = build_next_item(name)
    item_S = random_items()[:4]
    sequences = build_history_sequences(LENGTHS[:2])
    item_SC = torch.tensor([[3, 1, 6], [0, 5, 2], [1, 1, 4], [6, 0, 5]])
    assert_gradients(module, lambda: module.loss(module(item_S, sequences), item_SC, 0.5))


@each_encoder
def test_dropout_is_active_in_training_only(name: str) -> None:
    encoder: nn.Module = Hstu(D, HEADS, 1, MAX_HISTORY, times=False, dropout=0.5)
    if name == "sasrec":
        encoder = SasRec(D, HEADS, 1, dropout=0.5)
    module = NextItem(encoder, ITEMS, D, MAX_HISTORY, dropout=0.5).double()
    sequences = build_history_sequences(LENGTHS)
    init_parameters(module, seed=3)
    torch.manual_seed(0)
    assert not torch.equal(module(random_items(), sequences), module(random_items(), sequences))
    module.eval()
    assert torch.equal(module(random_items(), sequences), module(random_items(), sequences))


def test_initial_item_vectors_are_small() -> None:
    module = NextItem(SasRec(50, 1, 1), 900, 50, 8)
    init_parameters(module, seed=3)
    assert module.item.std().item() == pytest.approx(0.02, rel=0.02)
    assert module.position.std().item() == pytest.approx(50**-0.5, rel=0.1)

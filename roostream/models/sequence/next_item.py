"""Next-item prediction at every entry of a history (Zhai et al. 2024, §4.1.1), and SASRec.

    x_s = √D · e[item_s] + p[place_s]        u = unit(encoder(dropout(x)))        v_i = unit(e_i)
    loss of s = log(e^(u·v⁺/τ) + Σ_n e^(u·v_n/τ - q)) - u·v⁺/τ

v⁺ is the next item. v_n are N items drawn uniformly from the corpus for s alone, excluding v⁺. q = 0 as in
the paper, or log(N / (I - 1)), with which the expected sum is that over all items (sampled_softmax.py).

SASRec (Kang & McAuley 2018, "Self-attentive sequential recommendation", §III) is causal self-attention:

    x ← x + dropout(softmax(Q Kᵀ / √C, j ≤ i) V W_o)     [Q, K, V] = LN(x) W                  (eq. 2, 3)
    x ← x + dropout(FFN(LN(x)))                          FFN(x) = ReLU(x W1 + b1) W2 + b2     (eq. 4)

A final LN follows the last layer. Attention matrices have no bias; the feed-forward network keeps the width.

Letters: S tokens, I items of the corpus, N negatives of a token, C = 1 + N, D width. In attention: G
sequences of a group, N tokens of its longest, H heads, C width of a head, D = H · C.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roostream.models.embedding_ops import gather_rows
from roostream.models.sampled_scores import sampled_scores
from roostream.models.sequence.jagged_sequences import JaggedSequences
from roostream.models.two_tower.sampled_softmax import sampled_softmax

_STD, _EPS = 0.02, 1e-6


class NextItem(nn.Module):
    """`encoder`: [S, D] → [S, D] on histories; the output of a token depends on itself and earlier tokens."""

    def __init__(
        self, encoder: nn.Module, num_items: int, width: int, max_length: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.item = nn.Parameter(torch.zeros(num_items, width))
        self.position = nn.Parameter(torch.zeros(max_length, width))
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)

    def adjust_initial_parameters(self) -> None:
        """Scale the uniform item embeddings to a standard deviation of 0.02, so that a step of Adam changes
        them faster."""
        self.item.mul_(_STD * math.sqrt(self.item.shape[1]))

    def forward(self, item_S: Tensor, sequences: JaggedSequences) -> Tensor:
        """[S, D], of length 1. `item_S`: int64, places in the corpus, in the order of
        `build_history_sequences`."""
        e_SD = gather_rows([(self.item, item_S)]) * math.sqrt(self.item.shape[1])
        p_SD = gather_rows([(self.position, sequences.token_info_SC[:, 0].contiguous())])
        return _unit(self.encoder(self.dropout(e_SD + p_SD), sequences))

    def item_vectors(self) -> Tensor:
        """[I, D], of length 1."""
        return _unit(self.item)

    def loss(self, u_SD: Tensor, item_SC: Tensor, temperature: float, *, corrected: bool = False) -> Tensor:
        """The mean over tokens. `item_SC`: int64, the next item, then negatives."""
        v_ID = self.item_vectors()
        score_SC = sampled_scores(u_SD, v_ID, item_SC) / temperature
        is_next_SC = item_SC == item_SC[:, :1]
        is_next_SC[:, 0] = False
        expected_C = score_SC.new_zeros(item_SC.shape[1])
        if corrected:
            expected_C[1:] = math.log((item_SC.shape[1] - 1) / (len(v_ID) - 1))
        next_S = torch.zeros_like(item_SC[:, 0])
        score_SC = score_SC.masked_fill(is_next_SC, -math.inf)
        return sampled_softmax(score_SC, next_S, torch.zeros_like(expected_C), expected_C).mean()


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(_EPS)


class SasRecLayer(nn.Module):
    """One layer, [S, D] → [S, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self._heads = heads

    def forward(self, x_SD: Tensor, sequences: JaggedSequences) -> Tensor:
        seen_SD = _attend(self.queries_keys_values(self.attention_norm(x_SD)), sequences, self._heads)
        x_SD = x_SD + self.dropout(self.out(seen_SD))
        return x_SD + self.dropout(self.outer(F.relu(self.inner(self.network_norm(x_SD)))))


class SasRec(nn.Module):
    """A stack of layers, [S, D] → [S, D], for histories only (`build_history_sequences`): a target would see
    earlier targets."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SasRecLayer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x_SD: Tensor, sequences: JaggedSequences) -> Tensor:
        for layer in self.layers:
            x_SD = layer(x_SD, sequences)
        out_SD: Tensor = self.norm(x_SD)
        return out_SD


def _attend(x_SD3: Tensor, sequences: JaggedSequences, heads: int) -> Tensor:
    """[S, 3 · D] → [S, D]. Padding follows a group's tokens, so no token sees it."""
    slots_SD3 = sequences.groups.pad(x_SD3)
    out = []
    for group in sequences.groups.groups:
        g, n = group.shape_GK
        # [G, H, N, C] each
        q, k, v = group.of_slots(slots_SD3).view(g, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(g * n, -1))
    return sequences.groups.unpad(torch.cat(out)) if out else x_SD3[:, : x_SD3.shape[1] // 3]

"""SASRec: causal self-attention over a history (Kang & McAuley 2018, "Self-attentive sequential
recommendation", §III).

    x  ← x + dropout(Attention(LN(x)) W_o)       Attention = softmax(Q Kᵀ / √C, j ≤ i) V,   [Q, K, V] = LN(x) W     (eq. 2, 3)
    x  ← x + dropout(FFN(LN(x)))                 FFN(x) = ReLU(x W1 + b1) W2 + b2                                 (eq. 4)

A final LN follows the last layer. Attention matrices have no bias; the feed-forward network is as wide as a
token.

Letters: S tokens, G sequences of a group, N tokens of its longest, H heads, C width of a head, D = H · C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roostream.models.sequence.jagged_sequences import JaggedSequences


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
        q, k, v = (
            group.of_slots(slots_SD3).view(g, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
        )  # [G, H, N, C] each
        out.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(g * n, -1))
    return sequences.groups.unpad(torch.cat(out)) if out else x_SD3[:, : x_SD3.shape[1] // 3]

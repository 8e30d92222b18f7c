"""HSTU: hierarchical sequential transduction units (Zhai et al. 2024, §3; ROO paper §3.3).

    [U, V, Q, K] = SiLU(LN(X) W)
    A V          = hstu_attention.py
    Y            = dropout(U ⊙ LN(A V)) W_o + b_o + X

LN has no affine part and eps 1e-6; W has no bias and starts as N(0, 0.02).

Letters: S tokens of all sequences, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roostream.models.sequence.hstu_attention import pointwise_attention
from roostream.models.sequence.jagged_sequences import JaggedSequences

NUM_TIME_BUCKETS = 129
_STD = 0.02
_EPS = 1e-6


class HstuLayer(nn.Module):
    """One layer, [S, D] → [S, D]. A token's output depends only on the tokens that it sees.

    `dropout` must be 0 where a model is scored while it is trained, so that serving computes the same
    (guarantee G9).
    """

    def __init__(
        self, width: int, heads: int, max_history: int, *, times: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.gates_values_queries_keys = nn.Linear(width, 4 * width, bias=False)
        # N_max = max_history + 1: the target follows the history.
        self.position_bias = nn.Parameter(torch.zeros(2 * max_history + 1))
        self.time_bias = nn.Parameter(torch.zeros(NUM_TIME_BUCKETS)) if times else None
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, width)
        self.attention = pointwise_attention  # or what gives the same, where there is a kernel for a device
        self._width, self._heads, self._divisor = width, heads, float(max_history + 1)

    def adjust_initial_parameters(self) -> None:
        """Transform the uniform initial values to normal ones; they stay a function of seed and name."""
        weight = self.gates_values_queries_keys.weight
        bound = (3.0 / self._width) ** 0.5
        weight.div_(bound).clamp_(-1 + 1e-6, 1 - 1e-6).erfinv_().mul_(_STD * math.sqrt(2))

    def forward(self, x_SD: Tensor, sequences: JaggedSequences) -> Tensor:
        u_SD, v_SD, q_SD, k_SD = F.silu(self.gates_values_queries_keys(_norm(x_SD))).chunk(4, dim=1)
        seen_SD = self.attention(
            torch.cat([q_SD, k_SD, v_SD], dim=1),
            sequences,
            self.position_bias,
            self.time_bias,
            self._heads,
            self._divisor,
        )
        return x_SD + self.out(self.dropout(u_SD * _norm(seen_SD)))


class Hstu(nn.Module):
    """A stack of layers, [S, D] → [S, D]; a request costs (h + m)² D + (h + m) D² per layer, for h entries
    and m targets."""

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        max_history: int,
        *,
        times: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HstuLayer(width, heads, max_history, times=times, dropout=dropout) for _ in range(layers)
        )

    def forward(self, x_SD: Tensor, sequences: JaggedSequences) -> Tensor:
        for layer in self.layers:
            x_SD = layer(x_SD, sequences)
        return x_SD


def _norm(x_SD: Tensor) -> Tensor:
    return F.layer_norm(x_SD, x_SD.shape[1:], eps=_EPS)

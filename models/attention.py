"""Attention of candidates to a request's history, and to each other.

Letters: R requests, B candidates, G requests and K candidates of a group (candidate_groups.py), N entries of a history, H heads,
D width. Padding is masked before the softmax, where its probability underflows to exactly 0: neither results nor gradients
depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.candidate_groups import CandidateGroups


def attend(q_GKD: Tensor, k_GND: Tensor, v_GND: Tensor, mask_GN: Tensor | None, heads: int) -> Tensor:
    """softmax(q kᵀ / √(D / H)) v for each head → [G, K, D]; where a mask row is all False, 0.

    `mask_GN`: True = may be attended to; None = all.
    """
    q, k, v = (_split(x, heads) for x in (q_GKD, k_GND, v_GND))
    score_GHKN = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if mask_GN is not None:
        score_GHKN = score_GHKN.masked_fill(~mask_GN[:, None, None, :], torch.finfo(score_GHKN.dtype).min)
    out_GKD = torch.matmul(torch.softmax(score_GHKN, dim=-1), v).transpose(1, 2).reshape(q_GKD.shape)
    return out_GKD if mask_GN is None else out_GKD * mask_GN.any(dim=1)[:, None, None]


def _split(x_GND: Tensor, heads: int) -> Tensor:
    """[G, N, D] → [G, H, N, D / H]."""
    g, n, d = x_GND.shape
    return x_GND.view(g, n, heads, d // heads).transpose(1, 2)


class TargetAttention(nn.Module):
    """Every candidate pools its request's history by what it has in common with it (the idea of DIN, Zhou et al. 2018).

    Keys and values are computed once a request, queries once a candidate.
    """

    def __init__(self, query_width: int, entry_width: int, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, width)
        self.key_value = nn.Linear(entry_width, 2 * width)
        self.width = width
        self._heads = heads

    def forward(self, query_BQ: Tensor, entry_RNE: Tensor, mask_RN: Tensor | None, groups: CandidateGroups) -> Tensor:
        """`entry_RNE`: the histories; `mask_RN`: True = an entry, None = no padding. → [B, width]."""
        query_BD = self.query(query_BQ)
        if entry_RNE.shape[1] == 0:
            return query_BD.new_zeros(query_BD.shape)
        key_value = self.key_value(entry_RNE)
        out = []
        for group, q_GKD in zip(groups.groups, groups.pad(query_BD), strict=True):
            kv, mask = key_value, mask_RN
            if group.request_G is not None:
                kv = kv.index_select(0, group.request_G)
                mask = None if mask is None else mask.index_select(0, group.request_G)
            k_GND, v_GND = kv.chunk(2, dim=-1)
            out.append(attend(q_GKD, k_GND, v_GND, mask, self._heads))
        return groups.unpad(out, self.width, query_BD)


class ListAttention(nn.Module):
    """One pre-norm attention block over the candidates of a request: x + W_o attend(LN(x)).

    A candidate sees the others' inputs, never their labels; without positions, so the order shown does not matter.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self._heads = heads

    def forward(self, x_BD: Tensor, groups: CandidateGroups) -> Tensor:
        width = x_BD.shape[1]
        out = []
        padded = groups.pad(self.query_key_value(self.norm(x_BD)))
        for group, qkv in zip(groups.groups, padded, strict=True):
            q, k, v = qkv.chunk(3, dim=-1)
            out.append(attend(q, k, v, group.mask_GK, self._heads))
        return x_BD + self.out(groups.unpad(out, width, x_BD))

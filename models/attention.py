"""Attention of candidates to a request's history, and to each other.

Letters: R requests that have a candidate, B candidates, S slots, G requests and K candidates of a group (candidate_groups.py),
N entries of a history, H heads, C width of a head, D of all. Padding is masked before the softmax, where its probability
underflows to exactly 0: neither results nor gradients depend on it.

Both ways are written out, so that little is copied: heads are views of their columns, a group of its rows, and gradients are
written where they belong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.candidate_groups import CandidateGroups


class Squares(NamedTuple):
    """Queries, keys and values of a group, or their gradients; views."""

    q_GKD: Tensor
    k_GND: Tensor
    v_GND: Tensor


class Attended(NamedTuple):
    """What `attend` gave, and what its way back needs."""

    out_GHKC: Tensor
    sum_GHK: Tensor  # logarithm of the softmax's denominator
    bias_GHKN: Tensor | None  # added to scores: 0 = may be attended to
    some_G111: Tensor | None  # 1 = there is something to attend to, 0 = there isn't


def attend(of: Squares, mask_GN: Tensor | None, heads: int) -> Attended:
    """softmax(q kᵀ / √C) v of each head; where a mask row is all False, 0.

    `mask_GN`: True = may be attended to, the first so many of a row; None = all.
    """
    q, k, v = (_heads(x, heads) for x in of)
    bias = None
    if mask_GN is not None:
        # Half of the least number: what a score adds to it is lost, so it stays finite and the same for all padding.
        bias_GN = q.new_zeros(mask_GN.shape).masked_fill_(~mask_GN, torch.finfo(q.dtype).min / 2)
        bias = bias_GN[:, None, None, :].expand(*q.shape[:3], mask_GN.shape[1])
    if q.device.type == "cpu":
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)
    else:
        out, total = _plain(Squares(q, k, v), bias)
    some = None if mask_GN is None else mask_GN[:, 0, None, None, None].to(q.dtype)
    return Attended(out if some is None else out * some, total, bias, some)


def attend_back(of: Squares, attended: Attended, gradient_GKD: Tensor, to: Squares) -> None:
    """The way back of `attend`: writes the gradients of `of` into `to`."""
    out, total, bias, some = attended
    q, k, v, gradient = (_heads(x, out.shape[1]) for x in (*of, gradient_GKD))
    gradient = gradient if some is None else gradient * some
    if q.device.type == "cpu":
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = back(gradient, q, k, v, out, total, 0.0, False, attn_mask=bias)
    else:
        found = _plain_back(Squares(q, k, v), attended, gradient)
    for x_GHNC, to_GND in zip(found, to, strict=True):
        _write(x_GHNC, to_GND)


def _plain(of: Squares, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What torch has a kernel for on a CPU, which is the only one whose way back has the same bits every time. Of bfloat16,
    products are; scores and their softmax are float32."""
    score = _scores(of, bias)
    total = torch.logsumexp(score, dim=-1)
    return torch.matmul(torch.exp(score - total[..., None]).to(of.v_GND.dtype), of.v_GND), total


def _plain_back(of: Squares, attended: Attended, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = of
    p = torch.exp(_scores(of, attended.bias_GHKN) - attended.sum_GHK[..., None])
    to_p = _wide(torch.matmul(gradient, v.transpose(-1, -2))) - _wide(gradient * attended.out_GHKC).sum(dim=-1, keepdim=True)
    to_score, p = (p * to_p * q.shape[-1] ** -0.5).to(q.dtype), p.to(q.dtype)
    to_k, to_v = torch.matmul(to_score.transpose(-1, -2), q), torch.matmul(p.transpose(-1, -2), gradient)
    return torch.matmul(to_score, k), to_k, to_v


def _scores(of: Squares, bias: Tensor | None) -> Tensor:
    score = _wide(torch.matmul(of.q_GKD * of.q_GKD.shape[-1] ** -0.5, of.k_GND.transpose(-1, -2)))
    return score if bias is None else score + bias


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x


def _heads(x_GND: Tensor, heads: int) -> Tensor:
    """[G, N, D] → [G, H, N, C]."""
    g, n, d = x_GND.shape
    return x_GND.view(g, n, heads, d // heads).transpose(1, 2)


def _write(x_GHNC: Tensor, to_GND: Tensor) -> None:
    """The inverse."""
    g, h, n, c = x_GHNC.shape
    to_GND.view(g, n, h, c).copy_(x_GHNC.transpose(1, 2))


class _ToHistory(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BD: Tensor, key_value_RND: Tensor, mask_RN: Tensor | None, groups: CandidateGroups, heads: int
    ) -> Tensor:
        q_SD = groups.pad(q_BD)
        out_SD = torch.empty_like(q_SD)
        attended = []
        for group in groups.groups:
            of = Squares(group.of_slots(q_SD), *key_value_RND[group.requests].chunk(2, dim=-1))
            attended.append(attend(of, None if mask_RN is None else mask_RN[group.requests], heads))
            _write(attended[-1].out_GHKC, group.of_slots(out_SD))
        ctx.squares, ctx.attended, ctx.groups = (q_SD, key_value_RND), attended, groups
        return groups.unpad(out_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor | None, ...]:
        (q_SD, key_value_RND), gradient_SD = ctx.squares, ctx.groups.pad(gradient_BD)
        to_q_SD, to_key_value_RND = torch.empty_like(q_SD), torch.empty_like(key_value_RND)
        for group, attended in zip(ctx.groups.groups, ctx.attended, strict=True):
            of = Squares(group.of_slots(q_SD), *key_value_RND[group.requests].chunk(2, dim=-1))
            to = Squares(group.of_slots(to_q_SD), *to_key_value_RND[group.requests].chunk(2, dim=-1))
            attend_back(of, attended, group.of_slots(gradient_SD), to)
        return ctx.groups.unpad(to_q_SD), to_key_value_RND, None, None, None


class _ToEachOther(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_key_value_BD: Tensor, groups: CandidateGroups, heads: int) -> Tensor:
        query_key_value_SD = groups.pad(query_key_value_BD)
        out_SD = query_key_value_SD.new_empty(groups.num_slots, query_key_value_BD.shape[1] // 3)
        attended = []
        for group in groups.groups:
            of = Squares(*group.of_slots(query_key_value_SD).chunk(3, dim=-1))
            attended.append(attend(of, group.mask_GK, heads))
            _write(attended[-1].out_GHKC, group.of_slots(out_SD))
        ctx.squares, ctx.attended, ctx.groups = query_key_value_SD, attended, groups
        return groups.unpad(out_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BD: Tensor) -> tuple[Tensor | None, ...]:
        gradient_SD, to_SD = ctx.groups.pad(gradient_BD), torch.empty_like(ctx.squares)
        for group, attended in zip(ctx.groups.groups, ctx.attended, strict=True):
            of, to = (Squares(*group.of_slots(x_SD).chunk(3, dim=-1)) for x_SD in (ctx.squares, to_SD))
            attend_back(of, attended, group.of_slots(gradient_SD), to)
        return ctx.groups.unpad(to_SD), None, None


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
        """`entry_RNE`: histories in the order of `groups.request_order`; `mask_RN`: True = an entry, None = no padding.
        → [B, width]."""
        if entry_RNE.shape[1] == 0 or not groups.groups:
            return query_BQ.new_zeros(len(query_BQ), self.width)
        out: Tensor = _ToHistory.apply(self.query(query_BQ), self.key_value(entry_RNE), mask_RN, groups, self._heads)
        return out


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
        return x_BD + self.out(_ToEachOther.apply(self.query_key_value(self.norm(x_BD)), groups, self._heads))

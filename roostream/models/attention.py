"""Attention of candidates to their request's history, and to each other.

On a CPU, requests are unpadded segments (ragged_attention.py). On other devices, and for bfloat16, they are
padded matrices in plain torch with deterministic gradients: padding is masked before the softmax, where its
probability underflows to exactly 0. For bfloat16, products are bfloat16; scores and softmax are float32.

Letters: R requests, B candidates, L entries of all histories, G requests and K candidates of a group
(candidate_groups.py), N entries of a history, padded, H heads, C width of a head, D of all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roostream.models.candidate_groups import CandidateGroups, build_groups
from roostream.models.inputs import Sequence
from roostream.models.ragged_attention import (
    FirstColumns,
    QueryKeyValue,
    SegmentStarts,
    attend_ragged,
    attend_ragged_back,
)
from roostream.models.simd import COMPILED


class QueriesKeysValues(NamedTuple):
    """Queries, keys and values of a group of requests; views of padded tensors."""

    q_GKD: Tensor
    k_GND: Tensor
    v_GND: Tensor


def attend(qkv: QueriesKeysValues, mask_GN: Tensor | None, heads: int) -> Tensor:
    """softmax(q kᵀ / √C) v of each head, [G, K, D]; 0 where a mask row is all False.

    `mask_GN`: True = may be attended to, always a prefix of the row; None = all.
    """
    q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in qkv)
    score_GHKN = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if score_GHKN.dtype == torch.bfloat16:
        score_GHKN = score_GHKN.float()
    if mask_GN is not None:
        # Half of the least number stays finite whatever is subtracted from it.
        score_GHKN = score_GHKN.masked_fill(~mask_GN[:, None, None, :], torch.finfo(score_GHKN.dtype).min / 2)
    out_GKD = torch.matmul(torch.softmax(score_GHKN, dim=-1).to(v.dtype), v).transpose(1, 2).flatten(2)
    return out_GKD if mask_GN is None else out_GKD * mask_GN[:, :1, None].to(out_GKD.dtype)


def attend_to_histories(
    q_BD: Tensor, key_value_LD2: Tensor, sequence: Sequence, groups: CandidateGroups, heads: int
) -> Tensor:
    """Attention of each candidate to its request's entries; 0 without entries."""
    if _has_kernel(q_BD):
        starts = (groups.start_R1, sequence.offset_R1.numpy())
        out: Tensor = _Ragged.apply(starts, heads, q_BD, key_value_LD2)
        return out
    return padded_to_histories(q_BD, key_value_LD2, sequence, groups, heads)


def padded_to_histories(
    q_BD: Tensor, key_value_LD2: Tensor, sequence: Sequence, groups: CandidateGroups, heads: int
) -> Tensor:
    """`attend_to_histories` with padding."""
    if not groups.groups or sequence.shape_RN[1] == 0:
        return torch.zeros_like(q_BD)
    q_SD, mask_RN = groups.pad(q_BD), sequence.mask_RN
    key_value_RND2 = sequence.pad(key_value_LD2).view(*sequence.shape_RN, -1)
    out = []
    for group in groups.groups:
        qkv = QueriesKeysValues(group.of_slots(q_SD), *key_value_RND2[group.requests].chunk(2, dim=-1))
        out.append(attend(qkv, None if mask_RN is None else mask_RN[group.requests], heads).flatten(0, 1))
    return groups.unpad(torch.cat(out))


def attend_to_each_other(query_key_value_BD3: Tensor, groups: CandidateGroups, heads: int) -> Tensor:
    """Attention of each candidate to all candidates of its request, including itself."""
    if _has_kernel(query_key_value_BD3):
        out: Tensor = _Ragged.apply((groups.start_R1, groups.start_R1), heads, query_key_value_BD3)
        return out
    return padded_to_each_other(query_key_value_BD3, groups, heads)


def padded_to_each_other(query_key_value_BD3: Tensor, groups: CandidateGroups, heads: int) -> Tensor:
    """`attend_to_each_other` with padding."""
    if not groups.groups:
        return query_key_value_BD3[:, : query_key_value_BD3.shape[1] // 3]
    slots_SD3 = groups.pad(query_key_value_BD3)
    out = [
        attend(QueriesKeysValues(*group.of_slots(slots_SD3).chunk(3, dim=-1)), group.mask_GK, heads).flatten(
            0, 1
        )
        for group in groups.groups
    ]
    return groups.unpad(torch.cat(out))


def _has_kernel(x: Tensor) -> bool:
    return COMPILED and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


class _Ragged(torch.autograd.Function):
    """`packed`: queries, keys and values side by side in one tensor, or queries in a separate one."""

    @staticmethod
    def forward(ctx: Any, starts: SegmentStarts, heads: int, *packed: Tensor) -> Tensor:
        tensors, begins = _views(packed)
        out_QD = packed[0].new_empty(len(packed[0]), sum(x.shape[1] for x in packed) // 3)
        log_QH = out_QD.new_empty(len(out_QD), heads)
        attend_ragged(tensors, begins, starts, out_QD.numpy(), log_QH.numpy())
        ctx.starts = starts
        ctx.save_for_backward(log_QH, *packed)
        return out_QD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_QD: Tensor) -> tuple[Tensor | None, ...]:
        log_QH, *packed = ctx.saved_tensors
        tensors, begins = _views(packed)
        to = tuple(torch.empty_like(x) for x in packed)
        attend_ragged_back(
            tensors, begins, ctx.starts, log_QH.numpy(), gradient_QD.contiguous().numpy(), _views(to)[0]
        )
        return None, None, *to


def _views(packed: tuple[Tensor, ...] | list[Tensor]) -> tuple[QueryKeyValue, FirstColumns]:
    first, last = (x.detach().numpy() for x in (packed[0], packed[-1]))
    width = sum(x.shape[1] for x in packed) // 3
    return (first, last, last), (0, last.shape[1] - 2 * width, last.shape[1] - width)


class TargetAttention(nn.Module):
    """Each candidate pools its request's history by similarity (the idea of DIN, Zhou et al. 2018).

    Keys and values are computed once per request, queries once per candidate.
    """

    def __init__(self, query_width: int, entry_width: int, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_width, width)
        self.key_value = nn.Linear(entry_width, 2 * width)
        self.width = width
        self.heads = heads

    def forward(
        self, query_BQ: Tensor, entry_LE: Tensor, sequence: Sequence, groups: CandidateGroups
    ) -> Tensor:
        """Attend from each candidate to its request's entries. `entry_LE`: jagged, of `sequence`. → [B,
        width]."""
        return self.to_keys(query_BQ, self.key_value(entry_LE), sequence, groups)

    def to_keys(
        self, query_BQ: Tensor, key_value_LD2: Tensor, sequence: Sequence, groups: CandidateGroups
    ) -> Tensor:
        """`forward` with keys and values from `key_value`."""
        return attend_to_histories(self.query(query_BQ), key_value_LD2, sequence, groups, self.heads)


class ListAttention(nn.Module):
    """One pre-norm attention block over the candidates of a request: x + W_o attend(LN(x)).

    A candidate sees the inputs of the others, never their labels. There are no positions, so the order shown
    does not matter.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x_BD: Tensor, groups: CandidateGroups) -> Tensor:
        return x_BD + self.out(
            attend_to_each_other(self.query_key_value(self.norm(x_BD)), groups, self.heads)
        )


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    groups = build_groups(np.array([2]))
    attend_to_each_other(torch.ones(2, 3, requires_grad=True), groups, 1).sum().backward()  # type: ignore[no-untyped-call]

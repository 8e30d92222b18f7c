"""HSTU's pointwise attention (Zhai et al. 2024, "Actions speak louder than words", §3.2), in plain torch.

    A V, with A = SiLU(Q Kᵀ + b_pos[position of j - position of i] + b_time[bucket of (i, j)]) / N_fixed ⊙ M

No softmax: how much of a taste there is counts, not only its share. N_fixed is a constant, never the batch's longest sequence, so
that a request's result depends on no other.

Letters: S tokens, G sequences of a group, N tokens of its longest, H heads, C width of a head, D = H · C.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from roostream.models.gather import gather
from roostream.models.sequence.jagged_targets import JaggedTargets, Pairs


def pointwise_attention(
    query_key_value_SD3: Tensor,
    sequences: JaggedTargets,
    position_bias_P: Tensor,
    time_bias_T: Tensor | None,
    heads: int,
    divisor: float,
) -> Tensor:
    """[S, 3 · D] → A V, [S, D].

    `position_bias_P`: of position differences -(P // 2) .. P // 2; `time_bias_T`: of buckets, None = no times; both of all heads.
    `divisor`: N_fixed.
    """
    slots_SD3 = sequences.groups.pad(query_key_value_SD3)
    out = []
    for group, pairs in zip(sequences.groups.groups, sequences.pairs, strict=True):
        g, n = group.shape_GK
        q, k, v = (
            group.of_slots(slots_SD3).view(g, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
        )  # [G, H, N, C] each
        score_GHNN = (
            torch.matmul(q, k.transpose(-1, -2)) + _bias(pairs, position_bias_P, time_bias_T)[:, None]
        )
        a_GHNN = F.silu(score_GHNN) * (pairs.sees_GNN[:, None].to(score_GHNN.dtype) / divisor)
        out.append(torch.matmul(a_GHNN, v).transpose(1, 2).reshape(g * n, -1))
    if not out:
        return query_key_value_SD3[:, : query_key_value_SD3.shape[1] // 3]
    return sequences.groups.unpad(torch.cat(out))


def _bias(pairs: Pairs, position_bias_P: Tensor, time_bias_T: Tensor | None) -> Tensor:
    """[G, N, N]; its gradient is summed in the order of the pairs (roostream/models/gather.py)."""
    sources = [(position_bias_P[:, None], (pairs.offset_GNN + len(position_bias_P) // 2).flatten())]
    if time_bias_T is not None and pairs.bucket_GNN is not None:
        sources.append((time_bias_T[:, None], pairs.bucket_GNN.flatten()))
    return gather(sources).sum(dim=1).view(pairs.offset_GNN.shape)

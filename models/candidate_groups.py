"""The candidates of each request as padded squares, so that attention runs without a loop over requests.

Letters: R requests, B candidates, G requests of a group, K the longest list of the group, D width.

    num_candidates_R = [2, 0, 3, 40]    →    group 0: requests [0, 2], K = 3     x_BD rows   [[0, 1, ·],
                                             group 1: requests [3],    K = 40                 [2, 3, 4]]

A group holds lists of at most 16, 64, 256, … candidates: padding stays below a factor of four in K whatever the mix of
lengths, and a request's result depends on no other request. Where nothing needs padding (one request, an expanded
batch) padding is a view.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 16
_FACTOR = 4


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    shape_GK: tuple[int, int]
    request_G: Tensor | None  # int64; None = all requests in order
    candidate_GK: Tensor | None  # int64 [G · K], padding points at candidate 0; None = all candidates in order
    mask_GK: Tensor | None  # bool: True = a candidate; None = no padding


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CandidateGroups:
    """Built by `build_groups`; used through `pad` and `unpad`."""

    groups: tuple[Group, ...]
    position_B: Tensor | None  # int64: where `unpad` finds each candidate; None = in order

    def pad(self, x_BD: Tensor) -> list[Tensor]:
        """[B, D] → a [G, K, D] for each group; padding holds some candidate's values and must be masked."""
        return [
            (x_BD if g.candidate_GK is None else x_BD.index_select(0, g.candidate_GK)).view(*g.shape_GK, x_BD.shape[1])
            for g in self.groups
        ]

    def unpad(self, padded: list[Tensor], width: int, like: Tensor) -> Tensor:
        """The inverse, [B, width]; `like` gives dtype and device where there is no candidate at all."""
        if not padded:
            return like.new_zeros(0, width)
        flat = [x_GKD.reshape(-1, width) for x_GKD in padded]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        return joined if self.position_B is None else joined.index_select(0, self.position_B)


def build_groups(num_candidates_R: np.ndarray, device: str = "cpu") -> CandidateGroups:
    """int32 [R] → groups in rising order of length."""
    total, longest = int(num_candidates_R.sum()), int(num_candidates_R.max(initial=0))
    if total == longest * len(num_candidates_R):
        group = Group(shape_GK=(len(num_candidates_R), longest), request_G=None, candidate_GK=None, mask_GK=None)
        return CandidateGroups(groups=(group,) if total else (), position_B=None)
    starts_R = np.cumsum(num_candidates_R, dtype=np.int64) - num_candidates_R
    position_B = np.empty(total, dtype=np.int64)
    groups, low, high, base = [], 0, _SMALLEST, 0
    while low < longest:
        request_G = np.flatnonzero((num_candidates_R > low) & (num_candidates_R <= high))
        if len(request_G):
            group, candidate_GK, mask_GK = _group(request_G, num_candidates_R, starts_R, device)
            at = np.flatnonzero(mask_GK)
            position_B[candidate_GK.ravel()[at]] = base + at
            groups.append(group)
            base += mask_GK.size
        low, high = high, high * _FACTOR
    return CandidateGroups(groups=tuple(groups), position_B=torch.from_numpy(position_B).to(device))


def _group(
    request_G: np.ndarray, num_candidates_R: np.ndarray, starts_R: np.ndarray, device: str
) -> tuple[Group, np.ndarray, np.ndarray]:
    """A group of the requests `request_G`, with its candidates and mask as arrays, which `unpad` needs too."""
    lengths_G = num_candidates_R[request_G]
    column_K = np.arange(int(lengths_G.max()), dtype=np.int64)
    mask_GK = column_K < lengths_G[:, None]
    candidate_GK = np.where(mask_GK, starts_R[request_G][:, None] + column_K, 0)
    group = Group(
        shape_GK=(mask_GK.shape[0], mask_GK.shape[1]),
        request_G=None if len(request_G) == len(num_candidates_R) else torch.from_numpy(request_G).to(device),
        candidate_GK=torch.from_numpy(candidate_GK.ravel()).to(device),
        mask_GK=None if mask_GK.all() else torch.from_numpy(mask_GK).to(device),
    )
    return group, candidate_GK, mask_GK

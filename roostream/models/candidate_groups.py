"""Candidates of each request as padded matrices, so that attention needs no loop over requests.

    num_candidates_R = [2, 0, 3, 40]    →    group 0: requests [0, 2], K = 3     x_BD rows   [[0, 1, ·],
                                             group 1: requests [3],    K = 40                 [2, 3, 4]]

A group holds lists of up to 16, 64, 256, … candidates. So padding is at most fourfold, and a request's result
depends on no other request. All matrices lie in one tensor of slots, group after group; histories are
arranged in the same order, so a group's part of both is a view. Without padding (one request, an expanded
batch), `pad` returns a view. The matrices are built on first use; `with_slots` builds them at once, so they
reach a device in one copy.

Letters: R requests, B candidates, G requests of a group, K the longest list of the group, S slots of all
matrices, D width.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 16
_FACTOR = 4


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Requests with about as many candidates, padded to the longest list among them."""

    requests: slice  # of `CandidateGroups.request_order`
    slots: slice  # of the S slots
    shape_GK: tuple[int, int]
    mask_GK: Tensor | None  # bool: True = a candidate; None = no padding

    def of_slots(self, x_SD: Tensor) -> Tensor:
        """This group's padded candidates, [G, K, D], a view."""
        return x_SD[self.slots].view(*self.shape_GK, -1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """Places of candidates in the matrices of all groups."""

    groups: tuple[Group, ...]
    request_order: np.ndarray
    slot_B: Tensor | None  # int64: slot of each candidate; None = in order
    candidate_S: Tensor | None  # int64: candidate in each slot, B = padding; None = in order


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CandidateGroups:
    """How the candidates of a batch are padded. Use `pad` and `unpad`, or `start_R1` without padding."""

    start_R1: np.ndarray  # int64, on the host: request r has the candidates start_R1[r] .. start_R1[r + 1]
    device: str  # where padded tensors are made
    slots: Slots | None = None  # None: computed on first use

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of requests, in ascending order of length."""
        return self._slots.groups

    @property
    def request_order(self) -> np.ndarray:
        """int64: requests that have a candidate, group after group."""
        return self._slots.request_order

    def pad(self, x_BD: Tensor) -> Tensor:
        """[B, D] → [S, D]; padding is 0."""
        if self._slots.candidate_S is None:
            return x_BD.contiguous()
        return torch.cat([x_BD, x_BD.new_zeros(1, x_BD.shape[1])]).index_select(0, self._slots.candidate_S)

    def unpad(self, x_SD: Tensor) -> Tensor:
        """[S, D] → [B, D], the inverse of `pad`."""
        return x_SD if self._slots.slot_B is None else x_SD.index_select(0, self._slots.slot_B)

    def with_slots(self) -> CandidateGroups:
        """A copy in which all tensors are built."""
        return dataclasses.replace(self, slots=self._slots)

    @functools.cached_property
    def _slots(self) -> Slots:
        return self.slots or _build_slots(np.diff(self.start_R1), self.device)


def build_groups(num_candidates_R: np.ndarray, device: str = "cpu") -> CandidateGroups:
    """Group requests by their number of candidates, `num_candidates_R` (int32 [R])."""
    start_R1 = np.zeros(len(num_candidates_R) + 1, dtype=np.int64)
    np.cumsum(num_candidates_R, out=start_R1[1:])
    return CandidateGroups(start_R1=start_R1, device=device)


def _build_slots(num_candidates_R: np.ndarray, device: str) -> Slots:
    """One group without padding if all requests have equally many candidates; otherwise groups by length."""
    total, longest = int(num_candidates_R.sum()), int(num_candidates_R.max(initial=0))
    num_requests = len(num_candidates_R)
    if total == longest * num_requests:
        group = Group(
            requests=slice(0, num_requests),
            slots=slice(0, total),
            shape_GK=(num_requests, longest),
            mask_GK=None,
        )
        order = np.arange(num_requests if total else 0)
        return Slots(groups=(group,) if total else (), request_order=order, slot_B=None, candidate_S=None)
    starts_R = np.cumsum(num_candidates_R, dtype=np.int64) - num_candidates_R
    slot_B = np.empty(total, dtype=np.int64)
    groups: list[Group] = []
    orders: list[np.ndarray] = []
    low, high, base, first = 0, _SMALLEST, 0, 0
    while low < longest:
        request_G = np.flatnonzero((num_candidates_R > low) & (num_candidates_R <= high))
        if len(request_G):
            mask_GK, candidate_N = _pad_mask(num_candidates_R[request_G], starts_R[request_G])
            slot_B[candidate_N] = base + np.flatnonzero(mask_GK)
            groups.append(
                Group(
                    requests=slice(first, first + len(request_G)),
                    slots=slice(base, base + mask_GK.size),
                    shape_GK=(mask_GK.shape[0], mask_GK.shape[1]),
                    mask_GK=None if mask_GK.all() else placed(mask_GK, device),
                )
            )
            orders.append(request_G)
            base, first = base + mask_GK.size, first + len(request_G)
        low, high = high, high * _FACTOR
    candidate_S = np.full(base, total, dtype=np.int64)
    candidate_S[slot_B] = np.arange(total)
    return Slots(
        groups=tuple(groups),
        request_order=np.concatenate(orders),
        slot_B=placed(slot_B, device),
        candidate_S=placed(candidate_S, device),
    )


def placed(array: np.ndarray, device: str | torch.device) -> Tensor:
    """The array on the device; copies to CUDA are asynchronous."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _pad_mask(lengths_G: np.ndarray, starts_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which slots are candidates, bool [G, K], and those candidates in slot order."""
    column_K = np.arange(int(lengths_G.max()), dtype=np.int64)
    mask_GK = column_K < lengths_G[:, None]
    return mask_GK, (starts_G[:, None] + column_K)[mask_GK]

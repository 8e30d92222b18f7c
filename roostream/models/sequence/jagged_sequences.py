"""History and targets of each request as one jagged sequence, oldest entry first (ROO paper §3.3, Fig. 5b).

    histories, newest first   [a b | c | ]     tokens     [b a x | c y z | w]
    targets                   [x | y z | w]    position   [0 1 2 | 0 1 1 | 0]

Every target has position h, so its place among the targets does not matter. A request without targets has no
tokens.

Letters: R requests, L entries of the histories, B targets, S tokens of all sequences, G sequences of a group,
N tokens of the group's longest, h entries and m targets of a request.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import Tensor

from roostream.models.candidate_groups import CandidateGroups, build_groups, placed
from roostream.models.inputs import BUCKET_MS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Pairs (query i, key j) of a group's tokens, [G, N, N]."""

    offset_GNN: Tensor  # int64: position of j - position of i, in -(N - 1) .. N - 1
    # int64: bucket of the time from j to the token after i; None: there are no times.
    bucket_GNN: Tensor | None
    sees_GNN: Tensor  # bool: i attends to j; rows of padding are not used


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JaggedTokens:
    """Offsets and times of the sequences, without padding."""

    offset_R1: Tensor  # int64
    history_R: Tensor  # int64: entries in front of its targets
    gap_S: Tensor | None  # int64 ms from the token to its request; None: there are no times
    next_S: Tensor | None  # int64 ms from the following token to the request
    longest: int  # tokens of the longest sequence


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JaggedSequences:
    """The tokens of a batch, which all layers share; see `build_jagged_sequences`."""

    source_S: Tensor  # int64: each token's index into [L entries, then B targets]
    token_B: Tensor  # int64: index of each target's token
    groups: CandidateGroups  # of tokens: sequences of like lengths, padded to the longest of them
    # int64: position, is a target; with times: own and next token's time to the request.
    token_info_SC: Tensor
    tokens_R: np.ndarray  # h + m of each request that has a target, else 0
    lengths_R: np.ndarray  # h of each request that has a target, else 0

    @functools.cached_property
    def pairs(self) -> tuple[Pairs, ...]:
        """Pairs of each group, for attention on padded matrices."""
        token_info_SC = self.groups.pad(self.token_info_SC)
        return tuple(_pairs(group.of_slots(token_info_SC)) for group in self.groups.groups)

    @functools.cached_property
    def jagged(self) -> JaggedTokens:
        """Offsets and times, for attention without padding."""
        device, times = self.token_info_SC.device, self.token_info_SC.shape[1] > 2
        return JaggedTokens(
            offset_R1=placed(np.concatenate([[0], np.cumsum(self.tokens_R)]).astype(np.int64), device),
            history_R=placed(self.lengths_R.astype(np.int64), device),
            gap_S=self.token_info_SC[:, 2].contiguous() if times else None,
            next_S=self.token_info_SC[:, 3].contiguous() if times else None,
            longest=int(self.tokens_R.max(initial=0)),
        )


def build_jagged_sequences(
    length_R: np.ndarray,
    gap_ms_L: np.ndarray | None,
    num_targets_R: np.ndarray,
    max_history: int,
    device: str | torch.device = "cpu",
) -> JaggedSequences:
    """Arrange the histories and targets of a batch as tokens.

    `length_R`: lengths of histories, newest entry first, of which the newest `max_history` are used.
    `gap_ms_L`: int64 time from each entry to its request; None = the tokens get no times. `num_targets_R`:
    candidates of each request.
    """
    start_R, target_R = (np.cumsum(n_R, dtype=np.int64) - n_R for n_R in (length_R, num_targets_R))
    history_R = np.where(num_targets_R > 0, np.minimum(length_R, max_history), 0)
    tokens_R = history_R + num_targets_R
    request_S = np.repeat(np.arange(len(tokens_R)), tokens_R)
    place_S = np.arange(len(request_S)) - (np.cumsum(tokens_R) - tokens_R)[request_S]
    history_S = history_R[request_S]
    is_target_S = place_S >= history_S
    of_history_S = start_R[request_S] + history_S - 1 - place_S
    source_S = np.where(is_target_S, length_R.sum() + target_R[request_S] + place_S - history_S, of_history_S)
    columns = [np.minimum(place_S, history_S), is_target_S]
    if gap_ms_L is not None:
        gap_S, next_S = np.zeros((2, len(place_S)), dtype=np.int64)
        gap_S[~is_target_S] = gap_ms_L[of_history_S[~is_target_S]]
        # After the last entry and after targets the time is 0, that of the request itself.
        followed_S = place_S < history_S - 1
        next_S[followed_S] = gap_ms_L[of_history_S[followed_S] - 1]
        columns += [gap_S, next_S]
    return JaggedSequences(
        source_S=placed(source_S.astype(np.int64), device),
        token_B=placed(np.flatnonzero(is_target_S), device),
        groups=build_groups(tokens_R, str(device)),
        token_info_SC=placed(np.stack(columns, axis=1).astype(np.int64), device),
        tokens_R=tokens_R,
        lengths_R=history_R,
    )


def build_history_sequences(length_R: np.ndarray, device: str | torch.device = "cpu") -> JaggedSequences:
    """Histories alone, complete and without times, for next-item training: an entry sees itself and earlier
    entries.

    Tokens are the entries, oldest first; the newest one takes the place of a single target.
    """
    newest_R = np.minimum(length_R, 1).astype(np.int32)
    return build_jagged_sequences(length_R - newest_R, None, newest_R, int(length_R.max(initial=0)), device)


def _pairs(token_info_GNC: Tensor) -> Pairs:
    """Columns as in `JaggedSequences.token_info_SC`. Padding follows a sequence's tokens, so no token sees
    it."""
    position_GN, is_target_GN, *gaps = token_info_GNC.unbind(dim=-1)
    n = position_GN.shape[1]
    itself_NN = torch.eye(n, dtype=torch.bool, device=token_info_GNC.device)
    earlier_NN = torch.ones_like(itself_NN).tril(-1)
    return Pairs(
        offset_GNN=position_GN[:, None, :] - position_GN[:, :, None],
        bucket_GNN=_buckets(gaps[0][:, None, :] - gaps[1][:, :, None]) if gaps else None,
        sees_GNN=itself_NN | (earlier_NN & (is_target_GN == 0)[:, None, :]),
    )


def _buckets(gap_ms: Tensor) -> Tensor:
    """As `roostream.models.inputs.time_buckets`."""
    steps = placed(BUCKET_MS, gap_ms.device)
    return torch.bucketize(gap_ms.abs(), steps, right=True)

"""Items of each user in order, and windows of them (leave-last-out).

For a user with items a b c d e, the test predicts the last one and validation the one before:

    training     a b → b c         each entry predicts the next one
    validation   a b c → d
    test         a b c d → e

A window has the newest entries only; "seen" are all earlier items, in the window or not.

Letters: U users, N interactions, R users of a window, S entries of all windows, X pairs (user, seen item).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from roostream.errors import ConfigError

TEST, VALIDATION = 1, 2
"""Distance of the target item from the end of a user's items."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserSequences:
    """The items of all users; every user has at least three. See `group_by_user`."""

    item_N: np.ndarray  # int64 indices into the corpus; one user after the other, oldest first
    start_U1: np.ndarray  # int64: where each user's items begin, and the end

    @property
    def num_users(self) -> int:
        return len(self.start_U1) - 1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NextWindows:
    """The entries of windows, and the item after each entry."""

    item_S: np.ndarray  # int64; one user after the other, oldest first
    next_S: np.ndarray  # int64: the item after each
    length_R: np.ndarray  # int64


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationWindows:
    """The history of each user, and the target item."""

    item_S: np.ndarray  # int64; as in NextWindows
    length_R: np.ndarray  # int64
    target_R: np.ndarray  # int64: the item to predict
    seen_X: tuple[np.ndarray, np.ndarray]  # int64: index of the user, item


def group_by_user(user_N: np.ndarray, item_id_N: np.ndarray, corpus_I: np.ndarray) -> UserSequences:
    """Group interactions by user. `user_N`: interactions of a user are adjacent, oldest first; `corpus_I`:
    ascending ids of all items, including those of `item_id_N`.

    Raises:
        ConfigError: there is no user, a user occurs twice, or has fewer than three items.
    """
    is_first_N = np.concatenate([[True], user_N[1:] != user_N[:-1]])[: len(user_N)]
    first_U = np.flatnonzero(is_first_N)
    start_U1 = np.append(first_U, len(user_N)).astype(np.int64)
    if not len(first_U) or len(np.unique(user_N[first_U])) < len(first_U):
        raise ConfigError(
            "expected the interactions of each user next to each other, got none or a user twice; sort "
            "them by user"
        )
    shortest = int(np.argmin(np.diff(start_U1)))
    if np.diff(start_U1)[shortest] < 3:
        user = user_N[first_U[shortest]]
        raise ConfigError(
            f"expected at least 3 interactions of each user, got fewer of user {user}; leave such users out"
        )
    return UserSequences(item_N=np.searchsorted(corpus_I, item_id_N).astype(np.int64), start_U1=start_U1)


def training_windows(sequences: UserSequences, user_R: np.ndarray, max_length: int) -> NextWindows:
    """For each user in `user_R`, the newest entries before the validation item, at most `max_length`, and the
    item after each."""
    end_R = sequences.start_U1[user_R + 1] - VALIDATION
    length_R = np.minimum(end_R - 1 - sequences.start_U1[user_R], max_length)
    index_S = _ranges(end_R - 1 - length_R, length_R)
    return NextWindows(
        item_S=sequences.item_N[index_S], next_S=sequences.item_N[index_S + 1], length_R=length_R
    )


def evaluation_windows(
    sequences: UserSequences, user_R: np.ndarray, max_length: int, target: int
) -> EvaluationWindows:
    """The newest entries before each user's test or validation item, and that item. `target`: TEST or
    VALIDATION."""
    start_R, end_R = sequences.start_U1[user_R], sequences.start_U1[user_R + 1] - target
    length_R = np.minimum(end_R - start_R, max_length)
    seen_R = end_R - start_R
    return EvaluationWindows(
        item_S=sequences.item_N[_ranges(end_R - length_R, length_R)],
        length_R=length_R,
        target_R=sequences.item_N[end_R],
        seen_X=(np.repeat(np.arange(len(user_R)), seen_R), sequences.item_N[_ranges(start_R, seen_R)]),
    )


def _ranges(start_R: np.ndarray, length_R: np.ndarray) -> np.ndarray:
    """start, start + 1, … for each start, concatenated."""
    before_R = np.cumsum(length_R) - length_R
    return np.repeat(start_R - before_R, length_R) + np.arange(int(length_R.sum()))

"""Leave-last-out: what is learned from, what is asked for, and that neither knows what comes later."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.errors import ConfigError
from trainer.next_item.sequences import (
    TEST,
    VALIDATION,
    EvaluationWindows,
    NextWindows,
    UserSequences,
    evaluation_windows,
    group_by_user,
    training_windows,
)

CORPUS = np.array([10, 20, 30, 40, 50, 60])
ALL = np.array([0, 1, 2])


def sequences() -> UserSequences:
    user_N = np.array([7, 7, 7, 7, 7, 3, 3, 3, 9, 9, 9, 9])
    return group_by_user(user_N, np.array([10, 20, 30, 40, 50, 60, 10, 20, 50, 40, 30, 20]), CORPUS)


def per_user(windows: NextWindows | EvaluationWindows, values: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(CORPUS[values], np.cumsum(windows.length_R)[:-1])]


def test_training_windows_end_before_the_evaluated_items() -> None:
    windows = training_windows(sequences(), ALL, 10)
    assert per_user(windows, windows.item_S) == [[10, 20], [], [50]]
    assert per_user(windows, windows.next_S) == [[20, 30], [], [40]]


@pytest.mark.parametrize(
    ("behind", "given", "answers"),
    [
        (VALIDATION, [[10, 20, 30], [60], [50, 40]], [40, 10, 30]),
        (TEST, [[10, 20, 30, 40], [60, 10], [50, 40, 30]], [50, 20, 20]),
    ],
)
def test_validation_predicts_the_last_but_one_item_and_test_the_last(
    behind: int, given: list[list[int]], answers: list[int]
) -> None:
    windows = evaluation_windows(sequences(), ALL, 10, behind)
    assert per_user(windows, windows.item_S) == given
    assert CORPUS[windows.answer_R].tolist() == answers
    places, items = windows.seen_X
    assert [CORPUS[items[places == r]].tolist() for r in range(3)] == given


def test_windows_have_the_newest_entries_and_seen_items_are_complete() -> None:
    asked, learned = evaluation_windows(sequences(), ALL, 2, TEST), training_windows(sequences(), ALL, 1)
    assert per_user(asked, asked.item_S) == [[30, 40], [60, 10], [40, 30]]
    assert np.bincount(asked.seen_X[0]).tolist() == [4, 2, 3]
    assert per_user(learned, learned.item_S) == [[20], [], [50]]
    assert per_user(learned, learned.next_S) == [[30], [], [40]]


@pytest.mark.parametrize(
    ("user_N", "said"),
    [
        ([], "got none or a user twice"),
        ([1, 1, 1, 2, 2, 2, 1, 1, 1], "got none or a user twice"),
        ([1, 1, 1, 2, 2], "got fewer of user 2"),
    ],
    ids=str,
)
def test_invalid_interactions_are_rejected(user_N: list[int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        group_by_user(np.array(user_N), np.full(len(user_N), 10), CORPUS)

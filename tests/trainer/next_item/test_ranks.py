"""Ranks among all items that were not seen, and their figures, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.next_item.training import ranking_figures, ranks

NOTHING = (torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def rank_of(scores: list[float], answer: int, seen: list[int]) -> int:
    seen_X = (torch.zeros(len(seen), dtype=torch.int64), torch.tensor(seen, dtype=torch.int64))
    return int(ranks(torch.tensor([scores]), torch.tensor([answer]), seen_X)[0])


@pytest.mark.parametrize(
    ("scores", "answer", "seen", "rank", "why"),
    [
        ([0.1, 0.9, 0.5, 0.7], 2, [], 3, "two are better"),
        ([0.1, 0.9, 0.5, 0.7], 2, [1], 2, "one of them was seen"),
        ([0.1, 0.9, 0.5, 0.7], 2, [1, 3], 1, "both were"),
        ([0.1, 0.9, 0.5, 0.7], 0, [], 4, "the worst"),
        ([0.5, 0.5, 0.5, 0.5], 2, [], 4, "a model that tells nothing apart gains nothing"),
        ([0.5, 0.5, 0.5, 0.5], 2, [0], 3, "of those not seen"),
        ([math.nan] * 4, 2, [], 4, "nor does one whose scores are no numbers"),
        ([0.1, math.nan, 0.5, 0.2], 2, [], 2, "what is no number counts as better"),
        ([0.1, 0.9, 0.5, 0.7], 1, [1], 1, "an answer that was seen is asked for all the same"),
    ],
)
def test_a_rank_counts_better_unseen_items(
    scores: list[float], answer: int, seen: list[int], rank: int, why: str
) -> None:
    assert rank_of(scores, answer, seen) == rank, why


def test_seen_items_are_those_of_each_user() -> None:
    score_RI: Tensor = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    seen_X = (torch.tensor([0]), torch.tensor([0]))
    assert ranks(score_RI, torch.tensor([1, 1]), seen_X).tolist() == [1, 2]
    assert ranks(score_RI, torch.tensor([1, 1]), NOTHING).tolist() == [2, 2]


def test_metrics_of_ranks() -> None:
    told = ranking_figures(np.array([1, 3, 10, 11, 50]), (10, 50))
    assert told["HR@10"] == pytest.approx(3 / 5) and told["HR@50"] == 1.0
    gains = [1.0, 0.5, 1 / math.log2(11), 1 / math.log2(12), 1 / math.log2(51)]
    assert told["NDCG@10"] == pytest.approx(sum(gains[:3]) / 5)
    assert told["NDCG@50"] == pytest.approx(sum(gains) / 5)
    assert told["MRR"] == pytest.approx((1 + 1 / 3 + 1 / 10 + 1 / 11 + 1 / 50) / 5)

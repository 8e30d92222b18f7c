"""The softmax over the items of a batch: it equals its formula, and it can correct for the popularity of
items."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roostream.models.two_tower.sampled_softmax import log_expected, sampled_softmax
from tests.models.layer_checks import randn

ITEMS = torch.tensor([7, 3, 7, 5, 3, 7])


def test_with_counts_of_the_batch_it_is_the_softmax_over_distinct_items() -> None:
    of_item, positive = randn(2, 3), torch.tensor([0, 4])
    place = torch.tensor([0, 1, 0, 2, 1, 0])  # index of each entry among the distinct items 7, 3, 5
    for uniform in (0.0, 3.0):
        got = sampled_softmax(of_item[:, place], positive, *log_expected(ITEMS, None, uniform))
        torch.testing.assert_close(got, -torch.log_softmax(of_item, dim=1)[torch.arange(2), place[positive]])


@pytest.mark.parametrize("uniform", [0.0, 2.0])
def test_the_loss_equals_its_formula(uniform: float) -> None:
    score, positive = randn(2, 6), torch.tensor([3, 2])
    popularity = torch.tensor([9.0, 4.0, 9.0, 1.0, 4.0, 9.0], dtype=torch.float64)
    counts, shown = {7: 3, 3: 2, 5: 1}, {7: 6 * 9 / 14, 3: 6 * 4 / 14, 5: 6 * 1 / 14}
    expected = []
    for p, b in enumerate(positive.tolist()):
        pool = [
            (1 + uniform / counts[i]) * math.exp(float(score[p, c])) / (shown[i] + uniform)
            for c, i in enumerate(ITEMS.tolist())
        ]
        expected.append(math.log(sum(pool)) - float(score[p, b]))
    got = sampled_softmax(score, positive, *log_expected(ITEMS, popularity, uniform))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def learned_scores(corrected: bool) -> np.ndarray:
    """Learn the scores of ten items from random batches. Users like all items alike, but one item is shown
    and clicked ten times as often."""
    random = np.random.default_rng(0)
    share = np.array([10.0, *[1.0] * 9]) / 19
    score = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([score], lr=1.0)
    for _ in range(400):
        item = torch.from_numpy(random.choice(10, 64, p=share))
        log_weight, expected = log_expected(item, torch.from_numpy(share)[item], 0.0)
        expected = expected if corrected else torch.zeros_like(expected)
        optimizer.zero_grad()
        sampled_softmax(score[item].expand(64, 64), torch.arange(64), log_weight, expected).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return score.detach().numpy()


def test_the_correction_removes_the_effect_of_popularity() -> None:
    """A softmax over all items learns the logarithm of clicks, which differs by 2.3. Without the correction
    the model learns the logarithm of clicks per impression, which does not differ."""
    apart = [score[0] - score[1:].mean() for score in (learned_scores(True), learned_scores(False))]
    assert apart[0] == pytest.approx(math.log(10), abs=0.2)
    assert apart[1] == pytest.approx(0.0, abs=0.2)

"""Boosted trees that are fitted again and again on the requests so far. Runs in the environment `lightgbm`.

    python boosted_trees.py INPUT.npz OUTPUT.npz

INPUT: float32 x_BF, bool click_B, int64 num_candidates_R, in time order. OUTPUT: float64 probability_B, each
from trees that were fitted on earlier requests only; until the first fit, a constant.

Letters: B candidates, F floats, R requests.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np

FIRST_FIT, GROWTH = 50, 1.5  # requests; each fit has this many times those of the fit before
FIT_SHARE, PATIENCE, MAX_ROUNDS = 0.85, 20, 400  # the newest requests choose the number of trees
PRIOR = 0.1


def progressive(x_BF: np.ndarray, click_B: np.ndarray, num_candidates_R: np.ndarray) -> np.ndarray:
    """float64 [B]: the probability of each candidate before its request is learned."""
    starts = np.concatenate([[0], np.cumsum(num_candidates_R)])
    num_requests = len(num_candidates_R)
    probability_B = np.full(len(x_BF), PRIOR)
    fits = [FIRST_FIT]
    while fits[-1] < num_requests:
        fits.append(min(num_requests, max(fits[-1] + FIRST_FIT, int(fits[-1] * GROWTH))))
    for fit, until in itertools.pairwise(fits):
        middle, end = starts[int(fit * FIT_SHARE)], starts[fit]
        if click_B[:middle].sum() >= 2 and click_B[middle:end].any():
            model = fitted(x_BF[:end], click_B[:end], middle)
            probability_B[end : starts[until]] = model.predict(x_BF[end : starts[until]])
    return probability_B


def fitted(x_BF: np.ndarray, click_B: np.ndarray, middle: int) -> Any:
    """The trees (`lightgbm.Booster`) of all candidates; candidates from `middle` on decide how many there
    are."""
    import lightgbm  # type: ignore[import-not-found]  # the project's environment, which imports this file for its path, does not have it

    settings = {
        "objective": "binary",
        "num_leaves": 15,
        "min_data_in_leaf": min(200, max(10, len(x_BF) // 100)),
        "learning_rate": 0.05,
        "feature_fraction": 0.8,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "num_threads": 1,
        "seed": 0,
        "verbose": -1,
    }
    first = lightgbm.Dataset(x_BF[:middle], click_B[:middle])
    newest = lightgbm.Dataset(x_BF[middle:], click_B[middle:], reference=first)
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    trial = lightgbm.train(settings, first, MAX_ROUNDS, valid_sets=[newest], callbacks=[stop])
    return lightgbm.train(settings, lightgbm.Dataset(x_BF, click_B), max(trial.best_iteration, 1))


if __name__ == "__main__":
    with np.load(sys.argv[1]) as found:
        np.savez(sys.argv[2], probability_B=progressive(**found))

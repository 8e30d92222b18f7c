"""Which requests of a batch are trained, and with which weight. Pure: equal for equal requests, whatever batch they are in.

    eligible    of `negatives`: no label of the request is positive, nor was before a correction; of `random`: all;
                of `slipstream`: those whose rows are stale (slipstream.py)
    kept        u < keep, u = (splitmix64(sample id ^ seed) >> 11) · 2⁻⁵³ in [0, 1)
    weight      of a negative that is kept 1 / keep: it stands for those that are not. Else 1

A loss of kept negatives with these weights, divided by the number of kept candidates, has the mean of the loss of all (inverse
probability weighting, Horvitz and Thompson 1952; "negative downsampling": He et al. 2014, §6.3, where scores are put right
instead). Whole requests only: a thinned list is another list.

The same weights make the kept ones a sample of all for progressive metrics: of those that are kept each stands for 1 / keep, by
candidate and by request. What has stale rows is no such sample.

Letters: R requests, B candidates, T tasks, M of the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roostream.schema.ids import splitmix64_of
from roostream.wire.batch import Batch
from trainer.selection.config import SelectionConfig

TRAINED, FROZEN, NEGATIVE, RANDOM, STALE = range(5)
NAMES = ("trained", "frozen", "negative", "random", "stale")
"""What becomes of a request, as `Prediction.disposition` numbers it; the last three are reasons to skip it."""

_PROBE_SALT = 0x70726F6265  # another draw for the same id


class Decision(NamedTuple):
    """Of each request of a batch."""

    kept_R: np.ndarray  # bool
    weight_R: np.ndarray  # float32: of its loss, 0 where it isn't kept
    reason_R: np.ndarray  # uint8: TRAINED, or why not
    probe_R: np.ndarray  # bool: skipped, and scored all the same where not all of them are
    stands_for_R: (
        np.ndarray
    )  # float32: how many requests each that is kept stands for, where those alone are scored; else 0


class SelectionWeights(NamedTuple):
    """What selection says of the requests of a part."""

    reason_R: np.ndarray  # uint8
    train_weight_R: np.ndarray  # float32: of its loss; 0 = not trained
    metric_weight_R: np.ndarray  # float32: how many requests it stands for in progressive metrics


class UnscoredRequests(NamedTuple):
    """Requests of a batch that are neither trained nor scored."""

    batch: Batch
    row_M: np.ndarray  # int64: which of its requests
    reason_R: np.ndarray  # uint8: of all of them


def decide(batch: Batch, config: SelectionConfig, seed: int, stale_R: np.ndarray | None = None) -> Decision:
    """`stale_R`: bool, the requests that `slipstream` skips; None = none yet."""
    id_R, n = batch.sample_id_R, batch.num_requests
    weight_R, stands_for_R = np.ones(n, np.float32), np.ones(n, np.float32)
    if config.policy == "slipstream":
        skipped_R, reason = np.zeros(n, np.bool_) if stale_R is None else stale_R, STALE
    elif config.policy == "negatives":
        eligible_R = without_positive(batch)
        skipped_R, reason = eligible_R & (uniform_draws(id_R, seed) >= config.keep), NEGATIVE
        weight_R[eligible_R] = stands_for_R[eligible_R] = np.float32(1 / config.keep)
    elif config.policy == "random":
        skipped_R, reason = uniform_draws(id_R, seed) >= config.keep, RANDOM
        stands_for_R[:] = np.float32(1 / config.keep)
    else:
        skipped_R, reason = np.zeros(n, np.bool_), TRAINED
    weight_R[skipped_R] = stands_for_R[skipped_R] = 0
    return Decision(
        kept_R=~skipped_R,
        weight_R=weight_R,
        reason_R=np.where(skipped_R, reason, TRAINED).astype(np.uint8),
        probe_R=skipped_R & (uniform_draws(id_R, seed ^ _PROBE_SALT) < config.probe),
        stands_for_R=stands_for_R,
    )


def uniform_draws(id_R: np.ndarray, seed: int) -> np.ndarray:
    """float64 [R] in [0, 1), a function of id (int64) and seed."""
    return (splitmix64_of(id_R.view(np.uint64) ^ np.uint64(seed)) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


def without_positive(batch: Batch) -> np.ndarray:
    """bool [R]: no candidate has a positive label with weight in any task, nor had one that a correction takes back."""
    positive_BT = (batch.label_BT > 0) | (batch.label_before_BT > 0)
    positive_B = (positive_BT & (batch.weight_BT > 0)).any(axis=1)
    return np.bincount(batch.request_index_B, positive_B, batch.num_requests) == 0

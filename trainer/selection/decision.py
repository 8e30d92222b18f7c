"""Which requests of a batch are trained, and with which weight. Pure; a request's decision does not depend on
its batch.

    eligible    `negatives`: no label of the request is positive, nor was before a correction; `random`: all;
                `slipstream`: requests whose rows are stale (slipstream.py)
    kept        u < keep, u = (splitmix64(sample id ^ seed) >> 11) · 2⁻⁵³ in [0, 1)
    weight      1 / keep for a kept negative, which represents the dropped ones; else 1

With these weights, divided by the number of kept candidates, the expected loss is that of all requests
(inverse probability weighting, Horvitz and Thompson 1952; "negative downsampling" in He et al. 2014, §6.3,
corrects scores instead). Only whole requests are dropped, because a thinned list is another list.

The kept requests are a sample of all for progressive metrics: each represents 1 / keep, by candidate and by
request. Requests without stale rows are no such sample.

Letters: R requests, B candidates, T tasks, M some of the requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roostream.schema.ids import splitmix64_of
from roostream.wire.batch import Batch
from trainer.selection.config import SelectionConfig

TRAINED, FROZEN, NEGATIVE, RANDOM, STALE = range(5)
NAMES = ("trained", "frozen", "negative", "random", "stale")
"""Disposition of a request, as `Prediction.disposition` numbers it; the last three are reasons to skip it."""

_PROBE_SALT = 0x70726F6265  # for a second, independent draw from the same id


class Decision(NamedTuple):
    """Decisions for each request of a batch."""

    kept_R: np.ndarray  # bool
    weight_R: np.ndarray  # float32: loss weight, 0 if it is not kept
    reason_R: np.ndarray  # uint8: TRAINED, or the reason to skip it
    probe_R: np.ndarray  # bool: skipped, but scored even if the others are not
    # float32: requests that a kept one represents if only kept ones are scored; else 0
    stands_for_R: np.ndarray


class SelectionWeights(NamedTuple):
    """Weights of the requests of a part."""

    reason_R: np.ndarray  # uint8
    train_weight_R: np.ndarray  # float32: loss weight; 0 = not trained
    metric_weight_R: np.ndarray  # float32: number of requests that it represents in progressive metrics


class UnscoredRequests(NamedTuple):
    """Requests of a batch that are neither trained nor scored."""

    batch: Batch
    row_M: np.ndarray  # int64: which requests of the batch
    reason_R: np.ndarray  # uint8: of all requests of the batch


def decide(batch: Batch, config: SelectionConfig, seed: int, stale_R: np.ndarray | None = None) -> Decision:
    """Decide which requests of a batch are trained. `stale_R`: bool, the requests that `slipstream` skips;
    None = none yet."""
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
    """bool [R]: no task has a weighted positive label, nor one that a correction takes back."""
    positive_BT = (batch.label_BT > 0) | (batch.label_before_BT > 0)
    positive_B = (positive_BT & (batch.weight_BT > 0)).any(axis=1)
    return np.bincount(batch.request_index_B, positive_B, batch.num_requests) == 0

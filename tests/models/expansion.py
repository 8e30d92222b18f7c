"""The impression-level twin of a batch, as a system without requests would train it: for G10 and for
benchmarks.

Without list context that is `Batch.expand()`. With it (rank and share transforms, attention over the
candidates) an impression's inputs depend on the whole list, which impression-level storage has to carry with
every impression.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from roostream.wire.batch import Batch


def expand_with_context(batch: Batch) -> Batch:
    """A request for every candidate that holds its whole list; only the candidate itself has weight.

    R = B requests, Σ K² candidates: loss and gradients are those of the batch, at K times its cost.
    """
    twin = batch.take_requests(batch.request_index_B)
    starts_R = np.cumsum(batch.num_candidates_R, dtype=np.int64) - batch.num_candidates_R
    place_B = np.arange(batch.num_candidates) - starts_R[batch.request_index_B]
    ends = np.cumsum(twin.num_candidates_R, dtype=np.int64)
    weight = np.zeros_like(twin.weight_BT)
    own = ends - twin.num_candidates_R + place_B
    weight[own] = batch.weight_BT
    return dataclasses.replace(twin, weight_BT=weight)

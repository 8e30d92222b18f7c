"""Expands a batch of requests into impressions, as a system without requests would train them.

Used by the tests of guarantee G10 (docs/architecture.md). Without list context, `Batch.expand()` is enough.
With list context (rank and share transforms, attention over the candidates), the inputs of an impression
depend on the whole list. Impression-level storage has to keep that list with every impression.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from roostream.wire.batch import Batch


def expand_with_context(batch: Batch) -> Batch:
    """Build one request for every candidate. It holds the whole list; only that candidate has a weight above
    0.

    The result has R = B requests and Σ K² candidates. Loss and gradients equal those of the batch, at K times
    the cost.
    """
    expanded = batch.take_requests(batch.request_index_B)
    starts_R = np.cumsum(batch.num_candidates_R, dtype=np.int64) - batch.num_candidates_R
    position_B = np.arange(batch.num_candidates) - starts_R[batch.request_index_B]
    ends = np.cumsum(expanded.num_candidates_R, dtype=np.int64)
    weight = np.zeros_like(expanded.weight_BT)
    own_slot_B = ends - expanded.num_candidates_R + position_B
    weight[own_slot_B] = batch.weight_BT
    return dataclasses.replace(expanded, weight_BT=weight)

"""Predictions of the topic `predictions` as a batch for metrics, and for the comparison with baselines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from roostream.schema.schema import Label
from roostream.wire import roo_pb2 as pb
from trainer.monitoring.progressive_metrics import ScoredBatch
from trainer.monitoring.verdict import PairedRequests, request_scores


def is_scored(prediction: pb.Prediction) -> bool:
    """False for a request that selection skipped."""
    return bool(prediction.scores) or not prediction.item_ids


def scored_batch(
    predictions: Sequence[pb.Prediction], num_tasks: int, declared_T: Sequence[Label] = ()
) -> ScoredBatch:
    """The scores and labels of predictions as one batch; a label that is not known has weight 0.
    `predictions`: at least one, all scored."""
    counts_R = np.array([len(p.item_ids) for p in predictions], np.int64)
    score_BT, label_BT = (
        np.concatenate([np.array(getattr(p, name), dtype=np.float32) for p in predictions]).reshape(
            -1, num_tasks
        )
        for name in ("scores", "labels")
    )
    index_B = np.repeat(np.arange(len(predictions)), counts_R)
    time_ms_R = np.array([p.time_ms for p in predictions], dtype=np.int64)
    metric_weight_R = np.array([p.metric_weight or 1.0 for p in predictions])
    weight_BT = ~np.isnan(label_BT) * metric_weight_R[index_B][:, None].astype(np.float32)
    return ScoredBatch(
        score_BT,
        np.nan_to_num(label_BT),
        weight_BT,
        index_B,
        time_ms_R,
        declared_T,
        importance_R=metric_weight_R,
    )


def add_to_pairs(
    paired: PairedRequests, predictions: Sequence[pb.Prediction], scored: ScoredBatch, first_place: int
) -> None:
    """Add the model's side of `predictions` whose first label is known; `first_place` requests were scored
    before them."""
    unknown_B = scored.weight_BT[:, 0] == 0
    known_R = np.bincount(scored.request_index_B, unknown_B, len(predictions)) == 0
    place_R = first_place + np.flatnonzero(known_R)
    predictions, scored = list(itertools.compress(predictions, known_R)), scored.of_requests(known_R)
    index_B, num_requests = scored.request_index_B, len(predictions)
    positive_B = scored.label_BT[:, 0] > 0
    paired.add_model(
        [p.sample_id for p in predictions],
        request_scores(
            scored.score_BT[:, 0],
            positive_B,
            index_B,
            num_requests,
            is_probability=not scored.declared_T or scored.declared_T[0].is_probability,
        ),
        place_R=place_R,
        time_ms_R=scored.time_ms_R,
        candidates_R=np.bincount(index_B, minlength=num_requests),
        positives_R=np.bincount(index_B, positive_B, num_requests),
        weight_R=scored.importance_R,
    )

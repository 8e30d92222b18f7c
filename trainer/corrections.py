"""Training on corrections: labels that change after the close of a sample.

A correction is a request of the batch (`correction_R`) with the features of its sample and its labels before
and after. It waits for its sample if that was not read yet (record_source.py). A correction appears in no
metric and no prediction, and its sample's close time does not move the watermark. Its id (of the sample and
the engagement) is trained once, like a sample's.

Letters: R requests, B candidates, T tasks.
"""

from __future__ import annotations

import numpy as np
import torch

from roostream.models.candidate_groups import placed
from roostream.models.model import Targets
from roostream.wire.batch import Batch
from trainer.config import LoopConfig


def record_due_ms(batch: Batch) -> np.ndarray:
    """int64 [R]: when a request's record was due: its close, or the later engagement of a correction."""
    later_R = np.maximum(batch.close_ms_R, batch.oldest_engagement_ms_R)
    return np.where(batch.correction_R, later_R, batch.close_ms_R)


def without_unchanged_corrections(batch: Batch, config: LoopConfig) -> Batch:
    """The batch without corrections that change no trained label; the same object if all do."""
    if not batch.correction_R.any():
        return batch
    before_BT, after_BT = _before(batch, config), batch.label_BT
    by_value_T = np.array([label.learns_value for label in batch.schema.labels], dtype=np.bool_)
    changes_BT = np.where(by_value_T, before_BT != after_BT, (before_BT > 0) != (after_BT > 0))
    changes_B = changes_BT.any(axis=1, where=batch.weight_BT > 0)
    num_changes_R = np.bincount(batch.request_index_B, changes_B, batch.num_requests)
    keep_R = ~batch.correction_R | ((num_changes_R > 0) & _not_frozen(batch, config))
    return batch if keep_R.all() else batch.take_requests(np.flatnonzero(keep_R))


def build_targets(batch: Batch, config: LoopConfig) -> Targets:
    """Targets of the loss, on the loop's device."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return placed(array, config.device)

    before_BT = known_BT = None
    if batch.correction_R.any():
        before_BT = tensor(_before(batch, config))
    if config.loss in ("dfm", "es_dfm"):
        known_BT = tensor(_known(batch, config.label_delay_ms))
    return Targets(tensor(batch.label_BT), tensor(batch.weight_BT), before_BT, known_BT, config.loss)


def _before(batch: Batch, config: LoopConfig) -> np.ndarray:
    """[B, T]: labels trained before the correction; NaN for samples. Labels that the settings do not correct
    are unchanged."""
    corrected_B1 = batch.correction_R[batch.request_index_B][:, None]
    before_BT, after_BT = np.nan_to_num(batch.label_before_BT), batch.label_BT
    if config.corrections == "downgrades":
        before_BT = np.where((before_BT > 0) & ~(after_BT > 0), before_BT, after_BT)
    return np.where(corrected_B1, before_BT, np.float32(np.nan)).astype(np.float32)


def _known(batch: Batch, mean_delay_ms: int) -> np.ndarray:
    """[B, T]: expected share of engagements that arrive before the close, with exponential delays."""
    elapsed_ms_R = np.maximum(batch.close_ms_R - batch.time_ms_R, 0)
    known_R = -np.expm1(-elapsed_ms_R / mean_delay_ms).astype(np.float32)
    return np.repeat(known_R[batch.request_index_B][:, None], batch.label_BT.shape[1], axis=1)


def _not_frozen(batch: Batch, config: LoopConfig) -> np.ndarray:
    """bool [R]: False from `freeze_at_ms` on, where requests are only scored."""
    return (batch.time_ms_R < config.freeze_at_ms) | (config.freeze_at_ms == 0)

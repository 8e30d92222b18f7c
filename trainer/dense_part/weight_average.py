"""An average of the dense weights over their last steps, in a model of its own that scores (Polyak & Juditsky 1992; with an
exponential window, as Izmailov et al. 2018 and others score with).

    a <- d a + (1 - d) w    behind step t of the optimizer, d = min(1 - 1/steps, t / (t + 9))

A single step goes where its batch says, and so the weights wander about what they learn; their average does not, and lags by
about `steps` steps. At the beginning d is small: the average is one of about the last tenth of all steps, never the initial
values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roostream.models.model import Model
from trainer.dense_part.flat_weights import FlatWeights

_YOUNG = 9


class WeightAverage:
    """`model` scores by it; nothing else may write to its weights but `follow` and a restore. Changes nothing of what is
    trained."""

    def __init__(self, model: Model, steps: int) -> None:
        """`model`: built as the one in training is; its weights become parts of one tensor, as that one's are."""
        self.model, self.steps = model.eval(), steps
        self._average_P = FlatWeights(model.named_parameters()).weight_P

    @torch.no_grad()
    def follow(self, weight_P: Tensor, num_steps: int) -> None:
        """Behind step `num_steps` (from 1) of the optimizer, which led to `weight_P`."""
        kept = min(1 - 1 / self.steps, num_steps / (num_steps + _YOUNG))
        self._average_P.lerp_(weight_P, 1 - kept)

"""Forward and backward passes and optimizer steps of one worker's dense weights.

Letters: B candidates, T tasks, U unique rows of a stack, D width of a stack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from roostream.models.config import ModelConfig
from roostream.models.custom.loading import backward
from roostream.models.inputs import Inputs
from roostream.models.linear_part import LinearPart
from roostream.models.model import Targets
from roostream.schema.schema import Schema
from trainer.chunks import PulledPart
from trainer.config import LoopConfig
from trainer.dense_part import newton
from trainer.dense_part.adam import DenseAdam, WeightAverage
from trainer.device.numerics import build_training_model, forward_logits
from trainer.pipeline.stage_timer import StageTimer
from trainer.rows import clip_rows, largest_norm

_MAX_NORM = math.sqrt(torch.finfo(torch.float32).max)  # its square is finite


class Logits(NamedTuple):
    """Logits of a batch, each [B, T]."""

    trained_BT: Tensor  # of the weights in training, with a graph
    scored_BT: Tensor  # of those that score: the same, or their average (weight_average.py)


class DenseTrainer:
    """`model` is trained by `optimizer`; `scorer` predicts and is served: `model` itself, or the model with
    the averaged weights."""

    def __init__(
        self,
        config: LoopConfig,
        schema: Schema,
        model_config: ModelConfig,
        rate: Callable[[int], float],
        stages: StageTimer,
    ) -> None:
        """Build untrained models. `rate`: Adam's learning rate after a number of steps. Raises as
        `build_training_model`."""
        self.config, self.stages = config, stages
        self.model = self.scorer = build_training_model(schema, model_config, config)
        self._linear = [part for part in self.model.modules() if isinstance(part, LinearPart)]
        self.optimizer = DenseAdam(
            self.model.named_parameters(),
            learning_rate=rate,
            clip_norm=config.clip_norm,
            linear=self._linear,
        )
        if config.average_steps:
            as_served = dataclasses.replace(config, compile=False)
            self.scorer = build_training_model(schema, model_config, as_served)
            self.optimizer.average = WeightAverage(self.scorer, config.average_steps)

    def forward(self, pulled: PulledPart) -> Logits | None:
        """Logits, or None if one is not finite. A part that is not trained is only scored."""
        inputs = pulled.ready()
        model = self.model if pulled.part.trains else self.scorer
        with self.stages("forward"), torch.set_grad_enabled(pulled.part.trains):
            trained_BT = scored_BT = forward_logits(model, inputs, self.config)
            if model is not self.scorer:
                with torch.no_grad():
                    scored_BT = forward_logits(self.scorer, inputs, self.config)
        finite = torch.isfinite(trained_BT).all() and (
            scored_BT is trained_BT or torch.isfinite(scored_BT).all()
        )
        return Logits(trained_BT, scored_BT) if finite else None

    def score(self, pulled: PulledPart) -> Tensor | None:
        """Logits of the weights that score, [B, T], or None if one is not finite."""
        with self.stages("forward"), torch.no_grad():
            scored_BT = forward_logits(self.scorer, pulled.ready(), self.config)
        return scored_BT if torch.isfinite(scored_BT).all() else None

    def train_step(
        self, pulled: PulledPart, logits_BT: Tensor, targets: Targets, *, is_new: bool = True
    ) -> bool:
        """Backward pass with clipping, and the optimizer step. False: a squared gradient is not finite;
        nothing was changed. `is_new`: no weight has learned from the batch; only then it tells which part of
        the model predicts better."""
        self._differentiate(pulled, logits_BT, targets)
        if not is_new:
            for parameter in (p for part in self._linear for p in part.mixture_parameters()):
                parameter.grad = None
        with self.stages("backward"):
            return clip_rows(gradients_of(pulled.inputs), self.config.clip_row_norm) and self.optimizer.step()

    def train_unscored(self, pulled: PulledPart, targets: Targets, *, is_new: bool = True) -> bool:
        """Train a batch whose scores are not recorded. `is_new`: as in `train_step`. False: something is not
        finite; nothing was changed."""
        with self.stages("forward"):
            logits_BT = forward_logits(self.model, pulled.ready(), self.config)
        return bool(torch.isfinite(logits_BT).all()) and self.train_step(
            pulled, logits_BT, targets, is_new=is_new
        )

    def backward(self, pulled: PulledPart, logits_BT: Tensor, targets: Targets, workers: int) -> bool:
        """Compute the gradients of this worker's part of a step that `workers` workers share.

        `targets.total_T` holds the weights of the whole step. Return False if the squared norm of a sum of
        `workers` gradients as large as these could overflow.
        """
        self._differentiate(pulled, logits_BT, targets)
        max_norm = _MAX_NORM / (2 * workers)
        return self.optimizer.norm() <= max_norm and largest_norm(gradients_of(pulled.inputs)) <= max_norm

    def is_finite(self) -> bool:
        """Whether all trained weights are finite."""
        return all(bool(torch.isfinite(p).all()) for p in self.model.parameters())

    def _differentiate(self, pulled: PulledPart, logits_BT: Tensor, targets: Targets) -> None:
        with self.stages("backward"):
            self.optimizer.zero_grad()
            backward(self.model, self.model.loss(pulled.inputs, logits_BT, targets), pulled.inputs)
            total_T = targets.weight_BT.sum(dim=0) if targets.total_T is None else targets.total_T
            for part in self._linear:
                newton.scale_gradients(part, total_T)


def gradients_of(inputs: Inputs) -> Mapping[str, Tensor]:
    """Gradients of the stacks that the model used: stack → [U, D]."""
    return {stack: rows_UD.grad for stack, rows_UD in inputs.rows.items() if rows_UD.grad is not None}

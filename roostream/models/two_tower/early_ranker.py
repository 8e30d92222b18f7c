"""Early-stage ranking (ROO paper §3.1, Fig. 4): the request tower once per request, then a small network over
both vectors.

    user tower ─► u (R) ─► gather to B ─┐
    item tower ─► v (B) ────────────────┴► [u, v, u ⊙ v] ─► mix layers ─► a tower per task

Letters: R requests, B candidates, T tasks, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roostream.models.config import TwoTowerConfig
from roostream.models.embedding_ops import gather_rows
from roostream.models.feature_encoders import pool_features
from roostream.models.inputs import Inputs
from roostream.models.layers import Mlp
from roostream.models.loss import loss, task_objectives
from roostream.models.model import Model, Targets
from roostream.models.ranker import Heads
from roostream.models.two_tower.towers import item_tower, user_tower
from roostream.schema.schema import Schema


class EarlyRanker(Model):
    """A logit for each candidate and task, from its request and item only."""

    def __init__(self, schema: Schema, config: TwoTowerConfig) -> None:
        super().__init__()
        self.user, self.item = user_tower(schema, config, config.width), item_tower(schema, config)
        self.mix = Mlp(3 * config.width, config.mix_layers)
        self.heads = Heads(
            self.mix.width, config.task_layers, [label.prior or config.prior for label in schema.labels]
        )
        self._tasks = task_objectives(schema)

    def forward(self, inputs: Inputs) -> Tensor:
        pooled = pool_features(inputs)
        u_BD = gather_rows([(self.user(inputs, pooled), inputs.request_index_B)])
        v_BD = self.item(inputs, pooled)
        return self.heads(self.mix(torch.cat([u_BD, v_BD, u_BD * v_BD], dim=1)))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        """Pointwise multi-task loss (roostream/models/loss.py)."""
        return loss(logits_BT, targets, self._tasks, inputs.groups)

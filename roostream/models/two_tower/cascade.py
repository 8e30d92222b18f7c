"""Retrieval and a late ranker as one model: one stack, one set of rows, one version for both.

    history, request ─► two towers ─► which items         (retrieval.py)
                     ─► ranker     ─► in which order      (roostream/models/ranker.py)

The logits are the ranker's. The loss is the sum of both losses; the two parts share only the rows.
"""

from __future__ import annotations

from torch import Tensor

from roostream.models.config import CascadeConfig
from roostream.models.inputs import Inputs
from roostream.models.model import Model, Targets
from roostream.models.ranker import Ranker
from roostream.models.two_tower.retrieval import Retrieval
from roostream.schema.schema import Schema


class Cascade(Model):
    """A candidate's logits depend on its own request only; the retrieval loss uses the other items of the
    batch."""

    def __init__(self, schema: Schema, config: CascadeConfig) -> None:
        super().__init__()
        self.ranker, self.retrieval = Ranker(schema, config), Retrieval(schema, config.retrieval)
        self._weight = config.retrieval_weight

    def forward(self, inputs: Inputs) -> Tensor:
        logits_BT: Tensor = self.ranker(inputs)
        return logits_BT

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        return self.ranker.loss(inputs, logits_BT, targets) + self._weight * self.retrieval.loss(
            inputs, logits_BT, targets
        )


def retrieval_model(model: Model) -> Retrieval | None:
    """The part of a model that computes request and item vectors; None if there is none."""
    if isinstance(model, Cascade):
        return model.retrieval
    return model if isinstance(model, Retrieval) else None

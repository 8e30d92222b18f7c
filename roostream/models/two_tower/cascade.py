"""Retrieval and a late ranker as one model: one stack, one set of rows, one version for both.

    history, request ─► two towers ─► which items        (roostream/models/two_tower/retrieval.py)
                     ─► ranker     ─► in which order      (roostream/models/ranker.py)

Its logits are the ranker's. What is learned is the sum of both losses; they share the rows and nothing else.
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
    """A candidate's logits depend on its own request only; the loss looks at the batch's other items (retrieval's)."""

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
    """What of a model makes vectors of requests and items; None: nothing does."""
    if isinstance(model, Cascade):
        return model.retrieval
    return model if isinstance(model, Retrieval) else None

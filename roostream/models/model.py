"""Interface of a model for the trainer and serving.

Letters: B candidates, T tasks.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

from torch import Tensor, nn

from roostream.models.config import LossName
from roostream.models.inputs import Inputs
from roostream.models.named_columns import ColumnNames


class Targets(NamedTuple):
    """Labels of a batch's candidates, on the model's device."""

    label_BT: Tensor  # float32
    weight_BT: Tensor  # float32; 0 = the label is not there
    # float32: of a correction's candidates, the label that it corrects; NaN = a sample's
    before_BT: Tensor | None = None
    # float32 in [0, 1]: share of positives known when the sample was made; None = 0
    known_BT: Tensor | None = None
    loss: LossName = "log"
    # Of the weights of the batch that this is a part of; None: this is all of it
    total_T: Tensor | None = None


class Model(nn.Module, abc.ABC):
    """Dense parameters and their use; rows of embedding tables come with the inputs.

    A candidate's logits depend on its own request only, so serving, which scores one request at a time,
    computes what training computed (guarantee G9). No state is kept between calls.
    """

    @abc.abstractmethod
    def forward(self, inputs: Inputs) -> Tensor:
        """Return logits_BT in the order of `schema.tasks`; their sigmoid is predicted and served."""

    @abc.abstractmethod
    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        """The scalar to minimize, with a graph to the parameters and to `inputs.rows`; 0 if all weights are
        0.

        `logits_BT` is the result of `forward` for these inputs, before a step. A kind whose loss needs more
        than logits (a softmax over the batch's items) recomputes it from `inputs`.
        """

    def column_names(self) -> dict[str, ColumnNames]:
        """The names of the columns of parameters that have one for each feature. With other features such a
        parameter keeps its named columns; one that is not named starts again from its initial value."""
        return {}

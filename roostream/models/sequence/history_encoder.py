"""A request's history as one vector: what a two-tower model knows of the user before it has seen an item.

Letters: R requests, S tokens, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from roostream.models.config import HstuSettings
from roostream.models.gather import gather
from roostream.models.inputs import Inputs
from roostream.models.parts import Part, Pooled
from roostream.models.sequence.history_tokens import HistoryTokens
from roostream.models.sequence.hstu import Hstu
from roostream.models.sequence.jagged_targets import build_jagged_targets
from roostream.schema.schema import Feature, Schema


class HistoryEncoder(Part):
    """[R, hstu_width]: HSTU's output of a learned token behind each history, at the time of the request (ROO paper, Fig. 5b).

    The token stands where the next item would: it sees the whole history, and is there also where the history is empty.
    """

    def __init__(self, schema: Schema, feature: Feature, config: HstuSettings) -> None:
        super().__init__()
        self.width = config.hstu_width
        self._name, self._max_history = feature.name, config.max_history
        self._time = next(iter(feature.time_columns), None)
        self.tokens = HistoryTokens(schema, feature, self.width)
        self.next = nn.Parameter(torch.zeros(1, self.width))
        self.hstu = Hstu(
            self.width,
            config.hstu_heads,
            config.hstu_layers,
            config.max_history,
            times=self._time is not None,
        )

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        sequence = inputs.sequences[self._name]
        num_requests = len(sequence.host_length_R)
        sequences = build_jagged_targets(
            sequence.host_length_R,
            None if self._time is None else sequence.gap_ms_L[self._time],
            np.ones(num_requests, dtype=np.int32),
            self._max_history,
            self.next.device,
        )
        token_XD = torch.cat([self.tokens(inputs), self.next.expand(num_requests, -1)])
        x_SD = self.hstu(gather([(token_XD, sequences.source_S)]), sequences)
        return gather([(x_SD, sequences.token_B)])

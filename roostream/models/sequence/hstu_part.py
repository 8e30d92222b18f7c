"""HSTU as a ranker's part: what each candidate is at the end of its request's history.

Letters: L entries of the histories, B candidates, S tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roostream.models.config import HstuConfig
from roostream.models.gather import gather
from roostream.models.inputs import Inputs
from roostream.models.parts import Part, Pooled
from roostream.models.sequence.history_tokens import HistoryTokens
from roostream.models.sequence.hstu import Hstu
from roostream.models.sequence.jagged_targets import build_jagged_targets
from roostream.schema.schema import Feature, Schema


class HstuTargets(Part):
    """[B, hstu_width]. A history and all candidates of its request go through HSTU once; a candidate sees the history and itself.

    An entry's token is made of its item and its action (history_tokens.py). A candidate's is its item's, through the same matrix,
    with a learned token in the action's place: its own action is what is to be predicted. Its other id features are added as
    context. Its item is its first feature in the history's table.
    """

    def __init__(self, schema: Schema, feature: Feature, config: HstuConfig) -> None:
        super().__init__()
        self.width = config.hstu_width
        self._feature, self._max_history = feature, config.max_history
        lists = schema.lists("nro")
        self._item = next((f.name for f in lists if f.table == feature.table), "")
        self._context = tuple(f.name for f in lists if f.name != self._item)
        self.tokens = HistoryTokens(schema, feature, self.width)
        self.unknown_action = nn.Parameter(torch.zeros(self.width))
        context_width = sum(schema.table_by_name[f.table].dim for f in lists if f.name != self._item)
        self.context = nn.Linear(context_width, self.width, bias=False) if context_width else None
        self._time = next(iter(feature.time_columns), None)
        self.hstu = Hstu(
            self.width,
            config.hstu_heads,
            config.hstu_layers,
            config.max_history,
            times=self._time is not None,
        )

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        sequence = inputs.sequences[self._feature.name]
        sequences = build_jagged_targets(
            sequence.host_length_R,
            None if self._time is None else sequence.gap_ms_L[self._time],
            inputs.num_candidates_R,
            self._max_history,
            inputs.request_index_B.device,
        )
        token_XD = torch.cat([self.tokens(inputs), self._targets(inputs, pooled)])
        x_SD = self.hstu(gather([(token_XD, sequences.source_S)]), sequences)
        return gather([(x_SD, sequences.token_B)])

    def _targets(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        if self._item:
            x_BD: Tensor = self.tokens.item(pooled[self._item]) + self.unknown_action
        else:
            x_BD = self.unknown_action.expand(len(inputs.request_index_B), -1)
        if self.context is not None:
            x_BD = x_BD + self.context(torch.cat([pooled[name] for name in self._context], dim=1))
        return x_BD

"""HSTU as a ranker's part: what each candidate is at the end of its request's history.

Letters: L entries of the histories, B candidates, S tokens, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.config import HstuConfig
from models.gather import gather
from models.inputs import Inputs, Sequence
from models.parts import Part, Pooled
from models.sequence.hstu import Hstu
from models.sequence.jagged_targets import build_jagged_targets
from roo.schema import Feature, Schema


class HstuTargets(Part):
    """[B, hstu_width]. A history and all candidates of its request go through HSTU once; a candidate sees the history and itself.

    An entry's token is its item's embedding and those of its id columns (the action), each through a matrix of its own, added
    up. A candidate's is its item's, through the same matrix, with a learned token in the actions' place: its own action is what
    is to be predicted. Its other id features are added as context. Its item is its first feature in the history's table.
    """

    def __init__(self, schema: Schema, feature: Feature, config: HstuConfig) -> None:
        super().__init__()

        def dim(table: str) -> int:
            return schema.table_by_name[table].dim

        self.width = config.hstu_width
        self._feature, self._max_history = feature, config.max_history
        self._stacks = {c: schema.table_by_name[t].stack for c, t in (("", feature.table), *feature.column_tables.items())}
        lists = schema.lists("nro")
        self._item = next((f.name for f in lists if f.table == feature.table), "")
        self._context = tuple(f.name for f in lists if f.name != self._item)
        self.item = nn.Linear(dim(feature.table), self.width)
        self.columns = nn.ModuleDict(
            {c: nn.Linear(dim(table), self.width, bias=False) for c, table in feature.column_tables.items()}
        )
        self.unknown_action = nn.Parameter(torch.zeros(self.width))
        context_width = sum(dim(f.table) for f in lists if f.name != self._item)
        self.context = nn.Linear(context_width, self.width, bias=False) if context_width else None
        self._time = next(iter(feature.time_columns), None)
        self.hstu = Hstu(self.width, config.hstu_heads, config.hstu_layers, config.max_history, times=self._time is not None)

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        sequence = inputs.sequences[self._feature.name]
        sequences = build_jagged_targets(
            sequence.host_length_R,
            None if self._time is None else sequence.gap_ms_L[self._time],
            inputs.num_candidates_R,
            self._max_history,
            inputs.request_index_B.device,
        )
        token_XD = torch.cat([self._entries(inputs, sequence), self._targets(inputs, pooled)])
        x_SD = self.hstu(gather([(token_XD, sequences.source_S)]), sequences)
        return gather([(x_SD, sequences.token_B)])

    def _entries(self, inputs: Inputs, sequence: Sequence) -> Tensor:
        index_L = {"": sequence.index_L, **sequence.column_L}
        x_LD: Tensor = self.item(gather([(inputs.rows[self._stacks[""]], index_L[""])]))
        for column, layer in self.columns.items():
            x_LD = x_LD + layer(gather([(inputs.rows[self._stacks[column]], index_L[column])]))
        return x_LD

    def _targets(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        if self._item:
            x_BD: Tensor = self.item(pooled[self._item]) + self.unknown_action
        else:
            x_BD = self.unknown_action.expand(len(inputs.request_index_B), -1)
        if self.context is not None:
            x_BD = x_BD + self.context(torch.cat([pooled[name] for name in self._context], dim=1))
        return x_BD

"""HSTU encoders of a history: tokens of entries, a vector per request (two towers), an output per candidate
(ranker).

Letters: R requests, L entries of the histories, B candidates, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from roostream.models.config import HstuConfig, HstuSettings
from roostream.models.embedding_ops import gather_rows
from roostream.models.feature_encoders import FeatureEncoder, PooledFeatures, pooled_columns, row_columns
from roostream.models.inputs import Inputs
from roostream.models.layers import module_key
from roostream.models.named_columns import ColumnNames, with_prefix
from roostream.models.sequence.hstu import Hstu
from roostream.models.sequence.jagged_sequences import build_jagged_sequences
from roostream.schema.schema import Feature, Schema


class HistoryTokenizer(nn.Module):
    """Makes a token of each history entry, [L, D]: the sum of its projected item and id columns (such as the
    action). Entries that requests share are computed once."""

    def __init__(self, schema: Schema, feature: Feature, width: int) -> None:
        super().__init__()
        self._name = feature.name
        tables = {
            c: schema.table_by_name[t] for c, t in (("", feature.table), *feature.column_tables.items())
        }
        self._stacks = {column: table.stack for column, table in tables.items()}
        self._row_columns = {c: row_columns(schema, c, table.name) for c, table in tables.items()}
        self.item = nn.Linear(tables[""].dim, width)
        self.columns = nn.ModuleDict(
            {module_key(c): nn.Linear(table.dim, width, bias=False) for c, table in tables.items() if c}
        )

    def column_names(self) -> dict[str, ColumnNames]:
        return {
            f"columns.{module_key(column)}.weight" if column else "item.weight": (None, columns)
            for column, columns in self._row_columns.items()
        }

    def forward(self, inputs: Inputs) -> Tensor:
        sequence = inputs.sequences[self._name]
        shared = sequence.shared_entries
        if shared is None:
            return self._tokens(inputs, sequence.index_L, sequence.column_L)
        return gather_rows([(self._tokens(inputs, shared.index_V, shared.column_V), shared.at_L)])

    def _tokens(self, inputs: Inputs, index_L: Tensor, column_L: Mapping[str, Tensor]) -> Tensor:
        x_LD: Tensor = self.item(gather_rows([(inputs.rows[self._stacks[""]], index_L)]))
        for column, layer in zip(filter(None, self._stacks), self.columns.values(), strict=True):
            x_LD = x_LD + layer(gather_rows([(inputs.rows[self._stacks[column]], column_L[column])]))
        return x_LD


class HstuEncoder(FeatureEncoder):
    """Base of the encoders that pass a history and its targets through HSTU; `forward` returns the
    targets' outputs."""

    def __init__(self, schema: Schema, feature: Feature, config: HstuSettings) -> None:
        super().__init__()
        self.width = config.hstu_width
        self._feature, self._max_history = feature, config.max_history
        self._time = next(iter(feature.time_columns), None)
        self.tokens = HistoryTokenizer(schema, feature, self.width)

    def _add_hstu(self, config: HstuSettings) -> None:
        """Called last, so that parameters are registered in the order of checkpoints."""
        times = self._time is not None
        self.hstu = Hstu(self.width, config.hstu_heads, config.hstu_layers, config.max_history, times=times)

    def column_names(self) -> dict[str, ColumnNames]:
        return with_prefix("tokens", self.tokens.column_names())

    def _encode(self, inputs: Inputs, target_BD: Tensor, num_targets_R: np.ndarray) -> Tensor:
        """[B, width]. `target_BD`: tokens of the targets; `num_targets_R`: int32, of each request."""
        sequence = inputs.sequences[self._feature.name]
        sequences = build_jagged_sequences(
            sequence.host_length_R,
            None if self._time is None else sequence.gap_ms_L[self._time],
            num_targets_R,
            self._max_history,
            target_BD.device,
        )
        token_XD = torch.cat([self.tokens(inputs), target_BD])
        x_SD = self.hstu(gather_rows([(token_XD, sequences.source_S)]), sequences)
        return gather_rows([(x_SD, sequences.token_B)])


class HistoryEncoder(HstuEncoder):
    """[R, hstu_width]: HSTU's output of a learned token after each history, at the time of the request (ROO
    paper, Fig. 5b).

    The token stands where the next item would be: it sees the whole history, and exists even if the history
    is empty.
    """

    def __init__(self, schema: Schema, feature: Feature, config: HstuSettings) -> None:
        super().__init__(schema, feature, config)
        self.next = nn.Parameter(torch.zeros(1, self.width))
        self._add_hstu(config)

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        num_requests = len(inputs.num_candidates_R)
        return self._encode(inputs, self.next.expand(num_requests, -1), np.ones(num_requests, dtype=np.int32))


class HstuTargetEncoder(HstuEncoder):
    """[B, hstu_width]. History and all candidates of a request pass through HSTU once; a candidate sees the
    history and itself.

    A candidate's token is that of its item, with the same projection as entries, plus a learned token in
    place of the action, which is to be predicted. Other id features are added as context. The item is the
    first feature in the history's table.
    """

    def __init__(self, schema: Schema, feature: Feature, config: HstuConfig) -> None:
        super().__init__(schema, feature, config)
        lists = schema.lists("nro")
        self._item = next((f.name for f in lists if f.table == feature.table), "")
        self._context = tuple(f.name for f in lists if f.name != self._item)
        self.unknown_action = nn.Parameter(torch.zeros(self.width))
        self._context_columns = pooled_columns(schema, (f for f in lists if f.name != self._item))
        context_width = len(self._context_columns)
        self.context = nn.Linear(context_width, self.width, bias=False) if context_width else None
        self._add_hstu(config)

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        return self._encode(inputs, self._targets(inputs, pooled), inputs.num_candidates_R)

    def column_names(self) -> dict[str, ColumnNames]:
        names = super().column_names()
        return names if self.context is None else {**names, "context.weight": (None, self._context_columns)}

    def _targets(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        """Tokens of the candidates, [B, width]."""
        if self._item:
            x_BD: Tensor = self.tokens.item(pooled[self._item]) + self.unknown_action
        else:
            x_BD = self.unknown_action.expand(len(inputs.request_index_B), -1)
        if self.context is not None:
            x_BD = x_BD + self.context(torch.cat([pooled[name] for name in self._context], dim=1))
        return x_BD

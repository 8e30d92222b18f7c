"""Entries of a history as tokens.

Letters: L entries of the histories, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from roostream.models.gather import gather
from roostream.models.inputs import Inputs
from roostream.schema.schema import Feature, Schema


class HistoryTokens(nn.Module):
    """[L, D]: an entry's item and its id columns (its action), each embedding through a matrix of its own, added up; where
    requests share entries, once an entry."""

    def __init__(self, schema: Schema, feature: Feature, width: int) -> None:
        super().__init__()
        self._name = feature.name
        tables = {
            c: schema.table_by_name[t] for c, t in (("", feature.table), *feature.column_tables.items())
        }
        self._stacks = {column: table.stack for column, table in tables.items()}
        self.item = nn.Linear(tables[""].dim, width)
        self.columns = nn.ModuleDict(
            {c: nn.Linear(table.dim, width, bias=False) for c, table in tables.items() if c}
        )

    def forward(self, inputs: Inputs) -> Tensor:
        sequence = inputs.sequences[self._name]
        kept = sequence.kept
        if kept is None:
            return self._tokens(inputs, sequence.index_L, sequence.column_L)
        return gather([(self._tokens(inputs, kept.index_V, kept.column_V), kept.at_L)])

    def _tokens(self, inputs: Inputs, index_L: Tensor, column_L: Mapping[str, Tensor]) -> Tensor:
        x_LD: Tensor = self.item(gather([(inputs.rows[self._stacks[""]], index_L)]))
        for column, layer in self.columns.items():
            x_LD = x_LD + layer(gather([(inputs.rows[self._stacks[column]], column_L[column])]))
        return x_LD

"""What a model is put together from: parts that read `Inputs` and give a block of columns, R or B rows of it.

A new module (UserArch, HSTU's target output) is one more `Part`; `request_parts` and `candidate_parts` say which ones a
schema and a ranker's configuration ask for, and models concatenate what they get.

Letters: R requests, B candidates, G floats, N sequence entries, D width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import TargetAttention
from models.config import RankerConfig
from models.inputs import Inputs, Sequence
from roo.schema import Feature, Schema
from roo.transform import output_names

Side = Literal["ro", "nro"]
Pooled = dict[str, Tensor]


def pool(inputs: Inputs) -> Pooled:
    """Every list feature pooled, [R, D] or [B, D]: the mean (0 of nothing), for weighted ids the sum by weight.

    The semantics of TorchRec's EmbeddingBagCollection, but that a weight counts as its asinh, as floats do (`Floats`): a
    weight in any unit (a price, a duration) can't blow a layer up. One `embedding_bag` a stack and way of pooling.
    """
    out: Pooled = {}
    for bags in inputs.bags:
        mode = "mean" if bags.weight_L is None else "sum"
        weight_L = None if bags.weight_L is None else torch.asinh(bags.weight_L.to(inputs.rows[bags.stack].dtype))
        x_SD = F.embedding_bag(
            bags.index_L,
            inputs.rows[bags.stack],
            bags.offset_S1,
            mode=mode,
            per_sample_weights=weight_L,
            include_last_offset=True,
        )
        out.update(zip(bags.features, torch.split(x_SD, list(bags.sizes)), strict=True))
    return out


class Part(nn.Module):
    """Gives [R, width] as a request part, [B, width] as a candidate part; a row depends on its own request only.

    Called once a forward. Parts share nothing but `inputs` and `pooled`, and change neither.
    """

    width: int

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        raise NotImplementedError


class Floats(Part):
    """Floats and presence bits of a side: asinh keeps small numbers and takes the logarithm of large ones.

    So a raw count, age or price in any unit can't blow a layer up; what else a float needs is declared as a transform.
    """

    def __init__(self, schema: Schema, side: Side) -> None:
        super().__init__()
        self.width = len(output_names(schema, side)) + len(getattr(schema, side))
        self._side = side

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        if self._side == "ro":
            x, present = inputs.ro_float_RG, inputs.ro_present_RP
        else:
            x, present = inputs.nro_float_BG, inputs.nro_present_BP
        return torch.cat([torch.asinh(x), present.to(x.dtype)], dim=1)


class Embeddings(Part):
    """The pooled list features of a side, side by side."""

    def __init__(self, schema: Schema, side: Side) -> None:
        super().__init__()
        self._features = tuple(f.name for f in schema.lists(side))
        self.width = sum(schema.table_by_name[f.table].dim for f in schema.lists(side))

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        return torch.cat([pooled[name] for name in self._features], dim=1)


class HistoryAttention(Part):
    """Target attention to one request-only sequence; the candidate's pooled id features ask.

    An entry is its row, the rows of its id columns that have a table, and a learned vector of each time column's bucket
    (an id column without a table is carried in the data and not modelled).
    """

    def __init__(self, schema: Schema, feature: Feature, config: RankerConfig) -> None:
        super().__init__()
        self._feature = feature
        self._stacks = {c: schema.table_by_name[t].stack for c, t in (("", feature.table), *feature.column_tables.items())}
        self._queries = tuple(f.name for f in schema.lists("nro"))
        query_width = sum(schema.table_by_name[f.table].dim for f in schema.lists("nro"))
        dims = [schema.table_by_name[t].dim for t in (feature.table, *feature.column_tables.values())]
        time_width = dims[0]
        self.times = nn.ModuleDict({c: nn.Embedding(config.time_buckets, time_width) for c in feature.time_columns})
        self._last_bucket = config.time_buckets - 1
        entry_width = sum(dims) + time_width * len(self.times)
        self.attention = TargetAttention(query_width, entry_width, config.history_width, config.history_heads)
        self.width = config.history_width

    def forward(self, inputs: Inputs, pooled: Pooled) -> Tensor:
        sequence = inputs.sequences[self._feature.name]
        query_BQ = torch.cat([pooled[name] for name in self._queries], dim=1)
        mask_RN = sequence.mask_RN()
        return self.attention(query_BQ, self._entries(inputs, sequence, mask_RN), mask_RN, inputs.groups)

    def _entries(self, inputs: Inputs, sequence: Sequence, mask_RN: Tensor | None) -> Tensor:
        shape_RN = (len(sequence.length_R), sequence.longest)
        index_L = {"": sequence.index_L, **sequence.column_L}
        blocks = [_gather(inputs.rows[stack], _pad(index_L[c], shape_RN, mask_RN)) for c, stack in self._stacks.items()]
        for column, table in self.times.items():
            bucket_L = sequence.bucket_L[column].clamp_max(self._last_bucket)
            blocks.append(table(_pad(bucket_L, shape_RN, mask_RN)))
        return torch.cat(blocks, dim=-1)


def _pad(index_L: Tensor, shape_RN: tuple[int, int], mask_RN: Tensor | None) -> Tensor:
    """→ int64 [R, N]; padding points at 0, any row, since what is made of it is masked."""
    if mask_RN is None:
        return index_L.view(shape_RN)
    return index_L.new_zeros(shape_RN).masked_scatter_(mask_RN, index_L)


def _gather(rows_UD: Tensor, index_RN: Tensor) -> Tensor:
    """[U, D], [R, N] → [R, N, D]; U may be 0 where N is."""
    return rows_UD.index_select(0, index_RN.reshape(-1)).view(*index_RN.shape, rows_UD.shape[1])


def request_parts(schema: Schema, config: RankerConfig) -> dict[str, Part]:
    """Name → part that runs once a request; parts that would have no columns are left out."""
    parts: dict[str, Part] = {"floats": Floats(schema, "ro"), "embeddings": Embeddings(schema, "ro")}
    return {name: part for name, part in parts.items() if part.width}


def candidate_parts(schema: Schema, config: RankerConfig) -> dict[str, Part]:
    """Name → part that runs once a candidate."""
    parts: dict[str, Part] = {"floats": Floats(schema, "nro"), "embeddings": Embeddings(schema, "nro")}
    if config.history_attention and schema.lists("nro"):
        for f in schema.lists("ro"):
            if f.kind == "sequence":
                parts[f"attention_{f.name}"] = HistoryAttention(schema, f, config)
    return {name: part for name, part in parts.items() if part.width}

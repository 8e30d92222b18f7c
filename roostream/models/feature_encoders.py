"""Feature encoders: modules that read `Inputs` and return a block of columns for requests (R rows) or
candidates (B rows).

UserArch compresses many request-only embeddings to a few, once per request (ROO paper §3.2, eq. 1 and 2).

Letters: R requests, B candidates, U distinct requests, G floats, N sequence entries, D width; UserArch: I
embeddings in, C width of each, O embeddings out, P width of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from roostream.models.attention import TargetAttention
from roostream.models.config import RankerConfig
from roostream.models.embedding_ops import gather_rows, pool_bags
from roostream.models.inputs import Inputs, Sequence, SharedEntries
from roostream.models.layers import Mlp, module_key
from roostream.models.named_columns import ColumnNames, numbered, with_prefix
from roostream.online.counters import sources_of
from roostream.schema.counter_plan import declared
from roostream.schema.schema import Feature, Schema
from roostream.wire.transform import output_names

Side = Literal["ro", "nro"]
PooledFeatures = dict[str, Tensor]

_RATE_SCALE = 8.0


def float_kinds(schema: Schema, side: Side) -> list[str]:
    """What each float of a side after transforms is: the last transform's `op`, `rate` for a counter's rate,
    else empty."""
    counters, sources, names = declared(schema), sources_of(schema, side), output_names(schema, side)
    last_op = {t.output: t.op for t in schema.transforms}
    kinds = []
    for name in names:
        counter = counters.get(sources.get(name, ""))
        is_rate = counter is not None and counter.aggregation == "rate"
        kinds.append(last_op.get(name, "rate" if is_rate else ""))
    return kinds


class RateScale(nn.Module):
    """Multiplies rates of counters by 1 + `more`, which is 8 in a new model.

    A click rate varies by a few percent, other floats by about 1, so a network and the prior of a linear
    model would all but ignore it (docs/decisions/0117). Commits from before this part continue with
    `more` = 0, which leaves the rates as they are.
    """

    more: Tensor
    ro_is_rate_G: Tensor
    nro_is_rate_G: Tensor

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.register_buffer("more", torch.tensor([_RATE_SCALE - 1]))
        for side in ("ro", "nro"):
            is_rate_G = torch.tensor([float(kind == "rate") for kind in float_kinds(schema, side)])
            self.register_buffer(f"{side}_is_rate_G", is_rate_G, persistent=False)

    def of(self, side: Side) -> Tensor:
        """By what each float of a side is multiplied, [G]."""
        return 1 + self.more * (self.ro_is_rate_G if side == "ro" else self.nro_is_rate_G)

    def forward(self, inputs: Inputs) -> Inputs:
        """The same inputs with other floats."""
        ro_RG, nro_BG = inputs.ro_float_RG * self.of("ro"), inputs.nro_float_BG * self.of("nro")
        return dataclasses.replace(inputs, ro_float_RG=ro_RG, nro_float_BG=nro_BG)


def pool_features(inputs: Inputs) -> PooledFeatures:
    """Pool every list feature, [R, D] or [B, D]: the mean (0 if empty), for weighted ids the weighted sum.

    As TorchRec's EmbeddingBagCollection, except that a weight counts as its asinh, as floats do (inputs.py).
    Features of a stack that pool alike are pooled together.
    """
    out: PooledFeatures = {}
    for bags in inputs.bags:
        x_SD = pool_bags(inputs.rows[bags.stack], bags.index_L, bags.offset_S1, bags.weight_L)
        out.update(zip(bags.features, torch.split(x_SD, list(bags.sizes)), strict=True))
    return out


def normalize_pooled(pooled: PooledFeatures) -> PooledFeatures:
    """Normalize each vector to mean 0 and variance 1 (LayerNorm without gains, Ba et al. 2016; for rows:
    Slipstream, §3.5).

    Empty pools stay 0. Vectors of width 1 stay unchanged, because normalization would erase them.
    """
    return {
        name: nn.functional.layer_norm(x_SD, x_SD.shape[1:]) if x_SD.shape[1] > 1 else x_SD
        for name, x_SD in pooled.items()
    }


class FeatureEncoder(nn.Module):
    """Returns [R, width] for requests or [B, width] for candidates; a row depends on its own request only.

    Called once per forward pass. Encoders share only `inputs` and `pooled`, and change neither.
    """

    width: int

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        raise NotImplementedError

    def output_columns(self, name: str) -> tuple[str, ...]:
        """Names of the output's columns. `name`: of this encoder in its model."""
        return numbered(name, self.width)

    def column_names(self) -> dict[str, ColumnNames]:
        """As `Model.column_names`."""
        return {}


class FloatEncoder(FeatureEncoder):
    """Floats and presence bits of a side."""

    def __init__(self, schema: Schema, side: Side) -> None:
        super().__init__()
        self.columns = (
            *(f"{side} {name}" for name in output_names(schema, side)),
            *(f"{side} {f.name} is present" for f in (*schema.floats(side), *schema.lists(side))),
        )
        self.width = len(self.columns)
        self._side = side

    def output_columns(self, name: str) -> tuple[str, ...]:
        return self.columns

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        if self._side == "ro":
            x, present = inputs.ro_float_RG, inputs.ro_present_RP
        else:
            x, present = inputs.nro_float_BG, inputs.nro_present_BP
        return torch.cat([x, present.to(x.dtype)], dim=1)


class EmbeddingEncoder(FeatureEncoder):
    """Pooled list features of a side, side by side."""

    def __init__(self, schema: Schema, side: Side) -> None:
        super().__init__()
        self._features = tuple(f.name for f in schema.lists(side))
        self._columns = pooled_columns(schema, schema.lists(side))
        self.width = len(self._columns)

    def output_columns(self, name: str) -> tuple[str, ...]:
        return self._columns

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        return torch.cat([pooled[name] for name in self._features], dim=1)


def output_columns(parts: nn.ModuleDict) -> tuple[str, ...]:
    """Names of the columns of encoders side by side."""
    columns: list[str] = []
    for name, part in parts.items():
        assert isinstance(part, FeatureEncoder)
        columns += part.output_columns(name)
    return tuple(columns)


def column_names(parts: nn.ModuleDict) -> dict[str, ColumnNames]:
    """As `Model.column_names`, of encoders side by side."""
    names: dict[str, ColumnNames] = {}
    for name, part in parts.items():
        assert isinstance(part, FeatureEncoder)
        names |= with_prefix(name, part.column_names())
    return names


def pooled_columns(schema: Schema, features: Iterable[Feature]) -> tuple[str, ...]:
    """Names of the columns of pooled lists, side by side."""
    return tuple(name for f in features for name in row_columns(schema, f.name, f.table))


def row_columns(schema: Schema, feature: str, table: str) -> tuple[str, ...]:
    """Names of the columns of a row. A table that becomes wider keeps its columns."""
    return numbered(f"{feature} of {table}", schema.table_by_name[table].dim)


class HistoryAttentionEncoder(FeatureEncoder):
    """Target attention to one request-only sequence, with the candidate's pooled id features as query.

    An entry consists of its row, the rows of its id columns that have a table, and a learned vector for the
    bucket of each time column. Id columns without a table are not modeled.
    """

    def __init__(self, schema: Schema, feature: Feature, config: RankerConfig) -> None:
        super().__init__()
        self.feature = feature
        self.stacks = {
            c: schema.table_by_name[t].stack for c, t in (("", feature.table), *feature.column_tables.items())
        }
        self._queries = tuple(f.name for f in schema.lists("nro"))
        query_width = sum(schema.table_by_name[f.table].dim for f in schema.lists("nro"))
        dims = [schema.table_by_name[t].dim for t in (feature.table, *feature.column_tables.values())]
        time_width = dims[0]
        self.times = nn.ModuleDict(
            {module_key(c): nn.Embedding(config.time_buckets, time_width) for c in feature.time_columns}
        )
        self._last_bucket = config.time_buckets - 1
        entry_width = sum(dims) + time_width * len(self.times)
        of_rows = (("entry", feature.table), *feature.column_tables.items())
        self._entry_columns = (
            *(name for c, t in of_rows for name in row_columns(schema, c, t)),
            *(name for c in feature.time_columns for name in numbered(c, time_width)),
        )
        self.attention = TargetAttention(query_width, entry_width, config.history_width, config.history_heads)
        self.width = config.history_width
        self._query_columns = pooled_columns(schema, schema.lists("nro"))

    def column_names(self) -> dict[str, ColumnNames]:
        return {
            "attention.query.weight": (None, self._query_columns),
            "attention.key_value.weight": (None, self._entry_columns),
        }

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        sequence = inputs.sequences[self.feature.name]
        query_BQ = torch.cat([pooled[name] for name in self._queries], dim=1)
        if sequence.shared_entries is not None:
            return self.attention.to_keys(
                query_BQ, self._keys(inputs, sequence, sequence.shared_entries), sequence, inputs.groups
            )
        sources = self._rows(inputs, {"": sequence.index_L, **sequence.column_L})
        return self.attention(
            query_BQ, gather_rows([*sources, *self._times(sequence)]), sequence, inputs.groups
        )

    def _rows(self, inputs: Inputs, index_L: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        return [(inputs.rows[stack], index_L[c]) for c, stack in self.stacks.items()]

    def _times(self, sequence: Sequence) -> list[tuple[Tensor, Tensor]]:
        sources = []
        for column, table in zip(self.feature.time_columns, self.times.values(), strict=True):
            assert isinstance(table, nn.Embedding)
            sources.append((table.weight, sequence.bucket_L[column].clamp_max(self._last_bucket)))
        return sources

    def _keys(self, inputs: Inputs, sequence: Sequence, shared: SharedEntries) -> Tensor:
        """Keys and values of all entries, [L, 2 · width], as from `attention.key_value`.

        The part from rows is computed once per shared entry, the part from times once per bucket; each entry
        sums its own.
        """
        row_VE = gather_rows(self._rows(inputs, {"": shared.index_V, **shared.column_V}))
        weight, bias = self.attention.key_value.weight, self.attention.key_value.bias
        keys_LD2 = gather_rows(
            [(nn.functional.linear(row_VE, weight[:, : row_VE.shape[1]], bias), shared.at_L)]
        )
        first = row_VE.shape[1]
        for table, bucket_L in self._times(sequence):
            of_bucket = nn.functional.linear(table, weight[:, first : first + table.shape[1]])
            keys_LD2 = keys_LD2 + gather_rows([(of_bucket, bucket_L)])
            first += table.shape[1]
        return keys_LD2


class LinearCompression(nn.Module):
    """Linear compression embedding: X [R, C, I] → [R, O, P], no activation.

    f(X) = g(X) W + b with g(X) [R · C, I], W [I, O], b [O], as [R, O, C]; then f'(X) = f W' + b' with W' [C,
    P], b' [P].
    """

    def __init__(self, num_in: int, width_in: int, num_out: int, width_out: int) -> None:
        super().__init__()
        self.across = nn.Linear(num_in, num_out)
        self.each = nn.Linear(width_in, width_out)

    def forward(self, x_RCI: Tensor) -> Tensor:
        out: Tensor = self.each(self.across(x_RCI).transpose(1, 2))
        return out


class UserArch(FeatureEncoder):
    """[U, O · P] from a request's pooled lists and floats, once for equal requests (`Inputs.once`); P = C.

    Lists of a width other than C are projected first; all floats become one embedding. O is at most I.
    """

    def __init__(self, schema: Schema, config: RankerConfig) -> None:
        super().__init__()
        width = config.userarch_width
        dims = {f.name: schema.table_by_name[f.table].dim for f in schema.lists("ro")}
        self._names = tuple(dims)
        self.widen = nn.ModuleDict(
            {module_key(name): nn.Linear(dim, width) for name, dim in dims.items() if dim != width}
        )
        self._row_columns = {f.name: row_columns(schema, f.name, f.table) for f in schema.lists("ro")}
        self._floats = FloatEncoder(schema, "ro") if schema.floats("ro") else None
        self.tokens = (*dims, *(["floats"] if self._floats else []))
        self.dense = Mlp(self._floats.width, (width,)) if self._floats else None
        num_in = len(self.tokens)
        num_out = min(config.userarch_embeddings, num_in)
        self.compression = LinearCompression(num_in, width, num_out, width) if num_in else None
        self.width = num_out * width

    def column_names(self) -> dict[str, ColumnNames]:
        names: dict[str, ColumnNames] = {
            f"widen.{key}.weight": (None, self._row_columns[name])
            for name in self._names
            if (key := module_key(name)) in self.widen
        }
        if self._floats is not None:
            names["dense.layers.0.weight"] = (None, self._floats.columns)
        if self.compression is not None:
            names["compression.across.weight"] = (None, self.tokens)
        return names

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        once = {name: inputs.once(pooled[name]) for name in self._names}
        tokens = [
            self.widen[key](once[name]) if (key := module_key(name)) in self.widen else once[name]
            for name in self._names
        ]
        if self._floats is not None and self.dense is not None:
            tokens.append(self.dense(inputs.once(self._floats(inputs, pooled))))
        assert self.compression is not None, "without a request feature there is nothing to compress"
        return self.compression(torch.stack(tokens, dim=2)).flatten(1)

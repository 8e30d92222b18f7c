"""TorchRec's own `DLRM` and `DLRM_DCN` (torchrec.models.dlrm) over rows that live on the shards.

    floats, presence ─► dense arch ───────────────┐
    lists ─► as_kjt ─► bags, R or B of each list ─┴► interaction of [B, F + 1, D] ─► over arch ─► logits_BT

The modules are TorchRec's, unchanged. A request-only list is pooled once per request; TorchRec's inverse
indices give each candidate its bag. Imported only to build a model of these kinds, because TorchRec is an
optional package.

Letters: R requests, B candidates, F list features, D their width, G floats and presence bits, T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from roostream.errors import SchemaError, nearest
from roostream.models.config import DcnConfig, DlrmConfig
from roostream.models.custom.torchrec_bags import (
    RemoteEmbeddingBagCollection,
    as_kjt,
    rows_of,
    tables_of_features,
)
from roostream.models.feature_encoders import FloatEncoder
from roostream.models.inputs import Inputs
from roostream.models.named_columns import ColumnNames
from roostream.models.ranker import RankingModel
from roostream.schema.schema import Schema
from roostream.schema.settings import setting_error


class Dlrm(RankingModel):
    """TorchRec's `DLRM`, or `DLRM_DCN` for a `DcnConfig`, as a model of this project: a logit for each
    candidate and task.

    Raises:
        SchemaError: no list feature, an unknown one in `features`, or tables of several widths.
        ConfigError: a width of `config` is not that of the tables, or not the number of tasks.
    """

    def __init__(self, schema: Schema, config: DlrmConfig) -> None:
        super().__init__()
        tables = _tables(schema, config)
        width = _width(schema, config, tables)
        self._floats = (FloatEncoder(schema, "ro"), FloatEncoder(schema, "nro"))
        parts = {
            "embedding_bag_collection": MixedBagCollection(tables, schema),
            "dense_in_features": sum(part.width for part in self._floats),
            "dense_arch_layer_sizes": _layers(
                "dense_arch_layer_sizes",
                config.dense_arch_layer_sizes,
                (64, width),
                "the width of the tables",
            ),
            "over_arch_layer_sizes": _layers(
                "over_arch_layer_sizes",
                config.over_arch_layer_sizes,
                (64, 32, len(schema.tasks)),
                "the number of labels",
            ),
        }
        if isinstance(config, DcnConfig):
            parts |= {"dcn_num_layers": config.dcn_num_layers, "dcn_low_rank_dim": config.dcn_low_rank_dim}
            self.dlrm: DLRM = DLRM_DCN(**parts)
        else:
            self.dlrm = DLRM(**parts)
        priors = [label.prior or config.prior for label in schema.labels]
        self._biases = [math.log(prior / (1 - prior)) for prior in priors]
        self.add_parts(schema, config)

    def adjust_initial_parameters(self) -> None:
        """Untrained, each task predicts its prior."""
        last = self.dlrm.over_arch.model[-1]
        last.weight.zero_()
        last.bias.copy_(torch.tensor(self._biases))

    def forward(self, inputs: Inputs) -> Tensor:
        """Return logits_BT in the order of `schema.tasks`."""
        if not len(inputs.request_index_B):  # TorchRec's modules need a candidate
            last: Tensor = self.dlrm.over_arch.model[-1].bias
            return last.expand(0, -1)
        inputs = self.scaled(inputs)
        with rows_of(inputs):
            logits_BT: Tensor = self.dlrm(self.dense_features(inputs), as_kjt(inputs))
        return self.with_parts(inputs, logits_BT)

    def column_names(self) -> dict[str, ColumnNames]:
        """Weights over pairs of lists have no names: they start again when the lists change."""
        first = next(name for name, weight in self.dlrm.dense_arch.named_parameters() if weight.dim() == 2)
        columns = tuple(column for part in self._floats for column in part.columns)
        return {f"dlrm.dense_arch.{first}": (None, columns), **self.linear_column_names()}

    def dense_features(self, inputs: Inputs) -> Tensor:
        """[B, G]: floats and presence bits of each candidate's request, then its own."""
        ro_RG, nro_BG = (part(inputs, {}) for part in self._floats)
        return torch.cat([ro_RG.index_select(0, inputs.request_index_B), nro_BG], dim=1)


class MixedBagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """Drop-in for `torchrec.EmbeddingBagCollection`: the mean of each list, of `weighted_ids` the weighted
    sum.

    TorchRec's collection weights all of its features or none, so this is one collection of each sort.
    """

    def __init__(self, tables: dict[str, str], schema: Schema) -> None:
        """`tables`: feature → table. Raises SchemaError: as RemoteEmbeddingBagCollection."""
        super().__init__()
        weighted = {f.name for side in ("ro", "nro") for f in schema.lists(side) if f.kind == "weighted_ids"}
        self._parts = [
            RemoteEmbeddingBagCollection(configs, schema, is_weighted)
            for is_weighted, pooling in ((False, PoolingType.MEAN), (True, PoolingType.SUM))
            if (
                configs := _configs(
                    [f for f in tables if (f in weighted) == is_weighted], tables, schema, pooling
                )
            )
        ]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """[B, F · D], means before sums. Raises SchemaError: as RemoteEmbeddingBagCollection."""
        pooled = [part(features) for part in self._parts]
        return KeyedTensor(
            keys=[key for config in self.embedding_bag_configs() for key in config.feature_names],
            length_per_key=[width for part in pooled for width in part.length_per_key()],
            values=torch.cat([part.values() for part in pooled], dim=1),
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return [config for part in self._parts for config in part.embedding_bag_configs()]

    def is_weighted(self) -> bool:
        return any(part.is_weighted() for part in self._parts)

    @property
    def device(self) -> torch.device:
        """Device of the current rows; CPU outside `rows_of`."""
        return self._parts[0].device


def _configs(
    features: Sequence[str], tables: dict[str, str], schema: Schema, pooling: PoolingType
) -> list[EmbeddingBagConfig]:
    """A config for each table that these features use."""
    of_table: dict[str, list[str]] = {}
    for feature in features:
        of_table.setdefault(tables[feature], []).append(feature)
    return [
        EmbeddingBagConfig(
            name=table,
            embedding_dim=schema.table_by_name[table].dim,
            num_embeddings=1,
            feature_names=names,
            pooling=pooling,
        )
        for table, names in of_table.items()
    ]


def _tables(schema: Schema, config: DlrmConfig) -> dict[str, str]:
    """Key of `as_kjt` → table, of the features that the model uses."""
    every = tables_of_features(schema)
    for name in config.features:
        if name not in every:
            raise SchemaError(
                f"key 'features': expected list features of the schema, got {name!r}{nearest(name, every)}; "
                f"there are {', '.join(every) or 'none'}"
            )
    tables = {name: table for name, table in every.items() if name in config.features or not config.features}
    if not tables:
        raise SchemaError(
            f"expected a list feature with a table for kind = {config.kind!r}, got none; add one, or take "
            "kind = 'ranker'"
        )
    return tables


def _width(schema: Schema, config: DlrmConfig, tables: dict[str, str]) -> int:
    """The width of all tables."""
    dims = {table: schema.table_by_name[table].dim for table in tables.values()}
    width = config.embedding_dim or next(iter(dims.values()))
    for name, dim in dims.items():
        if dim != width:
            same_as = "embedding_dim" if config.embedding_dim else f"table {next(iter(dims))!r}"
            raise SchemaError(
                f"table {name!r}: expected dim = {width}, as {same_as} has, because TorchRec's DLRM has one "
                f"embedding width, got {dim}; change one of them, or leave the table's features out of "
                "`features`"
            )
    return width


def _layers(key: str, sizes: tuple[int, ...], default: tuple[int, ...], what: str) -> list[int]:
    if sizes and sizes[-1] != default[-1]:
        raise setting_error(
            key, f"{default[-1]} at the end, {what}", list(sizes), f"append {default[-1]}, or change the last"
        )
    return list(sizes or default)

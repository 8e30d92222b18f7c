"""TorchRec's DLRM for a schema whose tables have one width: a custom model file that worker and serving
load."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.models.dlrm import DLRM

from roostream.models.config import CustomModelConfig
from roostream.models.custom.torchrec_bags import RemoteEmbeddingBagCollection, as_kjt, rows_of
from roostream.models.inputs import Inputs
from roostream.models.loss import loss
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from roostream.wire.transform import output_names

DENSE, OVER = [64], [128, 64]


def configs_of(schema: Schema, num_embeddings: int = 1) -> list[EmbeddingBagConfig]:
    """A config for each table, with all features that look there; means."""
    features: dict[str, list[str]] = {}
    for f in (*schema.lists("ro"), *schema.lists("nro")):
        features.setdefault(f.table, []).append(f.name)
    return [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=schema.table_by_name[name].dim,
            num_embeddings=num_embeddings,
            feature_names=names,
            pooling=PoolingType.MEAN,
        )
        for name, names in features.items()
    ]


def dlrm_over(collection: torch.nn.Module, schema: Schema) -> DLRM:
    floats = sum(len(output_names(schema, side)) for side in ("ro", "nro"))
    dim = next(iter(schema.table_by_name.values())).dim
    return DLRM(collection, floats, [*DENSE, dim], [*OVER, len(schema.tasks)])


def floats_of(inputs: Inputs) -> Tensor:
    """[B, G], a request's repeated for its candidates."""
    return torch.cat([inputs.ro_float_RG[inputs.request_index_B], inputs.nro_float_BG], dim=1)


class RemoteDlrm(Model):
    """TorchRec's module, unchanged, over the rows of the batch."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.dlrm = dlrm_over(RemoteEmbeddingBagCollection(configs_of(schema), schema), schema)

    def forward(self, inputs: Inputs) -> Tensor:
        with rows_of(inputs):
            return self.dlrm(floats_of(inputs), as_kjt(inputs))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        return loss(logits_BT, targets)


def build(schema: Schema, config: CustomModelConfig) -> Model:
    return RemoteDlrm(schema)

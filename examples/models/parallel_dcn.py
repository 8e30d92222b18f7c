"""A cross network beside an MLP, from TorchRec's modules, over rows that live on the parameter servers."""

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP

from roostream.models.config import CustomModelConfig
from roostream.models.custom.torchrec_bags import RemoteEmbeddingBagCollection, as_kjt, rows_of
from roostream.models.inputs import Inputs
from roostream.models.loss import loss
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from roostream.wire.transform import output_names

DIM = 8


def table(name: str, *features: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=DIM, num_embeddings=1, feature_names=list(features), pooling=PoolingType.MEAN
    )


class ParallelDcn(Model):
    def __init__(self, schema: Schema) -> None:
        super().__init__()
        tables = [table("item", "item", "history"), table("category", "category")]
        self.bags = RemoteEmbeddingBagCollection(tables, schema)
        width = 3 * DIM + sum(len(output_names(schema, side)) for side in ("ro", "nro"))
        self.cross = LowRankCrossNet(width, num_layers=2, low_rank=8)
        self.deep = MLP(width, [32])
        self.logits = torch.nn.Linear(width + 32, len(schema.tasks))

    def forward(self, inputs: Inputs) -> Tensor:
        with rows_of(inputs):
            sparse_BC = self.bags(as_kjt(inputs)).values()
        x_BD = torch.cat([sparse_BC, inputs.ro_float_RG[inputs.request_index_B], inputs.nro_float_BG], dim=1)
        return self.logits(torch.cat([self.cross(x_BD), self.deep(x_BD)], dim=1))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        return loss(logits_BT, targets)


def build(schema: Schema, config: CustomModelConfig) -> Model:
    return ParallelDcn(schema)

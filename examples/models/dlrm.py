"""TorchRec's DLRM, unchanged: its embedding collection reads rows that live on the parameter servers.

Beside it a linear model of the numbers, which learns faster, as in the default model.
"""

import functools
import math

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.models.dlrm import DLRM

from roostream.models.config import CustomModelConfig
from roostream.models.custom.torchrec_bags import RemoteEmbeddingBagCollection, as_kjt, rows_of
from roostream.models.feature_encoders import RateScale
from roostream.models.inputs import Inputs
from roostream.models.linear_part import LinearColumns, LinearPart
from roostream.models.loss import loss
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from roostream.wire.transform import output_names


def table(name: str, *features: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=8, num_embeddings=1, feature_names=list(features), pooling=PoolingType.MEAN
    )


class ShopDlrm(Model):
    def __init__(self, schema: Schema) -> None:
        super().__init__()
        tables = [table("item", "item", "history"), table("category", "category")]
        floats = sum(len(output_names(schema, side)) for side in ("ro", "nro"))
        self.dlrm = DLRM(
            embedding_bag_collection=RemoteEmbeddingBagCollection(tables, schema),
            dense_in_features=floats,
            dense_arch_layer_sizes=[32, 8],
            over_arch_layer_sizes=[32, len(schema.tasks)],
        )
        priors = [label.prior or 0.1 for label in schema.labels]
        self.prior_logits = [math.log(prior / (1 - prior)) for prior in priors]
        self.scale_rates = RateScale(schema)
        self.columns = LinearColumns(schema, knots=True)
        width = self.columns.own.width
        first_weight = [[0.0] * width + [logit] for logit in self.prior_logits]
        self.linear = LinearPart(width, first_weight, self.columns.added_width)

    def adjust_initial_parameters(self) -> None:
        self.dlrm.over_arch.model[-1].bias.copy_(torch.tensor(self.prior_logits))

    def forward(self, inputs: Inputs) -> Tensor:
        inputs = self.scale_rates(inputs)
        dense_BG = torch.cat([inputs.ro_float_RG[inputs.request_index_B], inputs.nro_float_BG], dim=1)
        with rows_of(inputs):
            logits_BT = self.dlrm(dense_features=dense_BG, sparse_features=as_kjt(inputs))
        return self.linear.mixed(logits_BT, self.columns(inputs, self.scale_rates))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        columns_BG = self.columns(self.scale_rates(inputs), self.scale_rates)
        return self.linear.loss(columns_BG, logits_BT, functools.partial(loss, targets=targets))


def build(schema: Schema, config: CustomModelConfig) -> Model:
    return ShopDlrm(schema)

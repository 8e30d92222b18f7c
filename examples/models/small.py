"""A small model in plain torch: one hidden layer over all features of the request and of the candidate."""

import dataclasses

import torch
from torch import Tensor, nn

from roostream.models.config import CustomModelConfig
from roostream.models.feature_encoders import pool_features
from roostream.models.inputs import Inputs
from roostream.models.loss import loss
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from roostream.schema.settings import setting
from roostream.wire.transform import output_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(CustomModelConfig):
    width: int = setting(32, "of the hidden layer", ge=1)


class Small(Model):
    def __init__(self, schema: Schema, config: Config) -> None:
        super().__init__()
        lists = [*schema.lists("ro"), *schema.lists("nro")]
        floats = sum(len(output_names(schema, side)) for side in ("ro", "nro"))
        width_in = floats + sum(schema.table_by_name[f.table].dim for f in lists)
        self.ro_lists = [f.name for f in schema.lists("ro")]
        self.nro_lists = [f.name for f in schema.lists("nro")]
        self.hidden = nn.Linear(width_in, config.width)
        self.logits = nn.Linear(config.width, len(schema.tasks))

    def forward(self, inputs: Inputs) -> Tensor:
        pooled = pool_features(inputs)  # {feature: mean of its rows}
        ro_RD = torch.cat([inputs.ro_float_RG, *(pooled[name] for name in self.ro_lists)], dim=1)
        nro_BD = torch.cat([inputs.nro_float_BG, *(pooled[name] for name in self.nro_lists)], dim=1)
        x_BD = torch.cat([ro_RD[inputs.request_index_B], nro_BD], dim=1)  # each candidate with its request
        return self.logits(torch.relu(self.hidden(x_BD)))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        return loss(logits_BT, targets)


def build(schema: Schema, config: Config) -> Model:
    return Small(schema, config)

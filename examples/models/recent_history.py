"""A custom model: a configuration of its own, a history in which newer entries count more, and weights of the
labels."""

import dataclasses

import torch
from torch import Tensor, nn

from roostream.models.config import CustomModelConfig
from roostream.models.feature_encoders import pool_features
from roostream.models.inputs import Inputs
from roostream.models.layers import Mlp
from roostream.models.loss import loss_per_candidate
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from roostream.schema.settings import setting
from roostream.wire.transform import output_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(CustomModelConfig):
    width: int = setting(32, "of the hidden layer", ge=1)
    forget: float = setting(0.1, "an entry counts exp(-forget) as much a bucket of age", ge=0)
    task_weights: tuple[float, ...] = setting((), "of the labels in the loss; none = 1 each", ge=0)


class Shop(Model):
    def __init__(self, schema: Schema, config: Config) -> None:
        super().__init__()
        dims = {
            f.name: schema.table_by_name[f.table].dim for f in (*schema.lists("ro"), *schema.lists("nro"))
        }
        self.names = {side: [f.name for f in schema.lists(side)] for side in ("ro", "nro")}
        floats = sum(len(output_names(schema, side)) + len(getattr(schema, side)) for side in ("ro", "nro"))
        self.histories = {
            f.name: schema.table_by_name[f.table].stack for f in schema.lists("ro") if f.kind == "sequence"
        }
        recent = sum(dims[name] for name in self.histories)
        self.deep = Mlp(sum(dims.values()) + floats + recent, [config.width])
        self.logits = nn.Linear(config.width, len(schema.tasks))
        self.forget = config.forget
        self.weights = config.task_weights or (1.0,) * len(schema.tasks)

    def recent(self, inputs: Inputs, name: str) -> Tensor:
        """[R, D]: the entries of a jagged sequence, newer ones more."""
        sequence, rows_UD = inputs.sequences[name], inputs.rows[self.histories[name]]
        num_requests = len(sequence.length_R)
        owner_L = torch.repeat_interleave(sequence.length_R, output_size=len(sequence.index_L))
        age_L = next(iter(sequence.bucket_L.values()), 0 * sequence.index_L)
        entry_LD = rows_UD[sequence.index_L] * torch.exp(-self.forget * age_L)[:, None]
        return torch.zeros(num_requests, rows_UD.shape[1]).to(entry_LD).index_add(0, owner_L, entry_LD)

    def forward(self, inputs: Inputs) -> Tensor:
        pooled = pool_features(inputs)
        ro = [inputs.ro_float_RG, inputs.ro_present_RP.float(), *(pooled[name] for name in self.names["ro"])]
        ro_RD = torch.cat(ro + [self.recent(inputs, name) for name in self.histories], dim=1)
        nro = [
            inputs.nro_float_BG,
            inputs.nro_present_BP.float(),
            *(pooled[name] for name in self.names["nro"]),
        ]
        return self.logits(self.deep(torch.cat([ro_RD[inputs.request_index_B], *nro], dim=1)))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        total_T = targets.weight_BT.sum(dim=0) if targets.total_T is None else targets.total_T
        mean_T = (loss_per_candidate(logits_BT, targets) * targets.weight_BT).sum(dim=0) / torch.where(
            total_T > 0, total_T, 1.0
        )
        return (mean_T * mean_T.new_tensor(self.weights)).sum()


def build(schema: Schema, config: Config) -> Model:
    return Shop(schema, config)

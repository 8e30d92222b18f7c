"""Two-tower models (ROO paper §3.1, Fig. 4): retrieval, early-stage ranking, and retrieval with a ranker.

The request tower runs once per request. Item vectors do not depend on a request, so an index can hold them.

    Retrieval     s = u · v / temperature, u and v of unit length; logit = scale_T · s + bias_T. s decides the
                  order; its softmax over the batch's items trains the towers. Scale and bias calibrate s to a
                  probability; their loss does not reach the towers. Each task has its own request vector; one
                  index serves all tasks.
    EarlyRanker   [u, v, u ⊙ v] → mix layers → a tower per task
    Cascade       Retrieval for which items, the late-stage ranker for their order

Letters: R requests, B candidates, T tasks, P positives, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from roostream.errors import SchemaError, nearest
from roostream.models.config import CascadeConfig, TwoTowerConfig
from roostream.models.embedding_ops import gather_rows
from roostream.models.feature_encoders import (
    EmbeddingEncoder,
    FeatureEncoder,
    FloatEncoder,
    PooledFeatures,
    column_names,
    output_columns,
    pool_features,
)
from roostream.models.inputs import Inputs
from roostream.models.layers import Mlp
from roostream.models.loss import loss, task_objectives
from roostream.models.model import Model, Targets
from roostream.models.named_columns import ColumnNames, with_prefix
from roostream.models.ranker import Heads, Ranker
from roostream.models.sequence.history_encoders import HistoryEncoder
from roostream.models.two_tower.sampled_softmax import log_expected, sampled_softmax
from roostream.schema.schema import Schema
from roostream.wire.transform import output_names


class Tower(nn.Module):
    """Encoders side by side, layers, and a vector: [R, width] for requests, [B, width] for candidates."""

    def __init__(self, parts: dict[str, FeatureEncoder], layers: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.layers = Mlp(sum(part.width for part in parts.values()), layers)
        self.out = nn.Linear(self.layers.width, width)

    def column_names(self) -> dict[str, ColumnNames]:
        """As `Model.column_names`."""
        first = "layers.layers.0" if self.layers.layers else "out"
        names: dict[str, ColumnNames] = {f"{first}.weight": (None, output_columns(self.parts))}
        return names | with_prefix("parts", column_names(self.parts))

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        x = torch.cat([part(inputs, pooled) for part in self.parts.values()], dim=1)
        out: Tensor = self.out(self.layers(x))
        return out


class ItemFloatEncoder(FeatureEncoder):
    """Floats of the item itself, by name, after transforms."""

    def __init__(self, schema: Schema, names: tuple[str, ...]) -> None:
        super().__init__()
        self.width = len(names)
        columns = [column_of(schema, name, "item_floats") for name in names]
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.int64), persistent=False)
        self._names = tuple(f"nro {name}" for name in names)

    def output_columns(self, name: str) -> tuple[str, ...]:
        return self._names

    def forward(self, inputs: Inputs, pooled: PooledFeatures) -> Tensor:
        return inputs.nro_float_BG.index_select(1, self.get_buffer("columns"))


def user_tower(schema: Schema, config: TwoTowerConfig, width: int) -> Tower:
    """Floats and pooled lists of the request; with `history = "hstu"` also each sequence through HSTU.

    Raises:
        SchemaError: there is no request-only feature.
    """
    parts: dict[str, FeatureEncoder] = {
        "floats": FloatEncoder(schema, "ro"),
        "embeddings": EmbeddingEncoder(schema, "ro"),
    }
    for f in schema.lists("ro"):
        if f.kind == "sequence" and config.history == "hstu":
            parts[f"hstu_{f.name}"] = HistoryEncoder(schema, f, config)
    return Tower(_nonempty(parts, "[[ro]] feature for the request's tower"), config.user_layers, width)


def item_tower(schema: Schema, config: TwoTowerConfig) -> Tower:
    """Id lists of a candidate and `item_floats`: features that do not depend on the request, so vectors can
    be indexed.

    Raises:
        SchemaError: there is neither.
    """
    parts: dict[str, FeatureEncoder] = {
        "embeddings": EmbeddingEncoder(schema, "nro"),
        "floats": ItemFloatEncoder(schema, config.item_floats),
    }
    return Tower(
        _nonempty(parts, "[[nro]] id list, or one of item_floats, for the item's tower"),
        config.item_layers,
        config.width,
    )


def column_of(schema: Schema, name: str, key: str) -> int:
    """Column of `nro_float_BG`. Raises SchemaError: there is no such float."""
    names = output_names(schema, "nro")
    if name not in names:
        raise SchemaError(
            f"expected {key} to name [[nro]] floats or outputs of transforms, got "
            f"{name!r}{nearest(name, names)}"
        )
    return names.index(name)


def _nonempty(parts: dict[str, FeatureEncoder], what: str) -> dict[str, FeatureEncoder]:
    """The encoders that have a feature. Raises SchemaError: there is none."""
    parts = {name: part for name, part in parts.items() if part.width}
    if not parts:
        raise SchemaError(f"expected at least one {what}, got none; add one")
    return parts


class EarlyRanker(Model):
    """A logit for each candidate and task, from its request and item only."""

    def __init__(self, schema: Schema, config: TwoTowerConfig) -> None:
        super().__init__()
        self.user, self.item = user_tower(schema, config, config.width), item_tower(schema, config)
        self.mix = Mlp(3 * config.width, config.mix_layers)
        self.heads = Heads(
            self.mix.width, config.task_layers, [label.prior or config.prior for label in schema.labels]
        )
        self._tasks = task_objectives(schema)

    def forward(self, inputs: Inputs) -> Tensor:
        pooled = pool_features(inputs)
        u_BD = gather_rows([(self.user(inputs, pooled), inputs.request_index_B)])
        v_BD = self.item(inputs, pooled)
        return self.heads(self.mix(torch.cat([u_BD, v_BD, u_BD * v_BD], dim=1)))

    def column_names(self) -> dict[str, ColumnNames]:
        return with_prefix("user", self.user.column_names()) | with_prefix("item", self.item.column_names())

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        """Pointwise multi-task loss (roostream/models/loss.py)."""
        return loss(logits_BT, targets, self._tasks, inputs.groups)


class Retrieval(Model):
    """A candidate's logits depend on its own request and item; only the loss uses the other items of the
    batch.

    So the loss of a batch is not the sum of its parts' losses (docs/decisions/0041).
    """

    def __init__(self, schema: Schema, config: TwoTowerConfig) -> None:
        super().__init__()
        num_tasks = len(schema.labels)
        self.user = user_tower(schema, config, num_tasks * config.width)
        self.item = item_tower(schema, config)
        self.scale = nn.Parameter(torch.ones(num_tasks))
        self.bias = nn.Parameter(torch.zeros(num_tasks))
        self._biases = [
            math.log(p / (1 - p)) for p in (label.prior or config.prior for label in schema.labels)
        ]
        self._shape_TD = (num_tasks, config.width)
        self._temperature, self._uniform = config.temperature, config.uniform_negatives
        self._popularity = _popularity(schema, config.popularity)
        self._tasks, self._weights = task_objectives(schema), [label.weight for label in schema.labels]
        self.item_floats = config.item_floats  # what an item's vector depends on beside its id lists

    def adjust_initial_parameters(self) -> None:
        self.scale.fill_(self._temperature)  # logits of untrained towers are about those of the prior
        self.bias.copy_(torch.tensor(self._biases))

    def forward(self, inputs: Inputs) -> Tensor:
        u_RTD, v_BD = self.vectors(inputs)
        return self._logits(self._products(u_RTD, v_BD, inputs))

    def column_names(self) -> dict[str, ColumnNames]:
        return with_prefix("user", self.user.column_names()) | with_prefix("item", self.item.column_names())

    def vectors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Vectors of requests, [R, T, D], and of the candidates' items, [B, D]."""
        pooled = pool_features(inputs)
        return _unit(self.user(inputs, pooled).view(-1, *self._shape_TD)), _unit(self.item(inputs, pooled))

    def request_vectors(self, inputs: Inputs) -> Tensor:
        """[R, T, D], queries for an index."""
        return _unit(self.user(inputs, pool_features(inputs)).view(-1, *self._shape_TD))

    def item_vectors(self, inputs: Inputs) -> Tensor:
        """[B, D], for an index (item_index.py)."""
        return _unit(self.item(inputs, pool_features(inputs)))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        """Per task the weighted mean of its positives' sampled softmax, and the loss of its calibrated
        logits."""
        u_RTD, v_BD = self.vectors(inputs)
        calibration = loss(
            self._logits(self._products(u_RTD, v_BD, inputs).detach()), targets, self._tasks, inputs.groups
        )
        log_weight_B, log_expected_B = log_expected(inputs.item_B, self._popularity_of(inputs), self._uniform)
        total_T = targets.weight_BT.sum(dim=0) if targets.total_T is None else targets.total_T
        value = calibration
        for t, weight in enumerate(self._weights):
            counts_B = _counts(targets, t)
            positive_P = counts_B.nonzero()[:, 0]
            score_PB = u_RTD[:, t][inputs.request_index_B[positive_P]] @ v_BD.T / self._temperature
            loss_P = sampled_softmax(score_PB, positive_P, log_weight_B, log_expected_B)
            task_loss = (loss_P * counts_B[positive_P]).sum() / torch.where(total_T[t] > 0, total_T[t], 1.0)
            value = value + weight * task_loss
        return value

    def _products(self, u_RTD: Tensor, v_BD: Tensor, inputs: Inputs) -> Tensor:
        u_BTD = gather_rows([(u_RTD.flatten(1), inputs.request_index_B)]).view(-1, *u_RTD.shape[1:])
        return (u_BTD * v_BD[:, None, :]).sum(dim=-1) / self._temperature

    def _logits(self, product_BT: Tensor) -> Tensor:
        return product_BT * self.scale + self.bias

    def _popularity_of(self, inputs: Inputs) -> Tensor | None:
        if self._popularity is None:
            return None
        column, is_log = self._popularity
        value_B = torch.sinh(inputs.nro_float_BG[:, column])  # inputs are asinh of what transforms gave
        return (torch.expm1(value_B) if is_log else value_B).clamp_min(0) + 1


def _popularity(schema: Schema, name: str) -> tuple[int, bool] | None:
    """Column, and whether a transform took its logarithm. Raises SchemaError: it is not a count."""
    if not name:
        return None
    column, ops = column_of(schema, name, "popularity"), [t.op for t in schema.transforms if t.output == name]
    if ops not in ([], ["log1p"]):
        raise SchemaError(
            f"expected popularity to name a count or its log1p, got {name!r} with {', '.join(ops)}; give "
            "those an output"
        )
    return column, bool(ops)


def _counts(targets: Targets, t: int) -> Tensor:
    """[B]: weight of each candidate as a positive of the task; negative if a correction takes the positive
    back."""
    positive_B = (targets.label_BT[:, t] > 0).to(targets.weight_BT.dtype)
    if targets.before_BT is not None:
        was_B = torch.nan_to_num(targets.before_BT[:, t]) > 0
        positive_B = positive_B - was_B.to(positive_B.dtype)
    return positive_B * targets.weight_BT[:, t]


def _unit(x: Tensor) -> Tensor:
    """Length 1 along the last dimension; shorter for vectors near 0, so that gradients stay bounded."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


class Cascade(Model):
    """A candidate's logits depend on its own request only; the retrieval loss uses the other items of the
    batch."""

    def __init__(self, schema: Schema, config: CascadeConfig) -> None:
        super().__init__()
        self.ranker, self.retrieval = Ranker(schema, config), Retrieval(schema, config.retrieval)
        self._weight = config.retrieval_weight

    def forward(self, inputs: Inputs) -> Tensor:
        logits_BT: Tensor = self.ranker(inputs)
        return logits_BT

    def column_names(self) -> dict[str, ColumnNames]:
        retrieval = with_prefix("retrieval", self.retrieval.column_names())
        return with_prefix("ranker", self.ranker.column_names()) | retrieval

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        return self.ranker.loss(inputs, logits_BT, targets) + self._weight * self.retrieval.loss(
            inputs, logits_BT, targets
        )


def retrieval_model(model: Model) -> Retrieval | None:
    """The part of a model that computes request and item vectors; None if there is none."""
    if isinstance(model, Cascade):
        return model.retrieval
    return model if isinstance(model, Retrieval) else None

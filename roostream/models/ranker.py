"""The late-stage ranker (ROO paper §3.2, Fig. 8): request features are processed once per request, candidates
together.

    request encoders ─► tower, UserArch (R) ─► gather ─┐ candidate encoders (B rows) ───────────────────────┴►
    interaction ─► dense ─► list attention ─► deep ─► a tower per task

Letters: R requests, B candidates, U distinct requests, T tasks, D width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from roostream.errors import SchemaError
from roostream.models.attention import ListAttention
from roostream.models.config import DlrmConfig, HstuConfig, RankerConfig
from roostream.models.embedding_ops import gather_rows
from roostream.models.feature_encoders import (
    EmbeddingEncoder,
    FeatureEncoder,
    FloatEncoder,
    HistoryAttentionEncoder,
    PooledFeatures,
    RateScale,
    UserArch,
    column_names,
    normalize_pooled,
    output_columns,
    pool_features,
)
from roostream.models.inputs import Inputs
from roostream.models.interaction_layers import CrossNet, Dhen
from roostream.models.layers import Mlp
from roostream.models.linear_part import MAX_WIDTH, LinearColumns, LinearPart
from roostream.models.loss import loss, task_objectives
from roostream.models.model import Model, Targets
from roostream.models.named_columns import ColumnNames, numbered, with_prefix
from roostream.models.sequence.history_encoders import HstuTargetEncoder
from roostream.online.counters import sources_of
from roostream.schema.counter_plan import ITEM, declared
from roostream.schema.schema import Schema
from roostream.wire.transform import output_names

_FIRST_SLOPE = 1.0  # logits between the last and the first of a list
_MIDDLE = math.asinh(0.5)  # the rank of the middle of a list, as models see it


class RankingModel(Model):
    """A network and what it starts from: the order by click rate and a linear part of the floats, each if the
    settings want it."""

    def add_parts(self, schema: Schema, config: RankerConfig | DlrmConfig) -> None:
        """Call at the end of the constructor: initial weights follow the order of the modules."""
        self._tasks = task_objectives(schema)
        columns = [rate_rank(schema, label.action) for label in schema.labels]
        has_one = config.first_order and any(column is not None for column in columns)
        self.first_order = FirstOrder(columns) if has_one else None
        self.scale_rates = RateScale(schema) if config.scale_rates else None
        self.linear_columns = LinearColumns(schema, config.linear_knots)
        self.linear = linear_part(schema, config, columns, self.linear_columns.added_width)

    def scaled(self, inputs: Inputs) -> Inputs:
        """The floats as all parts of the model see them."""
        return inputs if self.scale_rates is None else self.scale_rates(inputs)

    def with_parts(self, inputs: Inputs, logits_BT: Tensor) -> Tensor:
        """`logits_BT` of the network, mixed with the other parts. `inputs`: scaled."""
        if self.first_order is not None:
            logits_BT = logits_BT + self.first_order(inputs.nro_float_BG)
        if self.linear is None:
            return logits_BT
        return self.linear.mixed(logits_BT, self.linear_columns(inputs, self.scale_rates))

    def loss(self, inputs: Inputs, logits_BT: Tensor, targets: Targets) -> Tensor:
        """Multi-task loss (loss.py); pairs within a request's list if a label requires it. With a linear part
        the sum of its losses (linear_part.py)."""
        loss_of = functools.partial(loss, targets=targets, tasks=self._tasks, groups=inputs.groups)
        if self.linear is None:
            return loss_of(logits_BT)
        columns_BG = self.linear_columns(self.scaled(inputs), self.scale_rates)
        return self.linear.loss(columns_BG, logits_BT, loss_of)

    def linear_column_names(self) -> dict[str, ColumnNames]:
        """Of the linear part, for `column_names`."""
        if self.linear is None:
            return {}
        return with_prefix("linear", self.linear.column_names(self.linear_columns.columns))


class Ranker(RankingModel):
    """A logit for each candidate and task.

    Raises:
        SchemaError: the schema declares no feature.
    """

    def __init__(self, schema: Schema, config: RankerConfig) -> None:
        super().__init__()
        request, candidate = request_encoders(schema, config), candidate_encoders(schema, config)
        self.request_parts, self.candidate_parts = nn.ModuleDict(request), nn.ModuleDict(candidate)
        request_width = sum(part.width for part in request.values())
        self.request_tower = Mlp(request_width, config.request_layers if request_width else ())
        self.user_arch = user_arch(schema, config)
        width = self.request_tower.width + (self.user_arch.width if self.user_arch else 0)
        width += sum(part.width for part in candidate.values())
        if width == 0:
            raise SchemaError(
                "expected at least one [[ro]] or [[nro]] feature, got none; a model needs something to "
                "look at"
            )
        self.cross = _interaction(width, config)
        self.dense = Mlp(self.cross.width, (config.width,))
        self.list_attention = nn.ModuleList(
            ListAttention(config.width, config.list_heads) for _ in range(config.list_layers)
        )
        self.deep = Mlp(config.width, config.deep_layers)
        self.normalizes_rows = config.normalize_rows
        self.heads = Heads(
            self.deep.width, config.task_layers, [label.prior or config.prior for label in schema.labels]
        )
        self.add_parts(schema, config)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return logits_BT in the order of `schema.tasks`."""
        inputs = self.scaled(inputs)
        pooled = normalize_pooled(pool_features(inputs)) if self.normalizes_rows else pool_features(inputs)
        blocks = [part(inputs, pooled) for part in self.candidate_parts.values()]
        if request := self.request(inputs, pooled):
            blocks.insert(0, gather_rows([(x_UD, inputs.shared_index_B) for x_UD in request]))
        x_BD = self.dense(self.cross(torch.cat(blocks, dim=1)))
        for block in self.list_attention:
            x_BD = block(x_BD, inputs.groups)
        return self.with_parts(inputs, self.heads(self.deep(x_BD)))

    def column_names(self) -> dict[str, ColumnNames]:
        request = output_columns(self.request_parts)
        has_tower = bool(self.request_tower.layers)
        columns = (
            *(numbered("request", self.request_tower.width) if has_tower else request),
            *(numbered("user arch", self.user_arch.width) if self.user_arch is not None else ()),
            *output_columns(self.candidate_parts),
        )
        names = with_prefix("cross", self.cross.column_names(columns))
        if has_tower:
            names["request_tower.layers.0.weight"] = (None, request)
        if self.user_arch is not None:
            names |= with_prefix("user_arch", self.user_arch.column_names())
        if isinstance(self.cross, CrossNet):
            names["dense.layers.0.weight"] = (None, columns)
        return (
            names
            | with_prefix("candidate_parts", column_names(self.candidate_parts))
            | self.linear_column_names()
        )

    def request(self, inputs: Inputs, pooled: PooledFeatures) -> list[Tensor]:
        """What the candidates of a request share, [U, D] once for equal requests; mapped by
        `inputs.shared_index_B`."""
        blocks = [inputs.once(part(inputs, pooled)) for part in self.request_parts.values()]
        shared = [self.request_tower(torch.cat(blocks, dim=1))] if blocks else []
        return shared if self.user_arch is None else [*shared, self.user_arch(inputs, pooled)]


def _interaction(width: int, config: RankerConfig) -> CrossNet | Dhen:
    if config.interaction == "dcn":
        return CrossNet(width, config.cross_layers, config.cross_rank)
    tokens = {"tokens": config.dhen_tokens, "token_width": config.dhen_width, "rank": config.cross_rank}
    return Dhen(width, config.dhen_layers, config.dhen_interactions, **tokens)


class FirstOrder(nn.Module):
    """Adds a learned weight times one float of a candidate to each label's logit, [B, G] → [B, T].

    The float is the item's rank within the list by its rate of the label's action. The initial weights order
    the candidates by that rank, so an untrained model is about as good as counting. In the middle of a list
    they add 0.
    """

    def __init__(self, columns: Sequence[int | None]) -> None:
        """`columns`: for each task that of `rate_rank`."""
        super().__init__()
        self._columns = [column or 0 for column in columns]
        self._has_column = [column is not None for column in columns]
        self.weight = nn.Parameter(torch.zeros(len(columns)))

    def adjust_initial_parameters(self) -> None:
        for task, has_column in enumerate(self._has_column):
            self.weight[task] = _FIRST_SLOPE if has_column else 0.0

    def forward(self, x_BG: Tensor) -> Tensor:
        return (x_BG[:, self._columns] - _MIDDLE) * self.weight

    def as_linear(self, width: int) -> nn.Linear:
        """The same as a layer over all `width` floats, for the compiled scorer."""
        layer = nn.Linear(width, len(self._columns))
        with torch.no_grad():
            nn.init.zeros_(layer.weight)
            layer.weight[range(len(self._columns)), self._columns] = self.weight
            layer.bias.copy_(-_MIDDLE * self.weight)
        return layer


def linear_part(
    schema: Schema, config: RankerConfig | DlrmConfig, columns: Sequence[int | None], added_width: int
) -> LinearPart | None:
    """None if a candidate has no floats, or too many. Untrained, its logits are those of the untrained
    network. `columns`: for each task that of `rate_rank`. `added_width`: of `LinearColumns`."""
    width = FloatEncoder(schema, "nro").width
    if not config.linear or not output_names(schema, "nro") or width >= MAX_WIDTH:
        return None
    first_weight = []
    for label, column in zip(schema.labels, columns, strict=True):
        prior = label.prior or config.prior
        weight_F = [0.0] * width + [math.log(prior / (1 - prior))]
        if config.first_order and column is not None:
            weight_F[column] = _FIRST_SLOPE
            weight_F[-1] -= _FIRST_SLOPE * _MIDDLE
        first_weight.append(weight_F)
    return LinearPart(width, first_weight, added_width)


def rate_rank(schema: Schema, action: str) -> int | None:
    """Column, among the candidate's floats after transforms, of the rank in the list by the share of an
    item's views with `action` over the longest time; None without a rank, or if a transform replaced it."""
    replaced = {t.input for t in schema.transforms if t.output == t.input}
    counters, sources, found = declared(schema), sources_of(schema, "nro"), dict[str, float]()
    for t in schema.transforms:
        counter = counters.get(sources.get(t.input, ""))
        if t.op != "rank" or t.output in replaced or t.input in replaced:
            continue
        if counter is None or counter.aggregation != "rate" or counter.entity != (ITEM,):
            continue
        if (counter.event or schema.online.click) == action:
            found[t.output] = counter.half_life_ms or counter.window_ms or math.inf
    return output_names(schema, "nro").index(max(found, key=found.__getitem__)) if found else None


class Heads(nn.Module):
    """A tower per task on a shared trunk, [B, D] → logits_BT. Untrained, each predicts its entry of
    `priors`."""

    def __init__(self, width: int, layers: tuple[int, ...], priors: Sequence[float]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Mlp(width, layers) for _ in priors)
        last_width = layers[-1] if layers else width
        self.logits = nn.ModuleList(nn.Linear(last_width, 1) for _ in priors)
        self._biases = [math.log(prior / (1 - prior)) for prior in priors]

    def adjust_initial_parameters(self) -> None:
        for layer, bias in zip(self.logits, self._biases, strict=True):
            for name, value in layer.named_parameters():
                nn.init.constant_(value, bias if name == "bias" else 0.0)

    def forward(self, x_BD: Tensor) -> Tensor:
        return torch.cat(
            [logit(tower(x_BD)) for tower, logit in zip(self.towers, self.logits, strict=True)], dim=1
        )


def request_encoders(schema: Schema, config: RankerConfig) -> dict[str, FeatureEncoder]:
    """Name → encoder for the request's tower; encoders without columns are left out."""
    if config.request_side == "userarch":
        return {}
    parts: dict[str, FeatureEncoder] = {
        "floats": FloatEncoder(schema, "ro"),
        "embeddings": EmbeddingEncoder(schema, "ro"),
    }
    return {name: part for name, part in parts.items() if part.width}


def user_arch(schema: Schema, config: RankerConfig) -> UserArch | None:
    """None if it is not configured, or has nothing to compress."""
    return UserArch(schema, config) if config.request_side != "direct" and schema.ro else None


def candidate_encoders(schema: Schema, config: RankerConfig) -> dict[str, FeatureEncoder]:
    """Name → encoder that runs once per candidate. History encoders need a candidate's id features as query.

    Raises:
        SchemaError: HSTU without a sequence, or without ids of a candidate.
    """
    parts: dict[str, FeatureEncoder] = {
        "floats": FloatEncoder(schema, "nro"),
        "embeddings": EmbeddingEncoder(schema, "nro"),
    }
    for f in schema.lists("ro") if schema.lists("nro") else ():
        if f.kind != "sequence":
            continue
        if config.history_attention:
            parts[f"attention_{f.name}"] = HistoryAttentionEncoder(schema, f, config)
        if isinstance(config, HstuConfig):
            parts[f"hstu_{f.name}"] = HstuTargetEncoder(schema, f, config)
    if isinstance(config, HstuConfig) and not any(
        isinstance(part, HstuTargetEncoder) for part in parts.values()
    ):
        raise SchemaError(
            "expected an [[ro]] sequence and [[nro]] ids for HSTU, got none; add them, or take kind = "
            "'ranker'"
        )
    return {name: part for name, part in parts.items() if part.width}

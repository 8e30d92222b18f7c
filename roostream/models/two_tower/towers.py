"""The request tower and the item tower (ROO paper §3.1, Fig. 4).

Letters: R requests, B candidates, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roostream.errors import SchemaError, nearest
from roostream.models.config import TwoTowerConfig
from roostream.models.feature_encoders import EmbeddingEncoder, FeatureEncoder, FloatEncoder, PooledFeatures
from roostream.models.inputs import Inputs
from roostream.models.layers import Mlp
from roostream.models.sequence.history_encoders import HistoryEncoder
from roostream.schema.schema import Schema
from roostream.wire.transform import output_names


class Tower(nn.Module):
    """Encoders side by side, layers, and a vector: [R, width] for requests, [B, width] for candidates."""

    def __init__(self, parts: dict[str, FeatureEncoder], layers: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.layers = Mlp(sum(part.width for part in parts.values()), layers)
        self.out = nn.Linear(self.layers.width, width)

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
    return Tower(_some(parts, "[[ro]] feature for the request's tower"), config.user_layers, width)


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
        _some(parts, "[[nro]] id list, or one of item_floats, for the item's tower"),
        config.item_layers,
        config.width,
    )


def column_of(schema: Schema, name: str, key: str) -> int:
    """Column of `nro_float_BG`. Raises SchemaError: there is no such float."""
    names = output_names(schema, "nro")
    if name not in names:
        raise SchemaError(
            f"expected {key} to name [[nro]] floats or outputs of transforms, got {name!r}{nearest(name, names)}"
        )
    return names.index(name)


def _some(parts: dict[str, FeatureEncoder], what: str) -> dict[str, FeatureEncoder]:
    parts = {name: part for name, part in parts.items() if part.width}
    if not parts:
        raise SchemaError(f"expected at least one {what}, got none; add one")
    return parts

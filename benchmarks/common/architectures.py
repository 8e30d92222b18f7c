"""Models of the benchmarks on shared request features, with the default sizes of
roostream/models/config.py."""

from __future__ import annotations

import dataclasses

from roostream.models.config import HstuConfig, ModelConfig, RankerConfig, TwoTowerConfig
from roostream.schema.schema import Schema

# Candidates that see each other can't be trained as impressions unless each carries its whole list (G10), so
# none do.
ARCHITECTURES: dict[str, ModelConfig] = {
    "retrieval": TwoTowerConfig(stage="retrieval", history="hstu"),
    "early": TwoTowerConfig(stage="ranking", history="hstu"),
    "late": RankerConfig(request_side="both", list_layers=0),
    "late with HSTU": HstuConfig(request_side="both", list_layers=0),
}


def pointwise(schema: Schema) -> Schema:
    """Without the floats that depend on the rest of the list, and what is made of them."""
    gone = {t.output for t in schema.transforms if t.op in ("rank", "share")}
    kept = (t for t in schema.transforms if t.op not in ("rank", "share") and t.input not in gone)
    return dataclasses.replace(schema, transforms=tuple(kept))

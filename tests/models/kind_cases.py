"""Configurations of small models for the schema "everything": every kind, and every optional part of a
ranker."""

from __future__ import annotations

import dataclasses

from roostream.models.config import (
    CascadeConfig,
    DcnConfig,
    DlrmConfig,
    HstuConfig,
    ModelConfig,
    TwoTowerConfig,
)
from tests.models.model_checks import SMALL

_SIZES = {
    f.name: getattr(SMALL, f.name)
    for f in dataclasses.fields(SMALL)
    if f.name not in ("kind", "history_attention")
}
CONFIGS: dict[str, ModelConfig] = {
    "ranker": SMALL,
    "hstu": HstuConfig(**_SIZES, hstu_width=6, hstu_heads=2, max_history=5),
    "hstu and attention": HstuConfig(**_SIZES, hstu_width=4, hstu_layers=1, history_attention=True),
    "userarch": dataclasses.replace(SMALL, request_side="userarch", userarch_embeddings=2, userarch_width=4),
    "tower and userarch": dataclasses.replace(
        SMALL, request_side="both", userarch_embeddings=9, userarch_width=3
    ),
    "retrieval": TwoTowerConfig(user_layers=(6,), item_layers=(5,), width=4),
    "retrieval of hstu": TwoTowerConfig(
        user_layers=(6,),
        item_layers=(5,),
        width=4,
        history="hstu",
        hstu_width=4,
        uniform_negatives=2.0,
        item_floats=("ctr",),
    ),
    "early ranking": TwoTowerConfig(
        stage="ranking", user_layers=(6,), item_layers=(5,), width=4, mix_layers=(6,), task_layers=(4,)
    ),
    "cascade": CascadeConfig(
        **_SIZES,
        history_attention=True,
        retrieval=TwoTowerConfig(user_layers=(6,), item_layers=(5,), width=4),
        retrieval_weight=0.5,
    ),
    "normalized rows": dataclasses.replace(SMALL, normalize_rows=True, request_side="both", userarch_width=4),
    "dhen": dataclasses.replace(SMALL, interaction="dhen", dhen_tokens=3, dhen_width=4),
    "dlrm": DlrmConfig(features=("item", "history"), dense_arch_layer_sizes=(4,)),
    "dcn": DcnConfig(features=("item", "history"), dcn_low_rank_dim=3),
}

"""Every kind of model learns in the training loop on simulated requests, and serving computes the same
scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roostream.models.config import (
    CascadeConfig,
    DcnConfig,
    DlrmConfig,
    HstuConfig,
    ModelConfig,
    RankerConfig,
    TwoTowerConfig,
)
from tests.trainer.visits import assert_serving_scores_as, log_losses, visit_loop, visits

SMALL = {
    "request_layers": (16,),
    "width": 16,
    "deep_layers": (16,),
    "task_layers": (8,),
    "list_heads": 2,
    "cross_rank": 8,
}
KINDS: dict[str, ModelConfig] = {
    "ranker": RankerConfig(**SMALL, history_width=8),
    "userarch": RankerConfig(
        **SMALL, history_width=8, request_side="userarch", userarch_embeddings=3, userarch_width=8
    ),
    "dhen": RankerConfig(**SMALL, history_width=8, interaction="dhen", dhen_tokens=4, dhen_width=8),
    "retrieval": TwoTowerConfig(user_layers=(32,), item_layers=(32,), width=16),
    "retrieval of hstu": TwoTowerConfig(
        user_layers=(32,), item_layers=(32,), width=16, history="hstu", hstu_width=16
    ),
    "early ranking": TwoTowerConfig(
        stage="ranking", user_layers=(32,), item_layers=(32,), width=16, mix_layers=(16,)
    ),
    "cascade": CascadeConfig(
        **SMALL, history_width=8, retrieval=TwoTowerConfig(user_layers=(32,), item_layers=(32,), width=16)
    ),
    "hstu": HstuConfig(**SMALL, hstu_width=16, max_history=20),
    "dlrm": DlrmConfig(dense_arch_layer_sizes=(16, 8), over_arch_layer_sizes=(16, 8, 2)),
    "dcn": DcnConfig(dense_arch_layer_sizes=(16, 8), over_arch_layer_sizes=(16, 8, 2), dcn_low_rank_dim=8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_kind_learns_and_serving_scores_equal_training(kind: str) -> None:
    torch.set_num_threads(1)
    records = visits(1000)
    loop, outputs = visit_loop(KINDS[kind], records)
    while loop.step() or loop.finish():
        pass
    first, last = np.array_split(log_losses(outputs.predicted), 4)[::3]
    assert loop.counts.requests == len(records) and loop.counts.non_finite == 0
    assert last.mean() < 0.93 * first.mean()

    assert_serving_scores_as(loop, loop.model_config, records[-20:])

"""Every kind of model through the training loop on simulated visits, and its scores in serving."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.config import HstuConfig, ModelConfig, RankerConfig, TwoTowerConfig
from roo import roo_pb2 as pb
from roo import wire
from roo.decode import Decoder
from roo.lookup import Lookup
from serving.scorer import build_version
from tests.trainer.visits import SCHEMA, visit_loop, visits
from trainer.loop import TrainLoop

SMALL = {"request_layers": (16,), "width": 16, "deep_layers": (16,), "task_layers": (8,), "list_heads": 2, "cross_rank": 8}
KINDS: dict[str, ModelConfig] = {
    "ranker": RankerConfig(**SMALL, history_width=8),
    "userarch": RankerConfig(**SMALL, history_width=8, request_side="userarch", userarch_embeddings=3, userarch_width=8),
    "dhen": RankerConfig(**SMALL, history_width=8, interaction="dhen", dhen_tokens=4, dhen_width=8),
    "retrieval": TwoTowerConfig(user_layers=(32,), item_layers=(32,), width=16),
    "retrieval of hstu": TwoTowerConfig(user_layers=(32,), item_layers=(32,), width=16, history="hstu", hstu_width=16),
    "early ranking": TwoTowerConfig(stage="ranking", user_layers=(32,), item_layers=(32,), width=16, mix_layers=(16,)),
    "hstu": HstuConfig(**SMALL, hstu_width=16, max_history=20),
}


class RowsOf:
    """The rows of a loop's shard as serving's replica gives them."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop = loop

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {stack: np.asarray(rows_UD) for stack, rows_UD in self.loop.rows.pull(lookup).items()}


def log_losses(predicted: list[pb.Prediction]) -> np.ndarray:
    """Of each request's first task, the mean over its candidates."""
    out = []
    for p in predicted:
        score_n, label_n = (np.array(x).reshape(len(p.item_ids), -1)[:, 0] for x in (p.scores, p.labels))
        out.append(-np.log(np.where(label_n > 0, score_n, 1 - score_n)).mean())
    return np.array(out)


@pytest.mark.parametrize("kind", KINDS)
def test_its_loss_falls_on_simulated_visits_and_serving_scores_as_training_does(kind: str) -> None:
    torch.set_num_threads(1)
    records = visits(1000)
    loop, outputs = visit_loop(KINDS[kind], records)
    while loop.step() or loop.finish():
        pass
    first, last = np.array_split(log_losses(outputs.predicted), 4)[::3]
    assert loop.counts.requests == len(records) and loop.counts.non_finite == 0
    assert last.mean() < 0.93 * first.mean()

    version = build_version("1-1", SCHEMA, loop.model_config, 0, loop.model.state_dict())
    for record in records[-20:]:
        batch, _ = Decoder(SCHEMA, {}.get).decode([record])
        _, sample = wire.decode(record.value)
        assert isinstance(sample, pb.Sample)
        items = np.array(sample.item_ids, np.uint64).view(np.int64)
        logits = version.score(RowsOf(loop), sample.ro, sample.parts[0].nro, items, sample.header.time_ms)
        np.testing.assert_allclose(1 / (1 + np.exp(-logits)), loop.scores(batch), rtol=0, atol=1e-5)

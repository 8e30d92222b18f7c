"""A cascade model trained on simulated visits retrieves items that users like, and item vectors follow the
training of rows between versions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from roostream.models.config import CascadeConfig, RankerConfig, TwoTowerConfig
from roostream.replay.world import World
from roostream.runtime.clock import FakeClock
from serving.build import open_retrieval
from serving.config import RetrievalSettings
from serving.http.retrieval_routes import RetrieveParser
from serving.rank import RankService
from serving.retrieval.item_vectors import encode_items
from serving.scorer import build_version
from serving.versions.idle_gate import IdleGate
from serving.versions.loaded_versions import LoadedVersions
from tests.trainer.visits import _WORLD, SCHEMA, T0, ReplicaRows, visit_loop, visits

SMALL = RankerConfig(
    request_layers=(16,), history_width=8, width=16, deep_layers=(16,), task_layers=(8,), list_heads=2
)
CASCADE = CascadeConfig(
    **{f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL) if f.name != "kind"},
    retrieval=TwoTowerConfig(user_layers=(32,), item_layers=(32,), width=16),
)


def test_trained_towers_retrieve_liked_items_and_vectors_follow_training(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    world, clock = World(_WORLD), FakeClock(T0)
    loop, _ = visit_loop(CASCADE, visits(1000))
    for _ in range(40):
        loop.step()
    items = sorted({int(i) for user in range(1, 31) for i in world.candidates_for(user, T0)})
    file = tmp_path / "items.jsonl"
    file.write_text(
        "".join(f"{json.dumps({'item_id': i, 'category': [world.category_of(i)]})}\n" for i in items)
    )
    rows = ReplicaRows(loop)
    service = RankService(
        SCHEMA,
        LoadedVersions(build_version("1-1", SCHEMA, CASCADE, 0, loop.dense_trainer.scorer.state_dict())),
        rows,
    )
    updater = open_retrieval(
        RetrievalSettings(items=str(file)), SCHEMA, service, IdleGate(clock), clock, CollectorRegistry()
    )
    assert updater is not None
    updater.turn()
    index = updater.retriever.index
    assert index is not None
    np.testing.assert_allclose(
        index.nearest.vectors(), encode_items(index.model, rows, index.catalogue.items), atol=1e-6
    )

    while loop.step() or loop.finish():  # train the rows further without a new version
        pass
    before = index.nearest.vectors()
    clock.advance(2.0)
    updater.turn()
    after = index.nearest.vectors()
    assert updater.retriever.index is index and np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, encode_items(index.model, rows, index.catalogue.items), atol=1e-6)

    service.versions.install(build_version("1-2", SCHEMA, CASCADE, 0, loop.dense_trainer.scorer.state_dict()))
    clock.advance(60.0)
    updater.turn()
    parser, liked, all_items = RetrieveParser(SCHEMA, 0), [], []
    for user in range(1, 31):
        body = {"user_id": user, "ro": {"user": [user], "hour": 3.0}, "k": 6}
        found = updater.retriever.retrieve(parser.retrieve(json.dumps(body).encode()), T0)
        assert found.index.version.name == "1-2"
        liked.append(world.attraction(user, np.array(found.given, np.int64), T0).mean())
        all_items.append(world.attraction(user, np.array(items, np.int64), T0).mean())
    assert np.mean(liked) > 1.3 * np.mean(all_items)

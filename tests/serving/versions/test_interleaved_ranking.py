"""Lists that are interleaved from two model versions: the answer, the logged impression, and the version that
is credited with an engagement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roostream.models.build import build_model
from roostream.schema.ids import key_bytes
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup
from serving.http.engagements import EngagementParser
from serving.ordering import request_rng, team_draft
from serving.rank import OrderPolicy, RankResult
from serving.rank_json import JsonParser
from serving.scorer import build_version, probabilities
from serving.versions.recent_requests import ScoredRequest
from serving.versions.routing import TrafficSplit
from tests.serving.serving_cases import BODY, MODEL, NOW_MS, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows


def weights(seed: int, fill: float | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = build_model(SCHEMA, MODEL, 0).state_dict()
    return {
        name: t + torch.randn(t.shape, generator=generator) if fill is None else torch.full_like(t, fill)
        for name, t in state.items()
    }


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[InProcessServing]:
    torch.set_num_threads(1)
    serving = build_serving(tmp_path, FakeRows(SCHEMA), policy=OrderPolicy(exploration=0.3))
    serving.service.versions.install(build_version("1-1", SCHEMA, MODEL, 0, weights(1)))
    serving.service.versions.install(build_version("1-2", SCHEMA, MODEL, 0, weights(2)))
    yield serving
    serving.close()


def rank(serving: InProcessServing, **changes: Any) -> tuple[RankResult, pb.Impression]:
    result = serving.service.rank(JsonParser(SCHEMA).parse(json.dumps({**BODY, **changes}).encode()), NOW_MS)
    _, message = wire.decode(result.record.value)
    assert isinstance(message, pb.Impression)
    return result, message


def best_order(serving: InProcessServing, version: str) -> list[int]:
    serving.service.versions.put(interleave=TrafficSplit())
    scores = rank(serving, model_version=version)[0].answer.scores.values_nT[:, 0]
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def test_an_interleaved_list_is_a_team_draft_with_propensities(serving: InProcessServing) -> None:
    ours, rival = best_order(serving, "1-2"), best_order(serving, "1-1")
    assert ours != rival
    serving.service.versions.put(interleave=TrafficSplit("previous", 1.0))
    orders = set()
    for number in range(12):
        result, impression = rank(serving, request_id=f"r-{number}")
        draft = team_draft(ours, rival, request_rng(0, key_bytes(17, 4, ""), f"r-{number}", 0))
        assert result.answer.order == draft.order and list(impression.propensities) == draft.propensities
        assert impression.header.model_version == "1-2"
        orders.add(tuple(result.answer.order))
    assert len(orders) > 1


def test_a_missing_row_degrades_its_pass_although_a_rival_misses_none(serving: InProcessServing) -> None:
    service, missing = serving.service, 555

    class RowsWithAMiss(FakeRows):
        is_complete = True

        def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
            self.is_complete = not any(missing in stack.id_U for stack in lookup.stacks.values())
            return super().gather(lookup)

    rows = RowsWithAMiss(SCHEMA)
    service.rows, service.rows_complete = rows, lambda: rows.is_complete
    share = TrafficSplit("previous", 0.5)
    interleaved, other = (
        next(n for n in range(1, 99) if share.takes(key_bytes(n, 0, ""), b"interleave") is wanted)
        for wanted in (True, False)
    )
    requests = [
        JsonParser(SCHEMA).parse(json.dumps({**BODY, "user_id": user, **changes}).encode())
        for user, changes in ((interleaved, {}), (other, {"candidates": [{"item_id": 5, "item": missing}]}))
    ]
    service.versions.put(interleave=share)
    answers = [outcome.answer for outcome in service.rank_all([(r, NOW_MS) for r in requests])]
    assert service.interleaving_stats.num_lists == 1
    assert answers[1].degraded, "its scores have an initial value in place of a row"


def test_a_click_is_credited_to_the_version_of_the_item(serving: InProcessServing) -> None:
    serving.service.versions.put(interleave=TrafficSplit("previous", 1.0))
    rank(serving)
    click = {"request_id": "r-1", "user_id": 17, "session_id": 4, "item_id": 8, "action": "click"}
    serving.service.interleaving_stats.record_engagements(
        EngagementParser(SCHEMA).parse(json.dumps(click).encode(), NOW_MS).records
    )
    assert sum(serving.service.interleaving_stats.outcomes().values()) == 1 and list(
        serving.service.interleaving_stats.outcomes_by_pair()
    ) == [("1-2", "1-1")]


def test_a_failing_rival_leaves_the_order_unchanged(serving: InProcessServing) -> None:
    serving.service.versions.put(interleave=TrafficSplit("1-3", 0.0))
    serving.service.versions.install(build_version("1-3", SCHEMA, MODEL, 0, weights(0, float("inf"))))
    serving.service.versions.activate("1-2")
    serving.service.versions.put(interleave=TrafficSplit("newest", 1.0))
    result, _ = rank(serving)
    assert result.answer.model_version == "1-2" and serving.service.interleaving_stats.num_failed == 1
    assert serving.service.interleaving_stats.num_lists == 0


def test_a_rival_without_memory_leaves_the_order_unchanged(serving: InProcessServing) -> None:
    class RowsForOnePass(FakeRows):
        num_passes = 0

        def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
            self.num_passes += 1
            if self.num_passes > 1:
                raise MemoryError("no room for a second batch")
            return super().gather(lookup)

    serving.service.rows = RowsForOnePass(SCHEMA)
    serving.service.versions.put(interleave=TrafficSplit("previous", 1.0))
    result, _ = rank(serving)
    assert result.answer.model_version == "1-2" and serving.service.interleaving_stats.num_failed == 1


def test_a_scored_request_contains_all_inputs_of_a_rescore(serving: InProcessServing) -> None:
    scored_requests: list[ScoredRequest] = []
    serving.service.on_scored = scored_requests.append
    result, impression = rank(serving)
    (scored,) = scored_requests
    assert (scored.request_id, scored.model_version, scored.ro, scored.nro) == (
        "r-1",
        "1-2",
        impression.ro,
        impression.nro,
    )
    rescored = scored.score_with(serving.service.versions.served.version, serving.service.rows)
    np.testing.assert_array_equal(probabilities(rescored), result.answer.scores.values_nT)
    assert scored.took_s > 0

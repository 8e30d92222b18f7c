"""From a rank request to its answer and logged impression. Guarantee G9 (docs/architecture.md, Guarantees):
the logged features, scored by the training code, give the served scores."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roostream.errors import ConfigError
from roostream.models.build import build_model
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.model import Model, Targets
from roostream.schema.ids import hash64, key_bytes
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from roostream.wire.records import Record
from serving.answer import ENCODER
from serving.errors import RequestError
from serving.rank import OrderPolicy, RankResult, RankService
from serving.rank_json import JsonParser
from serving.request_batch import read_request
from serving.scorer import build_version, first_version, probabilities
from serving.versions.loaded_versions import LoadedVersions
from tests.serving.serving_cases import BODY, MODEL, NOW_MS, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeHydrator, FakeRows

HYDRATED = FakeHydrator({"history": {"item": [99], "action": [2], "time": [NOW_MS - 1]}}, {"clicks_1h": 50.0})


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return weights that differ from the initial ones."""
    generator = torch.Generator().manual_seed(seed)
    state = build_model(SCHEMA, MODEL, 0).state_dict()
    return {name: t + 0.3 * torch.randn(t.shape, generator=generator) for name, t in state.items()}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[InProcessServing]:
    torch.set_num_threads(1)
    serving = build_serving(tmp_path, FakeRows(SCHEMA), HYDRATED)
    serving.service.versions.install(build_version("1-7", SCHEMA, MODEL, 0, random_weights(1)))
    yield serving
    serving.close()


def rank(service: RankService, **changes: Any) -> tuple[RankResult, dict[str, Any], pb.Impression]:
    request = JsonParser(SCHEMA).parse(json.dumps({**BODY, **changes}).encode())
    ranked = service.rank(request, NOW_MS)
    kind, message = wire.decode(ranked.record.value)
    assert wire.encode(kind, message) == ranked.record.value, (
        "the record has the bytes that the protobuf library writes"
    )
    assert kind == wire.IMPRESSION and isinstance(message, pb.Impression)
    return ranked, json.loads(ENCODER.encode(ranked.answer)), message


def sample_of(impression: pb.Impression) -> Record:
    """Return the sample that the joiner makes of an impression. It has the same blocks, byte for byte."""
    n = len(impression.item_ids)
    sample = pb.Sample(
        header=impression.header, ro=impression.ro, item_ids=impression.item_ids, labels=[0.0] * 2 * n
    )
    sample.parts.add(nro=impression.nro, num_rows=n)
    return Record("samples", 0, 0, 0, b"", wire.encode(wire.SAMPLE, sample))


def test_answer_and_impression_agree(serving: InProcessServing) -> None:
    ranked, answer, impression = rank(serving.service)
    scores = np.array([[s["click"], s["dwell"]] for s in answer["scores"]], np.float32)
    assert answer["request_id"] == "r-1" and answer["model_version"] == "1-7" and answer["degraded"] is False
    assert answer["order"] == np.argsort(-scores[:, 0]).tolist()
    assert [answer["order"].index(i) for i in range(3)] == list(impression.positions)
    np.testing.assert_array_equal(np.array(impression.scores, np.float32).reshape(3, 2), scores)
    assert list(impression.item_ids) == [8, hash64("nine"), 10] and not impression.propensities
    header = impression.header
    assert (header.request_id, header.user_id, header.time_ms) == ("r-1", 17, NOW_MS)
    assert (header.model_version, header.schema) == ("1-7", SCHEMA.fingerprint)
    assert ranked.record[:4] == ("impressions", -1, NOW_MS, key_bytes(17, 4, "r-1"))


def test_g9_the_logged_impression_scored_alone_by_training_gives_the_same(serving: InProcessServing) -> None:
    for changes in ({}, {"ro": {}}, {"candidates": BODY["candidates"][:1]}, {"user_id": 0}):
        _, _, impression = rank(serving.service, **changes)
        batch, rejects = Decoder(SCHEMA, lambda _: SCHEMA).decode([sample_of(impression)])
        assert not rejects
        lookup = build_lookup(batch)
        rows = serving.service.rows.gather(lookup)
        model = build_model(SCHEMA, MODEL, 0)
        model.load_state_dict(random_weights(1))
        logits = model(build_inputs(batch, lookup, rows, train=True)).detach().numpy()
        served = np.array(impression.scores, np.float32).reshape(-1, 2)
        np.testing.assert_allclose(served, probabilities(logits), rtol=0, atol=1e-5)
        version = serving.service.versions.newest
        items = np.array(impression.item_ids, np.uint64).view(np.int64)
        logged = read_request(SCHEMA, impression.ro, impression.nro, items, NOW_MS)
        scored = version.score(serving.service.rows, logged)
        np.testing.assert_allclose(scored, logits, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(
            probabilities(scored), served, "the logged bytes give the served scores bit for bit"
        )
        as_trained = dataclasses.replace(version, as_trained=True)
        alone = as_trained.score(serving.service.rows, logged)
        np.testing.assert_array_equal(
            alone, logits, "with `scoring = modules`, logits equal those of training bit for bit"
        )
        for batched in as_trained.score_all(serving.service.rows, [logged] * 3):
            np.testing.assert_array_equal(batched, logits)


def test_only_the_request_with_a_missing_row_is_degraded(serving: InProcessServing) -> None:
    service, gather = serving.service, serving.service.rows.gather
    row_missing = [False]

    class RowsWithAlternatingMisses:
        def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
            row_missing.append(not row_missing[-1])
            return gather(lookup)

    service.rows, service.rows_complete = RowsWithAlternatingMisses(), lambda: not row_missing[-1]
    assert rank(service)[1]["degraded"] is True
    assert rank(service)[1]["degraded"] is False


def test_hydrated_features_are_logged_as_scored(serving: InProcessServing) -> None:
    _, answer, impression = rank(serving.service, ro={}, candidates=[{"item_id": 5}])
    assert decode_block(SCHEMA, "ro", impression.ro, 1)["history"]["item"] == [99]
    assert decode_block(SCHEMA, "nro", impression.nro, 1)["clicks"].tolist() == [50]
    assert answer["degraded"] is False


def test_an_unavailable_redis_degrades_answers(tmp_path: Path) -> None:
    hydrator = FakeHydrator()
    hydrator.unavailable = True
    serving = build_serving(tmp_path, FakeRows(SCHEMA), hydrator)
    _, answer, impression = rank(serving.service, ro={})
    assert answer["degraded"] is True and "history" not in decode_block(SCHEMA, "ro", impression.ro, 1)
    _, answer, _ = rank(serving.service)
    assert answer["degraded"] is False and hydrator.num_reads == 1, "a complete request does not read Redis"
    serving.service.rows_ready = lambda: False
    assert rank(serving.service)[1]["degraded"] is True
    serving.close()


def test_before_the_first_commit_the_initial_weights_are_served(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    _, answer, impression = rank(serving.service)
    assert answer["model_version"] == impression.header.model_version == "0-0"
    assert all(abs(s["click"] - 0.1) < 1e-6 for s in answer["scores"]), "initial weights give the prior"
    serving.close()


def test_a_later_page_is_logged_without_request_features(serving: InProcessServing) -> None:
    _, first_answer, first = rank(serving.service)
    _, answer, added = rank(serving.service, append=True)
    assert first.HasField("ro") and not added.HasField("ro")
    assert answer["scores"] == first_answer["scores"] and added.nro == first.nro
    _, _, second = rank(serving.service, append=True, first_position=3)
    assert sorted(second.positions) == [3, 4, 5]


def test_exploration_is_logged_with_its_propensities(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), policy=OrderPolicy(exploration=0.5, task=1, seed=3))
    orders = set()
    for i in range(20):
        _, answer, impression = rank(serving.service, request_id=f"r{i}")
        orders.add(tuple(answer["order"]))
        assert len(impression.propensities) == 3 and min(impression.propensities) > 0
        assert [answer["order"].index(c) for c in range(3)] == list(impression.positions)
    assert len(orders) > 1
    assert rank(serving.service, request_id="r1")[1] == rank(serving.service, request_id="r1")[1]
    serving.close()


def test_an_impression_beyond_the_record_limit_is_413(serving: InProcessServing) -> None:
    schema = dataclasses.replace(SCHEMA, limits=dataclasses.replace(SCHEMA.limits, max_record_bytes=1536))
    service = RankService(schema, LoadedVersions(first_version(schema, MODEL, 0)), serving.service.rows)
    rank(service)
    messages = set()
    for length in range(40, 140):
        lists = [list(range(length // 20 + (i < length % 20))) for i in range(20)]
        try:
            rank(service, candidates={"item_id": list(range(20)), "topics": lists})
        except RequestError as error:
            assert error.status == 413
            messages.add(str(error).partition(", got")[0])
    assert messages == {"expected an impression of at most 1536 bytes"}


def test_a_score_that_is_not_finite_is_never_answered(serving: InProcessServing) -> None:
    weights = {name: torch.full_like(t, float("inf")) for name, t in random_weights(1).items()}
    service = RankService(
        SCHEMA, LoadedVersions(build_version("1-9", SCHEMA, MODEL, 0, weights)), serving.service.rows
    )
    with pytest.raises(RequestError, match="not finite") as caught:
        rank(service)
    assert caught.value.status == 500


class FailsOnTwo(Model):
    """A custom model that raises an error for item 2 and returns NaN for item 31."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Inputs) -> torch.Tensor:
        if 2 in inputs.item_B:
            raise ConfigError("own.py:3: no twos")
        logits_BT: torch.Tensor = self.inner(inputs)
        return logits_BT.masked_fill((inputs.item_B == 31)[:, None], float("nan"))

    def loss(self, inputs: Inputs, logits_BT: torch.Tensor, targets: Targets) -> torch.Tensor:
        raise NotImplementedError


def test_an_invalid_request_fails_alone(serving: InProcessServing) -> None:
    version = serving.service.versions.newest
    bodies = [{**BODY, "candidates": {"item_id": [i, 30 + i]}} for i in range(4)]
    requests = [(JsonParser(SCHEMA).parse(json.dumps(body).encode()), NOW_MS) for body in bodies]
    alone = [serving.service.rank(*each).scores_nT for each in requests]

    serving.service.versions.install(dataclasses.replace(version, model=FailsOnTwo(version.model)))
    outcomes = serving.service.rank_all(requests)
    messages = [str(o) if isinstance(o, RequestError) else "" for o in outcomes]
    assert (
        "code of model version 1-7 failed" in messages[2]
        and "not finite for this request" in messages[1]
        and not messages[0] + messages[3]
    )
    for i in (0, 3):
        ranked = outcomes[i]
        assert isinstance(ranked, RankResult)
        np.testing.assert_allclose(ranked.scores_nT, alone[i], rtol=0, atol=1e-5)


def test_a_version_requires_the_weights_of_its_model() -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        build_version("1-1", SCHEMA, MODEL, 0, {"x": torch.zeros(1)})

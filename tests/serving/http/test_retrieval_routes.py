"""`/v1/retrieve` and `/v1/recommend`: what is found, what is shown, what is logged, and what is refused in
the one shape."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from tests.serving.live_serving import serving_live
from tests.serving.retrieval_cases import CASCADE, NUM_ITEMS, TOWERS, Retrieving, packed_version, retrieving
from tests.serving.serving_cases import HISTORY, MODEL, NOW_MS, SCHEMA, build
from tests.serving.serving_fakes import FakeHydrator, FakeRows

WHO: dict[str, Any] = {"request_id": "r-1", "user_id": 17, "ro": {"mood": 0.5, "hour": 13.0}}


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Retrieving]:
    hydrator = FakeHydrator({"history": HISTORY}, {"clicks_1h": 2.0})
    made = retrieving(tmp_path / "home", FakeRows(SCHEMA), hydrator)
    made.turn()
    yield made
    made.built.close()


def ask(
    kept: Retrieving, path: str, body: object, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {
            "type": "http.request",
            "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
        }

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "query_string": b""}
    asyncio.run(kept.app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def found(kept: Retrieving, **asked: Any) -> list[Any]:
    status, answer = ask(kept, "/v1/retrieve", {**WHO, **asked})
    assert status == 200, answer
    return [item["item_id"] for item in answer["items"]]


def candidates_of(kept: Retrieving, ids: list[Any]) -> list[dict[str, Any]]:
    """As a client spells them that has the catalogue too."""
    space = kept.keeper.retriever.index
    assert space is not None
    features = space.catalogue.features(np.array([space.catalogue.client_id_I.index(item) for item in ids]))
    topics, ages = features.get("topics", [None] * len(ids)), features.get("age_h", np.full(len(ids), np.nan))
    return [
        {"item_id": item, "topics": topic, "age_h": None if np.isnan(age) else float(age)}
        for item, topic, age in zip(ids, topics, ages, strict=True)
    ]


def test_the_k_nearest_items_are_returned_with_the_version_of_both_towers(kept: Retrieving) -> None:
    status, answer = ask(kept, "/v1/retrieve", {**WHO, "k": 5})
    products = [item["product"] for item in answer["items"]]
    assert status == 200 and answer["retrieval_version"] == "1-2" and answer["degraded"] is False
    assert len(products) == 5 and products == sorted(products, reverse=True) and answer["request_id"] == "r-1"
    assert len(found(kept, k=1000)) == NUM_ITEMS == len(set(found(kept)))
    assert kept.built.records() == []


def test_retrieved_items_are_in_the_order_of_the_models_logits(kept: Retrieving) -> None:
    kept.serve(packed_version("1-3", TOWERS))
    kept.turn(60.0)
    who = {
        **WHO,
        "ro": {**WHO["ro"], "num_candidates": 20.0},
    }  # else a rank counts its list, and here there is none yet
    for task in SCHEMA.tasks:
        listed = candidates_of(kept, found(kept, k=20, task=task, ro=who["ro"]))
        status, answer = ask(kept, "/v1/rank", {**who, "candidates": listed})
        assert status == 200 and answer["model_version"] == "1-3", answer
        logits = [np.log(s[task] / (1 - s[task])) for s in answer["scores"]]
        assert (np.diff(logits) < 1e-4).all() and logits[0] > logits[-1] + 1e-3


def test_excluded_filtered_and_seen_items_are_not_retrieved(kept: Retrieving) -> None:
    every = found(kept, k=1000)
    assert (
        not {2, "i3"} & set(found(kept, k=1000, exclude=[2, "i3", "no such"]))
        and len(found(kept, k=1000, exclude=[2])) == 59
    )
    danish = found(kept, k=1000, filter={"lang": "da", "tags": [1, 2]})
    assert danish == [
        i for i in every if int(str(i).strip("i")) % 2 == 0 and int(str(i).strip("i")) % 5 in (1, 2)
    ]
    assert set(every) - set(found(kept, k=1000, exclude_seen=True)) == {
        8
    }  # the history has 8 and 3, and "i3" is no 3
    given = {"history": {"item": [2, 4], "action": [1, 1], "time": [NOW_MS] * 2}}
    assert set(every) - set(found(kept, k=1000, exclude_seen=True, ro={**WHO["ro"], **given})) == {2, 4}
    assert found(kept, k=5, filter={"lang": "sv"}) == []


def test_a_client_can_restrict_the_items(kept: Retrieving) -> None:
    every = found(kept, k=1000)
    named = [2, "i3", 4, 5, "no such"]
    assert (
        found(kept, k=1000, among=named) == [i for i in every if i in named]
        and found(kept, k=1000, among=None) == every
    )
    assert set(found(kept, among=named, exclude=[2], filter={"lang": "da"})) == {4}
    assert found(kept, among=[]) == found(kept, among=["no such"]) == []
    status, answer = ask(kept, "/v1/recommend", {**WHO, "k": 4, "among": named})
    assert status == 200 and {item["item_id"] for item in answer["items"]} == {2, "i3", 4, 5}


def test_missing_features_are_hydrated_or_the_answer_is_degraded(kept: Retrieving) -> None:
    hydrator = kept.keeper.retriever.hydrator
    assert isinstance(hydrator, FakeHydrator)
    with_history = found(kept, k=NUM_ITEMS)
    hydrator.away = True
    status, answer = ask(kept, "/v1/retrieve", {**WHO, "k": NUM_ITEMS})
    assert status == 200 and answer["degraded"] is True
    assert [item["item_id"] for item in answer["items"]] != with_history


def impression(kept: Retrieving) -> pb.Impression:
    (record,) = kept.built.records()
    kind, message = wire.decode(record.value)
    assert kind == wire.IMPRESSION
    return message


@pytest.mark.parametrize("retrieved", [3, 20])
def test_a_recommendation_is_logged_as_one_request(kept: Retrieving, retrieved: int) -> None:
    status, answer = ask(kept, "/v1/recommend", {**WHO, "k": 3, "retrieved": retrieved})
    assert status == 200 and (answer["model_version"], answer["retrieval_version"]) == ("1-2", "1-2"), answer
    message, space = impression(kept), kept.keeper.retriever.index
    assert space is not None and message.header.request_id == "r-1" and sorted(message.positions) == [0, 1, 2]
    given = dict(zip(space.catalogue.id_I.view(np.uint64).tolist(), space.catalogue.client_id_I, strict=True))
    shown = sorted(zip(message.positions, message.item_ids, strict=True))
    assert [given[item] for _, item in shown] == [item["item_id"] for item in answer["items"]]
    if retrieved == 3:
        assert {item["item_id"] for item in answer["items"]} == set(found(kept, k=3))


def test_shown_items_are_scored_as_the_shown_list(kept: Retrieving) -> None:
    """The same list sent to `/v1/rank` has the same scores; its features come from the catalogue and
    Redis."""
    status, answer = ask(kept, "/v1/recommend", {**WHO, "k": 4, "retrieved": 20})
    assert status == 200 and len(answer["items"]) == 4
    listed = candidates_of(kept, [item["item_id"] for item in answer["items"]])
    status, ranked = ask(kept, "/v1/rank", {**WHO, "request_id": "r-2", "candidates": listed})
    assert status == 200, ranked
    ours, theirs = kept.built.records()
    messages = [wire.decode(record.value)[1] for record in (ours, theirs)]
    assert [m.ro for m in messages[:1]] == [m.ro for m in messages[1:]]
    for item, scores in zip(answer["items"], ranked["scores"], strict=True):
        assert item["scores"] == pytest.approx(scores, abs=1e-5)


def test_a_recommendation_shows_the_best_retrieved_items_by_rank_score(kept: Retrieving) -> None:
    kept.serve(
        packed_version("1-3", dataclasses.replace(CASCADE, list_layers=0))
    )  # a candidate's score is its own
    with torch.no_grad():  # untrained heads give all the same
        for head in kept.built.service.versions.newest.model.ranker.heads.logits:  # type: ignore[union-attr]
            head.weight.normal_(generator=torch.Generator().manual_seed(3))
    status, answer = ask(kept, "/v1/recommend", {**WHO, "k": 4, "retrieved": 12})
    assert status == 200 and answer["model_version"] == "1-3"
    everything = candidates_of(kept, found(kept, k=12))
    _, ranked = ask(
        kept, "/v1/rank", {**WHO, "request_id": "r-2", "candidates": everything, "model_version": "1-3"}
    )
    best = {everything[i]["item_id"] for i in ranked["order"][:4]}
    assert {item["item_id"] for item in answer["items"]} == best, "the shown list alone decides their order"


def test_a_retrieval_past_its_deadline_keeps_its_place_until_it_ends(kept: Retrieving) -> None:
    go, app, retriever = threading.Event(), kept.app, kept.keeper.retriever
    retrieve, gate = retriever.retrieve, app.ranking.retrieval_lane.gate
    retriever.retrieve = lambda *given: (go.wait(30), retrieve(*given))[1]  # type: ignore[method-assign]

    async def ask_twice() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://serving") as client:
            hurried = {"x-deadline-ms": "50"}
            answers = [await client.post("/v1/retrieve", json=WHO, headers=hurried) for _ in range(2)]
            await asyncio.sleep(0.05)
            counts = [gate.in_flight]
            go.set()
            until_s = time.monotonic() + 30
            while gate.in_flight and time.monotonic() < until_s:
                await asyncio.sleep(0.01)
            return [*(answer.status_code for answer in answers), *counts, gate.in_flight]

    assert asyncio.run(ask_twice()) == [504, 429, 1, 0], "the second one never began"


def test_an_empty_recommendation_is_not_logged(kept: Retrieving) -> None:
    status, answer = ask(kept, "/v1/recommend", {**WHO, "filter": {"lang": "sv"}})
    assert (
        status == 200
        and answer["items"] == []
        and answer["model_version"] == "1-2"
        and kept.built.records() == []
    )


@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/recommend"])
@pytest.mark.parametrize(
    ("change", "status", "where"),
    [
        ({"k": 0}, 400, "$.k"),
        ({"k": 1001}, 400, "$.k"),
        ({"kk": 3}, 400, "$.kk"),
        ({"task": "clik"}, 400, "$.task"),
        ({"filter": {"lng": "da"}}, 400, "$.filter.lng"),
        ({"filter": {"paid": True, "lang": 2.5}}, 400, "$.filter.lang"),
        ({"filter": {"tags": [1, "all"], "lang": ["da", None]}}, 400, "$.filter.lang[1]"),
        ({"filter": {str(i): 1 for i in range(33)}}, 413, "$.filter"),
        ({"exclude": [1, ""]}, 400, "$.exclude[1]"),
        ({"exclude": list(range(10_001))}, 413, "$.exclude"),
        ({"among": [1, ""]}, 400, "$.among[1]"),
        ({"among": list(range(10_001))}, 413, "$.among"),
        ({"ro": {"moood": 1}}, 400, "$.ro.moood"),
        ({"ro": {"mood": 1e300}}, 400, "$.ro.mood"),
        ({"user_id": ""}, 400, "$.user_id"),
        ({"candidates": []}, 400, "$.candidates"),
    ],
)
def test_a_bad_field_is_refused_with_its_path(
    kept: Retrieving, path: str, change: dict[str, Any], status: int, where: str
) -> None:
    got, answer = ask(kept, path, {**WHO, **change})
    assert (got, answer["error"]["path"]) == (status, where), answer
    assert kept.built.records() == []


@pytest.mark.parametrize(
    "body", [b'{"filter":{"a":1.5},', b'{"filter":{"a":1.5},"filter":5}', b'{"filter":{"a":1.5},"k":"\xff"}']
)
def test_a_wrong_filter_before_other_mistakes_is_refused(kept: Retrieving, body: bytes) -> None:
    status, answer = ask(kept, "/v1/retrieve", body)
    assert (status, answer["error"]["path"]) == (400, "$.filter[...]")


def test_a_feature_of_candidates_has_no_place_in_a_retrieval(kept: Retrieving) -> None:
    status, answer = ask(kept, "/v1/retrieve", {**WHO, "ro": {"age_h": 1}})
    assert (status, answer["error"]["path"]) == (400, "$.ro.age_h")
    assert "candidate" not in answer["error"]["message"]
    status, answer = ask(kept, "/v1/retrieve", {**WHO, "mood": 1})
    assert status == 400 and "it belongs in 'ro'" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/recommend", "/v1/explain", "/v1/engagements"])
def test_parameters_that_would_be_ignored_are_refused(kept: Retrieving, path: str) -> None:
    answer = TestClient(kept.app).post(f"{path}?top=10", json={})
    assert (answer.status_code, answer.json()["error"]["path"]) == (400, "?top")


def test_an_unloaded_version_is_404_in_body_or_header(kept: Retrieving) -> None:
    status, answer = ask(kept, "/v1/recommend", {**WHO, "model_version": "9-9"})
    assert (status, answer["error"]["code"]) == (404, "unknown_model_version")
    status, answer = ask(kept, "/v1/recommend", WHO, ((b"x-model-version", b"0-0"),))
    assert status == 200 and answer["model_version"] == "0-0" and answer["retrieval_version"] == "1-2"


def test_retrieval_is_503_with_a_reason_before_vectors_exist(tmp_path: Path) -> None:
    kept = retrieving(tmp_path / "home", FakeRows(SCHEMA), version=packed_version("1-2", MODEL))
    for reason in ("the items' vectors are not built yet", "expected a model that retrieves"):
        status, answer = ask(kept, "/v1/retrieve", WHO)
        assert (status, answer["error"]["code"]) == (503, "unavailable") and reason in answer["error"][
            "message"
        ]
        kept.turn()
    kept.built.close()


def test_without_a_catalogue_there_are_no_retrieval_routes(tmp_path: Path) -> None:
    built = build(tmp_path / "home", FakeRows(SCHEMA))
    with serving_live(built) as live, httpx.Client(base_url=live.url) as client:
        assert client.post("/v1/retrieve", json=WHO).status_code == 404
        assert "/v1/retrieve" not in client.get("/openapi.json").json()["paths"]
    kept = retrieving(tmp_path / "with", FakeRows(SCHEMA))
    assert set(kept.app.openapi()["paths"]) - set(live.app.openapi()["paths"]) == {
        "/v1/retrieve",
        "/v1/recommend",
    }
    kept.built.close()


def test_recall_finds_each_retrieved_request(tmp_path: Path) -> None:
    kept = retrieving(tmp_path / "home", FakeRows(SCHEMA))
    kept.turn()
    with serving_live(kept.built) as live, httpx.Client(base_url=live.url) as client:
        answer = client.post("/v1/recommend", json={**WHO, "k": 5})
        assert answer.status_code == 200 and len(answer.json()["items"]) == 5
        assert client.get("/v1/retrieve").status_code == 405
        kept.turn()
        shown = client.get("/metrics").text
    assert "roostream_serving_items 60.0" in shown and "roostream_serving_items_recall 1.0" in shown

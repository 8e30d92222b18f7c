"""`/v1/retrieve` and `/v1/recommend`: the items that they return, the records that they log, and the requests
that they refuse."""

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
from tests.serving.live_serving import run_live_serving
from tests.serving.retrieval_cases import (
    CASCADE,
    NUM_ITEMS,
    TOWERS,
    RetrievalServing,
    make_retrieval,
    make_version,
)
from tests.serving.serving_cases import HISTORY, MODEL, NOW_MS, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeHydrator, FakeRows

REQUEST: dict[str, Any] = {"request_id": "r-1", "user_id": 17, "ro": {"mood": 0.5, "hour": 13.0}}


@pytest.fixture
def retrieval(tmp_path: Path) -> Iterator[RetrievalServing]:
    hydrator = FakeHydrator({"history": HISTORY}, {"clicks_1h": 2.0})
    made = make_retrieval(tmp_path / "home", FakeRows(SCHEMA), hydrator)
    made.turn()
    yield made
    made.serving.close()


def post(
    retrieval: RetrievalServing, path: str, body: object, headers: tuple[tuple[bytes, bytes], ...] = ()
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
    asyncio.run(retrieval.app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def retrieved_items(retrieval: RetrievalServing, **fields: Any) -> list[Any]:
    status, answer = post(retrieval, "/v1/retrieve", {**REQUEST, **fields})
    assert status == 200, answer
    return [item["item_id"] for item in answer["items"]]


def to_candidates(retrieval: RetrievalServing, ids: list[Any]) -> list[dict[str, Any]]:
    """Return the candidates that a client would send for these items, with their features of the
    catalogue."""
    index = retrieval.updater.retriever.index
    assert index is not None
    features = index.catalogue.features(np.array([index.catalogue.client_id_I.index(item) for item in ids]))
    topics, ages = features.get("topics", [None] * len(ids)), features.get("age_h", np.full(len(ids), np.nan))
    return [
        {"item_id": item, "topics": topic, "age_h": None if np.isnan(age) else float(age)}
        for item, topic, age in zip(ids, topics, ages, strict=True)
    ]


def test_the_k_nearest_items_are_returned_with_the_version_of_both_towers(
    retrieval: RetrievalServing,
) -> None:
    status, answer = post(retrieval, "/v1/retrieve", {**REQUEST, "k": 5})
    products = [item["product"] for item in answer["items"]]
    assert status == 200 and answer["retrieval_version"] == "1-2" and answer["degraded"] is False
    assert len(products) == 5 and products == sorted(products, reverse=True) and answer["request_id"] == "r-1"
    assert len(retrieved_items(retrieval, k=1000)) == NUM_ITEMS == len(set(retrieved_items(retrieval)))
    assert retrieval.serving.records() == []


def test_retrieved_items_are_in_the_order_of_the_models_logits(retrieval: RetrievalServing) -> None:
    retrieval.serve(make_version("1-3", TOWERS))
    retrieval.turn(60.0)
    request = {
        **REQUEST,
        "ro": {**REQUEST["ro"], "num_candidates": 20.0},
    }  # given, because retrieval does not know the length of the list that rank counts
    for task in SCHEMA.tasks:
        listed = to_candidates(retrieval, retrieved_items(retrieval, k=20, task=task, ro=request["ro"]))
        status, answer = post(retrieval, "/v1/rank", {**request, "candidates": listed})
        assert status == 200 and answer["model_version"] == "1-3", answer
        logits = [np.log(s[task] / (1 - s[task])) for s in answer["scores"]]
        assert (np.diff(logits) < 1e-4).all() and logits[0] > logits[-1] + 1e-3


def test_excluded_filtered_and_seen_items_are_not_retrieved(retrieval: RetrievalServing) -> None:
    all_items = retrieved_items(retrieval, k=1000)
    assert (
        not {2, "i3"} & set(retrieved_items(retrieval, k=1000, exclude=[2, "i3", "no such"]))
        and len(retrieved_items(retrieval, k=1000, exclude=[2])) == 59
    )
    danish = retrieved_items(retrieval, k=1000, filter={"lang": "da", "tags": [1, 2]})
    assert danish == [
        i for i in all_items if int(str(i).strip("i")) % 2 == 0 and int(str(i).strip("i")) % 5 in (1, 2)
    ]
    assert set(all_items) - set(retrieved_items(retrieval, k=1000, exclude_seen=True)) == {
        8
    }  # the history has items 8 and 3, and item "i3" is not item 3
    given = {"history": {"item": [2, 4], "action": [1, 1], "time": [NOW_MS] * 2}}
    assert set(all_items) - set(
        retrieved_items(retrieval, k=1000, exclude_seen=True, ro={**REQUEST["ro"], **given})
    ) == {2, 4}
    assert retrieved_items(retrieval, k=5, filter={"lang": "sv"}) == []


def test_a_client_can_restrict_the_items(retrieval: RetrievalServing) -> None:
    all_items = retrieved_items(retrieval, k=1000)
    named = [2, "i3", 4, 5, "no such"]
    assert (
        retrieved_items(retrieval, k=1000, among=named) == [i for i in all_items if i in named]
        and retrieved_items(retrieval, k=1000, among=None) == all_items
    )
    assert set(retrieved_items(retrieval, among=named, exclude=[2], filter={"lang": "da"})) == {4}
    assert retrieved_items(retrieval, among=[]) == retrieved_items(retrieval, among=["no such"]) == []
    status, answer = post(retrieval, "/v1/recommend", {**REQUEST, "k": 4, "among": named})
    assert status == 200 and {item["item_id"] for item in answer["items"]} == {2, "i3", 4, 5}


def test_missing_features_are_hydrated_or_the_answer_is_degraded(retrieval: RetrievalServing) -> None:
    hydrator = retrieval.updater.retriever.hydrator
    assert isinstance(hydrator, FakeHydrator)
    with_history = retrieved_items(retrieval, k=NUM_ITEMS)
    hydrator.unavailable = True
    status, answer = post(retrieval, "/v1/retrieve", {**REQUEST, "k": NUM_ITEMS})
    assert status == 200 and answer["degraded"] is True
    assert [item["item_id"] for item in answer["items"]] != with_history


def impression(retrieval: RetrievalServing) -> pb.Impression:
    (record,) = retrieval.serving.records()
    kind, message = wire.decode(record.value)
    assert kind == wire.IMPRESSION
    return message


@pytest.mark.parametrize("retrieved", [3, 20])
def test_a_recommendation_is_logged_as_one_request(retrieval: RetrievalServing, retrieved: int) -> None:
    status, answer = post(retrieval, "/v1/recommend", {**REQUEST, "k": 3, "retrieved": retrieved})
    assert status == 200 and (answer["model_version"], answer["retrieval_version"]) == ("1-2", "1-2"), answer
    message, index = impression(retrieval), retrieval.updater.retriever.index
    assert index is not None and message.header.request_id == "r-1" and sorted(message.positions) == [0, 1, 2]
    given = dict(zip(index.catalogue.id_I.view(np.uint64).tolist(), index.catalogue.client_id_I, strict=True))
    shown = sorted(zip(message.positions, message.item_ids, strict=True))
    assert [given[item] for _, item in shown] == [item["item_id"] for item in answer["items"]]
    if retrieved == 3:
        assert {item["item_id"] for item in answer["items"]} == set(retrieved_items(retrieval, k=3))


def test_shown_items_are_scored_as_the_shown_list(retrieval: RetrievalServing) -> None:
    """The shown list gets the same scores from `/v1/rank`. Its features come from the catalogue and Redis."""
    status, answer = post(retrieval, "/v1/recommend", {**REQUEST, "k": 4, "retrieved": 20})
    assert status == 200 and len(answer["items"]) == 4
    listed = to_candidates(retrieval, [item["item_id"] for item in answer["items"]])
    status, ranked = post(retrieval, "/v1/rank", {**REQUEST, "request_id": "r-2", "candidates": listed})
    assert status == 200, ranked
    messages = [wire.decode(record.value)[1] for record in retrieval.serving.records()]
    assert [m.ro for m in messages[:1]] == [m.ro for m in messages[1:]]
    for item, scores in zip(answer["items"], ranked["scores"], strict=True):
        assert item["scores"] == pytest.approx(scores, abs=1e-5)


def test_a_recommendation_shows_the_best_retrieved_items_by_rank_score(retrieval: RetrievalServing) -> None:
    retrieval.serve(
        make_version("1-3", dataclasses.replace(CASCADE, list_layers=0))
    )  # without list layers, a candidate's score does not depend on the others
    with torch.no_grad():  # untrained heads give all candidates the same score
        for head in retrieval.serving.service.versions.newest.model.ranker.heads.logits:  # type: ignore[union-attr]
            head.weight.normal_(generator=torch.Generator().manual_seed(3))
    status, answer = post(retrieval, "/v1/recommend", {**REQUEST, "k": 4, "retrieved": 12})
    assert status == 200 and answer["model_version"] == "1-3"
    everything = to_candidates(retrieval, retrieved_items(retrieval, k=12))
    _, ranked = post(
        retrieval,
        "/v1/rank",
        {**REQUEST, "request_id": "r-2", "candidates": everything, "model_version": "1-3"},
    )
    best = {everything[i]["item_id"] for i in ranked["order"][:4]}
    assert {item["item_id"] for item in answer["items"]} == best, "the order within the shown list may differ"


def test_a_retrieval_past_its_deadline_keeps_its_slot_until_it_ends(retrieval: RetrievalServing) -> None:
    may_end, app, retriever = threading.Event(), retrieval.app, retrieval.updater.retriever
    retrieve, gate = retriever.retrieve, app.ranking.retrieval_lane.gate
    retriever.retrieve = lambda *given: (may_end.wait(30), retrieve(*given))[1]  # type: ignore[method-assign]

    async def post_twice() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://serving") as client:
            hurried = {"x-deadline-ms": "50"}
            answers = [await client.post("/v1/retrieve", json=REQUEST, headers=hurried) for _ in range(2)]
            await asyncio.sleep(0.05)
            counts = [gate.in_flight]
            may_end.set()
            deadline_s = time.monotonic() + 30
            while gate.in_flight and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
            return [*(answer.status_code for answer in answers), *counts, gate.in_flight]

    assert asyncio.run(post_twice()) == [504, 429, 1, 0], "the second request was not started"


def test_an_empty_recommendation_is_not_logged(retrieval: RetrievalServing) -> None:
    status, answer = post(retrieval, "/v1/recommend", {**REQUEST, "filter": {"lang": "sv"}})
    assert (
        status == 200
        and answer["items"] == []
        and answer["model_version"] == "1-2"
        and retrieval.serving.records() == []
    )


@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/recommend"])
@pytest.mark.parametrize(
    ("change", "status", "error_path"),
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
def test_a_bad_retrieval_field_is_refused_with_its_path(
    retrieval: RetrievalServing, path: str, change: dict[str, Any], status: int, error_path: str
) -> None:
    got, answer = post(retrieval, path, {**REQUEST, **change})
    assert (got, answer["error"]["path"]) == (status, error_path), answer
    assert retrieval.serving.records() == []


@pytest.mark.parametrize(
    "body", [b'{"filter":{"a":1.5},', b'{"filter":{"a":1.5},"filter":5}', b'{"filter":{"a":1.5},"k":"\xff"}']
)
def test_a_wrong_filter_before_other_mistakes_is_refused(retrieval: RetrievalServing, body: bytes) -> None:
    status, answer = post(retrieval, "/v1/retrieve", body)
    assert (status, answer["error"]["path"]) == (400, "$.filter[...]")


def test_a_candidate_feature_is_refused_in_a_retrieval(retrieval: RetrievalServing) -> None:
    status, answer = post(retrieval, "/v1/retrieve", {**REQUEST, "ro": {"age_h": 1}})
    assert (status, answer["error"]["path"]) == (400, "$.ro.age_h")
    assert "candidate" not in answer["error"]["message"]
    status, answer = post(retrieval, "/v1/retrieve", {**REQUEST, "mood": 1})
    assert status == 400 and "it belongs in 'ro'" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/recommend", "/v1/explain", "/v1/engagements"])
def test_parameters_that_would_be_ignored_are_refused(retrieval: RetrievalServing, path: str) -> None:
    answer = TestClient(retrieval.app).post(f"{path}?top=10", json={})
    assert (answer.status_code, answer.json()["error"]["path"]) == (400, "?top")


def test_an_unloaded_version_is_404_in_body_or_header(retrieval: RetrievalServing) -> None:
    status, answer = post(retrieval, "/v1/recommend", {**REQUEST, "model_version": "9-9"})
    assert (status, answer["error"]["code"]) == (404, "unknown_model_version")
    status, answer = post(retrieval, "/v1/recommend", REQUEST, ((b"x-model-version", b"0-0"),))
    assert status == 200 and answer["model_version"] == "0-0" and answer["retrieval_version"] == "1-2"


def test_retrieval_is_503_with_a_reason_before_vectors_exist(tmp_path: Path) -> None:
    retrieval = make_retrieval(tmp_path / "home", FakeRows(SCHEMA), version=make_version("1-2", MODEL))
    for reason in ("the items' vectors are not built yet", "expected a model that retrieves"):
        status, answer = post(retrieval, "/v1/retrieve", REQUEST)
        assert (status, answer["error"]["code"]) == (503, "unavailable") and reason in answer["error"][
            "message"
        ]
        retrieval.turn()
    retrieval.serving.close()


def test_without_a_catalogue_there_are_no_retrieval_routes(tmp_path: Path) -> None:
    serving = build_serving(tmp_path / "home", FakeRows(SCHEMA))
    with run_live_serving(serving) as live, httpx.Client(base_url=live.url) as client:
        assert client.post("/v1/retrieve", json=REQUEST).status_code == 404
        assert "/v1/retrieve" not in client.get("/openapi.json").json()["paths"]
    retrieval = make_retrieval(tmp_path / "with", FakeRows(SCHEMA))
    assert set(retrieval.app.openapi()["paths"]) - set(live.app.openapi()["paths"]) == {
        "/v1/retrieve",
        "/v1/recommend",
    }
    retrieval.serving.close()


def test_recall_finds_each_retrieved_request(tmp_path: Path) -> None:
    retrieval = make_retrieval(tmp_path / "home", FakeRows(SCHEMA))
    retrieval.turn()
    with run_live_serving(retrieval.serving) as live, httpx.Client(base_url=live.url) as client:
        answer = client.post("/v1/recommend", json={**REQUEST, "k": 5})
        assert answer.status_code == 200 and len(answer.json()["items"]) == 5
        assert client.get("/v1/retrieve").status_code == 405
        retrieval.turn()
        shown = client.get("/metrics").text
    assert "roostream_serving_items 60.0" in shown and "roostream_serving_items_recall 1.0" in shown

"""The live list of serving's front page: items of recent requests, and the score changes by training since a
click."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from infra.options import DEMO_SCHEMA
from roostream.replay.world import NUM_CATEGORIES
from roostream.schema.ids import hash64, item_id
from roostream.schema.schema_file import load_schema
from serving.page import live
from serving.page.live import NUM_ITEMS, LivePage
from tests.serving.serving_cases import (
    BODY,
    NOW_MS,
    SCHEMA,
    InProcessServing,
    build_serving,
    make_http_client,
    serve_random_weights,
)
from tests.serving.serving_fakes import FakeRows

BIG = (1 << 63) + 5  # an id beyond int64 and beyond the exact integers of JavaScript


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[InProcessServing]:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), join_window_ms=20_000)
    serving.service.on_scored = serving.context.recent.add
    yield serving
    serving.close()


def make_request(first: int, num_items: int, num_topics: int, user: int = 17) -> dict[str, Any]:
    """Return a request with `num_items` items whose kinds (topics) alternate among `num_topics`."""
    candidates = [
        {"item_id": first + i, "nro": {"topics": [100 + i % num_topics], "age_h": float(i)}}
        for i in range(num_items)
    ]
    ro = {"user": [user], "likes": {"ids": [user], "weights": [1.0]}, "mood": 0.5}
    return {"request_id": f"r-{first}", "user_id": user, "ro": ro, "candidates": candidates}


def test_without_traffic_there_are_no_items(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    http.post("/v1/rank", json=BODY)
    serving.context.recent.end_warm_up()  # requests before the end of the warm-up are not shown
    assert http.get("/page/items.json").json()["items"] == []
    http.post("/v1/rank", json=make_request(40, 2, 1))
    assert {item["id"] for item in http.get("/page/items.json").json()["items"]} == {"40", "41"}


def test_the_list_has_recent_items_with_the_features_that_clients_sent(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    http.post(
        "/v1/rank",
        json={**BODY, "candidates": [{"item_id": BIG, "nro": {"topics": [BIG, 2]}}, *BODY["candidates"]]},
    )
    given = http.get("/page/items.json").json()
    sent = {item["id"]: json.loads(item["candidate"]) for item in given["items"]}
    assert set(sent) == {str(BIG), "8", str(item_id("nine")), "10"}
    assert [int(topic) % (1 << 64) for topic in sent[str(BIG)]["nro"]["topics"]] == [BIG, 2]
    assert sent["8"] == {"item_id": 8, "nro": {"topics": [1, 2], "age_h": 2.5}}, (
        "online features are left out"
    )
    assert sent["10"] == {"item_id": 10, "nro": {}}
    body = '{"candidates":[' + ",".join(item["candidate"] for item in given["items"]) + "]}"
    assert (
        http.post("/v1/explain", content=body, headers={"content-type": "application/json"}).status_code
        == 200
    )


def test_the_newest_request_decides_the_features_of_an_item(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    for age in (1.0, 2.0):
        http.post("/v1/rank", json={"candidates": [{"item_id": 1, "nro": {"age_h": age}}, {"item_id": 2}]})
    sent = [json.loads(item["candidate"]) for item in http.get("/page/items.json").json()["items"]]
    assert {"item_id": 1, "nro": {"age_h": 2.0}} in sent


@pytest.mark.parametrize("seed", range(4))
def test_a_list_has_several_items_of_each_kind(serving: InProcessServing, seed: int) -> None:
    make_http_client(serving).post("/v1/rank", json=make_request(100, 20, 5))
    given = LivePage(serving.context, random.Random(seed)).items()
    kinds = [item["kind"] for item in given["items"]]
    assert (
        given["kind_feature"] == "topics"
        and len(kinds) == len({item["id"] for item in given["items"]}) == NUM_ITEMS
    )
    assert sorted(kinds.count(kind) for kind in set(kinds)) == [3, 3, 3, 3]


def test_items_that_all_have_different_kinds_are_shown_without_kinds(serving: InProcessServing) -> None:
    make_http_client(serving).post("/v1/rank", json=make_request(100, 6, 6))
    given = LivePage(serving.context).items()
    assert given["kind_feature"] == "" and {item["kind"] for item in given["items"]} == {""}


def test_features_that_hold_the_users_id_are_recognized(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    http.post("/v1/rank", json=make_request(40, 3, 1, user=17))
    http.post("/v1/rank", json=make_request(50, 3, 1, user=BIG))
    assert LivePage(serving.context).items()["user_features"] == ["user"]
    http.post("/v1/rank", json={**make_request(60, 3, 1), "user_id": 18})
    assert LivePage(serving.context).items()["user_features"] == [], (
        "in one request, the feature was not the user's id"
    )


def test_the_page_knows_what_a_click_is_and_which_features_it_changes(serving: InProcessServing) -> None:
    given = LivePage(serving.context).items()
    assert (given["action"], given["value"], given["task"]) == ("click", 1.0, "click")
    assert given["click_features"] == ["history"] and given["join_window_ms"] == 20_000
    assert given["item_features"] == ["item", "history"]
    assert given["online_features"] == ["hour", "history", "num_candidates", "clicks", "place"]
    label = dataclasses.replace(SCHEMA.labels[0], action="order", threshold=50.0)
    other = dataclasses.replace(SCHEMA, labels=(label,))
    given = LivePage(dataclasses.replace(serving.context, schema=other)).items()
    assert (given["action"], given["value"], given["click_features"]) == ("order", 50.0, [])


def test_the_demo_has_names_for_its_categories_and_features_that_its_clicks_change(
    serving: InProcessServing,
) -> None:
    demo = load_schema(DEMO_SCHEMA)
    page = LivePage(dataclasses.replace(serving.context, schema=demo))
    assert page.items()["click_features"] == ["user_clicks", "history", "history_len"]
    names = [live.item_names(5, hash64(f"category/{i}"), is_demo=True)["kind"] for i in range(NUM_CATEGORIES)]
    assert len(set(names)) == NUM_CATEGORIES and all(name.isalpha() for name in names)
    assert live.item_names(5, 7, is_demo=False) == {"name": "Item 5", "kind": "7"}


def rescored(http: TestClient, **query: str) -> dict[str, Any]:
    answer = http.get("/page/rescored.json", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_features_of_a_click_are_scored_again_with_the_current_weights(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    ranked = http.post("/v1/rank", json={**BODY, "request_id": "page-1"}).json()
    served = [scores["click"] for scores in ranked["scores"]]
    result = rescored(http, request_id="page-1")
    assert result["then"] == pytest.approx(served, abs=1e-6) and result["now"] == pytest.approx(
        served, abs=1e-6
    )
    assert result["trained_up_to_ms"] is None and result["request_ms"] == result["now_ms"] == NOW_MS
    serve_random_weights(serving)
    serving.service.versions.install(serving.service.versions.newest, NOW_MS, NOW_MS + 30_000)
    result = rescored(http, request_id="page-1", model_version="1-9")
    now = [c["scores"]["click"] for c in http.post("/v1/explain", json=BODY).json()["candidates"]]
    assert result["then"] == pytest.approx(served, abs=1e-6) and result["now"] == pytest.approx(now, abs=1e-6)
    assert result["model_version"] == "1-9" and result["trained_up_to_ms"] == NOW_MS + 30_000


def test_a_click_is_remembered_when_traffic_has_replaced_its_request(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    http.post("/v1/rank", json={**BODY, "request_id": "page-1"})
    rescored(http, request_id="page-1")
    serving.context.recent.max_bytes = 1
    http.post("/v1/rank", json={**BODY, "request_id": "page-2"})
    assert rescored(http, request_id="page-1")["then"]
    assert http.get("/page/rescored.json?request_id=page-2").status_code == 404


@pytest.mark.parametrize(
    "query", ["", "?request_id=page-0", "?request_id=r-1", "?request_id=page-1&model_version=9-9"]
)
def test_only_requests_of_the_page_are_scored_again(serving: InProcessServing, query: str) -> None:
    http = make_http_client(serving)
    for name in ("r-1", "page-1"):
        http.post("/v1/rank", json={**BODY, "request_id": name})
    answer = http.get(f"/page/rescored.json{query}")
    assert answer.status_code == 404 and answer.json()["error"]["message"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]

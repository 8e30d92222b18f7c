"""`/v1/explain`: the contribution of each feature equals the change of the scores without it, and
explanations do not delay rank requests."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from param_server.replica.replica import Replica
from roostream.schema.ids import item_id
from roostream.wire.lookup import Lookup
from serving.examples import rank_example
from serving.http.app import HttpInterface
from serving.page import explanation
from tests.serving.serving_cases import (
    BODY,
    NOW_MS,
    SCHEMA,
    InProcessServing,
    build_serving,
    make_http_client,
    serve_random_weights,
)
from tests.serving.serving_fakes import FakeHydrator, FakeRows


def explain(serving: InProcessServing, body: dict[str, Any] = BODY) -> dict[str, Any]:
    answer = make_http_client(serving).post("/v1/explain", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_explain_gives_the_scores_and_order_of_rank_and_logs_nothing(serving: InProcessServing) -> None:
    serve_random_weights(serving)
    result = explain(serving)
    assert serving.records() == []
    rank = make_http_client(serving).post("/v1/rank", json=BODY).json()
    assert result["order"] == rank["order"] and result["model_version"] == rank["model_version"] == "1-9"
    assert [c["item_id"] for c in result["candidates"]] == [8, "nine", 10]
    for one, scores in zip(result["candidates"], rank["scores"], strict=True):
        assert one["scores"] == pytest.approx(scores, abs=1e-6)
        assert all(score == float(str(np.float32(score))) for score in one["scores"].values()), (
            "decimals as short as those of rank"
        )


def test_a_contribution_is_the_score_change_without_the_feature(serving: InProcessServing) -> None:
    serve_random_weights(serving)
    result = explain(serving)
    by_name = {f["name"]: f for f in result["features"]}
    for name in ("mood", "likes", "history", "age_h", "topics", "clicks"):
        body = copy.deepcopy(BODY)
        body["ro"].pop(name, None)
        for candidate in body["candidates"]:
            candidate["nro"].pop(name, None)
        without = make_http_client(serving).post("/v1/rank", json=body).json()["scores"]
        changes = [
            {task: s[task] - c["scores"][task] for task in s}
            for s, c in zip(without, result["candidates"], strict=True)
        ]
        for change, expected in zip(by_name[name]["changes"], changes, strict=True):
            assert change == pytest.approx(expected, abs=2e-6), name
    assert max(abs(c["click"]) for f in by_name.values() for c in f["changes"] or ()) > 1e-4, (
        "at least one feature changes the scores"
    )


def test_features_are_shown_as_scored(serving: InProcessServing) -> None:
    by_name = {f["name"]: f for f in explain(serving)["features"]}
    assert set(by_name) == {f.name for f in (*SCHEMA.ro, *SCHEMA.nro)}
    assert by_name["age_h"]["values"] == [2.5, None, None] and by_name["mood"]["values"] == [0.5]
    assert by_name["topics"]["values"] == ["1, 2", "7", None] and by_name["history"]["values"] == ["8, 3"]
    assert by_name["num_candidates"]["values"] == [3.0] and by_name["place"]["values"] == [0.0, 1.0, 2.0], (
        "computed features are shown too"
    )
    assert by_name["item"]["values"] == ["8", str(item_id("nine")), "10"] and by_name["mood"]["rows"] is None


def test_hydrated_features_are_explained_and_marked(tmp_path: Path) -> None:
    hydrator = FakeHydrator({}, {"clicks_1h": 7.0})
    serving = build_serving(tmp_path, FakeRows(SCHEMA), hydrator)
    body = {"user_id": 1, "candidates": [{"item_id": 1}, {"item_id": 2}]}
    result = explain(serving, body)
    assert {f["name"]: f["values"] for f in result["features"]}["clicks"] == [7.0, 7.0] and not result[
        "degraded"
    ]
    hydrator.unavailable = True
    assert explain(serving, body)["degraded"]
    serving.close()


def test_rows_that_did_not_arrive_in_time_are_marked(serving: InProcessServing) -> None:
    assert not explain(serving)["degraded"]
    serving.service.rows_complete = lambda: False
    assert explain(serving)["degraded"]


def test_known_and_trained_rows_are_counted(tmp_path: Path) -> None:
    class RowsWithTwoTrained:
        """Rows of which only those of item 8 and topic 2 are trained."""

        def __init__(self) -> None:
            self.initial_rows = Replica(SCHEMA, 0, num_buckets=1)

        def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
            rows = {stack: found.copy() for stack, found in self.initial_rows.gather(lookup).items()}
            known = {(SCHEMA.table_by_name["item"].id, 8), (SCHEMA.table_by_name["topic"].id, 2)}
            for stack, entry in lookup.stacks.items():
                learned = [(int(t), int(i)) in known for t, i in zip(entry.table_U, entry.id_U, strict=True)]
                rows[stack][learned] += 1
            return rows

    serving = build_serving(tmp_path, RowsWithTwoTrained())
    rows = {f["name"]: f["rows"] for f in explain(serving)["features"]}
    assert rows["topics"] == [
        {"needed": 2, "learned": 1},
        {"needed": 1, "learned": 0},
        {"needed": 0, "learned": 0},
    ]
    assert rows["history"] == [{"needed": 2, "learned": 1}] and rows["likes"] == [{"needed": 2, "learned": 1}]
    assert rows["user"] == [{"needed": 1, "learned": 0}]
    serving.close()


def test_explain_is_bounded_in_candidates_and_features(
    serving: InProcessServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanation, "MAX_FEATURES", 3)
    result = explain(serving)
    assert [f["name"] for f in result["features"] if f["changes"] is not None] == ["item", "topics", "age_h"]
    assert result["left_out"] == 8
    monkeypatch.setattr("serving.http.explain_route.MAX_CANDIDATES", 2)
    refused = make_http_client(serving).post("/v1/explain", json=BODY)
    assert refused.status_code == 413 and refused.json()["error"]["path"] == "$.candidates"


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({**BODY, "model_version": "9-9"}, 404), ({**BODY, "ro": {"hours": 1}}, 400)],
)
def test_explain_refuses_what_rank_refuses(
    serving: InProcessServing, body: dict[str, Any], status: int
) -> None:
    assert make_http_client(serving).post("/v1/explain", json=body).status_code == status
    assert make_http_client(serving).get("/v1/explain").status_code == 405


def test_explain_requests_queue_with_rank_one_at_a_time(serving: InProcessServing) -> None:
    app = HttpInterface(serving.context)
    passes: list[str] = []
    explainer, may_begin, begun = app.explainer, threading.Event(), threading.Event()
    begin, score_without = explainer.begin, explainer.score_without
    explainer.begin = lambda *given: (begun.set(), may_begin.wait(30), begin(*given))[2]
    explainer.score_without = lambda *given: (passes.append("explain"), score_without(*given))[1]

    async def post(path: str) -> int:
        import httpx2 as httpx

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
            return (await http.post(path, json=BODY, timeout=60)).status_code

    async def send_all() -> list[int]:
        first = asyncio.create_task(post("/v1/explain"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        second = await post("/v1/explain")
        rank = asyncio.create_task(post("/v1/rank"))
        while not app.gate.in_flight:
            await asyncio.sleep(0.001)
        serving.service.on_scored = lambda scored: passes.append("rank")
        may_begin.set()
        return [await first, second, await rank]

    assert asyncio.run(send_all()) == [200, 429, 200]
    assert passes[0] == "rank" and "explain" in passes, (
        "a rank request waits for at most one pass of an explanation"
    )
    app.gate.in_flight = 1 << 20
    full = TestClient(app).post("/v1/explain", json=BODY)
    assert full.status_code == 429 and "in flight" in full.text


def test_the_example_of_the_page_is_valid(serving: InProcessServing) -> None:
    page = make_http_client(serving).get("/page.json").json()
    assert page["example"] == rank_example(SCHEMA) and explain(serving, page["example"])["order"]


def test_the_page_describes_the_served_schema(serving: InProcessServing) -> None:
    http = make_http_client(serving)
    page = http.get("/page.json").json()
    assert (page["ready"], page["served"], page["versions"]) == (
        True,
        {"name": "0-0", "age_s": None, "trained_up_to_ms": None},
        ["0-0"],
    )
    assert page["rows"] is None and page["tasks"] == ["click", "dwell"] and "trainer" not in page["links"]
    serving.waiting_for.append("rows")
    serving.service.versions.install(serving.service.versions.newest, NOW_MS - 5000, NOW_MS - 9000)
    page = http.get("/page.json").json()
    assert page["waiting_for"] == ["rows"] and page["served"]["age_s"] == 5.0
    assert page["served"]["trained_up_to_ms"] == NOW_MS - 9000


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/live.js", "/parts.js", "/page.json"])
def test_page_files_have_a_content_security_policy(serving: InProcessServing, path: str) -> None:
    answer = make_http_client(serving).get(path, headers={"accept": "text/html" if path == "/" else "*/*"})
    assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert (
        answer.headers["cache-control"] == "no-store"
        and "https://" not in answer.text
        and "innerHTML" not in answer.text
    )

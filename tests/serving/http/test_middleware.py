"""Requests that are refused before their body is read: from pages of other sites, and under overload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from serving.http.app import HttpInterface
from tests.serving.serving_cases import BODY, InProcessServing, make_http_client


@pytest.fixture(scope="module")
def http(shared_serving: InProcessServing) -> TestClient:
    return make_http_client(shared_serving)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "https://shop.example"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://testserver"}, 200),
        ({"origin": "https://TESTSERVER"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "http://testserver"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://testserver:81"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
    ],
)
def test_pages_of_other_sites_cannot_post(
    http: TestClient, shared_serving: InProcessServing, headers: dict[str, str], status: int
) -> None:
    num_before = len(shared_serving.records())
    answer = http.post("/v1/rank", json=BODY, headers=headers)
    assert answer.status_code == status and len(shared_serving.records()) - num_before == (status == 200)
    assert http.get("/healthz", headers=headers).status_code == 200, (
        "GET is allowed: the browser itself protects answers from other sites"
    )
    if status == 403:
        assert answer.json()["error"]["code"] == "forbidden"


def test_an_overloaded_process_refuses_without_reading_the_body(serving: InProcessServing) -> None:
    app = HttpInterface(serving.context)
    app.gate.in_flight = app.gate.max_in_flight
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    for path in ("/v1/rank", "/v1/explain", "/v2/models/default/infer"):
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        asyncio.run(app(scope, receive, send))
    assert [message["status"] for message in sent[::2]] == [429] * 3
    registry = serving.context.metrics.registry
    for route in ("rank", "explain", "infer"):
        labels = {"route": route, "status": "429"}
        assert registry.get_sample_value("roostream_serving_requests_total", labels) == 1

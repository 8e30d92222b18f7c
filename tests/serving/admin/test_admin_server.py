"""The admin port on a real socket: a token, bounded bodies, and an end."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch
from serving_cases import SCHEMA, Built, build
from serving_fakes import FakeRows

from runtime.clock import FakeClock
from serving.admin import admin_server
from serving.admin.admin_token import AdminToken
from serving.admin.desk import AdminDesk
from serving.http import http_server
from serving.versions.quiet import Quiet
from serving.versions.recent import RecentRequests
from serving.versions.shadow_scoring import ShadowScoring

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Built]:
    torch.set_num_threads(1)
    built = build(tmp_path, FakeRows(SCHEMA))
    yield built
    built.close()


@pytest.fixture
def http(built: Built) -> Iterator[httpx2.Client]:
    service, clock = built.service, FakeClock()
    shadow = ShadowScoring(service.versions, service.rows, 0, Quiet(clock))
    desk = AdminDesk(service.versions, RecentRequests(), shadow, service.credits, clock.now_ms)
    bound, stop = http_server.bind("127.0.0.1:0"), threading.Event()
    bound.listen(8)
    thread = threading.Thread(target=admin_server.run, args=(admin_server.AdminInterface(desk, AdminToken(TOKEN)), bound, stop))
    thread.start()
    try:
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/admin/v1", headers={"authorization": f"Bearer {TOKEN}"}
        ) as client:
            yield client
    finally:
        stop.set()
        thread.join(20)
        bound.close()
        assert not thread.is_alive()


def test_what_is_changed_here_is_what_requests_meet(http: httpx2.Client, built: Built) -> None:
    assert http.get("/versions").json()["served"] == "0-0"
    answer = http.put("/shadow", json={"version": "newest", "share": 0.5})
    assert answer.status_code == 200 and answer.json()["share"] == 0.5
    assert built.service.versions.routing.shadow.share == 0.5


@pytest.mark.parametrize("header", ["", "Bearer wrong", f"Basic {TOKEN}"])
def test_without_the_token_nothing_is_told_and_nothing_logged(
    http: httpx2.Client, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "roostream"):
        for answer in (
            http.get("/versions", headers={"authorization": header}),
            http.get("/no", headers={"authorization": header}),
        ):
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "unauthorized"
        assert http.post("/versions/resume").status_code == 200
    assert TOKEN not in caplog.text and "wrong" not in caplog.text


def test_a_refusal_has_the_shape_of_all_errors(http: httpx2.Client) -> None:
    answer = http.post("/versions/9-9/activate")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_model_version"


def test_a_body_is_bounded(http: httpx2.Client) -> None:
    answer = http.put("/canary", content=json.dumps({"version": "x" * (70 << 10)}))
    assert answer.status_code == 413

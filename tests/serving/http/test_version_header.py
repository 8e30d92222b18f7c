"""`x-model-version` is the body's `model_version`."""

from __future__ import annotations

import pytest
from serving_cases import BODY, MODEL, SCHEMA, Built, client_of
from starlette.testclient import TestClient

from serving.scorer import build_version


@pytest.fixture(scope="module")
def http(shared: Built) -> TestClient:
    shared.service.versions.install(build_version("1-1", SCHEMA, MODEL, 1, {}))
    return client_of(shared)


@pytest.mark.parametrize(
    ("header", "body", "version"),
    [("0-0", "", "0-0"), ("", "", "1-1"), ("0-0", "0-0", "0-0"), ("", "0-0", "0-0")],
)
def test_header_or_body_selects_the_version(http: TestClient, header: str, body: str, version: str) -> None:
    answer = http.post("/v1/rank", json={**BODY, "model_version": body}, headers={"X-Model-Version": header})
    assert answer.status_code == 200 and answer.json()["model_version"] == version


@pytest.mark.parametrize(
    ("header", "body", "status", "code"),
    [
        ("9-9", "", 404, "unknown_model_version"),
        ("newest", "", 400, "bad_request"),
        ("0-0", "1-1", 400, "bad_request"),
    ],
)
def test_unloaded_or_contradicting_versions_are_refused(
    http: TestClient, header: str, body: str, status: int, code: str
) -> None:
    answer = http.post("/v1/rank", json={**BODY, "model_version": body}, headers={"X-Model-Version": header})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["path"]) == (status, code, "$.model_version")

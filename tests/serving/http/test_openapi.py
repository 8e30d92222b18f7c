"""The OpenAPI document is what the process does: requests made of it, and a client generated from it."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from starlette.routing import Route

from serving.examples import engagement_example, rank_example
from serving.http.app import HttpInterface
from serving.oip.features import FeatureTensors
from tests.serving.admin_cases import TOKEN, admin_app, admin_of
from tests.serving.document_cases import NUM_CASES, answers_conform
from tests.serving.live_serving import LiveServing, serving_live
from tests.serving.retrieval_cases import retrieving
from tests.serving.serving_cases import BODY, SCHEMA, build
from tests.serving.serving_fakes import FakeRows
from tests.serving.undocumented_routes import admin_document, inference_document, page_document


@contextlib.contextmanager
def finding(home: Path) -> Iterator[LiveServing]:
    """A process with all routes."""
    kept = retrieving(home, FakeRows(SCHEMA), max_log_bytes=1 << 28)
    kept.turn()
    with serving_live(kept.built) as live:
        yield live


def cases_of_all_routes(home: Path, num_cases: int, seed_number: int) -> dict[str, Counter[int]]:
    """Answers by status, for each document."""
    with finding(home) as live, admin_of(live.built) as port:
        documented = live.app.openapi()
        features = FeatureTensors(SCHEMA)
        inference = inference_document(
            SCHEMA.name, [about["name"] for about in features.inputs()], [*SCHEMA.tasks, "order", "unknown"]
        )
        named = {**documented["paths"], **inference["paths"]}
        pages = page_document([path for path in paths_of(live.app) if path not in named])
        assert set(paths_of(live.app)) == {*named, *pages["paths"]}, "cases are made for every route"
        traffic = answers_conform(documented, live.url, num_cases, seed_number)
        others = answers_conform(inference, live.url, num_cases, seed_number)
        others += answers_conform(pages, live.url, num_cases, seed_number)
        token = {"authorization": f"Bearer {TOKEN}"}
        admin = answers_conform(admin_document(), f"http://127.0.0.1:{port}", num_cases, seed_number, token)
        return {"traffic": traffic, "others": others, "admin": admin}


def paths_of(app: FastAPI) -> list[str]:
    return [route.path for route in app.routes if isinstance(route, Route)]


def test_the_admin_routes_are_those_that_cases_are_made_for(tmp_path: Path) -> None:
    built = build(tmp_path, FakeRows(SCHEMA))
    assert set(paths_of(admin_app(built))) == set(admin_document()["paths"])
    built.close()


@pytest.mark.timeout(600)
def test_answers_match_the_openapi_document(tmp_path: Path) -> None:
    found = cases_of_all_routes(tmp_path, NUM_CASES, 0)
    assert found["traffic"][200] >= 15 and found["traffic"][400] >= 25
    assert found["others"][200] >= 15 and found["others"][400] >= 5 and found["admin"][200] >= 5
    assert not server_errors(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_requests_get_no_server_error(tmp_path: Path) -> None:
    found = cases_of_all_routes(tmp_path, max(NUM_CASES, 1_600), 7)
    print({name: dict(sorted(statuses.items())) for name, statuses in found.items()})
    assert sum(statuses.total() for statuses in found.values()) >= 20_000
    assert not server_errors(found)


def server_errors(found: dict[str, Counter[int]]) -> list[int]:
    """Without 504, which a case with a short deadline asks for."""
    return [status for statuses in found.values() for status in statuses if status >= 500 and status != 504]


def test_the_document_is_valid_openapi(tmp_path: Path) -> None:
    kept = retrieving(tmp_path, FakeRows(SCHEMA))
    document = kept.app.openapi()
    schemathesis.openapi.from_dict(document).validate()
    assert document["openapi"].startswith("3.1") and "/v1/recommend" in document["paths"]
    broken = {**document, "paths": {"/v1/rank": {"post": {"responses": 3}}}}
    with pytest.raises(Exception, match="responses"):
        schemathesis.openapi.from_dict(broken).validate()
    kept.built.close()


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that openapi-python-client makes of the document."""
    described = build(tmp_path / "described", FakeRows(SCHEMA))
    (tmp_path / "openapi.json").write_text(json.dumps(HttpInterface(described.context).openapi()))
    described.close()
    overrides = "content_type_overrides:\n  application/x-protobuf: application/octet-stream\n"
    (tmp_path / "generator.yaml").write_text(f"post_hooks: []\n{overrides}")
    command = [
        sys.executable,
        "-m",
        "openapi_python_client",
        "generate",
        "--path",
        "openapi.json",
        "--meta",
        "none",
    ]
    command += ["--config", "generator.yaml", "--output-path", "generated_client", "--fail-on-warning"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    return "generated_client"


def test_a_generated_client_ranks_and_engages(tmp_path: Path, generated: str) -> None:
    def part(name: str) -> Any:
        return importlib.import_module(f"{generated}.{name}")

    models = part("models")
    flat = {
        **rank_example(SCHEMA),
        "candidates": [{"item_id": c["item_id"], **c["nro"]} for c in BODY["candidates"]],
    }
    with (
        serving_live(build(tmp_path / "home", FakeRows(SCHEMA))) as live,
        part("client").Client(base_url=live.url) as client,
    ):
        answer = part("api.traffic.rank").sync(
            client=client, body=models.RankRequest.from_dict(flat), ranked=True
        )
        assert isinstance(answer, models.RankAnswer) and sorted(answer.order) == [0, 1, 2]
        assert answer.ranked == [flat["candidates"][i]["item_id"] for i in answer.order]
        click = models.Engagement.from_dict(engagement_example(SCHEMA))
        told = part("api.traffic.engage").sync(client=client, body=click)
        assert isinstance(told, models.EngagementsAnswer) and told.accepted == 1
        bad = models.RankRequest.from_dict({**flat, "first_position": -1})
        refused = part("api.traffic.rank").sync(client=client, body=bad)
        assert isinstance(refused, models.Error) and refused.error.path == "$.first_position"
        assert part("api.health.ready").sync(client=client).model_version == "0-0"

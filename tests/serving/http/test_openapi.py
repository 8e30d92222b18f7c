"""The OpenAPI document is what the process does: cases made of it, and a client generated from it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from document_cases import answers_conform
from live_serving import serving_live
from retrieval_cases import retrieving
from serving_cases import BODY, SCHEMA, build
from serving_fakes import FakeRows

from serving.examples import engagement_example, rank_example
from serving.http.app import HttpInterface


def test_answers_match_the_openapi_document(tmp_path: Path) -> None:
    statuses = answers_conform(tmp_path, 25)
    assert statuses[200] >= 15 and statuses[400] >= 25
    assert not [status for status in statuses if status >= 500 and status != 504]


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

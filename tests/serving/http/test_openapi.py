"""The OpenAPI document matches the behavior of serving: checked with generated requests and with a generated
client."""

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

import jsonschema_rs
import pytest
import schemathesis
from fastapi import FastAPI
from starlette.routing import Route

from serving.examples import ENGAGED, engagement_example, rank_example
from serving.http.app import HttpInterface
from serving.http.openapi import for_generators
from serving.oip.features import FeatureTensors
from tests.serving.admin_cases import TOKEN, make_admin_app, run_admin_server
from tests.serving.document_cases import NUM_CASES, answers_conform
from tests.serving.live_serving import LiveServing, run_live_serving
from tests.serving.retrieval_cases import make_retrieval
from tests.serving.serving_cases import BODY, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows
from tests.serving.undocumented_routes import admin_document, inference_document, page_document


@contextlib.contextmanager
def run_with_retrieval(home: Path) -> Iterator[LiveServing]:
    """Start a serving with all routes."""
    retrieval = make_retrieval(home, FakeRows(SCHEMA), max_log_bytes=1 << 28)
    retrieval.turn()
    with run_live_serving(retrieval.serving) as live:
        yield live


def send_to_all_routes(home: Path, num_cases: int, seed_number: int) -> dict[str, Counter[int]]:
    """Send generated requests to all routes. Return the number of answers by status, for each document."""
    with run_with_retrieval(home) as live, run_admin_server(live.serving) as port:
        documented = live.app.openapi()
        features = FeatureTensors(SCHEMA)
        inference = inference_document(
            SCHEMA.name, [tensor["name"] for tensor in features.inputs()], [*SCHEMA.tasks, "order", "unknown"]
        )
        documented_paths = {**documented["paths"], **inference["paths"]}
        pages = page_document([path for path in paths_of(live.app) if path not in documented_paths])
        assert set(paths_of(live.app)) == {*documented_paths, *pages["paths"]}, (
            "requests are generated for every route"
        )
        traffic = answers_conform(without_other_fields(documented), live.url, num_cases, seed_number)
        others = answers_conform(inference, live.url, num_cases, seed_number)
        others += answers_conform(pages, live.url, num_cases, seed_number)
        token = {"authorization": f"Bearer {TOKEN}"}
        admin = answers_conform(admin_document(), f"http://127.0.0.1:{port}", num_cases, seed_number, token)
        return {"traffic": traffic, "others": others, "admin": admin}


def without_other_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with answers that have no field beyond those of their types."""
    closed: dict[str, Any] = json.loads(json.dumps(document))
    for component in closed["components"]["schemas"].values():
        if "properties" in component:
            component["additionalProperties"] = False
    return closed


def paths_of(app: FastAPI) -> list[str]:
    return [route.path for route in app.routes if isinstance(route, Route)]


def test_requests_are_generated_for_every_admin_route(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    assert set(paths_of(make_admin_app(serving))) == set(admin_document()["paths"])
    serving.close()


@pytest.mark.timeout(600)
def test_answers_match_the_openapi_document(tmp_path: Path) -> None:
    found = send_to_all_routes(tmp_path, NUM_CASES, 0)
    assert found["traffic"][200] >= 15 and found["traffic"][400] >= 25
    assert found["others"][200] >= 15 and found["others"][400] >= 5 and found["admin"][200] >= 5
    assert not server_errors(found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_thousand_requests_get_no_server_error(tmp_path: Path) -> None:
    found = send_to_all_routes(tmp_path, max(NUM_CASES, 1_600), 7)
    print({name: dict(sorted(statuses.items())) for name, statuses in found.items()})
    assert sum(statuses.total() for statuses in found.values()) >= 20_000
    assert not server_errors(found)


def server_errors(found: dict[str, Counter[int]]) -> list[int]:
    """Return all statuses from 500 on, except 504, which is right for a case with a short deadline."""
    return [status for statuses in found.values() for status in statuses if status >= 500 and status != 504]


def test_the_document_is_valid_openapi(tmp_path: Path) -> None:
    retrieval = make_retrieval(tmp_path, FakeRows(SCHEMA))
    document = retrieval.app.openapi()
    schemathesis.openapi.from_dict(document).validate()
    assert document["openapi"].startswith("3.1") and "/v1/recommend" in document["paths"]
    broken = {**document, "paths": {"/v1/rank": {"post": {"responses": 3}}}}
    with pytest.raises(Exception, match="responses"):
        schemathesis.openapi.from_dict(broken).validate()
    retrieval.serving.close()


def test_generators_of_typed_clients_get_optional_fields_and_64_bit_numbers(tmp_path: Path) -> None:
    """Java and Go read an `integer` without a format as 32 bits, and ogen for Go refuses a maximum beyond 64
    signed bits. TypeScript requires fields with a default, and Java has no order in unique values."""
    components = all_components(tmp_path)
    schemas = list(inner_schemas(components))
    assert not [schema for schema in schemas if "default" in schema or "uniqueItems" in schema]
    for schema in schemas:
        if "integer" in type_names(schema):
            least, most = schema.get("minimum", -(1 << 63)), schema.get("maximum", 1 << 63)
            is_small = least >= -(1 << 31) and most < 1 << 31
            assert is_small != (schema.get("format") == "int64") and most <= 1 << 63, schema
        elif "number" in type_names(schema):
            assert schema["format"] == "double", schema
    assert components["Engagement"]["properties"]["time_ms"]["type"] == ["integer", "null"]
    assert "100 if left out" in components["RetrieveRequest"]["properties"]["k"]["description"]
    found = components["FoundItem"]["properties"]["item_id"]
    assert found == components["RankRequest"]["properties"]["user_id"] == {"$ref": "#/components/schemas/Id"}


def test_generators_of_typed_clients_get_no_union_with_a_list_or_null(tmp_path: Path) -> None:
    """They do not compile in Java and TypeScript. An optional list that cannot be null is sent empty by Java,
    which would mean something else than a missing one."""
    components = all_components(tmp_path)
    for schema in inner_schemas(components):
        kinds = [type_names(kind) for kind in schema.get("anyOf", ())]
        assert not [kind for kind in kinds if "array" in kind or "null" in kind], schema
        assert len({*type_names(schema)} - {"null"}) <= 1, schema
    ids = components["CandidateRow"]["properties"]["topics"]
    assert ids["type"] == components["RetrieveRequest"]["properties"]["among"]["type"] == ["array", "null"]
    assert components["RankRequest"]["properties"]["candidates"]["type"] == "array"
    assert not components["FeatureEffect"]["properties"]["values"].get("items"), "a number, a text or null"


def test_only_bodies_of_requests_refuse_other_fields(tmp_path: Path) -> None:
    """Generated Java clients would not read an answer of a newer serving that has one more field."""
    components = all_components(tmp_path)
    closed = {
        name for name, component in components.items() if component.get("additionalProperties") is False
    }
    assert {"RankRequest", "CandidateRow", "RetrieveRequest", "Engagement"} <= closed
    assert not [name for name in closed if name.endswith("Answer")] and "Scores" not in closed


def all_components(home: Path) -> dict[str, Any]:
    retrieval = make_retrieval(home, FakeRows(SCHEMA))
    components: dict[str, Any] = retrieval.app.openapi()["components"]["schemas"]
    retrieval.serving.close()
    return components


def test_a_feature_may_be_called_like_a_keyword_of_json_schema() -> None:
    named = ("default", "type", "anyOf", "properties")
    schema = {"type": "object", "properties": {name: {"type": "integer", "default": 0} for name in named}}
    made = for_generators(schema)["properties"]
    assert made == {name: {"type": "integer", "format": "int64"} for name in named}


def inner_schemas(part: Any) -> Iterator[dict[str, Any]]:
    """Yield every schema of a document, or of a part of it."""
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from inner_schemas(inner)


def type_names(schema: dict[str, Any]) -> list[Any]:
    kind = schema.get("type", [])
    return kind if isinstance(kind, list) else [kind]


def test_the_examples_fit_their_schemas(tmp_path: Path) -> None:
    retrieval = make_retrieval(tmp_path, FakeRows(SCHEMA))
    document = retrieval.app.openapi()
    retrieval.serving.close()
    contents = [part for part in inner_schemas(document["paths"]) if "example" in part]
    assert len(contents) >= 13
    for content in contents:
        schema = {**content["schema"], "components": document["components"]}
        validator = jsonschema_rs.validator_for(schema)
        validator.validate(content["example"])
        assert not validator.is_valid([{"no": "example"}])


@pytest.mark.parametrize(("path", "statuses"), [("/metrics", {401, 403}), ("/", {401})])
def test_pages_for_operators_document_the_answers_to_a_missing_key(
    shared_serving: InProcessServing, path: str, statuses: set[int]
) -> None:
    operation = HttpInterface(shared_serving.context).openapi()["paths"][path]["get"]
    assert {str(status) for status in statuses} == {"401", "403"} & set(operation["responses"])


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Generate a client with openapi-python-client. Return the name of its package."""
    documented_serving = build_serving(tmp_path / "described", FakeRows(SCHEMA))
    (tmp_path / "openapi.json").write_text(json.dumps(HttpInterface(documented_serving.context).openapi()))
    documented_serving.close()
    (tmp_path / "generator.yaml").write_text("post_hooks: []\n")
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
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
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
        run_live_serving(build_serving(tmp_path / "home", FakeRows(SCHEMA))) as live,
        part("client").Client(base_url=live.url) as client,
    ):
        answer = part("api.traffic.rank").sync(
            client=client, body=models.RankRequest.from_dict(flat), ranked=True
        )
        assert isinstance(answer, models.RankAnswer) and sorted(answer.order) == [0, 1, 2]
        assert answer.ranked == [flat["candidates"][i]["item_id"] for i in answer.order]
        click = [models.Engagement.from_dict(engagement_example(SCHEMA))]
        engaged = part("api.traffic.engage").sync(client=client, body=click)
        assert isinstance(engaged, models.EngagementsAnswer)
        assert engaged.event_ids == ENGAGED.event_ids
        bad = models.RankRequest.from_dict({**flat, "first_position": -1})
        refused = part("api.traffic.rank").sync(client=client, body=bad)
        assert isinstance(refused, models.ErrorAnswer) and refused.error.path == "$.first_position"
        assert part("api.health.ready").sync(client=client).model_version == "0-0"

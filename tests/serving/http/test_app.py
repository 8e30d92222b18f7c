"""Pages and behavior common to all HTTP routes: HEAD, the common form of errors, media types, query
options."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

from roostream.schema.ids import MASK64
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.http.engagements import EngagementParser
from serving.http.pages import LINKS
from serving.scorer import build_version
from tests.serving.serving_cases import BODY, MODEL, SCHEMA, Client, InProcessServing, make_http_client

CLICK = {"request_id": "r-1", "user_id": 17, "item_id": 8, "action": "click"}


@pytest.fixture(scope="module")
def http(shared_serving: InProcessServing) -> TestClient:
    return make_http_client(shared_serving)


def test_the_root_describes_the_service_as_json_and_as_html(client: Client) -> None:
    http, serving = client()
    serving.waiting_for.append("rows")
    description = http.get("/").json()
    assert (description["name"], description["ready"], description["model_version"]) == (
        "Roostream serving",
        False,
        "0-0",
    )
    assert set(description["links"].values()) == set(LINKS.values())
    page = http.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html") and 'href="docs"' in page.text
    generated_client = http.get("/", headers={"accept": "application/json, text/html"})
    assert generated_client.json()["links"] == description["links"]


def test_the_root_links_to_the_controller_page_if_configured(client: Client) -> None:
    url = "http://127.0.0.1:9100/"
    http, _ = client(status_page=url)
    assert (
        http.get("/").json()["links"]["status_page"]
        == http.get("/page.json").json()["links"]["trainer"]
        == url
    )


def test_pages_load_nothing_from_other_hosts(http: TestClient) -> None:
    for path in ("/", "/docs", "/redoc"):
        answer = http.get(path, headers={"accept": "text/html"})
        assert not re.search(r"<img|https?://", answer.text)
        links = re.findall(r'(?:src|href)="([^"#]*)"', answer.text)
        assert links and not any(link.startswith("/") for link in links), (
            "links also work behind a path prefix"
        )
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        for link in links:
            if not link.startswith("data:"):
                assert http.get(urljoin(path, link)).status_code == 200, link


def test_the_documentation_pages_show_the_openapi_document(http: TestClient) -> None:
    assert "SwaggerUIBundle({" in http.get("/docs").text and "<redoc" in http.get("/redoc").text
    for path in ("/docs", "/redoc"):
        assert re.search(r"""["']openapi.json["']""", http.get(path).text)
    assert http.get("/openapi.json").json()["servers"] == [{"url": "."}]
    assert len(http.get("/docs/swagger-ui-bundle.js").content) > 1 << 20


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json"])
def test_probes_accept_head(http: TestClient, path: str) -> None:
    assert http.head(path).status_code == http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "text"),
    [
        ("GET", "/v1/rnk", 404, "not_found", "did you mean '/v1/rank'?"),
        ("POST", "/v1/rank/", 404, "not_found", "nothing is at"),
        ("GET", "/" + "x" * 5000, 404, "not_found", "…"),
        ("GET", "/v1/rank", 405, "method_not_allowed", "expected POST, got GET"),
        ("OPTIONS", "/v1/engagements", 405, "method_not_allowed", "expected POST"),
        ("DELETE", "/healthz", 405, "method_not_allowed", "expected GET or HEAD"),
    ],
)
def test_unknown_routes_and_methods_have_the_common_error_shape(
    http: TestClient, method: str, path: str, status: int, code: str, text: str
) -> None:
    answer = http.request(method, path, headers={"host": "evil.example"})
    assert answer.status_code == status and answer.json()["error"]["code"] == code
    assert text in answer.json()["error"]["message"] and len(answer.content) < 300
    assert "location" not in answer.headers, "no redirect goes to the address in the Host header"
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("media", "status", "text"),
    [
        ("application/json", 200, ""),
        ("application/json; charset=UTF-8", 200, ""),
        ('application/json; charset="utf-8"', 200, ""),
        ("application/vnd.shop+json", 200, ""),
        ("", 200, ""),
        ("application/x-www-form-urlencoded", 415, "curl: add -H 'content-type: application/json'"),
        ("application/json; charset=utf-16", 415, "expected charset utf-8, got 'utf-16'"),
        ("text/" + "x" * 5000, 415, "…"),
    ],
)
def test_media_types_are_accepted_as_clients_send_them(
    http: TestClient, media: str, status: int, text: str
) -> None:
    for path, body in (("/v1/rank", BODY), ("/v1/engagements", CLICK)):
        answer = http.post(path, content=json.dumps(body), headers={"content-type": media})
        assert answer.status_code == status, answer.text
        assert text in answer.text and (status == 200 or len(answer.content) < 400)


def test_ranked_returns_item_ids_in_order(http: TestClient) -> None:
    answer = http.post("/v1/rank?ranked=true", json=BODY).json()
    given = [c["item_id"] for c in BODY["candidates"]]
    assert answer["ranked"] == [given[i] for i in answer["order"]] and "nine" in answer["ranked"]
    assert "ranked" not in http.post("/v1/rank?ranked=false", json=BODY).json()
    message = pb.Impression(item_ids=[MASK64, 5]).SerializeToString()
    binary = http.post(
        "/v1/rank?ranked=true", content=message, headers={"content-type": "application/x-protobuf"}
    ).json()
    assert set(binary["ranked"]) == {MASK64, 5}


def test_top_returns_only_the_first_slots(client: Client) -> None:
    http, serving = client()
    full_answer = http.post("/v1/rank?ranked=true", json=BODY).json()
    for top in (1, 2, 3, 50):
        answer = http.post(f"/v1/rank?top={top}&ranked=true", json=BODY).json()
        slots = [
            {"item_id": i, "scores": full_answer["scores"][at]}
            for i, at in zip(full_answer["ranked"], full_answer["order"], strict=True)
        ]
        assert answer == {
            **{n: full_answer[n] for n in ("request_id", "model_version", "degraded")},
            "top": slots[:top],
        }
    binary = http.post("/v1/rank?top=2", json=BODY, headers={"accept": "application/x-protobuf"})
    message = pb.RankAnswer.FromString(binary.content)
    assert list(message.order) == full_answer["order"][:2] and len(message.scores) == 6
    logged = wire.decode(serving.records()[1].value)[1]
    assert len(logged.item_ids) == 3, "all scored candidates are logged with their positions"


def test_a_client_may_set_a_shorter_deadline(client: Client) -> None:
    http, _ = client(deadline_ms=30_000)
    for deadline in ("1000", " 30000", "9" * 20):
        assert http.post("/v1/rank", json=BODY, headers={"X-Deadline-Ms": deadline}).is_success, deadline
    for deadline in ("0", "-5", "1.5", "soon", "9" * 21, "²"):
        for path, body in (("/v1/rank", BODY), ("/v1/engagements", CLICK)):
            answer = http.post(path, json=body, headers={"X-Deadline-Ms": deadline.encode("latin-1")})
            assert (
                answer.status_code == 400
                and "whole milliseconds from 1 on" in answer.json()["error"]["message"]
            ), deadline


def test_query_options_are_validated_like_fields(client: Client) -> None:
    http, serving = client()
    bad = [
        ("appendd=true", "did you mean 'append'"),
        ("append=1", "expected true or false"),
        ("ranked", "got ''"),
        ("append=true&append=false", "expected append once"),
        ("top=1&ranked=true&top=2", "expected top once"),
    ]
    bad += [
        (f"top={value}", "expected a number of slots from 1 on")
        for value in ("0", "-1", "x", "", "true", "1.0")
    ]
    for query, text in bad:
        answer = http.post(f"/v1/rank?{query}", json=BODY)
        assert answer.status_code == 400 and text in answer.json()["error"]["message"]
    accepts = {"accept": "application/x-protobuf"}
    answer = http.post("/v1/rank?ranked=true", json=BODY, headers=accepts)
    assert answer.status_code == 400 and "protobuf" in answer.json()["error"]["message"]
    assert not serving.records()
    assert http.post("/v1/rank?append=true", json=BODY).is_success
    assert not wire.decode(serving.records()[0].value)[1].HasField("ro"), (
        "a later page is logged without request-only features"
    )


def test_event_ids_are_stable_strings(client: Client) -> None:
    http, serving = client()
    first = http.post("/v1/engagements", json=CLICK).json()["event_ids"]
    again = http.post("/v1/engagements", json={**CLICK, "event_id": first[0]}).json()["event_ids"]
    number = http.post("/v1/engagements", json={**CLICK, "event_id": int(first[0])}).json()["event_ids"]
    assert isinstance(first[0], str) and first == again == number
    assert http.post("/v1/engagements", json={**CLICK, "event_id": 0}).json()["event_ids"] == first, (
        "0 means that no id is given"
    )
    other = http.post("/v1/engagements", json={**CLICK, "event_id": "e-1"}).json()["event_ids"]
    beyond = http.post("/v1/engagements", json={**CLICK, "event_id": "9" * 20}).json()["event_ids"]
    assert len({*first, *other, *beyond}) == 3
    assert {str(wire.decode(r.value)[1].event_id) for r in serving.records()} == {*first, *other, *beyond}


def test_an_unused_action_is_reported_and_counted_within_bounds(client: Client) -> None:
    http, _ = client()
    body = [
        CLICK,
        {**CLICK, "action": "clik"},
        {**CLICK, "action": "clik", "item_id": 9},
        {**CLICK, "action": "read"},
    ]
    assert http.post("/v1/engagements", json=body).json()["unused_actions"] == ["clik"]
    for i in range(50):
        http.post("/v1/engagements", json={**CLICK, "action": f"made-up-{i}"})
    lines = [
        n
        for n in http.get("/metrics").text.splitlines()
        if n.startswith("roostream_serving_engagements_unused_total{")
    ]
    assert 'roostream_serving_engagements_unused_total{action="clik"} 2.0' in lines and len(lines) == 21
    assert 'roostream_serving_engagements_unused_total{action="(other)"} 31.0' in lines


def test_a_strict_process_refuses_an_unused_action(client: Client) -> None:
    http, serving = client(strict_actions=True)
    answer = http.post("/v1/engagements", json=[CLICK, {**CLICK, "action": "clik"}])
    assert answer.status_code == 400 and answer.json()["error"]["path"] == "$[1].action"
    assert "did you mean 'click'?" in answer.json()["error"]["message"] and not serving.records()
    assert EngagementParser(SCHEMA).known == ("click", "read")


def test_a_defect_is_500_without_details_and_logged_once_a_minute(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def gather(self, lookup: Any) -> Any:
            raise ZeroDivisionError("secret")

    http, _ = client(rows=Broken())
    answers = [http.post("/v1/rank", json=BODY) for _ in range(20)]
    assert all(answer.status_code == 500 and "secret" not in answer.text for answer in answers)
    assert len([r for r in caplog.records if r.exc_info]) == 1 and "defect of Roostream" in caplog.text


def test_every_possible_refusal_is_documented(http: TestClient) -> None:
    document = http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["operationId"] and operation["tags"], path
            for status, answer in operation["responses"].items():
                assert answer["description"] and answer["content"]
                if status in ("429", "503", "504"):
                    assert answer["headers"]["Retry-After"]["required"]
    names = set(document["components"]["schemas"])
    assert {
        "RankRequest",
        "CandidateRow",
        "CandidateColumns",
        "Engagement",
        "RankAnswer",
        "ErrorAnswer",
    } <= names


@pytest.fixture(scope="module")
def client_with_versions(shared_serving: InProcessServing) -> TestClient:
    shared_serving.service.versions.install(build_version("1-1", SCHEMA, MODEL, 1, {}))
    return make_http_client(shared_serving)


@pytest.mark.parametrize(
    ("header", "body", "version"),
    [("0-0", "", "0-0"), ("", "", "1-1"), ("0-0", "0-0", "0-0"), ("", "0-0", "0-0")],
)
def test_header_or_body_selects_the_version(
    client_with_versions: TestClient, header: str, body: str, version: str
) -> None:
    answer = client_with_versions.post(
        "/v1/rank", json={**BODY, "model_version": body}, headers={"X-Model-Version": header}
    )
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
    client_with_versions: TestClient, header: str, body: str, status: int, code: str
) -> None:
    answer = client_with_versions.post(
        "/v1/rank", json={**BODY, "model_version": body}, headers={"X-Model-Version": header}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["path"]) == (status, code, "$.model_version")

"""The HTTP routes: every kind of answer and refusal, and the records that each leaves in the feature log.

Tests named g1 to g9 check a guarantee of docs/architecture.md (Guarantees).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.feature_log.format import LogRecord
from serving.heartbeat import beat
from serving.http.app import HttpInterface
from serving.rank import RankResult, RankService
from serving.rank_json import JsonParser
from serving.request import RankRequest
from serving.request_batch import RequestColumns
from serving.scorer import build_version, probabilities
from tests.serving.serving_cases import BODY, MODEL, NOW_MS, SCHEMA, Client, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeHydrator, FakeRows


class WaitingRankService(RankService):
    """A rank service that waits until `go` is set before it scores."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def rank_all(self, requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        self.begun.release()
        assert self.go.wait(30)
        return super().rank_all(requests)


def error_of(answer: Any) -> dict[str, str]:
    return answer.json()["error"]


def test_a_request_is_scored_logged_and_answered(client: Client) -> None:
    http, serving = client()
    answer = http.post("/v1/rank", json=BODY)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json()["order"] and len(answer.json()["scores"]) == 3
    (record,) = serving.records()
    kind, impression = wire.decode(record.value)
    assert kind == wire.IMPRESSION and record.timestamp_ms == NOW_MS
    assert impression.header.request_id == "r-1"  # type: ignore[attr-defined]


def test_compressed_and_binary_bodies_give_equal_answers(client: Client) -> None:
    http, serving = client()
    raw = json.dumps(BODY).encode()
    plain = http.post(
        "/v1/rank", content=raw, headers={"content-type": "application/json; charset=utf-8"}
    ).json()
    packed = gzip.compress(raw)
    for encoding, body in (("gzip", packed), ("x-gzip", packed), ("deflate", zlib.compress(raw))):
        assert http.post("/v1/rank", content=body, headers={"content-encoding": encoding}).json() == plain
    logged = wire.decode(serving.records()[0].value)[1]
    assert isinstance(logged, pb.Impression)
    message = pb.Impression(header=logged.header, ro=logged.ro, nro=logged.nro, item_ids=logged.item_ids)
    message.header.model_version = ""
    binary = http.post(
        "/v1/rank", content=message.SerializeToString(), headers={"content-type": "application/x-protobuf"}
    )
    assert binary.json() == plain
    assert serving.records()[-1].value == serving.records()[0].value, (
        "the feature blocks are logged byte for byte"
    )
    url = "/v1/rank?append=true"
    assert http.post(
        url, content=message.SerializeToString(), headers={"content-type": "application/x-protobuf"}
    ).is_success
    assert not wire.decode(serving.records()[-1].value)[1].HasField("ro")


@pytest.mark.parametrize(
    ("accept", "is_protobuf"),
    [
        ("application/x-protobuf", True),
        ("APPLICATION/X-Protobuf; messageType=roo.RankAnswer, */*", True),
        ("application/json;q=0.9, application/x-protobuf", True),
        ("application/x-protobuf, application/json", True),  # named first
        ("application/json, application/x-protobuf", False),  # as clients generated for Java send it
        ("application/json, application/x-protobuf;q=0.9", False),
        ("application/x-protobuf;q=0, */*", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_a_rank_is_answered_in_the_media_type_that_the_client_prefers(
    client: Client, accept: str, is_protobuf: bool
) -> None:
    http, _ = client()
    answer = http.post("/v1/rank", json=BODY, headers={"accept": accept})
    assert answer.status_code == 200
    assert (answer.headers["content-type"] == "application/x-protobuf") == is_protobuf


def test_a_client_that_accepts_protobuf_gets_protobuf(client: Client) -> None:
    http, _ = client()
    plain = http.post("/v1/rank", json=BODY).json()
    wanted = {"accept": "application/x-protobuf, application/json;q=0.5"}
    binary = http.post("/v1/rank", json=BODY, headers=wanted)
    assert binary.headers["content-type"] == "application/x-protobuf"
    answer = pb.RankAnswer.FromString(binary.content)
    assert (answer.request_id, list(answer.order), answer.degraded) == (
        "r-1",
        plain["order"],
        plain["degraded"],
    )
    scores = np.array(answer.scores, dtype=np.float32).reshape(-1, len(answer.tasks))
    assert (scores == np.array([list(row.values()) for row in plain["scores"]], dtype=np.float32)).all()
    refused = http.post("/v1/rank", content=b"{", headers=wanted)
    assert refused.status_code == 400 and error_of(refused)["code"] == "bad_request", "errors are JSON"
    click = {"request_id": "r-1", "item_id": 8, "action": "click"}
    assert http.post("/v1/engagements", json=click, headers=wanted).json()["accepted"] == 1


def test_every_refusal_has_a_status_a_code_and_leaves_no_record(client: Client) -> None:
    http, serving = client(max_body_bytes=4096)
    large = b" " * 5000
    bomb = gzip.compress(bytes(1 << 20))
    cases: list[tuple[dict[str, Any], int, str, str]] = [
        (
            {"json": {**BODY, "candidates": [{"item_id": 1, "nro": {"age_h": "x"}}]}},
            400,
            "$.candidates[0].nro.age_h",
            "float",
        ),
        ({"content": b"{"}, 400, "$", "truncated"),
        ({"content": b"zz", "headers": {"content-encoding": "gzip"}}, 400, "", "expected a gzip body"),
        (
            {"content": gzip.compress(b"{}")[:-4], "headers": {"content-encoding": "gzip"}},
            400,
            "",
            "truncated",
        ),
        ({"json": {**BODY, "model_version": "9-9"}}, 404, "$.model_version", "not loaded"),
        ({"content": large}, 413, "", "at most 4096 bytes"),
        ({"content": iter([large])}, 413, "", "at most 4096 bytes"),
        ({"content": bomb, "headers": {"content-encoding": "gzip"}}, 413, "", "at most 4096 bytes"),
        ({"json": {"candidates": {"item_id": [1] * 21}}}, 413, "$.candidates", "at most 20 candidates"),
        ({"content": b"", "headers": {"content-encoding": "br"}}, 415, "", "gzip, deflate or none"),
        ({"content": b"", "headers": {"content-type": "text/csv"}}, 415, "", "expected content-type"),
    ]
    codes = {
        400: "bad_request",
        404: "unknown_model_version",
        413: "too_large",
        415: "unsupported_media_type",
    }
    for arguments, status, path, text in cases:
        answer = http.post("/v1/rank", **arguments)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error.get("path", "")) == (status, codes[status], path), (
            arguments
        )
        assert text in error["message"]
    assert not serving.records()
    assert http.get("/v1/rank").status_code == 405


def test_all_members_of_a_gzip_body_are_read(client: Client) -> None:
    http, serving = client()
    data, encoding = json.dumps(BODY).encode(), {"content-encoding": "gzip"}
    parts = b"".join(gzip.compress(data[at : at + 100]) for at in range(0, len(data), 100))
    assert http.post("/v1/rank", content=parts, headers=encoding).status_code == 200
    assert len(serving.records()) == 1
    for bad in (gzip.compress(data) + b"garbage", parts + parts[:-1], gzip.compress(b"") * 100):
        assert http.post("/v1/rank", content=bad, headers=encoding).status_code == 400
    more = zlib.compress(data) + b"x"
    assert http.post("/v1/rank", content=more, headers={"content-encoding": "deflate"}).status_code == 400


def test_positions_that_the_trainer_would_refuse_are_refused(client: Client) -> None:
    http, serving = client()
    last_valid = (1 << 31) - 1 - len(BODY["candidates"])
    assert http.post("/v1/rank", json={**BODY, "first_position": last_valid}).status_code == 200
    for first in (last_valid + 1, (1 << 31) - 1, 1 << 31, -1):
        answer = http.post("/v1/rank", json={**BODY, "first_position": first})
        assert answer.status_code == 400 and error_of(answer)["path"] == "$.first_position", first
        inference = {
            "inputs": [{"name": "item_id", "shape": [3], "datatype": "INT64", "data": [1, 2, 3]}],
            "parameters": {"first_position": first},
        }
        assert http.post("/v2/models/default/infer", json=inference).status_code == 400
    positions = wire.decode(serving.records()[0].value)[1].positions  # type: ignore[attr-defined]
    assert max(positions) == (1 << 31) - 2


def test_engagements_are_logged_before_they_are_answered(client: Client) -> None:
    http, serving = client()
    click = {"request_id": "r-1", "user_id": 17, "item_id": 8, "action": "click"}
    one = http.post("/v1/engagements", json=click)
    assert one.status_code == 200 and one.json()["accepted"] == 1
    many = http.post("/v1/engagements", json=[click, {**click, "item_id": 9}])
    assert many.json()["accepted"] == 2 and many.json()["event_ids"][0] == one.json()["event_ids"][0]
    assert [r.topic for r in serving.records()] == ["engagements"] * 3
    bad = http.post("/v1/engagements", json=[click, {**click, "item_id": None}])
    assert bad.status_code == 400 and error_of(bad)["path"] == "$[1].item_id"
    other = http.post("/v1/engagements", content=b"", headers={"content-type": "application/x-protobuf"})
    assert other.status_code == 415
    assert len(serving.records()) == 3


def test_g7_a_full_log_is_503_with_retry_after_and_recovers(client: Client) -> None:
    http, serving = client(log_segment_bytes=1 << 20, max_log_bytes=1 << 21)
    parts = serving.context
    for size in (100_000, 5_000):
        while parts.log.has_room(size):
            parts.log.append(LogRecord("impressions", -1, NOW_MS, b"userkey!", bytes(size)))
    for route, body in (
        ("/v1/rank", {**BODY, "ro": {}}),
        ("/v1/engagements", [_click(i) for i in range(1000)]),
    ):
        for _ in range(100):
            answer = http.post(route, json=body)
            if answer.status_code != 200:
                break
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "feature log is full" in error_of(answer)["message"]
    parts.log.acknowledge(parts.log.read(parts.log.cursor, 1 << 20)[-1].after)
    assert http.post("/v1/rank", json=BODY).status_code == 200


def _click(i: int) -> dict[str, Any]:
    return {"request_id": "r-1", "item_id": i, "action": "click"}


def test_a_process_is_ready_once_it_waits_for_nothing_and_always_live(client: Client) -> None:
    http, serving = client()
    serving.waiting_for.append("rows of the shards")
    serving.service.rows_ready = lambda: False
    answer = http.get("/readyz")
    assert answer.status_code == 503 and answer.json()["waiting_for"] == ["rows of the shards"]
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.post("/v1/rank", json=BODY).json()["degraded"] is True
    serving.waiting_for.clear()
    assert http.get("/readyz").json() == {
        "ready": True,
        "waiting_for": [],
        "model_version": "0-0",
        "rows_age_s": None,
    }


def test_metrics_count_answers_by_route_and_status(client: Client) -> None:
    http, _ = client(hydrator=FakeHydrator())
    http.post("/v1/rank", json=BODY)
    http.post("/v1/rank", content=b"{")
    text = http.get("/metrics").text
    assert 'roostream_serving_requests_total{route="rank",status="200"} 1.0' in text
    assert 'roostream_serving_requests_total{route="rank",status="400"} 1.0' in text
    assert 'roostream_serving_request_seconds_count{route="rank",status="2xx"} 1.0' in text
    assert "roostream_serving_candidates_total 3.0" in text and "roostream_serving_in_flight 0.0" in text


def test_documented_examples_work(client: Client) -> None:
    http, _ = client()
    document = http.get("/openapi.json").json()
    assert {"/v1/rank", "/v1/engagements", "/healthz", "/readyz", "/metrics"} <= set(document["paths"])
    for route in ("/v1/rank", "/v1/engagements"):
        operation = document["paths"][route]["post"]
        example = operation["requestBody"]["content"]["application/json"]["example"]
        assert http.post(route, json=example).status_code == 200
        assert {"400", "413", "429", "503"} <= set(operation["responses"])
    schemas = document["components"]["schemas"]
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert refs <= set(schemas), "every reference has its schema"
    features = schemas["CandidateFeatures"]["properties"]
    assert list(features) == [f.name for f in SCHEMA.nro]
    assert features["clicks"]["description"] == "filled in by serving when missing: clicks_1h"
    assert schemas["RankAnswer"]["required"] == ["request_id", "degraded", "model_version"]
    assert {"scores", "order", "ranked", "top"} <= set(schemas["RankAnswer"]["properties"])
    assert {"item_id", *features} == set(schemas["CandidateColumns"]["properties"])
    assert {"item_id", "nro", *features} == set(schemas["CandidateRow"]["properties"])
    assert http.get("/docs").status_code == 200


def _async_client(serving: InProcessServing) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(HttpInterface(serving.context)), base_url="http://serving"
    )


def test_g7_excess_requests_are_429_at_once(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), service=WaitingRankService, max_in_flight=4)
    service = serving.service
    assert isinstance(service, WaitingRankService)

    async def main() -> None:
        async with _async_client(serving) as http:
            admitted = [
                asyncio.create_task(http.post("/v1/rank", json={**BODY, "request_id": f"a{i}"}))
                for i in range(4)
            ]
            await asyncio.to_thread(service.begun.acquire)
            while not all_admitted(serving):
                await asyncio.sleep(0.001)
            refused_answers = await asyncio.gather(*(http.post("/v1/rank", json=BODY) for _ in range(20)))
            assert {a.status_code for a in refused_answers} == {429} and {
                a.headers["retry-after"] for a in refused_answers
            } == {"1"}
            assert (await http.post("/v1/engagements", json=_click(1))).status_code == 200, (
                "engagements have their own limit"
            )
            service.go.set()
            assert [a.status_code for a in await asyncio.gather(*admitted)] == [200] * 4
            assert (await http.post("/v1/rank", json=BODY)).status_code == 200

    asyncio.run(main())
    assert sum(r.topic == "impressions" for r in serving.records()) == 5
    serving.close()


def all_admitted(serving: InProcessServing) -> bool:
    return serving.context.metrics.registry.get_sample_value("roostream_serving_in_flight") == 4


def test_g7_a_request_that_misses_its_deadline_is_504_and_not_logged(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), service=WaitingRankService, deadline_ms=50)
    service = serving.service
    assert isinstance(service, WaitingRankService)

    async def main() -> None:
        async with _async_client(serving) as http:
            late = await asyncio.gather(*(http.post("/v1/rank", json=BODY) for _ in range(3)))
            assert {a.status_code for a in late} == {504} and error_of(late[0])["code"] == "deadline_exceeded"

    asyncio.run(main())
    service.go.set()
    serving.context.executor.shutdown()
    assert not serving.records()
    assert service.begun.acquire(blocking=False)
    assert not service.begun.acquire(blocking=False), "requests that were still queued are not scored"
    assert serving.context.watermark.horizon_ms() == NOW_MS
    serving.close()


def test_g7_a_clients_deadline_is_504_not_logged_and_counts_for_admission(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), service=WaitingRankService, deadline_ms=30_000)
    service, app = serving.service, HttpInterface(serving.context)
    assert isinstance(service, WaitingRankService)

    async def main() -> None:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://serving") as http:
            patient = asyncio.create_task(http.post("/v1/rank", json=BODY))
            await asyncio.to_thread(service.begun.acquire)
            late = await http.post("/v1/rank", json=BODY, headers={"X-Deadline-Ms": "20"})
            assert late.status_code == 504 and late.headers["retry-after"] == "1"
            app.gate.service_s = 1.0
            refused = await http.post("/v1/rank", json=BODY, headers={"X-Deadline-Ms": "500"})
            assert refused.status_code == 429 and "deadline" in error_of(refused)["message"]
            service.go.set()
            assert (await patient).status_code == 200

    asyncio.run(main())
    assert len(serving.records()) == 1
    serving.close()


def test_heartbeats_do_not_overtake_a_request_in_flight(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), service=WaitingRankService)
    service, clock = serving.service, serving.context.watermark.clock
    assert isinstance(service, WaitingRankService)

    async def main() -> None:
        async with _async_client(serving) as http:
            working = asyncio.create_task(http.post("/v1/rank", json=BODY))
            await asyncio.to_thread(service.begun.acquire)
            clock.advance(5.0)  # type: ignore[attr-defined]
            beat(serving.context.log, serving.context.watermark, "p", 4)
            service.go.set()
            await working
            beat(serving.context.log, serving.context.watermark, "p", 4)

    asyncio.run(main())
    times = [(r.partition, r.timestamp_ms) for r in serving.records() if r.topic == "impressions"]
    assert times == [*((p, NOW_MS) for p in range(4)), (-1, NOW_MS), *((p, NOW_MS + 5000) for p in range(4))]
    serving.close()


def test_g4_no_answer_mixes_versions_while_they_are_swapped(tmp_path: Path) -> None:
    """Each version has its own bias, so that scores show which version computed them. They must match the
    version that the answer names.
    """
    serving = build_serving(tmp_path, FakeRows(SCHEMA), max_in_flight=1000)
    versions = [build_version(f"1-{i}", SCHEMA, MODEL, i, {}) for i in range(1, 7)]
    for i, version in enumerate(versions):
        for name, parameter in version.model.named_parameters():
            if parameter.ndim == 1:
                parameter.data.add_(0.1 * (i + 1) + 0.01 * len(name))
    request = JsonParser(SCHEMA).parse(json.dumps(BODY).encode())
    expected = {v.name: _scores(serving, v, request) for v in (serving.service.versions.newest, *versions)}
    assert len({tuple(map(tuple, s)) for s in expected.values()}) == len(expected)
    stop = threading.Event()

    def swap() -> None:
        at = 0
        while not stop.is_set():
            serving.service.versions.install(versions[at % len(versions)])
            at += 1

    async def main() -> list[Any]:
        async with _async_client(serving) as http:
            return [
                a.json() for a in await asyncio.gather(*(http.post("/v1/rank", json=BODY) for _ in range(60)))
            ]

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        answers = asyncio.run(main())
    finally:
        stop.set()
        swapper.join()
    seen = set()
    for answer in answers:
        seen.add(answer["model_version"])
        scores = np.array([[s["click"], s["dwell"]] for s in answer["scores"]], dtype=np.float32)
        assert scores.tolist() == expected[answer["model_version"]]
    assert len(seen) > 1
    logged = {r[1].header.model_version for r in (wire.decode(r.value) for r in serving.records())}  # type: ignore[attr-defined]
    assert logged == seen
    serving.close()


def _scores(serving: InProcessServing, version: Any, request: RankRequest) -> list[list[float]]:
    blocks = serving.service.completion.encode(request, NOW_MS, {}, {})
    logits = version.score(serving.service.rows, RequestColumns(*blocks[2:], request.item_ids, NOW_MS))
    return probabilities(logits).tolist()


def test_a_client_that_disconnects_gets_no_answer(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    app, sent = HttpInterface(serving.context), []

    async def main() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/rank", "headers": [], "query_string": b""}

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)

    asyncio.run(main())
    assert not sent and not serving.records()
    serving.close()

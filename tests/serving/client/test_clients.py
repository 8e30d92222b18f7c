"""The Python clients (sync and async) against a live serving, in JSON and protobuf; and the fields that they
send against the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast, get_type_hints

import httpx2 as httpx
import numpy as np
import pytest

from roostream.errors import ConfigError, WireError
from roostream.wire import records as wire
from serving.client import AsyncClient, Client, Ranking, RetryPolicy, ServingError
from serving.client.messages import (
    EngagementFields,
    RankFields,
    RecommendFields,
    RetrieveFields,
    engage_exchange,
    rank_exchange,
    recommend_exchange,
    retrieve_exchange,
    top_exchange,
)
from serving.client.retry import DEADLINE_HEADER
from tests.serving.live_serving import LiveServing, run_live_serving
from tests.serving.retrieval_cases import make_retrieval
from tests.serving.serving_cases import BODY, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeRows

FIELDS = cast(RankFields, BODY)
COLUMNS: RankFields = {
    **FIELDS,
    "candidates": {
        "item_id": [8, "nine", 10],
        "topics": [[1, 2], 7, None],
        "age_h": np.array([2.5, np.nan, np.nan]),
        "clicks": [3, 0, 1],
    },
}
PATIENT = RetryPolicy(deadline_ms=60_000)  # long enough for a busy machine
RETRIEVE_FIELDS: RetrieveFields = {
    "request_id": "r-1",
    "user_id": 17,
    "ro": {"mood": 0.5, "hour": 13.0},
    "k": 5,
}
RECOMMEND_FIELDS: RecommendFields = {**RETRIEVE_FIELDS, "k": 3, "retrieved": 12}
CLICK: EngagementFields = {"request_id": "r-1", "user_id": 17, "item_id": 8, "action": "click"}


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServing]:
    with run_live_serving(build_serving(tmp_path, FakeRows(SCHEMA))) as running:
        yield running


@pytest.fixture
def live_retrieval(tmp_path: Path) -> Iterator[LiveServing]:
    retrieval = make_retrieval(tmp_path / "home", FakeRows(SCHEMA))
    retrieval.turn()
    with run_live_serving(retrieval.serving) as running:
        yield running


def logged_impressions(live: LiveServing) -> list[bytes]:
    """Return the logged impressions, without their times."""
    messages = [wire.decode(r.value)[1] for r in live.serving.records()]
    for message in messages:
        message.header.time_ms = 0
    return [m.SerializeToString(deterministic=True) for m in messages]


def test_one_request_gives_equal_answers_in_every_encoding(live: LiveServing) -> None:
    async def call_async(schema: Any) -> list[Ranking]:
        async with AsyncClient(live.url, policy=PATIENT, schema=schema) as client:
            return [await client.rank(FIELDS), await client.rank(COLUMNS)]

    answers = [*asyncio.run(call_async(None)), *asyncio.run(call_async(SCHEMA))]
    for schema in (None, SCHEMA):
        with Client(live.url, policy=PATIENT, schema=schema) as client:
            answers += [client.rank(FIELDS), client.rank(COLUMNS)]
    assert len(set(logged_impressions(live))) == 1 and len(answers) == 8
    first = answers[0]
    assert {a.request_id for a in answers} == {"r-1"} and set(first.items) == {8, "nine", 10}
    for answer in answers:
        assert (answer.items, answer.order, answer.model_version) == (first.items, first.order, "0-0")
        assert [s["click"] for s in answer.scores] == pytest.approx(
            [s["click"] for s in first.scores], rel=1e-6
        )
        assert set(answer.scores[0]) == {"click", "dwell"} and not answer.degraded


def test_top_returns_the_first_slots_and_all_candidates_are_logged(live: LiveServing) -> None:
    async def call_async(schema: Any) -> Any:
        async with AsyncClient(live.url, policy=PATIENT, schema=schema) as client:
            return await client.top(FIELDS, 2)

    for schema in (None, SCHEMA):
        with Client(live.url, policy=PATIENT, schema=schema) as client:
            full_ranking = client.rank(FIELDS)
            for top in (client.top(FIELDS, 2), asyncio.run(call_async(schema)), client.top(COLUMNS, 2)):
                assert [slot.item_id for slot in top.top] == full_ranking.items[:2] and not top.degraded
                assert (top.request_id, top.model_version) == ("r-1", "0-0")
                assert [s.scores for s in top.top] == [
                    pytest.approx(full_ranking.scores[i], rel=1e-6) for i in full_ranking.order[:2]
                ]
    assert len(set(logged_impressions(live))) == 1


def test_retrieve_and_recommend_return_items(live_retrieval: LiveServing) -> None:
    async def call_async() -> tuple[Any, Any]:
        async with AsyncClient(live_retrieval.url, policy=PATIENT, schema=SCHEMA) as client:
            return await client.retrieve(
                {**RETRIEVE_FIELDS, "among": np.array([1, 2, 4]).tolist()}
            ), await client.recommend(RECOMMEND_FIELDS)

    some, shown = asyncio.run(call_async())
    with Client(live_retrieval.url, policy=PATIENT) as client:
        found = client.retrieve(RETRIEVE_FIELDS)
        assert client.recommend(RECOMMEND_FIELDS) == shown
    assert len(found.items) == 5 and found.retrieval_version == "1-2" and found.request_id == "r-1"
    assert found.items[0].product >= found.items[-1].product and {item.item_id for item in some.items} == {
        1,
        2,
        4,
    }
    assert (
        len(shown.items) == 3
        and set(shown.items[0].scores) == {"click", "dwell"}
        and shown.model_version == "1-2"
    )
    assert len(live_retrieval.serving.records()) == 2


def test_a_later_page_is_logged_as_a_page_in_both_encodings(live: LiveServing) -> None:
    for schema in (None, SCHEMA):
        with Client(live.url, policy=PATIENT, schema=schema) as client:
            client.rank({**FIELDS, "append": True})
            client.rank({**FIELDS, "append": True, "first_position": 7})
    messages = [wire.decode(r.value)[1] for r in live.serving.records()]
    assert not any(m.HasField("ro") for m in messages)
    assert [min(m.positions) for m in messages] == [0, 7, 0, 7]


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_numpy_ids_equal_python_ids_in_both_encodings(live: LiveServing, kind: type[Any]) -> None:
    numpy_fields = cast(
        RankFields,
        {
            "request_id": "r-1",
            "user_id": kind(17),
            "session_id": kind(4),
            "candidates": {"item_id": np.array([8, 9, 10], kind), "clicks": np.array([3, 0, 1])},
        },
    )
    rows = [{"item_id": kind(i), "clicks": c} for i, c in ((8, 3), (9, 0), (10, 1))]
    ids = {"user_id": 17, "session_id": 4, "candidates": {"item_id": [8, 9, 10], "clicks": [3, 0, 1]}}
    for schema in (None, SCHEMA):
        with Client(live.url, policy=PATIENT, schema=schema) as client:
            forms = (numpy_fields, {**numpy_fields, "candidates": rows}, {"request_id": "r-1", **ids})
            answers = [client.rank(cast(RankFields, fields)) for fields in forms]
            assert answers[0].items == answers[1].items == answers[2].items
            assert {type(item) for answer in answers for item in answer.items} == {int}
    assert len(live.serving.records()) == 6 and len(set(logged_impressions(live))) == 1
    with Client(live.url, policy=PATIENT) as client:
        click = client.engage(cast(Any, {**CLICK, "user_id": kind(17), "item_id": kind(8)}))
        assert click.event_ids == client.engage(CLICK).event_ids


@pytest.mark.parametrize("given", [2**63 + 5, 2**64 - 1])
def test_numpy_ids_beyond_63_bits_are_sent_in_both_encodings(live: LiveServing, given: int) -> None:
    for schema in (None, SCHEMA):
        with Client(live.url, policy=PATIENT, schema=schema) as client:
            ids = np.array([given, 1], np.uint64)
            ranking = client.rank(
                cast(Any, {"request_id": "r-1", "user_id": ids[0], "candidates": {"item_id": ids}})
            )
            assert set(ranking.items) == {given, 1}
    assert len(live.serving.records()) == 2 and len(set(logged_impressions(live))) == 1


def test_the_client_reads_readiness_and_version(live: LiveServing) -> None:
    async def call_async() -> tuple[bool, str]:
        async with AsyncClient(live.url, policy=PATIENT) as client:
            return await client.ready(), await client.version()

    with Client(live.url, policy=PATIENT) as client:
        assert client.ready() and client.version() == "0-0"
        live.serving.waiting_for.append("rows")
        assert not client.ready()
    assert asyncio.run(call_async()) == (False, "0-0")


def test_a_refusal_names_the_field(live: LiveServing) -> None:
    wrong: RankFields = {**FIELDS, "candidates": [{"item_id": 8, "age": 1}]}

    async def call_async() -> None:
        async with AsyncClient(live.url, policy=PATIENT) as client:
            await client.rank(wrong)

    with (
        Client(live.url, policy=PATIENT) as client,
        pytest.raises(ServingError, match="did you mean 'age_h'") as sync,
    ):
        client.rank(wrong)
    with pytest.raises(ServingError) as other:
        asyncio.run(call_async())
    assert (sync.value.status, sync.value.code, sync.value.path) == (
        400,
        "bad_request",
        "$.candidates[0].age",
    )
    assert str(sync.value) == str(other.value)
    with (
        Client(live.url, policy=PATIENT, schema=SCHEMA) as client,
        pytest.raises(WireError, match="did you mean 'age_h'"),
    ):
        client.rank(wrong)


def test_an_unreachable_server_is_retried_and_then_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    policy = RetryPolicy(retries=1, first_s=0.001)

    async def call_async() -> None:
        async with AsyncClient(url, policy=policy) as client:
            await client.rank(FIELDS)

    with Client(url, policy=policy) as client, pytest.raises(ServingError, match="did not answer") as sync:
        client.rank(FIELDS)
    with pytest.raises(ServingError, match="did not answer") as other:
        asyncio.run(call_async())
    assert sync.value.code == other.value.code == "unreachable"


def test_a_silent_server_is_given_up_at_the_deadline() -> None:
    async def call_async(url: str) -> None:
        async with AsyncClient(url, policy=RetryPolicy(retries=0)) as client:
            await client.rank(FIELDS, deadline_ms=50)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, policy=RetryPolicy(retries=0)) as client, pytest.raises(ServingError) as sync:
            client.rank(FIELDS, deadline_ms=50)
        with pytest.raises(ServingError) as other:
            asyncio.run(call_async(url))
    assert sync.value.code == other.value.code == "timeout"


FORKING_CLIENT = """
import os, sys
from serving.client import Client
client = Client(sys.argv[1])
client.rank({"candidates": [{"item_id": 1}]})
if os.fork() == 0:
    client.rank({"candidates": [{"item_id": 1}]})
    print("ranked", flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
client.rank({"candidates": [{"item_id": 1}]})
"""


def test_a_forked_process_does_not_share_the_connections_of_its_parent(live: LiveServing) -> None:
    command = [sys.executable, "-c", FORKING_CLIENT, live.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ranked\n"
        assert len(live.app.connections) == 2
        process.communicate(timeout=60)
    assert process.returncode == 0 and len(live.serving.records()) == 3


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # about the connection of the first event loop
def test_an_async_client_works_in_one_event_loop_after_another(live: LiveServing) -> None:
    client = AsyncClient(live.url, policy=PATIENT)

    async def call_async(is_last: bool) -> list[Any]:
        items = (await client.rank(FIELDS)).items
        if is_last:
            await client.close()
        return items

    assert asyncio.run(call_async(False)) == asyncio.run(call_async(True))
    with pytest.raises(RuntimeError, match="client has been closed"):
        asyncio.run(call_async(True))
    client = AsyncClient(live.url, policy=PATIENT)
    asyncio.run(call_async(False))
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match="client has been closed"):
        asyncio.run(call_async(False))
    gc.collect()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"userid": 17}, "$.userid"),
        ({"user_id": None}, "$.user_id"),
        ({"user_id": True}, "$.user_id"),
        ({"user_id": 1.0}, "$.user_id"),
        ({"user_id": 2**64}, "$.user_id"),
        ({"user_id": ""}, "$.user_id"),
        ({"user_id": b"ann"}, "$.user_id"),
        ({"session_id": []}, "$.session_id"),
        ({"request_id": 7}, "$.request_id"),
        ({"request_id": 0}, "$.request_id"),
        ({"surface": None}, "$.surface"),
        ({"append": "false"}, "$.append"),
        ({"append": np.array([True, False])}, "$.append"),
        ({"first_position": np.array([0, 1])}, "$.first_position"),
        ({"model_version": None}, "$.model_version"),
        ({"ro": None}, "$.ro"),
        ({"candidates": [{"item_id": None}]}, "$.candidates[0].item_id"),
        ({"candidates": [{"item_id": 1}, {"item_id": True}]}, "$.candidates[1].item_id"),
        ({"candidates": {"item_id": [1, 2.0]}}, "$.candidates.item_id[1]"),
        ({"candidates": {"age_h": [1.0]}}, "$.candidates"),
        ({"candidates": {"item_id": "ab"}}, "$.candidates.item_id"),
        ({"candidates": {"item_id": 5}}, "$.candidates.item_id"),
        ({"candidates": {"item_id": None}}, "$.candidates.item_id"),
        ({"candidates": ["a"]}, "$.candidates[0]"),
        ({"candidates": [{"item_id": 1, "nro": 5}]}, "$.candidates[0].nro"),
        ({"candidates": [{"item_id": 1, "age_h": 1, "nro": {"age_h": 1}}]}, "$.candidates[0].nro.age_h"),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_with_its_path_in_both_encodings(
    live: LiveServing, change: dict[str, Any], path: str
) -> None:
    wrong = cast(RankFields, {"request_id": "r-1", "user_id": 17, "candidates": [{"item_id": 1}], **change})
    for schema in (None, SCHEMA):
        with Client(live.url, policy=PATIENT, schema=schema) as client, pytest.raises(ServingError) as caught:
            client.rank(wrong)
        assert (caught.value.path, caught.value.code in ("bad_request", "bad_fields")) == (path, True)
    assert not live.serving.records()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"ro": {"mood": float("-inf")}}, "$.ro.mood"),
        ({"ro": {"mood": np.float32("inf")}}, "$.ro.mood"),
        ({"candidates": {"item_id": [1, 2], "age_h": np.array([1, np.inf])}}, "$.candidates.age_h"),
        ({"candidates": [{"item_id": 1}, {"item_id": b"two"}]}, "$.candidates[1].item_id"),
        ({"candidates": {"item_id": np.array([b"a", b"b"])}}, "$.candidates.item_id[0]"),
        ({"user_id": "\ud83d"}, "$"),
        ({"ro": {"mood": 1j}}, "$"),
    ],
    ids=str,
)
def test_values_that_json_would_change_are_not_sent(change: dict[str, Any], path: str) -> None:
    wrong = cast(RankFields, {"request_id": "r-1", "candidates": [{"item_id": 1}], **change})
    with pytest.raises(ServingError) as caught:
        rank_exchange(wrong, None)
    assert (caught.value.status, caught.value.code, caught.value.path) == (0, "bad_fields", path)
    with pytest.raises(ServingError, match="bytes"):
        engage_exchange([CLICK, {**CLICK, "item_id": cast(Any, b"8")}])


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"ro": {3: 1.0}}, "$.ro"),
        ({"candidates": [{"item_id": 1, 3: 1.0}]}, "$.candidates"),
        ({"candidates": {"item_id": [1], 3: [1.0]}}, "$.candidates"),
    ],
    ids=str,
)
def test_a_name_that_is_no_text_is_refused_in_protobuf(change: dict[str, Any], path: str) -> None:
    wrong = cast(RankFields, {"request_id": "r-1", "candidates": [{"item_id": 1}], **change})
    with pytest.raises(ServingError, match="names of features as texts, got 3") as caught:
        rank_exchange(wrong, SCHEMA)
    assert caught.value.path == path


def test_a_key_is_sent_without_the_line_end_of_its_file_and_never_repeated() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    with Client("http://serving", key=" k-1\r\n", transport=httpx.MockTransport(answer)) as client:
        assert client.ready() and seen == ["Bearer k-1"]
    for wrong in ("secret\nsecret", "secret\u00e9", "secret secret", "\x00secret"):
        with pytest.raises(ConfigError) as caught:
            Client("http://serving", key=wrong)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "serving:8080", "127.0.0.1:8080", "ftp://serving", "http://[::1", "http://"]
)
def test_an_address_that_is_not_http_is_refused_before_any_call(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="http://serving:8080"):
            kind(url)


def test_a_path_or_another_schema_is_refused_with_advice(live: LiveServing) -> None:
    with pytest.raises(ConfigError, match="load_schema"):
        Client(live.url, schema=cast(Any, "schema.toml"))
    other = dataclasses.replace(SCHEMA, ro=SCHEMA.ro[::-1])
    with (
        Client(live.url, policy=PATIENT, schema=other) as client,
        pytest.raises(ServingError, match="load the schema file of this serving") as caught,
    ):
        client.rank(FIELDS)
    assert caught.value.path == "$.header.schema" and not live.serving.records()


def test_an_answer_that_arrives_byte_by_byte_is_given_up_at_the_deadline() -> None:
    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n")
            for _ in range(40):
                time.sleep(0.1)
                connection.sendall(b" ")

    async def call_async(url: str) -> None:
        async with AsyncClient(url, policy=RetryPolicy(retries=0)) as client:
            await client.rank(FIELDS, deadline_ms=500)

    with socket.create_server(("127.0.0.1", 0)) as slow, ThreadPoolExecutor(1) as server:
        url = f"http://127.0.0.1:{slow.getsockname()[1]}"
        server.submit(drip, slow)
        with Client(url, policy=RetryPolicy(retries=0)) as client, pytest.raises(ServingError) as sync:
            client.rank(FIELDS, deadline_ms=500)
        server.submit(drip, slow)
        with pytest.raises(ServingError) as other:
            asyncio.run(call_async(url))
    assert sync.value.code == other.value.code == "timeout"


def test_a_retry_repeats_the_request_and_connections_are_reused() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(
            {"id": json.loads(request.content)["request_id"], "key": request.headers["authorization"]}
        )
        if len(seen) < 3:
            return httpx.Response(503, headers={"retry-after": "0"})
        return httpx.Response(
            200,
            json={
                "request_id": seen[0]["id"],
                "model_version": "1-2",
                "scores": [{"click": 0.5}],
                "order": [0],
                "degraded": False,
            },
        )

    policy = RetryPolicy(first_s=0.0)
    with Client("http://serving", key="k-1", policy=policy, transport=httpx.MockTransport(answer)) as client:
        assert client.rank({"candidates": [{"item_id": 1}]}).request_id == seen[0]["id"]
    assert (
        len(seen) == 3 and seen[0] == seen[1] == seen[2] and seen[0]["key"] == "Bearer k-1" and seen[0]["id"]
    )


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"{}",
        b'{"request_id":"\xff"}',
        b'{"request_id":"r","model_version":"","scores":[],"order":[4],"degraded":false}',
    ],
)
def test_an_unexpected_answer_is_reported_as_such(body: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    with Client("http://proxy", transport=transport) as client, pytest.raises(ServingError, match="read"):
        client.rank(FIELDS)


ONE: RankFields = {"request_id": "r-1", "candidates": [{"item_id": 8}, {"item_id": 9}]}
TWO_SCORES = [{"click": 0.5}, {"click": 0.4}]


@pytest.mark.parametrize(
    ("order", "scores"),
    [
        ([], []),
        ([1], TWO_SCORES),
        ([0, -1], TWO_SCORES),
        ([1, 1], TWO_SCORES),
        ([0, 2], TWO_SCORES),
        ([0, 1], []),
    ],
)
def test_an_answer_that_does_not_order_the_candidates_is_reported(
    order: list[int], scores: list[Any]
) -> None:
    body = {"request_id": "r-1", "model_version": "1-2", "scores": scores, "order": order, "degraded": False}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    with Client("http://proxy", transport=transport) as client, pytest.raises(ServingError, match="read"):
        client.rank(ONE)


def test_an_empty_answer_in_protobuf_is_reported() -> None:
    transport = httpx.MockTransport(
        lambda _: httpx.Response(200, headers={"content-type": "application/x-protobuf"})
    )
    with Client("http://proxy", transport=transport, schema=SCHEMA) as client:
        for call in (lambda: client.rank(ONE), lambda: client.top(ONE, 1)):
            with pytest.raises(ServingError, match="read"):
                call()


def test_an_answer_that_cannot_be_decompressed_is_reported() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"{}"))

    policy = RetryPolicy(retries=0)
    with (
        Client("http://proxy", policy=policy, transport=httpx.MockTransport(answer)) as client,
        pytest.raises(ServingError, match="did not answer"),
    ):
        client.rank(FIELDS)


def test_the_client_sends_the_documented_fields(live_retrieval: LiveServing) -> None:
    document = live_retrieval.app.openapi()
    components = document["components"]["schemas"]
    for fields, name in (
        (RankFields, "RankRequest"),
        (RetrieveFields, "RetrieveRequest"),
        (RecommendFields, "RecommendRequest"),
        (EngagementFields, "Engagement"),
    ):
        assert set(get_type_hints(fields)) == set(components[name]["properties"])
    ranks = (rank_exchange(FIELDS, None), rank_exchange(FIELDS, SCHEMA), top_exchange(FIELDS, 2, SCHEMA))
    for exchange in (
        *ranks,
        engage_exchange(CLICK),
        retrieve_exchange(RETRIEVE_FIELDS),
        recommend_exchange(RECOMMEND_FIELDS),
    ):
        path, _, query = exchange.call.path.partition("?")
        documented = document["paths"][path]["post"]["parameters"]
        named = {(p["in"], p["name"].lower()) for p in documented}
        assert ("header", DEADLINE_HEADER) in named and (
            not query or ("query", query.partition("=")[0]) in named
        )
        assert {name for name, _ in exchange.call.headers} == {"content-type", "accept"}

"""The Open Inference Protocol (`/v2`): scores equal to those of `/v1/rank` bit for bit, and the protocol's
own forms of metadata and errors."""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from serving.http.app import HttpInterface
from serving.oip.features import FeatureTensors
from tests.serving.live_serving import run_live_serving
from tests.serving.serving_cases import BODY, SCHEMA, InProcessServing, build_serving, make_http_client
from tests.serving.serving_fakes import FakeRows

INFER = "/v2/models/default/infer"
ITEMS = {"name": "item_id", "shape": [3], "datatype": "INT64", "data": [8, 9, 10]}


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "shape": shape or [len(data)], "datatype": datatype, "data": data}


HISTORY = BODY["ro"]["history"]
INFERENCE: dict[str, Any] = {
    "id": "r-1",
    "parameters": {"user_id": 17, "session_id": 4},
    "inputs": [
        tensor("item_id", "BYTES", ["8", "nine", "10"]),
        tensor("hour", "FP32", [13.0], [1]),
        tensor("mood", "FP64", [0.5], [1, 1]),
        tensor("user", "UINT64", [17], [1, 1]),
        tensor("likes", "INT64", [1, 2], [1, 2]),
        tensor("likes.weights", "FP32", [[0.5, 2]], [1, 2]),
        tensor("history", "INT64", HISTORY["item"], [1, 2]),
        tensor("history.action", "INT32", HISTORY["action"], [1, 2]),
        tensor("history.time", "INT64", HISTORY["time"], [1, 2]),
        tensor("topics", "INT64", [1, 2, 7]),
        tensor("topics:lengths", "INT32", [2, 1, -1]),
        tensor("age_h", "FP32", [2.5, None, None]),
        tensor("clicks", "FP32", [3, 0, 1], [3, 1]),
    ],
}
RANK_BODY = {
    **BODY,
    "candidates": [{**c, "item_id": i} for c, i in zip(BODY["candidates"], ("8", "nine", "10"), strict=True)],
}


@pytest.fixture
def http(serving: InProcessServing) -> TestClient:
    return make_http_client(serving)


@pytest.fixture(scope="module")
def shared_http(shared_serving: InProcessServing) -> TestClient:
    """A client of a serving that the module shares, for tests that look at answers only."""
    return make_http_client(shared_serving)


def replace_input(**changes: Any) -> dict[str, Any]:
    """Return INFERENCE with one input changed, added, or (`gone`) removed."""
    name = changes["name"]
    others = [i for i in INFERENCE["inputs"] if i["name"] != name]
    old = next((i for i in INFERENCE["inputs"] if i["name"] == name), {})
    return {**INFERENCE, "inputs": others if changes.get("gone") else [*others, {**old, **changes}]}


def test_an_inference_equals_the_rank_of_the_same_request(
    http: TestClient, serving: InProcessServing
) -> None:
    rank = http.post("/v1/rank", json=RANK_BODY).json()
    answer = http.post(INFER, json=INFERENCE)
    assert answer.status_code == 200, answer.text
    result = answer.json()
    outputs = {o["name"]: o for o in result["outputs"]}
    assert (
        outputs["click"]["data"] == [s["click"] for s in rank["scores"]]
        and outputs["order"]["data"] == rank["order"]
    )
    assert [(o["datatype"], o["shape"]) for o in outputs.values()] == [
        ("FP32", [3]),
        ("FP32", [3]),
        ("INT32", [3]),
    ]
    assert (result["model_name"], result["model_version"], result["id"]) == ("default", "0-0", "r-1")
    assert result["parameters"] == {"degraded": False}
    values = {wire.decode(r.value)[1].SerializeToString(deterministic=True) for r in serving.records()}
    assert len(serving.records()) == 2 and len(values) == 1, "both requests log the same record"


def test_rectangular_lists_and_single_ids_need_no_lengths(
    http: TestClient, serving: InProcessServing
) -> None:
    without_lengths = replace_input(name="topics:lengths", gone=True)
    for data, shape in (([[1, 2], [3, 4], [5, 6]], [3, 2]), ([1, 2, 3, 4, 5, 6], [3, 2]), ([7, 8, 9], [3])):
        body = {
            **without_lengths,
            "inputs": [
                {**i, **(tensor("topics", "INT64", data, shape) if i["name"] == "topics" else {})}
                for i in without_lengths["inputs"]
            ],
        }
        assert http.post(INFER, json=body).status_code == 200
    flat, nested = (wire.decode(r.value)[1].nro for r in serving.records()[:2])
    assert flat == nested


def test_only_requested_outputs_are_returned(shared_http: TestClient) -> None:
    some = shared_http.post(
        INFER, json={**INFERENCE, "outputs": [{"name": "order"}, {"name": "click"}]}
    ).json()
    assert [o["name"] for o in some["outputs"]] == ["order", "click"]
    every = shared_http.post(INFER, json={**INFERENCE, "outputs": []}).json()
    assert [o["name"] for o in every["outputs"]] == ["click", "dwell", "order"], (
        "an empty list means all outputs, as in Triton"
    )
    refused = shared_http.post(INFER, json={**INFERENCE, "outputs": [{"name": "clck"}]})
    assert refused.status_code == 400 and "did you mean 'click'" in refused.json()["error"]


def test_binary_tensors_follow_the_json_in_both_directions(shared_http: TestClient) -> None:
    ages, items = (
        np.array([2.5, np.nan, 1], "<f4").tobytes(),
        b"".join(struct.pack("<I", len(t)) + t for t in (b"8", b"nine", b"10")),
    )
    sized = [
        {
            "name": "item_id",
            "shape": [3],
            "datatype": "BYTES",
            "parameters": {"binary_data_size": len(items)},
        },
        {"name": "clicks", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]},
        {"name": "age_h", "shape": [3], "datatype": "FP32", "parameters": {"binary_data_size": len(ages)}},
    ]
    outputs = [{"name": "click", "parameters": {"binary_data": True}}, {"name": "order"}]
    head = json.dumps({"inputs": sized, "outputs": outputs}).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    answer = shared_http.post(INFER, content=head + items + ages, headers=headers)
    size = int(answer.headers["inference-header-content-length"])
    result = json.loads(answer.content[:size])
    plain = [
        tensor("item_id", "BYTES", ["8", "nine", "10"]),
        sized[1],
        tensor("age_h", "FP32", [2.5, None, 1]),
    ]
    same = shared_http.post(INFER, json={"inputs": plain}).json()["outputs"]
    assert (
        result["outputs"][0]["parameters"] == {"binary_data_size": 12}
        and result["outputs"][1]["data"] == same[2]["data"]
    )
    assert np.frombuffer(answer.content[size:], "<f4").tolist() == np.array(same[0]["data"], "f4").tolist()
    everything = shared_http.post(INFER, json={"inputs": plain, "parameters": {"binary_data_output": True}})
    assert len(everything.content) - int(everything.headers["inference-header-content-length"]) == 3 * 12


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (replace_input(name="item_id", gone=True), 400, "expected an input 'item_id'"),
        (replace_input(name="item_id", data=["8", "8", "10"]), 400, "expected each candidate once"),
        (replace_input(name="item_id", data=["8", "", "10"]), 400, "(at $.inputs["),
        (replace_input(name="item_id", shape=[0], data=[]), 400, "at least one candidate"),
        (
            replace_input(name="item_id", shape=[21], datatype="INT64", data=list(range(21))),
            413,
            "at most 20 candidates",
        ),
        (replace_input(name="item_id", datatype="FP32", data=[1, 2, 3]), 400, "expected integers"),
        (
            replace_input(name="clicks", shape=[2], data=[1, 2]),
            400,
            "expected 'clicks' of shape [3], got [2]",
        ),
        (replace_input(name="clicks", data=[1, 2]), 400, "expected 3 values by its shape, got 2"),
        (replace_input(name="clicks", data=["1", "2", "3"]), 400, "expected FP32 values"),
        (replace_input(name="clicks", data=[1e39, 0, 0]), 400, "finite 32-bit floats"),
        (replace_input(name="clicks", datatype="INT8", data=[300, 0, 0]), 400, "got one beyond it"),
        (replace_input(name="clicks", datatype="FLOAT"), 400, "expected one of INT8"),
        (
            replace_input(name="clicks", datatype="BYTES", data=["a", "b", "c"]),
            400,
            "expected numbers, got BYTES",
        ),
        (replace_input(name="clicks", shape=[-1]), 400, "sizes of 0 or more"),
        (replace_input(name="clicks", shape=[1 << 40]), 400, "sizes of 0 or more"),
        (replace_input(name="clicks", parameters={"binary_data_size": 5}), 400, "expected at most 0 bytes"),
        (replace_input(name="hour", shape=[2], data=[1, 2]), 400, "of shape [1]"),
        (
            replace_input(name="likes.weights", datatype="BYTES", data=["0.5", "2"]),
            400,
            "expected numbers, got BYTES",
        ),
        (replace_input(name="user", shape=[2, 1], data=[1, 2]), 400, "expected shape [1, L]"),
        (replace_input(name="user", shape=[1, 11], data=list(range(11))), 413, "at most 10 entries"),
        (
            replace_input(name="topics:lengths", data=[9, 9, 9]),
            400,
            "expected 27 values by the lengths, got 3",
        ),
        (replace_input(name="topics:lengths", data=[2, 1, -2]), 400, "of -1 (missing) or more"),
        (replace_input(name="topics:lengths", shape=[1], data=[3]), 400, "expected 3 lengths"),
        (replace_input(name="topics:lengths", gone=True), 200, ""),
        (replace_input(name="topics", gone=True), 400, "expected 'topics' beside its lengths"),
        (
            replace_input(name="history.time", gone=True),
            400,
            "expected an input 'history.time' beside 'history'",
        ),
        (replace_input(name="history.action", shape=[1, 1], data=[1]), 400, "columns of equal length"),
        (
            replace_input(name="agee_h", datatype="FP32", shape=[3], data=[1, 2, 3]),
            400,
            "did you mean 'age_h'",
        ),
        (
            {**INFERENCE, "inputs": [*INFERENCE["inputs"], INFERENCE["inputs"][0]]},
            400,
            "expected each input once",
        ),
        ({**INFERENCE, "parameters": {"usr_id": 1}}, 400, "did you mean 'user_id'"),
        ({**INFERENCE, "parameters": {"append": "yes"}}, 400, "expected bool"),
        ({**INFERENCE, "parameters": {"user_id": True}}, 400, "expected int or str"),
        ({**INFERENCE, "parameters": {"first_position": -1}}, 400, "position"),
        ({**INFERENCE, "id": "r" * 65}, 400, "at most 64 bytes"),
        ({"inputs": 3}, 400, "$.inputs"),
    ],
)
def test_invalid_tensors_are_refused_with_their_path(
    shared_http: TestClient, shared_serving: InProcessServing, body: dict[str, Any], status: int, text: str
) -> None:
    num_before = len(shared_serving.records())
    answer = shared_http.post(INFER, json=body)
    assert answer.status_code == status, answer.text
    assert len(shared_serving.records()) - num_before == (status == 200)
    assert status == 200 or (set(answer.json()) == {"error"} and text in answer.json()["error"])


@pytest.mark.parametrize(
    ("field", "status"),
    [
        (b'"x": "\xff", "\\u0061": 1', 400),
        (b'"\xed\xa0\x80": 1, "\xed\xa0\x80": 2', 400),
        (b'"x": %b, "\\u0061": 1' % (b"9" * 5000), 200),
    ],
    ids=["no UTF-8", "a surrogate", "digits"],
)
def test_fields_of_other_servers_are_skipped_or_refused(
    shared_http: TestClient, field: bytes, status: int
) -> None:
    """Keys are compared by another parser if one of them is escaped or repeated."""
    body = b'{"inputs": [%b], %b}' % (json.dumps(ITEMS).encode(), field)
    answer = shared_http.post(INFER, content=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or "UTF-8" in answer.json()["error"]


@pytest.mark.parametrize("json_size", ["x", "-1", "99999", "9" * 30])
def test_a_wrong_json_size_is_refused(shared_http: TestClient, json_size: str) -> None:
    answer = shared_http.post(INFER, json=INFERENCE, headers={"inference-header-content-length": json_size})
    assert answer.status_code == 400 and "inference-header-content-length" in answer.json()["error"]
    assert "b'" not in answer.json()["error"]


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("FP32", b"123"), ("BYTES", b"\x09\0\0\0abc"), ("BYTES", b"\x01\0"), ("BYTES", b"\x01\0\0\0\xff")],
)
def test_truncated_binary_data_is_refused(shared_http: TestClient, datatype: str, data: bytes) -> None:
    one = {
        "name": "item_id",
        "shape": [1],
        "datatype": datatype,
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"inputs": [one]}).encode()
    for tail in (data, data + b"more"):
        answer = shared_http.post(
            INFER, content=head + tail, headers={"inference-header-content-length": str(len(head))}
        )
        assert answer.status_code == 400 and "expected" in answer.json()["error"]


def test_user_and_page_are_parameters(http: TestClient, serving: InProcessServing) -> None:
    body = {
        "inputs": [ITEMS],
        "parameters": {
            "user_id": "ann",
            "surface": "home",
            "append": True,
            "first_position": 5,
            "priority": 1,
        },
    }
    assert http.post(INFER, json=body).status_code == 200
    message = wire.decode(serving.records()[0].value)[1]
    assert message.header.surface == "home" and min(message.positions) == 5 and not message.HasField("ro")
    assert message.header.user_id > 1 << 32 and len(message.header.request_id) == 32


def test_health_and_metadata(http: TestClient, serving: InProcessServing) -> None:
    assert http.get("/v2").json() == {
        "name": "roostream",
        "version": http.get("/").json()["version"],
        "extensions": ["binary_tensor_data"],
    }
    assert http.get("/v2/health/live").json() == {"live": True} and http.get("/v2/health/ready").json() == {
        "ready": True
    }
    for path in ("/v2/models/default", "/v2/models/default/versions/0-0"):
        spec = http.get(path).json()
        assert spec["versions"] == ["0-0"] and spec["inputs"] == FeatureTensors(SCHEMA).inputs()
        assert [o["name"] for o in spec["outputs"]] == ["click", "dwell", "order"]
        assert http.get(f"{path}/ready").json() == {"name": "default", "ready": True}
    serving.waiting_for.append("rows")
    for path in ("/v2/health/ready", "/v2/models/default/ready"):
        waiting = http.get(path)
        assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "1")
    assert http.get("/v2/health/live").status_code == http.head("/v2").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v2/models/other", 404, "expected model 'default', got 'other'"),
        ("POST", "/v2/models/other/infer", 404, "expected model 'default'"),
        ("POST", "/v2/models/default/versions/9-9/infer", 404, "not loaded"),
        ("GET", "/v2/models/default/versions/x", 400, "expected a model version"),
        ("GET", "/v2/repository", 404, "nothing is at"),
        ("GET", INFER, 405, "expected POST"),
        ("DELETE", "/v2/health/live", 405, "expected GET or HEAD"),
    ],
)
def test_unknown_models_have_the_errors_of_the_protocol(
    shared_http: TestClient, method: str, path: str, status: int, text: str
) -> None:
    answer = shared_http.request(method, path, **({"json": INFERENCE} if method == "POST" else {}))
    assert answer.status_code == status and text in answer.json()["error"] and answer.headers["x-request-id"]


def test_path_or_header_selects_the_version(shared_http: TestClient) -> None:
    assert (
        shared_http.post("/v2/models/default/versions/0-0/infer", json=INFERENCE).json()["model_version"]
        == "0-0"
    )
    assert shared_http.post(INFER, json=INFERENCE, headers={"x-model-version": "9-9"}).status_code == 404


def test_inferences_share_queue_and_metrics_with_rank(http: TestClient, serving: InProcessServing) -> None:
    assert http.post(INFER, json=INFERENCE).is_success
    get_metric = serving.context.metrics.registry.get_sample_value
    assert get_metric("roostream_serving_requests_total", {"route": "infer", "status": "200"}) == 1
    app = HttpInterface(serving.context)
    app.gate.in_flight = 1 << 20
    full = TestClient(app).post(INFER, json=INFERENCE)
    assert (
        full.status_code == 429 and full.headers["retry-after"] == "1" and "in flight" in full.json()["error"]
    )


def test_every_input_of_a_schema_has_a_unique_name() -> None:
    names = [i["name"] for i in FeatureTensors(SCHEMA).inputs()]
    assert len(set(names)) == len(names) and {"likes.weights", "history.action", "topics:lengths"} <= set(
        names
    )
    odd = schema_from_dict(
        {
            "tables": {"item": {"dim": 4}},
            "ro": [
                {
                    "name": "h",
                    "kind": "sequence",
                    "table": "item",
                    "max_len": 3,
                    "columns": {"lengths": "ids"},
                }
            ],
            "nro": [
                {
                    "name": "h2",
                    "kind": "sequence",
                    "table": "item",
                    "max_len": 3,
                    "columns": {"lengths": "ids"},
                }
            ],
            "label": [{"name": "click", "action": "click"}],
        }
    )
    names = [i["name"] for i in FeatureTensors(odd).inputs()]
    assert len(set(names)) == len(names)


def test_a_client_of_the_protocol_gets_the_scores_of_rank(tmp_path: Path) -> None:
    """NVIDIA's Triton client, over a socket, with JSON and with binary tensors."""
    client = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    np_to_triton = importlib.import_module("tritonclient.utils").np_to_triton_dtype
    with run_live_serving(build_serving(tmp_path, FakeRows(SCHEMA))) as live:
        rank = TestClient(live.app).post("/v1/rank", json=RANK_BODY).json()
        with client.InferenceServerClient(live.url.removeprefix("http://"), network_timeout=60.0) as triton:
            assert (
                triton.is_server_live()
                and triton.is_server_ready()
                and triton.is_model_ready("default", "0-0")
            )
            assert triton.get_server_metadata()["extensions"] == ["binary_tensor_data"]
            kinds = {i["name"]: i["datatype"] for i in triton.get_model_metadata("default")["inputs"]}
            for binary in (False, True):
                inputs = []
                for spec in INFERENCE["inputs"]:
                    text = spec["datatype"] == "BYTES"
                    kind = (
                        np.object_
                        if text
                        else {"FP32": np.float32, "INT32": np.int32}.get(kinds[spec["name"]], np.int64)
                    )
                    data = np.array(
                        [np.nan if v is None else v for v in np.ravel(spec["data"]).tolist()], dtype=kind
                    )
                    one = client.InferInput(spec["name"], spec["shape"], np_to_triton(data.dtype))
                    one.set_data_from_numpy(
                        data.reshape(spec["shape"]), binary_data=binary or (kind is np.float32)
                    )
                    inputs.append(one)
                wanted = [
                    client.InferRequestedOutput(name, binary_data=binary) for name in ("click", "order")
                ]
                result = triton.infer(
                    "default", inputs, request_id="r-1", outputs=wanted, parameters=INFERENCE["parameters"]
                )
                assert result.as_numpy("order").tolist() == rank["order"]
                assert result.as_numpy("click").tolist() == pytest.approx(
                    [s["click"] for s in rank["scores"]], rel=1e-6
                )
            with pytest.raises(
                importlib.import_module("tritonclient.utils").InferenceServerException,
                match="expected model 'default'",
            ):
                triton.infer("other", inputs)
        assert len(live.serving.records()) == 3
        assert len({r.value for r in live.serving.records()}) == 1, "both encodings log the same record"

"""One request in five formats: JSON rows (two forms), JSON columns, protobuf, and the Open Inference
Protocol. The logged bytes, the scores and the order are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from roostream.errors import WireError
from roostream.wire import roo_pb2 as pb
from serving.client.messages import rank_exchange
from serving.http.app import HttpInterface
from tests.serving.serving_cases import NOW_MS, SCHEMA, InProcessServing, build_serving, serve_random_weights
from tests.serving.serving_fakes import FakeRows

NUM_FORMATS = 5
TEXTS = st.text(min_size=1, max_size=8)
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
FLOATS = st.floats(width=32, min_value=-1e6, max_value=1e6)
TIMES = st.integers(0, NOW_MS)


def lists_of(**columns: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, list[Any]]]:
    """Strategy of columns of equal length, as in a sequence or in weighted ids."""
    rows = st.lists(st.tuples(*columns.values()), max_size=5)
    return rows.map(lambda rows: {name: [row[i] for row in rows] for i, name in enumerate(columns)})


def features(ids: st.SearchStrategy[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return strategies of the features of a request and of a candidate. Each value may be null."""
    ro = {
        "hour": FLOATS,
        "mood": FLOATS,
        "user": st.lists(ids, max_size=3),
        "likes": lists_of(ids=ids, weights=FLOATS),
        "history": lists_of(item=ids, action=INTEGERS, time=TIMES),
        "num_candidates": FLOATS,
    }
    nro = {
        "item": st.lists(ids, max_size=3),
        "topics": st.lists(ids, max_size=3),
        "age_h": FLOATS,
        "clicks": FLOATS,
        "place": FLOATS,
    }
    return {k: st.none() | v for k, v in ro.items()}, {k: st.none() | v for k, v in nro.items()}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy of rank requests as nested rows. The ids of a request are either all integers or all texts,
    because the elements of a tensor have one type.
    """
    ids = draw(st.sampled_from((INTEGERS, TEXTS)))
    ro, nro = features(ids)
    items = draw(st.lists(ids, min_size=1, max_size=4, unique=True))
    optional = {
        "user_id": INTEGERS | TEXTS,
        "session_id": INTEGERS | TEXTS,
        "surface": st.text(max_size=8),
        "append": st.booleans(),
        "model_version": st.sampled_from(("", "1-9")),
    }
    return {
        "request_id": "r-1",
        **draw(st.fixed_dictionaries({}, optional=optional)),
        **draw(st.fixed_dictionaries({}, optional={"ro": st.fixed_dictionaries({}, optional=ro)})),
        "candidates": [
            {"item_id": item, "nro": draw(st.fixed_dictionaries({}, optional=nro))} for item in items
        ],
    }


def to_columns(body: dict[str, Any]) -> dict[str, Any]:
    rows = body["candidates"]
    names = dict.fromkeys(name for row in rows for name in row["nro"])
    columns = {name: [row["nro"].get(name) for row in rows] for name in names}
    return {**body, "candidates": {"item_id": [row["item_id"] for row in rows], **columns}}


def to_inference_request(body: dict[str, Any]) -> dict[str, Any]:
    """Return the same request as tensors, without features that no candidate has."""
    columns = to_columns(body)["candidates"]
    inputs = [id_tensor("item_id", columns.pop("item_id"))]
    for feature in SCHEMA.ro:
        value = body.get("ro", {}).get(feature.name)
        if value is not None and feature.kind == "float":
            inputs.append(tensor(feature.name, "FP32", [value]))
        elif value is not None:
            inputs += [id_tensor(name, part, [1, len(part)]) for name, part in parts_of(feature.name, value)]
    for feature in SCHEMA.nro:
        column = columns.get(feature.name, [None])
        if all(value is None for value in column):
            continue
        if feature.kind == "float":
            inputs.append(tensor(feature.name, "FP32", column))
            continue
        lengths = [-1 if value is None else len(value) for value in column]
        inputs.append(id_tensor(feature.name, [v for value in column for v in value or ()]))
        inputs.append(tensor(f"{feature.name}:lengths", "INT32", lengths))
    fields = ("user_id", "session_id", "surface", "append")
    return {
        "id": body["request_id"],
        "parameters": {name: body[name] for name in fields if name in body},
        "inputs": inputs,
    }


def parts_of(name: str, value: Any) -> list[tuple[str, list[Any]]]:
    if isinstance(value, list):
        return [(name, value)]
    return [(name if part in ("ids", "item") else f"{name}.{part}", values) for part, values in value.items()]


def tensor(name: str, datatype: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "shape": shape or [len(data)], "datatype": datatype, "data": data}


def id_tensor(name: str, data: list[Any], shape: list[int] | None = None) -> dict[str, Any]:
    """Return a tensor of ids, times or weights."""
    is_float = name.endswith(".weights")
    is_text = any(isinstance(value, str) for value in data)
    return tensor(name, "FP32" if is_float else "BYTES" if is_text else "INT64", data, shape)


def answers(http: TestClient, body: dict[str, Any]) -> list[tuple[list[list[float]], list[int]]]:
    """Send a request in each format. Return (scores by candidate, order) of each answer."""
    flat = {**body, "candidates": [{"item_id": row["item_id"], **row["nro"]} for row in body["candidates"]]}
    found = []
    for form in (body, flat, to_columns(body)):
        answer = http.post("/v1/rank", json=form)
        assert answer.status_code == 200, answer.text
        scores = [list(each.values()) for each in answer.json()["scores"]]
        found.append((scores, answer.json()["order"]))
    call = rank_exchange(cast(Any, body), SCHEMA).call
    binary = http.post(call.path, content=call.body, headers=dict(call.headers))
    assert binary.status_code == 200, binary.text
    message = pb.RankAnswer.FromString(binary.content)
    found.append((np.array(message.scores).reshape(-1, len(message.tasks)).tolist(), list(message.order)))
    version = body.get("model_version")
    path = f"/v2/models/default{f'/versions/{version}' if version else ''}/infer"
    inferred = http.post(path, json=to_inference_request(body))
    assert inferred.status_code == 200, inferred.text
    outputs = {output["name"]: output["data"] for output in inferred.json()["outputs"]}
    by_task = [outputs[task] for task in SCHEMA.tasks]
    found.append(([list(each) for each in zip(*by_task, strict=True)], outputs["order"]))
    return [(np.array(scores, np.float32).tolist(), order) for scores, order in found]


@pytest.fixture
def serving(tmp_path: Path) -> InProcessServing:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), max_log_bytes=1 << 26)
    serve_random_weights(serving)
    return serving


@pytest.mark.parametrize("value", [3.4028235e38, 3.4028235677973362e38])
def test_decimals_of_the_largest_float_are_accepted_in_every_format(
    serving: InProcessServing, value: float
) -> None:
    http = TestClient(HttpInterface(serving.context), raise_server_exceptions=False)
    body = {
        "request_id": "r-1",
        "ro": {"mood": -value},
        "candidates": [{"item_id": 1, "nro": {"age_h": value}}],
    }
    found, records = answers(http, body), serving.records()
    assert len(found) == NUM_FORMATS and all(answer == found[0] for answer in found)
    assert len({record.value for record in records}) == 1
    click = {"request_id": "r-1", "item_id": 1, "action": "click", "value": value}
    assert http.post("/v1/engagements", json=click).status_code == 200
    serving.close()


def test_decimals_that_round_to_an_infinity_are_refused_in_every_format(serving: InProcessServing) -> None:
    http = TestClient(HttpInterface(serving.context), raise_server_exceptions=False)
    value = 3.4028235677973366e38
    for place in ({"ro": {"mood": value}}, {"candidates": [{"item_id": 1, "nro": {"age_h": value}}]}):
        body = {"request_id": "r-1", "candidates": [{"item_id": 1, "nro": {}}], **place}
        for form in (body, to_columns(body)):
            assert http.post("/v1/rank", json=form).status_code == 400
        inference = to_inference_request(body)
        for one in inference["inputs"][1:]:
            one["datatype"] = "FP64"
        assert http.post("/v2/models/default/infer", json=inference).status_code == 400
        with pytest.raises(WireError, match="finite 32-bit floats"):
            rank_exchange(cast(Any, body), SCHEMA)
    assert serving.records() == []
    serving.close()


def test_every_format_of_a_request_gives_equal_scores_and_equal_records(serving: InProcessServing) -> None:
    http = TestClient(HttpInterface(serving.context), raise_server_exceptions=False)
    seen: set[str] = set()
    num_records = 0

    @seed(0)
    @settings(max_examples=60, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies())
    def check(body: dict[str, Any]) -> None:
        nonlocal num_records
        found = answers(http, body)
        records = serving.records()[num_records:]
        num_records += NUM_FORMATS
        assert len(found) == len(records) == NUM_FORMATS
        assert all(answer == found[0] for answer in found), json.dumps(body)
        assert len({record.value for record in records}) == 1, json.dumps(body)
        seen.update(str(scores) for scores in found[0][0])

    check()
    assert len(seen) > NUM_FORMATS, "requests are scored differently"
    serving.close()

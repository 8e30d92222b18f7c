"""Parsing of inference requests: any body, however malformed, becomes a request or is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import RequestError
from serving.oip.features import FeatureTensors
from serving.oip.tensors import TYPES, OutputTensor, encode_response, parse_inference
from tests.serving.serving_cases import SCHEMA

FEATURES = FeatureTensors(SCHEMA)
NAMES = [spec["name"] for spec in FEATURES.inputs()]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
)
DATA = st.lists(LEAVES | st.lists(LEAVES, max_size=3), max_size=4)
INPUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "datatype": st.sampled_from(TYPES),
        "shape": st.lists(st.integers(-1, 4), max_size=3),
    },
    optional={"data": DATA, "parameters": st.dictionaries(st.just("binary_data_size"), LEAVES)},
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS, max_size=6)},
    optional={"parameters": st.dictionaries(st.text(max_size=9), LEAVES, max_size=2)},
)


def is_accepted(body: bytes, header: bytes | None) -> bool:
    try:
        request = FEATURES.build_request(parse_inference(body, header), "")
    except RequestError as error:
        assert error.status in (400, 413) and len(str(error)) < 500
        return False
    return len(request.item_ids) > 0


@settings(max_examples=150)
@given(BODIES, st.binary(max_size=12), st.sampled_from([None, "right", "short"]))
def test_any_json_is_accepted_or_refused(body: Any, tail: bytes, header_size: str | None) -> None:
    head = json.dumps(body).encode()
    header = None if header_size is None else str(len(head) - 3 * (header_size == "short")).encode()
    is_accepted(head + (tail if header else b""), header)


def test_any_bytes_are_accepted_or_refused() -> None:
    rng = random.Random(0)
    items = np.arange(3, dtype="<i8").tobytes()
    one = {
        "name": "item_id",
        "shape": [3],
        "datatype": "INT64",
        "parameters": {"binary_data_size": len(items)},
    }
    head = json.dumps({"inputs": [one]}).encode()
    valid_body, header = head + items, str(len(head)).encode()
    assert is_accepted(valid_body, header)
    for _ in range(500):
        body = bytearray(valid_body)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        is_accepted(bytes(body[: rng.randint(0, len(body))] if rng.random() < 0.5 else body), header)


def test_text_that_is_not_utf_8_is_refused_with_its_path() -> None:
    """msgspec does not validate tensor data while it parses the request, so the error appears later."""
    body = b'{"inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": ["\xbe"]}]}'
    with pytest.raises(RequestError, match="expected BYTES values") as refused:
        parse_inference(body, None)
    assert (refused.value.status, refused.value.path) == (400, "$.inputs[0].data")


def test_too_many_inputs_are_refused() -> None:
    one = {"name": "x", "shape": [0], "datatype": "FP32", "data": []}
    with pytest.raises(RequestError, match="at most 4096 inputs"):
        parse_inference(json.dumps({"inputs": [one] * 4097}).encode(), None)


def test_an_answer_without_binary_data_has_no_json_size() -> None:
    output = OutputTensor("click", "FP32", np.array([0.5], np.float32), [0.5])
    assert encode_response({"id": "r"}, [(output, False)]) == (
        b'{"id":"r","outputs":[{"name":"click","shape":[1],"datatype":"FP32","data":[0.5]}]}',
        None,
    )
    body, size = encode_response({}, [(output, True)])
    assert size is not None and body[size:] == b"\0\0\0?"

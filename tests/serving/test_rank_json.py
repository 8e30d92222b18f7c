"""Parsing of rank requests in JSON: the accepted forms, and that every refusal names the path of the wrong
field."""

from __future__ import annotations

import copy
import gzip
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.schema.ids import hash64, signed
from roostream.schema.schema_file import schema_from_dict
from serving.errors import RequestError
from serving.examples import rank_example
from serving.rank_json import JsonParser
from serving.request import RankRequest
from tests.serving.serving_cases import BODY, SCHEMA

PARSER = JsonParser(SCHEMA)


def parse(body: Any) -> RankRequest:
    return PARSER.parse(body if isinstance(body, bytes) else json.dumps(body).encode())


def body_with(path: str, value: Any) -> dict[str, Any]:
    """Return BODY with one field changed. `path` has names and list indices, separated by dots."""
    body = copy.deepcopy(BODY)
    at: Any = body
    *steps, last = [int(p) if p.isdecimal() else p for p in path.split(".")]
    for step in steps:
        at = at[step]
    at[last] = value
    return body


COLUMNS = body_with(
    "candidates",
    {
        "item_id": [8, "nine", 10],
        "topics": [[1, 2], 7, None],
        "age_h": [2.5, None, None],
        "clicks": [3, 0, 1],
    },
)


def test_rows_become_columns_with_missing_values() -> None:
    request = parse(BODY)
    assert request.item_ids.tolist() == [8, signed(hash64("nine")), 10]
    assert request.nro["topics"] == [[1, 2], [7], None]
    np.testing.assert_array_equal(request.nro["age_h"], [2.5, np.nan, np.nan])
    np.testing.assert_array_equal(request.nro["clicks"], [3, 0, 1])
    assert set(request.nro) == {"topics", "age_h", "clicks"}, "features that no candidate has are absent"
    assert request.ro["history"]["item"] == [8, 3] and request.ro["likes"] == {
        "ids": [1, 2],
        "weights": [0.5, 2.0],
    }
    assert "num_candidates" not in request.ro
    assert (request.user_id, request.session_id, request.request_id, request.append) == (17, 4, "r-1", False)


def test_a_feature_of_the_name_item_id_is_given_in_the_nro_of_a_row() -> None:
    nro = [{"name": "item_id", "kind": "ids", "table": "item"}, {"name": "age_h"}]
    label = [{"name": "click", "action": "click"}]
    parser = JsonParser(schema_from_dict({"tables": {"item": {"dim": 4}}, "nro": nro, "label": label}))
    rows = parser.parse(
        b'{"candidates": [{"item_id": 8, "age_h": 2, "nro": {"item_id": 9}}, {"item_id": 7}]}'
    )
    assert rows.item_ids.tolist() == [8, 7] and rows.nro["item_id"] == [[9], None]
    columns = parser.parse(b'{"candidates": {"item_id": [8, 7], "age_h": [2, null]}}')
    assert columns.item_ids.tolist() == [8, 7] and set(columns.nro) == {"age_h"}
    np.testing.assert_array_equal(columns.nro["age_h"], rows.nro["age_h"])


def test_columns_and_rows_are_equivalent() -> None:
    by_row, columnar = parse(BODY), parse(COLUMNS)
    np.testing.assert_array_equal(by_row.item_ids, columnar.item_ids)
    assert by_row.nro["topics"] == columnar.nro["topics"]
    for name in ("age_h", "clicks"):
        np.testing.assert_array_equal(by_row.nro[name], columnar.nro[name])


FLAT = {**BODY, "candidates": [{"item_id": c["item_id"], **c["nro"]} for c in BODY["candidates"]]}


def test_features_may_stand_beside_item_id() -> None:
    mixed = copy.deepcopy(FLAT)
    mixed["candidates"][0] = BODY["candidates"][0]
    mixed["candidates"][1] = {"item_id": "nine", "topics": 7, "nro": {"age_h": None, "clicks": 0}}
    nested = parse(BODY)
    for request in (parse(FLAT), parse(mixed)):
        assert set(request.nro) == set(nested.nro) and request.nro["topics"] == nested.nro["topics"]
        for name in ("age_h", "clicks"):
            np.testing.assert_array_equal(request.nro[name], nested.nro[name])


def test_echoed_input_is_truncated() -> None:
    for body in (
        {**BODY, "x" * 1_000_000: 1},
        {**BODY, "ro": {"y" * 1_000_000: 1}},
        body_with("user_id", int("9" * 400)),
    ):
        with pytest.raises(RequestError) as caught:
            parse(body)
        assert caught.value.status == 400 and len(json.dumps(caught.value.body())) < 600


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_mutated_bodies_are_parsed_or_refused_in_one_sentence(seed: int) -> None:
    rng = random.Random(seed)
    body = bytearray(json.dumps(rng.choice((BODY, FLAT, COLUMNS)), ensure_ascii=False).encode())
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(body))
        body[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    try:
        assert len(parse(bytes(body)).item_ids) > 0
    except RequestError as error:
        assert error.status in (400, 413) and 0 < len(str(error)) <= 401 and error.path.startswith("$")


def test_a_minimal_body_is_valid() -> None:
    request = parse({"candidates": [{"item_id": 8}]})
    assert request.item_ids.tolist() == [8] and request.ro == {} and request.nro == {}
    assert request.user_id == request.session_id == 0
    assert (
        len(request.request_id) == 32
        and request.request_id != parse({"candidates": [{"item_id": 8}]}).request_id
    )


def test_ids_are_64_bit_integers_or_strings() -> None:
    request = parse({"user_id": "ann", "session_id": -1, "candidates": {"item_id": [2**64 - 2, -1, "x"]}})
    assert request.user_id == hash64("ann") and request.session_id == 2**64 - 1
    assert request.item_ids.tolist() == [-2, -1, signed(hash64("x"))]


def test_the_ids_of_a_sequence_may_be_named_ids() -> None:
    history = {"ids": [8], "action": [1], "time": [5]}
    assert parse(body_with("ro.history", history)).ro["history"] == {"item": [8], "action": [1], "time": [5]}


def test_the_documented_example_is_valid() -> None:
    assert len(parse(rank_example(SCHEMA)).item_ids) == 2


BAD_BODIES = [
    (b"", "$", "got an empty body", "no body"),
    (b" \n", "$", "got an empty body", "white space"),
    (b"\xef\xbb\xbf{}", "$", "byte order mark", "a byte order mark"),
    ('{"candidates":[]}'.encode("utf-16"), "$", "got UTF-16", "text in UTF-16"),
    (gzip.compress(b"{}"), "$", "content-encoding: gzip", "compressed without the header"),
    (b"{", "$", "truncated", "half a body"),
    (b"\xff{}", "$", "malformed", "not JSON"),
    (b'{"surface":"\\ud800"}', "$", "surrogate pair", "a text that JavaScript cut within an emoji"),
    (body_with("append", None), "$.append", "leave it out", "null of a client that sends all fields"),
    ([], "$", "Expected `object`", "another shape"),
    ({}, "$", "missing required field `candidates`", "nothing to rank"),
    (body_with("candidates", 3), "$.candidates", "Expected `object | array`", "no list"),
    (body_with("candidates.1.item_id", None), "$.candidates[1].item_id", "Expected `int | str`", "no id"),
    (
        body_with("candidates.1.item_id", 1.5),
        "$.candidates[1].item_id",
        "Expected `int | str`",
        "a float isn't an id",
    ),
    (body_with("candidates.2.item_id", 2**64), "$.candidates[2].item_id", "64-bit", "beyond 64 bits"),
    (
        body_with("candidates.1.nro.age_h", "old"),
        "$.candidates[1].nro.age_h",
        "Expected `float | null`",
        "text for a float",
    ),
    (
        body_with("candidates.1.nro.age_h", True),
        "$.candidates[1].nro.age_h",
        "Expected `float | null`",
        "a bool is no number",
    ),
    (
        body_with("candidates.2.nro.age_h", 1e39),
        "$.candidates[2].nro.age_h",
        "finite 32-bit",
        "infinite as float32",
    ),
    (
        body_with("candidates.2.nro.topics", [1, 2**70]),
        "$.candidates[2].nro.topics[1]",
        "64-bit",
        "an id in a list",
    ),
    (
        body_with("candidates.0.nro.aeg_h", 1),
        "$.candidates[0].nro.aeg_h",
        "did you mean 'age_h'",
        "a misspelt feature",
    ),
    (
        body_with("candidates.0.itemid", 1),
        "$.candidates[0].itemid",
        "did you mean 'item_id'",
        "a misspelt field",
    ),
    (body_with("ro.histroy", {}), "$.ro.histroy", "did you mean 'history'", "a misspelt RO feature"),
    (body_with("ro.history.actoin", []), "$.ro.history.actoin", "did you mean 'action'", "a misspelt column"),
    (body_with("ro.likes.weight", []), "$.ro.likes.weight", "did you mean 'weights'", "a misspelt part"),
    (body_with("ro.history.time", [1, "x"]), "$.ro.history.time[1]", "Expected `int`", "text for a time"),
    (body_with("ro.history.time", [1, 2**63]), "$.ro.history.time", "64-bit", "a time beyond 64 bits"),
    (
        body_with("ro.history.time", [1]),
        "$.ro.history",
        "equal length, got item 2, action 2, time 1",
        "unequal columns",
    ),
    (body_with("ro.history.ids", [1, 2]), "$.ro.history", "got them 2 times", "ids under both names"),
    (
        body_with("ro.likes.weights", [1, 1e20]),
        "$.ro.likes.weights[1]",
        "within ±1000000, got 1e+20",
        "a weight too large",
    ),
    (
        body_with("ro.likes.weights", [-1000001, 1]),
        "$.ro.likes.weights[0]",
        "within ±1000000",
        "a weight too small",
    ),
    (b'{"candidates":[],"request_id":"\xff"}', "$", "expected JSON in UTF-8, got byte 0xff", "not UTF-8"),
    (b'{"candidates":[],"\xc3(":1}', "$", "expected JSON in UTF-8", "a name that isn't UTF-8"),
    (b"[" * 100_000, "$", "", "nested deep"),
    (b'{"candidates":' + b"[" * 100_000, "$.candidates[0]", "Expected", "nested deep in candidates"),
    (
        body_with("candidates", []),
        "$.candidates",
        "expected at least one candidate, got none",
        "no candidates",
    ),
    (
        body_with("candidates", {"item_id": []}),
        "$.candidates",
        "at least one candidate",
        "no candidates in columns",
    ),
    (
        body_with("candidates.2.item_id", 8),
        "$.candidates[2].item_id",
        "that of $.candidates[0].item_id again",
        "a repeated candidate",
    ),
    (
        body_with("candidates", {"item_id": [1, "a", "a"]}),
        "$.candidates.item_id[2]",
        "$.candidates.item_id[1]",
        "a repeated candidate",
    ),
    (body_with("user_id", ""), "$.user_id", "an empty string", "no user"),
    (body_with("candidates.1.item_id", ""), "$.candidates[1].item_id", "an empty string", "no item"),
    (body_with("ro.user", [1, ""]), "$.ro.user[1]", "an empty string", "no id in a list"),
    (
        body_with("candidates.0.age_h", 1),
        "$.candidates[0].nro.age_h",
        "expected 'age_h' once",
        "a feature in both places",
    ),
    (
        body_with("candidates.1.aeg_h", 1),
        "$.candidates[1].aeg_h",
        "did you mean 'age_h'",
        "a misspelt flat feature",
    ),
    (body_with("ro.likes.weights", [1]), "$.ro.likes", "equal length", "a weight is missing"),
    (body_with("ro.mood", -1e39), "$.ro.mood", "finite 32-bit", "an infinite RO float"),
    (body_with("ro", None), "$.ro", "Expected `object`", "null isn't an object"),
    (body_with("user_id", 2**64), "$.user_id", "64-bit", "a user beyond 64 bits"),
    (body_with("request_id", "ä" * 33), "$.request_id", "at most 64 bytes", "66 bytes"),
    (body_with("surface", "s" * 65), "$.surface", "at most 64 bytes", "a long surface"),
    (body_with("first_position", -1), "$.first_position", "position", "no such position"),
    (body_with("userid", 1), "$.userid", "did you mean 'user_id'", "an unknown field"),
    (body_with("mood", 1), "$.mood", "it belongs in 'ro'", "an RO feature beside ro"),
    (body_with("ro.age_h", 1), "$.ro.age_h", "it belongs in each candidate", "an NRO feature in ro"),
    (body_with("candidates.0.mood", 1), "$.candidates[0].mood", "it belongs in 'ro'", "an RO feature"),
    (body_with("candidates.0.nro.mood", 1), "$.candidates[0].nro.mood", "in 'ro'", "an RO feature in nro"),
    (body_with("candidates", [8, 9]), "$.candidates[0]", 'such as {"item_id": 8}', "ids instead of objects"),
    (body_with("user_id", None), "$.user_id", "leave it out", "null instead of no user"),
    (body_with("ro", None), "$.ro", "leave it out", "null instead of no features"),
    (
        body_with("candidates", {"item_id": [1], "nro": {}}),
        "$.candidates.nro",
        "unknown field 'nro'",
        "columns have no nro",
    ),
    (body_with("ro.user_id", 1), "$.ro.user_id", "at the top of the body", "a field of the body in ro"),
    (
        body_with("candidates.0.surface", ""),
        "$.candidates[0].surface",
        "at the top of the body",
        "a field of the body in a candidate",
    ),
    (
        body_with("top", 2),
        "$.top",
        "unknown field 'top'; say it in the address, ?top=",
        "a query option in the body",
    ),
    (body_with("ro.top", 2), "$.ro.top", "unknown field 'top'", "a query option in ro"),
    (
        body_with("candidates", {"item_id": [1, 2], "age_h": [1]}),
        "$.candidates.age_h",
        "expected 2 values",
        "a short column",
    ),
    (
        body_with("candidates", {"item_id": [1], "ageh": [1]}),
        "$.candidates.ageh",
        "did you mean 'age_h'",
        "unknown column",
    ),
    (
        body_with("candidates", {"item_id": [1, 2**64]}),
        "$.candidates.item_id[1]",
        "64-bit",
        "an id of a column",
    ),
    (
        body_with("candidates", {"item_id": [1], "age_h": [1e39]}),
        "$.candidates.age_h[0]",
        "finite",
        "an infinite float",
    ),
]


@pytest.mark.parametrize(
    ("body", "path", "text"), [c[:3] for c in BAD_BODIES], ids=[c[3] for c in BAD_BODIES]
)
def test_a_bad_field_is_400_with_its_path(body: Any, path: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.path) == (400, path)
    assert text in str(caught.value)


def test_too_many_candidates_or_entries_are_413() -> None:
    for body, path in (
        ({"candidates": [{"item_id": i} for i in range(21)]}, "$.candidates"),
        ({"candidates": {"item_id": [1] * 21}}, "$.candidates"),
        (body_with("candidates.1.nro.topics", [1] * 11), "$.candidates[1].nro.topics"),
        (body_with("ro.history.item", [1] * 11), "$.ro.history.item"),
    ):
        with pytest.raises(RequestError, match="expected at most") as caught:
            parse(body)
        assert (caught.value.status, caught.value.path) == (413, path)

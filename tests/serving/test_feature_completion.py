"""Completing the features of a request: values of the client win, missing ones are hydrated or computed, and
complete blocks stay unchanged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from roostream.schema.ids import hash64, signed
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import decode_block, encode_nro, encode_ro
from serving.errors import RequestError
from serving.feature_completion import FeatureCompletion
from serving.rank_json import JsonParser
from serving.rank_protobuf import parse_impression
from serving.request import RankRequest
from tests.serving.serving_cases import BODY, HISTORY, NOW_MS, SCHEMA

COMPLETION = FeatureCompletion(SCHEMA)
ONLINE_RO = {"history": {"item": [99], "action": [2], "time": [NOW_MS - 1]}}


def request_from_json(body: dict[str, Any]) -> RankRequest:
    return JsonParser(SCHEMA).parse(json.dumps(body).encode())


def request_from_blocks(ro: bytes | None, nro: bytes, n: int = 2) -> RankRequest:
    return parse_impression(SCHEMA, pb.Impression(ro=ro, nro=nro, item_ids=range(n)).SerializeToString())


def features(
    request: RankRequest, ro_online: Any = None, nro_online: Any = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    ro, nro, *_ = COMPLETION.encode(request, NOW_MS, ro_online or {}, nro_online or {})
    return decode_block(SCHEMA, "ro", ro, 1), decode_block(SCHEMA, "nro", nro, len(request.item_ids))


def test_values_of_the_client_win() -> None:
    request = request_from_json(BODY)
    assert not COMPLETION.needs_hydration(request)
    ro, nro = features(request, ONLINE_RO, {"clicks_1h": np.array([50, 50, 50], np.float32)})
    assert ro["hour"] == 13.0 and ro["history"] == HISTORY
    assert nro["clicks"].tolist() == [3, 0, 1]


def test_missing_features_are_hydrated_or_computed() -> None:
    request = request_from_json({"candidates": [{"item_id": 5}, {"item_id": 6, "nro": {"clicks": 2}}]})
    assert COMPLETION.needs_hydration(request)
    ro, nro = features(request, ONLINE_RO, {"clicks_1h": np.array([50, 51], np.float32)})
    assert ro == {
        "hour": pytest.approx(22 + 13 / 60 + 20 / 3600),
        "num_candidates": 2.0,
        "history": ONLINE_RO["history"],
    }
    assert nro["clicks"].tolist() == [50, 2], "each candidate is completed separately"
    assert nro["place"].tolist() == [0, 1] and nro["item"] == [[5], [6]]
    assert np.isnan(nro["age_h"]).all(), "a feature without an online source stays missing"


@pytest.mark.parametrize("as_blocks", [False, True])
def test_a_request_feature_named_user_is_filled_with_the_users_id(as_blocks: bool) -> None:
    schema = schema_from_dict(
        {
            "tables": {"user": {"dim": 4}},
            "ro": [{"name": "user", "kind": "ids", "table": "user"}],
            "nro": [{"name": "price"}],
            "label": [{"name": "click", "action": "click"}],
        }
    )
    body = {"user_id": "ann", "candidates": [{"item_id": 5, "price": 2.0}]}
    request = JsonParser(schema).parse(json.dumps(body).encode())
    if as_blocks:
        message = pb.Impression(nro=encode_nro(schema, {"price": [2.0]}, 1), item_ids=[5])
        message.header.user_id = hash64("ann")
        request = parse_impression(schema, message.SerializeToString())
    completion = FeatureCompletion(schema)
    completion.open(request)
    ro, *_ = completion.encode(request, NOW_MS, {}, {})
    assert decode_block(schema, "ro", ro, 1)["user"] == [signed(hash64("ann"))]


def test_a_later_page_has_later_positions() -> None:
    _, nro = features(
        request_from_json(
            {"candidates": [{"item_id": 5}, {"item_id": 6}], "append": True, "first_position": 20}
        )
    )
    assert nro["place"].tolist() == [20, 21]


def test_complete_blocks_stay_byte_for_byte() -> None:
    ro = encode_ro(SCHEMA, {"hour": 1.0, "num_candidates": 2.0, "history": HISTORY})
    nro = encode_nro(SCHEMA, {"clicks": np.ones(2), "place": np.arange(2.0), "item": np.array([0, 1])}, 2)
    request = request_from_blocks(ro, nro)
    COMPLETION.open(request)
    assert not COMPLETION.needs_hydration(request)
    assert COMPLETION.encode(request, NOW_MS, ONLINE_RO, {})[:2] == (ro, nro)


def test_stateless_features_need_no_redis() -> None:
    given = encode_nro(SCHEMA, {"clicks": np.ones(2), "item": np.array([0, 1])}, 2)
    request = request_from_blocks(encode_ro(SCHEMA, {"history": HISTORY}), given)
    COMPLETION.open(request)
    assert request.has_missing and not COMPLETION.needs_hydration(request)


@pytest.mark.parametrize(
    ("ro", "nro"),
    [
        (None, {"clicks": np.ones(2), "place": np.arange(2.0), "item": np.array([0, 1])}),
        (
            {"hour": 1.0, "num_candidates": 2.0},
            {"clicks": np.ones(2), "place": np.arange(2.0), "item": np.array([0, 1])},
        ),
        ({"hour": 1.0, "num_candidates": 2.0, "history": HISTORY}, {"clicks": np.array([1.0, np.nan])}),
        ({"hour": 1.0, "num_candidates": 2.0, "history": HISTORY}, {}),
    ],
    ids=["no RO block", "no history", "a missing float", "an empty NRO block"],
)
def test_incomplete_blocks_are_completed(ro: dict[str, Any] | None, nro: dict[str, Any]) -> None:
    request = request_from_blocks(None if ro is None else encode_ro(SCHEMA, ro), encode_nro(SCHEMA, nro, 2))
    COMPLETION.open(request)
    assert COMPLETION.needs_hydration(request)
    got_ro, got_nro = features(request, ONLINE_RO, {"clicks_1h": np.array([50, 51], np.float32)})
    assert got_ro["history"] == (ro or {}).get("history", ONLINE_RO["history"])
    given = nro.get("clicks", np.array([np.nan, np.nan]))
    assert got_nro["clicks"].tolist() == np.where(np.isnan(given), [50, 51], given).tolist()
    assert got_nro["item"] == [[0], [1]]


BAD_IMPRESSIONS = [
    (b"\xff\xff", "$", "expected a roo.Impression", 400),
    (b"", "$.item_ids", "at least one candidate", 400),
    (pb.Impression(item_ids=[4, 5, 4]), "$.item_ids[2]", r"again", 400),
    (pb.Impression(header=pb.Header(schema=5)), "$.header.schema", "expected schema", 400),
    (
        pb.Impression(item_ids=[1], header=pb.Header(request_id="x" * 65)),
        "$.header.request_id",
        "at most 64 bytes",
        400,
    ),
    (pb.Impression(scores=[1.0]), "$.scores", "serving sets it", 400),
    (pb.Impression(positions=[1]), "$.positions", "serving sets it", 400),
    (pb.Impression(item_ids=[1] * 21), "$.item_ids", "at most 20 candidates", 413),
    (pb.Impression(item_ids=[1], ro=b"\xff"), "$.ro", "expected a Block", 400),
    (
        pb.Impression(item_ids=[1], ro=pb.Block(floats=[1.0]).SerializeToString()),
        "$.ro",
        "expected 3 floats",
        400,
    ),
    (
        pb.Impression(item_ids=[1], nro=encode_nro(SCHEMA, {"clicks": [1.0, 2.0]}, 2)),
        "$.nro",
        "expected 3 floats",
        400,
    ),
]


@pytest.mark.parametrize(
    ("message", "path", "text", "status"), BAD_IMPRESSIONS, ids=[c[1] + " " + c[2] for c in BAD_IMPRESSIONS]
)
def test_a_bad_impression_is_refused_with_its_path(message: Any, path: str, text: str, status: int) -> None:
    body = message if isinstance(message, bytes) else message.SerializeToString()
    with pytest.raises(RequestError, match=text) as caught:
        parse_impression(SCHEMA, body)
    assert (caught.value.status, caught.value.path) == (status, path)


def test_a_list_beyond_the_limit_is_413() -> None:
    block = pb.Block(floats=[1, 1, 1], lengths=[11, 0, 0], ids=range(11)).SerializeToString()
    with pytest.raises(RequestError, match="at most 10 entries") as caught:
        parse_impression(SCHEMA, pb.Impression(item_ids=[1], ro=block).SerializeToString())
    assert caught.value.status == 413


def test_invalid_hydrated_values_are_refused() -> None:
    with pytest.raises(RequestError, match="finite"):
        features(
            request_from_json({"candidates": [{"item_id": 5}]}),
            {},
            {"clicks_1h": np.array([np.inf], np.float32)},
        )

"""The catalogue file: the items and features read from it, and the invalid lines that are refused with their
number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roostream.errors import ConfigError
from roostream.schema.ids import item_id, signed
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.block import encode_nro
from roostream.wire.decode import Decoder
from serving.errors import RequestError
from serving.retrieval.catalogue import (
    Attributes,
    Catalogue,
    check_attributes,
    load_catalogue,
    read_catalogue,
)
from tests.serving.retrieval_cases import NUM_ITEMS, make_catalogue, make_item, write_items
from tests.serving.serving_cases import SCHEMA


def read(*rows: Any) -> Catalogue:
    return read_catalogue(
        SCHEMA, [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    )


def test_items_are_found_by_id() -> None:
    catalogue = make_catalogue()
    assert len(catalogue) == NUM_ITEMS and (np.diff(catalogue.id_I) > 0).all()
    assert {signed(item_id(given)): given for given in catalogue.client_id_I} == dict(
        zip(catalogue.id_I.tolist(), catalogue.client_id_I, strict=True)
    )
    assert set(catalogue.client_id_I) == {make_item(i)["item_id"] for i in range(NUM_ITEMS)}
    assert catalogue.attributes.allowed({"lang": "da"}).sum() == NUM_ITEMS / 2


def test_features_equal_those_of_the_file_for_any_selection() -> None:
    catalogue = make_catalogue()
    slots = catalogue.find_slots(catalogue.id_I[[40, 3, 17]])
    features = catalogue.features(slots)
    for at, slot in enumerate(slots.tolist()):
        client_id = catalogue.client_id_I[slot]
        row = next(make_item(i) for i in range(NUM_ITEMS) if make_item(i)["item_id"] == client_id)
        assert features["item"][at] == [catalogue.id_I[slot]]
        assert features["topics"][at] == row.get("topics")
        assert (
            features["age_h"][at] == pytest.approx(row["age_h"])
            if "age_h" in row
            else np.isnan(features["age_h"][at])
        )


def test_selected_items_equal_a_decoded_request_with_them() -> None:
    catalogue, slots = make_catalogue(), np.array([3, 17, 40])
    selected = catalogue.take(slots)
    block = encode_nro(SCHEMA, catalogue.features(slots), 3)
    decoded = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get).decode_request(
        b"", block, catalogue.id_I[slots], 0
    )
    np.testing.assert_array_equal(selected.nro_float_BF, decoded.nro_float_BF)
    np.testing.assert_array_equal(selected.nro_lists.values, decoded.nro_lists.values)
    np.testing.assert_array_equal(selected.nro_lists.lengths_KN, decoded.nro_lists.lengths_KN)
    np.testing.assert_array_equal(selected.item_B, decoded.item_B)


def test_every_kind_of_list_round_trips() -> None:
    schema = schema_from_dict(
        {
            "tables": {"item": {"dim": 4}},
            "nro": [
                {"name": "parts", "kind": "weighted_ids", "table": "item"},
                {"name": "viewers", "kind": "sequence", "table": "item", "columns": {"at": "time_ms"}},
            ],
            "label": [{"name": "click", "action": "click"}],
        }
    )
    rows = [
        {"item_id": 1, "parts": {"ids": [5, 6], "weights": [0.5, 2.0]}},
        {"item_id": 2, "viewers": {"item": [7], "at": [9]}},
        {"item_id": 3, "parts": {"ids": [], "weights": []}, "viewers": {"item": [7, 8], "at": [9, 10]}},
    ]
    features = read_catalogue(schema, [json.dumps(row).encode() for row in rows]).features(
        np.array([0, 2, 1])
    )
    assert features["parts"] == [rows[0]["parts"], rows[2]["parts"], None]
    assert features["viewers"] == [None, rows[2]["viewers"], rows[1]["viewers"]]


def test_unknown_ids_have_no_slot() -> None:
    catalogue = read({"item_id": 5}, {"item_id": 9})
    assert catalogue.find_slots(np.array([9, 1, 7, 100, 9])).tolist() == [1]
    assert catalogue.find_slots(np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "items:22: expected an item as a JSON object: "),
        (b"[1]", r"items:22: expected an item as a JSON object, got '\[1\]'"),
        (b"\xff\xfe", "items:22: expected an item as a JSON object: "),
        (
            {"item_id": 100, "agee_h": 1},
            r"items:22: unknown field 'agee_h'; did you mean 'age_h'\? \(at agee_h\)",
        ),
        ({"item_id": 100, "topics": ["a", ""]}, r"items:22: .*\(at topics\[1\]\)"),
        ({"topics": [1]}, "items:22: .*item_id"),
        ({"item_id": 100, "clicks": 3}, "items:22: expected no 'clicks', which the schema keeps online"),
        (
            {"item_id": 100, "nro": {"clicks": 3}},
            "items:22: expected no 'clicks', which the schema keeps online",
        ),
        ({"item_id": 100, "attributes": {"price": 2.5}}, "items:22: expected attribute 'price' as a text"),
        ({"item_id": 21}, "items:22: expected each item once, got 21 of line 21 again"),
        ({"item_id": 1}, "items:22: expected each item once, got 1 of line 1 again"),
        (
            {"item_id": signed(item_id("nine"))},
            "items: expected each item once, got .* as a number and as a text",
        ),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(bad: Any, message: str) -> None:
    good: list[Any] = [{"item_id": i} for i in (*range(1, 20), "nine", 21)]
    with pytest.raises(ConfigError, match=message):
        read(*good, bad)


def test_a_byte_order_mark_is_no_part_of_the_first_item() -> None:
    assert read_catalogue(SCHEMA, [b'\xef\xbb\xbf{"item_id": 4}\n']).client_id_I == [4]


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least one item, got none"):
        load_catalogue(SCHEMA, write_items(tmp_path / "none.jsonl", []))
    with pytest.raises(ConfigError, match=r"items: expected a file of items, got .*: No such file"):
        load_catalogue(SCHEMA, tmp_path / "absent.jsonl")


# Tests of filters: an item passes if it has one of the wanted values of each attribute.


ATTRIBUTES = Attributes(
    [{"lang": "da", "tags": ["a", "b", "a"]}, {"lang": "en", "paid": True}, {"tags": ["b"], "paid": 1}, {}]
)


@pytest.mark.parametrize(
    ("wanted", "slots"),
    [
        ({}, [0, 1, 2, 3]),
        ({"lang": "da"}, [0]),
        ({"lang": ["da", "en"]}, [0, 1]),
        ({"tags": "b"}, [0, 2]),  # one of the item's several values
        ({"tags": "b", "paid": 1}, [2]),  # all attributes must match
        ({"paid": True}, [1]),  # true does not equal 1
        ({"lang": "sv"}, []),  # a value that no item has
        ({"lang": []}, []),
    ],
)
def test_a_filter_matches_one_of_the_values_of_each_attribute(
    wanted: dict[str, Any], slots: list[int]
) -> None:
    assert np.flatnonzero(ATTRIBUTES.allowed(wanted)).tolist() == slots


def test_an_unknown_attribute_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="no item has attribute 'lng'; did you mean 'lang'") as refused:
        ATTRIBUTES.allowed({"lng": "da"})
    assert (refused.value.status, refused.value.path) == (400, "$.filter.lng")


@pytest.mark.parametrize(
    "given", [{"price": 2.5}, {"a": None}, {"a": [["b"]]}, {"a": {"b": 1}}, [1], "a", None]
)
def test_attributes_of_unsupported_types_are_refused(given: object) -> None:
    assert check_attributes(given).startswith("expected attribute")


def test_strings_integers_booleans_and_lists_are_attributes() -> None:
    assert check_attributes({"a": "b", "c": 1, "d": True, "e": ["b", 1, False], "f": []}) == ""

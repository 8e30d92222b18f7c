"""Items by their attributes: of each name one of the values asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving.errors import RequestError
from serving.retrieval.catalogue import Attributes, check_attributes

ATTRIBUTES = Attributes(
    [{"lang": "da", "tags": ["a", "b", "a"]}, {"lang": "en", "paid": True}, {"tags": ["b"], "paid": 1}, {}]
)


@pytest.mark.parametrize(
    ("wanted", "slots"),
    [
        ({}, [0, 1, 2, 3]),
        ({"lang": "da"}, [0]),
        ({"lang": ["da", "en"]}, [0, 1]),
        ({"tags": "b"}, [0, 2]),  # one of several values of the item's own
        ({"tags": "b", "paid": 1}, [2]),  # all names
        ({"paid": True}, [1]),  # true isn't 1
        ({"lang": "sv"}, []),  # a value that no item has
        ({"lang": []}, []),
    ],
)
def test_items_are_those_that_have_of_each_name_one_of_the_values(
    wanted: dict[str, Any], slots: list[int]
) -> None:
    assert np.flatnonzero(ATTRIBUTES.allowed(wanted)).tolist() == slots


def test_a_name_that_no_item_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="no item has attribute 'lng'; did you mean 'lang'") as told:
        ATTRIBUTES.allowed({"lng": "da"})
    assert (told.value.status, told.value.path) == (400, "$.filter.lng")


@pytest.mark.parametrize(
    "given", [{"price": 2.5}, {"a": None}, {"a": [["b"]]}, {"a": {"b": 1}}, [1], "a", None]
)
def test_attributes_that_cannot_be_compared_are_told(given: object) -> None:
    assert check_attributes(given).startswith("expected attribute")


def test_texts_integers_booleans_and_lists_of_them_are_attributes() -> None:
    assert check_attributes({"a": "b", "c": 1, "d": True, "e": ["b", 1, False], "f": []}) == ""

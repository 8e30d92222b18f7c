"""An object in a JSON body may have each key only once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.errors import RequestError
from serving.json_keys import check_keys


@pytest.mark.parametrize(
    "body",
    [
        b'{"user_id": 1, "user_id": 2}',
        b'{"user_id": 1, "user\\u005fid": 2}',
        b'{"a": {"b": 1, "c": [{"d": 1}], "b": 2}}',
        b'[{"a": 1}, {"a": 1, "a": 1}]',
        b'{"a": ["}", "{"], "b": "\\"", "a": null}',
        b'{ "a" : {} , "a" : [] }',
        b'{"": 1, "": 2}',
        b"{%b}" % b",".join([*(b'"k%d":1' % n for n in range(2000)), b'"k7":1']),
    ],
)
def test_a_repeated_key_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="each field once"):
        check_keys(body)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_other_json_is_accepted(value: Any, indent: int | None, is_ascii: bool) -> None:
    check_keys(json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"))


def test_equal_keys_of_different_objects_are_accepted() -> None:
    rows = [{"item_id": n, "nro": {"item_id": n, "a": "a"}, "text": "item_id"} for n in range(50)]
    check_keys(json.dumps({"candidates": rows, "text": [rows]}).encode())

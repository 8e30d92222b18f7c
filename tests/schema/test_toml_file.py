"""Every table, key and entry of a TOML file has its line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.schema.toml_file import Keys, Place, lines_of

TEXT = '''# x
a = 1
"b c".d = "x # y"
s = """
multi " line [x]
"""
arr = [ # comment
  1,
  { x = 2, y = [3,
   '4]']},
]
[tables.item]
dim = 4
[tables."{a,b}".rule]
name = "[[x]]"
[[ro]]
name = "q"
[ro.extra]
z = 1979-05-27T07:32:00Z
[[ro]]
window = "r"
columns = { t = "time_ms" }
'''


def test_a_line_is_that_of_the_key_itself() -> None:
    assert lines_of(TEXT) == {
        ("a",): 2,
        ("b c",): 3,
        ("b c", "d"): 3,
        ("s",): 4,
        ("arr",): 7,
        ("arr", 0): 8,
        ("arr", 1): 9,
        ("arr", 1, "x"): 9,
        ("arr", 1, "y"): 9,
        ("arr", 1, "y", 0): 9,
        ("arr", 1, "y", 1): 10,
        ("tables", "item"): 12,
        ("tables", "item", "dim"): 13,
        ("tables", "{a,b}", "rule"): 14,
        ("tables", "{a,b}", "rule", "name"): 15,
        ("ro",): 16,
        ("ro", 0): 16,
        ("ro", 0, "name"): 17,
        ("ro", 0, "extra"): 18,
        ("ro", 0, "extra", "z"): 19,
        ("ro", 1): 20,
        ("ro", 1, "window"): 21,
        ("ro", 1, "columns"): 22,
        ("ro", 1, "columns", "t"): 22,
    }


def keys_of(value: Any, at: Keys = ()) -> Iterator[Keys]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from keys_of(inner, (*at, key))


VALUES = st.recursive(
    st.one_of(st.text(), st.integers(-9, 9), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=12,
)


@given(raw=st.dictionaries(st.text(), VALUES, max_size=5), multiline=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_value_of_any_file_has_a_line(raw: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(raw, multiline_strings=multiline)
    found = lines_of(text)
    assert set(keys_of(tomllib.loads(text))) - set(found) <= {
        keys for keys in keys_of(tomllib.loads(text)) if len(keys) < 9
    }
    missing = set(keys_of(tomllib.loads(text))) - set(found)
    assert all(any(k[: len(keys)] == keys for k in found) for keys in missing), (
        "a table that only its inner tables name"
    )


def test_a_key_that_is_not_there_is_told_by_its_table() -> None:
    place = Place("f.toml", {keys: f"f.toml:{line}: " for keys, line in lines_of(TEXT).items()})
    assert place.of("a") == "f.toml:2: "
    assert place.of("absent") == "f.toml: "
    assert place.inner("tables", "item").of("absent") == "f.toml:12: "
    assert place.inner("ro", 1).of("window_ms") == "f.toml:21: ", "written without its unit"
    assert place.inner("ro", 1).first("name", "columns") == "f.toml:22: "
    assert place.inner("ro", 1).first("name", "online") == "f.toml:20: "
    assert Place().of("a") == ""

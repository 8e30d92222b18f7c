"""Messages about a TOML file name the line of the table or key."""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.schema.toml_file import SourceLocation, line_numbers

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


def test_tables_and_keys_have_their_lines() -> None:
    assert line_numbers(TEXT, tomllib.loads(TEXT)) == {
        ("a",): 2,
        ("b c",): 3,
        ("b c", "d"): 3,
        ("s",): 4,
        ("arr",): 7,
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
    }


VALUES = st.recursive(
    st.one_of(st.text(), st.integers(-9, 9), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=12,
)


@given(raw=st.dictionaries(st.text(), VALUES, max_size=5), multiline=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_key_of_any_file_has_a_line_or_one_of_its_table(raw: dict[str, Any], multiline: bool) -> None:
    text = tomli_w.dumps(raw, multiline_strings=multiline)
    parsed = tomllib.loads(text)
    lines = line_numbers(text, parsed)
    assert all(0 < line <= len(text.splitlines()) + 1 for line in lines.values())
    for key, value in parsed.items():
        assert any(keys[0] == key for keys in lines) or value == {}


def test_an_absent_key_is_located_by_its_table() -> None:
    lines = line_numbers(TEXT, tomllib.loads(TEXT))
    location = SourceLocation("f.toml", {keys: f"f.toml:{line}: " for keys, line in lines.items()})
    assert location.describe("a") == "f.toml:2: "
    assert location.describe("absent") == "f.toml: "
    assert location.child("tables", "item").describe("absent") == "f.toml:12: "
    assert location.child("ro", 1).describe("window_ms") == "f.toml:21: ", "written without its unit"
    assert location.child("ro", 1).describe_first("name", "columns") == "f.toml:22: "
    assert location.child("ro", 1).describe_first("name", "online") == "f.toml:20: "
    assert SourceLocation().describe("a") == ""

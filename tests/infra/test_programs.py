"""What a program's TOML is made of."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from infra.programs import plain

VALUES = st.one_of(
    st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(st.characters(exclude_categories=["Cs"]))
)
KEYS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1)


@given(st.dictionaries(KEYS, VALUES | st.lists(st.integers(-9, 9))), st.dictionaries(KEYS, VALUES, min_size=1))
def test_what_is_written_is_what_is_read(flat: dict[str, object], inner: dict[str, object]) -> None:
    table = {k: v for k, v in flat.items() if k != "inner"} | {"inner": inner}
    assert tomllib.loads(tomli_w.dumps(plain(table))) == table


def test_paths_and_tuples_have_a_form() -> None:
    table = {"home": Path('/a "b"\\c'), "shards": ("x:1", "y:2"), "rule": {"files": (Path("d"),)}}
    assert tomllib.loads(tomli_w.dumps(plain(table))) == {
        "home": '/a "b"\\c',
        "shards": ["x:1", "y:2"],
        "rule": {"files": ["d"]},
    }


def test_a_value_without_a_form_is_refused() -> None:
    with pytest.raises(TypeError):
        tomli_w.dumps(plain({"x": None}))

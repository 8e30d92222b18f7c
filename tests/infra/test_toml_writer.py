from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import toml

PLAIN = st.one_of(
    st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text(st.characters(exclude_categories=["Cs"]))
)
KEYS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1)


@given(st.dictionaries(KEYS, PLAIN | st.lists(st.integers(-9, 9))), st.dictionaries(KEYS, PLAIN, min_size=1))
def test_what_is_written_is_what_is_read(flat: dict[str, object], inner: dict[str, object]) -> None:
    table = {k: v for k, v in flat.items() if k != "inner"} | {"inner": inner}
    assert tomllib.loads(toml.render(table)) == table


def test_a_value_without_a_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no TOML form"):
        toml.render({"x": None})

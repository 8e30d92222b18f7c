"""Options of a stack, and their file in the home folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from infra.options import OPTIONS_FILE, StackOptions, load_saved_options, save_options, to_toml_value
from roostream.errors import ConfigError, UnavailableError
from tests.runtime.full_disk import limited_file_size

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
KEYS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"prefix": "Ä"}, "prefix"),
        ({"num_shards": 0}, "num_shards"),
        ({"num_shards": 65}, "num_shards.*at most buckets = 64"),
        ({"num_workers": 5}, "num_workers.*at most partitions = 4"),
        ({"num_updaters": 5}, "num_updaters.*at most partitions = 4"),
        ({"num_task_managers": 65}, "num_task_managers"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        StackOptions(**change)  # type: ignore[arg-type]


def test_saved_options_are_loaded_again(tmp_path: Path) -> None:
    assert load_saved_options(tmp_path) is None
    overrides = {"joiner": {"window_ms": 5}, "worker": {"model": ""}}
    options = StackOptions(schema=tmp_path / "s.toml", replay=True, num_shards=3, seed=7, overrides=overrides)
    save_options(tmp_path, options)
    assert load_saved_options(tmp_path) == options
    mode = (tmp_path / OPTIONS_FILE).stat().st_mode
    assert mode & 0o077 == 0, "an override may contain a password"


def test_options_that_cannot_be_written_leave_the_old_ones(tmp_path: Path) -> None:
    save_options(tmp_path, old := StackOptions(num_shards=3))
    with limited_file_size(64), pytest.raises(UnavailableError, match=r"options\.json"):
        save_options(tmp_path, StackOptions(num_shards=4))
    assert load_saved_options(tmp_path) == old and [path.name for path in tmp_path.iterdir()] == [
        OPTIONS_FILE
    ]


@pytest.mark.parametrize(
    ("model", "later"), [("home/model.toml", "moved/model.toml"), ("model.toml", "model.toml")]
)
def test_a_moved_home_finds_its_own_files_and_those_outside(model: str, later: str, tmp_path: Path) -> None:
    home, moved = tmp_path / "home", tmp_path / "moved"
    home.mkdir()
    overrides = {"worker": {"model": str(tmp_path / model)}}
    save_options(home, StackOptions(schema=home / "schema.toml", overrides=overrides))
    home.rename(moved)
    found = load_saved_options(moved)
    assert found is not None and found.schema == moved / "schema.toml"
    assert found.overrides["worker"]["model"] == str(tmp_path / later)


@pytest.mark.parametrize(
    "text",
    [
        '{"overrides": {"worker": 3}}',
        "{",
        "{}",
        "[]",
        '{"overrides": {}, "num_shards": 0}',
        '{"overrides": {}, "shards": 1}',
    ],
)
def test_a_damaged_options_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / OPTIONS_FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"options\.json"):
        load_saved_options(tmp_path)


@given(
    st.dictionaries(KEYS, VALUES | st.lists(st.integers(-9, 9))), st.dictionaries(KEYS, VALUES, min_size=1)
)
def test_a_table_round_trips_as_toml(flat: dict[str, object], inner: dict[str, object]) -> None:
    table = {k: v for k, v in flat.items() if k != "inner"} | {"inner": inner}
    assert tomllib.loads(tomli_w.dumps(to_toml_value(table))) == table

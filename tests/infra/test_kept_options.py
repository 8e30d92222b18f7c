from __future__ import annotations

from pathlib import Path

import pytest

from infra.kept_options import FILE, keep, kept
from infra.options import StackOptions
from roostream.errors import ConfigError


def test_what_a_stack_was_made_with_comes_back(tmp_path: Path) -> None:
    options = StackOptions(
        schema=tmp_path / "s.toml",
        replay=True,
        num_shards=3,
        seed=7,
        overrides={"joiner": {"window_ms": 5}, "worker": {"model": ""}},
    )
    keep(tmp_path, options)
    assert kept(tmp_path) == options


def test_a_home_without_it_has_none_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    for text in ("{", "{}", "[]", '{"overrides": {}, "num_shards": 0}', '{"overrides": {}, "shards": 1}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ConfigError, match=r"options\.json"):
            kept(tmp_path)

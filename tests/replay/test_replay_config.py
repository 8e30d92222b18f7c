"""Settings of a replay."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.errors import ConfigError
from roostream.replay import ebnerd
from roostream.replay import jsonl_log as jsonl
from roostream.replay.config import ReplayConfig

EXISTING_FILE = __file__


def config(**settings: Any) -> ReplayConfig:
    options = ebnerd.Options(behaviors=(EXISTING_FILE,), history=(EXISTING_FILE,))
    return ReplayConfig(**{"dataset": "ebnerd", "options": options, **settings})


def test_the_schema_of_the_dataset_is_the_default() -> None:
    assert config().schema_path.name == "ebnerd.toml" and config().schema_path.is_file()
    assert str(config(schema=EXISTING_FILE).schema_path) == EXISTING_FILE


def test_freeze_at_freezes_counters_and_weights_and_freeze_weights_at_only_weights() -> None:
    both, weights = config(freeze_at="2023-05-23"), config(freeze_weights_at="2023-05-23")
    assert both.freeze_counters_at_ms == both.freeze_weights_at_ms == 1_684_800_000_000
    assert (weights.freeze_counters_at_ms, weights.freeze_weights_at_ms) == (0, 1_684_800_000_000)


def test_the_speed_is_max_or_a_factor() -> None:
    assert config().speed_factor == 0
    assert config(speed="60x").speed_factor == 60
    assert config(speed="1.5").speed_factor == 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"dataset": "jsonl", "options": jsonl.Options(log=(EXISTING_FILE,))},
            "replay jsonl needs --schema FILE",
        ),
        ({"model": ("nowhere.toml",)}, "nowhere.toml: no such file"),
        ({"freeze_at": "soon"}, "key 'freeze_at': expected a time such as '2023-05-23'.*got 'soon'"),
        ({"freeze_at": "2023-05-23", "freeze_weights_at": "2023-05-23"}, "got both"),
        ({"speed": "fast"}, "key 'speed': expected 'max' or a multiple such as '60x', got 'fast'"),
        ({"label_delay_ms": -1}, "key 'label_delay_ms': expected at least 0, got -1"),
        ({"window_ms": 1}, "key 'window_ms': expected at least 1000, got 1"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)

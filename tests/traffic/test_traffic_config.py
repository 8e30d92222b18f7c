from __future__ import annotations

from typing import Any

import pytest

from roo.errors import ConfigError
from traffic.config import ReplayConfig, parse_time_ms

HERE = __file__


def config(**more: Any) -> ReplayConfig:
    return ReplayConfig(**{"dataset": "ebnerd", "behaviors": (HERE,), "history": (HERE,), **more})


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("", 0),
        ("2023-05-23", 1_684_800_000_000),
        ("2023-05-23T00:00:00", 1_684_800_000_000),
        ("2023-05-23T02:00:00+02:00", 1_684_800_000_000),
        ("1684800000000", 1_684_800_000_000),
    ],
)
def test_times_of_flags(text: str, ms: int) -> None:
    assert parse_time_ms(text) == ms


def test_a_freeze_is_of_both_or_of_weights_alone() -> None:
    both, weights = config(freeze_at="2023-05-23"), config(freeze_weights_at="2023-05-23")
    assert both.freeze_counters_at_ms == both.freeze_weights_at_ms == 1_684_800_000_000
    assert (weights.freeze_counters_at_ms, weights.freeze_weights_at_ms) == (0, 1_684_800_000_000)


def test_speeds() -> None:
    assert config().speed_factor == 0 and config(speed="60x").speed_factor == 60 and config(speed="1.5").speed_factor == 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "ebnrd"}, "key 'dataset': expected one of ebnerd, jsonl, got 'ebnrd'; did you mean 'ebnerd'"),
        ({"behaviors": ()}, "replay ebnerd needs --behaviors"),
        ({"log": (HERE,)}, "replay ebnerd takes no --log"),
        ({"dataset": "jsonl", "behaviors": (), "history": (), "log": (HERE,)}, "needs --schema FILE"),
        ({"behaviors": ("nowhere.parquet",)}, "nowhere.parquet: no such file"),
        ({"freeze_at": "soon"}, "key 'freeze_at': expected a time such as '2023-05-23'.*got 'soon'"),
        ({"freeze_at": "2023-05-23", "freeze_weights_at": "2023-05-23"}, "got both"),
        ({"speed": "fast"}, "key 'speed': expected 'max' or a multiple such as '60x', got 'fast'"),
        ({"label_delay_ms": -1}, "key 'label_delay_ms': expected at least 0"),
        ({"window_ms": 1}, "key 'window_ms': expected at least 1000"),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)

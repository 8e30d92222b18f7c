"""The joiner's settings: derived defaults and messages for invalid values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from joiner.config import JoinerConfig
from roostream.errors import ConfigError
from roostream.schema.settings import load


def test_timeouts_follow_the_longest_window_of_any_surface() -> None:
    rules = JoinerConfig(window_ms=1_000, surface_windows={"feed": "5s", "search": 500}).rules
    assert (rules.orphan_timeout_ms, rules.late_horizon_ms, rules.shortest_window_ms) == (5_000, 50_000, 500)


def test_with_an_early_close_corrections_carry_features_for_the_longest_window() -> None:
    windows = {"window_ms": 1_000, "surface_windows": {"feed": "5s"}}
    assert JoinerConfig(**windows, early_close_ms=10).rules.correction_horizon_ms == 5_000
    assert JoinerConfig(**windows).rules.correction_horizon_ms == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_ms": 0}, "'window_ms': expected at least 1, got 0"),
        ({"flink": "localhost:8081"}, "expected http://host:port, got 'localhost:8081'"),
        ({"surface_windows": {"feed": 0}}, "'surface_windows.feed': expected at least 1 ms"),
        ({"surface_windows": {"feed": "soon"}}, "expected a duration"),
        ({"window_ms": 10, "window_jitter_ms": 10}, "less than the shortest window"),
        (
            {"window_ms": 10, "window_jitter_ms": 3, "early_close_ms": 7},
            r"less than the shortest window \(7 ms\), or 0 for off",
        ),
        ({"window_ms": 1_000, "late_horizon_ms": 999}, "at least the longest window"),
        ({"window_ms": 10, "correction_horizon_ms": 101}, "at most the late horizon"),
        (
            {"delivery": "exactly_once", "engine": "local"},
            "'delivery': expected at_least_once with the local engine",
        ),
        ({"delivery": "exactly_once", "checkpoint_interval_ms": 500_000}, "at least two checkpoints"),
        ({"idleness_ms": 1_000}, "'idleness_ms': expected 0 with the flink engine"),
        ({"state_backend": "disk"}, "'state_backend': expected"),
    ],
)
def test_an_invalid_setting_is_refused_with_name_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JoinerConfig(**settings)


def test_settings_load_from_toml_with_durations_and_surface_windows(tmp_path: Path) -> None:
    file = tmp_path / "joiner.toml"
    file.write_text(
        'window = "20s"\nterminal_actions = ["buy"]\n[surface_windows]\nfeed = "5s"\n', encoding="utf-8"
    )
    config = load(JoinerConfig, file)
    assert (config.rules.window_ms, config.rules.surface_windows["feed"]) == (20_000, 5_000)
    assert config.rules.terminal_actions == ("buy",)


def test_reading_ahead_is_limited_to_the_timestamps_that_topics_accept() -> None:
    assert JoinerConfig(window_ms=5_000).max_drift_ms == 60_000
    assert JoinerConfig(window_ms=20_000).max_drift_ms == 120_000
    assert JoinerConfig(read_ahead_ms=7).max_drift_ms == 7

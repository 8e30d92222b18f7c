"""A replay with `--engine stack` (all programs of a stack) gives the same results as `--engine local`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from joiner.config import JoinerConfig
from roostream.cli.replay.program_settings import joiner_settings
from roostream.cli.replay.replay_run import replay, run
from roostream.cli.replay.stack_replay import options_for_up, stack_options
from roostream.errors import ConfigError
from roostream.replay import jsonl_log as jsonl
from roostream.replay.config import ReplayConfig
from roostream.runtime.program import Stop
from roostream.schema.toml_file import read_toml

DOCUMENTED = Path(__file__).resolve().parents[3] / "docs" / "bring-your-own-data.md"


def config(folder: Path, **settings: Any) -> ReplayConfig:
    """Return the settings of a replay of the documentation's log and schema."""
    page = DOCUMENTED.read_text()
    for language in ("jsonl", "toml"):
        (folder / f"shop.{language}").write_text(page.split(f"```{language}\n")[1].split("```")[0])
    defaults = {
        "dataset": "jsonl",
        "options": jsonl.Options(log=(str(folder / "shop.jsonl"),)),
        "schema": str(folder / "shop.toml"),
    }
    return ReplayConfig(**{**defaults, **settings})


def test_both_engines_join_by_the_same_rules(tmp_path: Path) -> None:
    replay_config = config(tmp_path, window_ms=60_000, lateness_ms=500)
    options = stack_options(replay_config, tmp_path)
    assert options.replay and options.overrides["joiner"] == joiner_settings(replay_config)
    rules = JoinerConfig(**joiner_settings(replay_config)).rules
    assert (rules.window_ms, rules.late_horizon_ms) == (60_000, 600_000)


def test_changed_model_settings_are_written_to_the_home(tmp_path: Path) -> None:
    replay_config = config(tmp_path, set=("model.width=32", "shard.publish_interval=1s"))
    overrides = stack_options(replay_config, tmp_path / "home").overrides
    assert Path(overrides["worker"]["model"]).read_text() == "width = 32\n"
    assert overrides["shard"] == {"publish_interval_ms": 1000} and overrides["controller"] == {
        "commit_interval_ms": 5000
    }


def test_a_home_with_the_records_of_another_run_gets_no_second_log(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "kafka").mkdir(parents=True)
    (home / "kafka" / "meta.properties").touch()
    with pytest.raises(ConfigError, match=r"expected a new home.*roostream reset --home"):
        replay(config(tmp_path, home=str(home)), Stop())


def test_a_kept_home_continues_with_the_settings_of_the_replay_but_default_limits(tmp_path: Path) -> None:
    replay_config = config(
        tmp_path,
        window_ms=60_000,
        freeze_weights_at="2024-05-01",
        seed=3,
        num_shards=1,
        set=("joiner.linger=1s",),
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "schema.toml").write_text("of the user")
    found = options_for_up(replay_config, stack_options(replay_config, home), home)
    assert (home / "schema.toml").read_text() == "of the user"
    assert (
        found.schema.is_relative_to(home) and found.schema.read_text() == (tmp_path / "shop.toml").read_text()
    )
    assert found.overrides["joiner"] == {"window_ms": 60_000, "lateness_ms": 2000, "linger_ms": 1000}
    assert found.overrides["worker"] == {"threads": 1, "model": "", "seed": 3}
    assert (found.replay, found.num_shards, found.seed) == (True, 1, 3)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_stack_and_the_local_engine_give_the_same_counts_and_features(tmp_path: Path) -> None:
    reports = {}
    for engine in ("local", "stack"):
        report = tmp_path / f"{engine}.json"
        assert run(config(tmp_path, engine=engine, report=str(report))) == 0
        reports[engine] = json.loads(report.read_text())
    assert reports["stack"]["accounted"]
    assert reports["stack"]["counts"] == reports["local"]["counts"]
    assert reports["stack"]["features_digest"] == reports["local"]["features_digest"]


def test_a_custom_models_file_is_found_from_the_homes_model_file(tmp_path: Path) -> None:
    model = tmp_path / "model.toml"
    model.write_text('kind = "shop.py:build"\nwidth = 3\n')
    replay_config = config(tmp_path, model=(str(model),), set=("model.width=5",))
    written = read_toml(stack_options(replay_config, tmp_path / "home").overrides["worker"]["model"])
    assert written.raw == {"kind": str(tmp_path / "shop.py:build"), "width": 5}

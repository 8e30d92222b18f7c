"""How flags and `--set` assignments of a replay become settings of the programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roostream.cli.replay.program_settings import program_settings, with_model_settings
from roostream.errors import ConfigError
from roostream.models.config import RankerConfig
from roostream.replay import ebnerd
from roostream.replay import jsonl_log as jsonl
from roostream.replay.config import ReplayConfig
from trainer.selection.config import RehearsalConfig


def config(*sets: str, **settings: Any) -> ReplayConfig:
    options = jsonl.Options(log=(__file__,))
    return ReplayConfig(
        dataset="jsonl", options=options, schema=__file__, set=sets, **{"engine": "local", **settings}
    )


def test_flags_and_assignments_reach_the_programs() -> None:
    found = program_settings(
        config(
            "joiner.next_request=session",
            "worker.dedupe_horizon=10m",
            "model.width=32",
            learning_rate=0.01,
            batch_requests=8,
        )
    )
    assert found.joiner["next_request"] == "session" and found.joiner["window_ms"] == 1_800_000
    worker = {
        "seed": 0,
        "freeze_at_ms": 0,
        "threads": 1,
        "batch_requests": 8,
        "learning_rate": 0.01,
        "dedupe_horizon_ms": 600_000,
    }
    assert found.worker == worker and found.model == {"width": 32}


def worker_settings_of_news(tmp_path: Path, *sets: str, **settings: Any) -> dict[str, Any]:
    file = tmp_path / "behaviors.parquet"
    file.touch()
    settings_of_replay = {
        "dataset": "ebnerd",
        "options": ebnerd.Options(behaviors=(str(file),)),
        "set": sets,
        "engine": "stack",
        **settings,
    }
    return program_settings(ReplayConfig(**settings_of_replay)).worker


def test_a_replay_enables_rehearsal_unless_settings_exclude_it(
    tmp_path: Path,
) -> None:
    assert (
        worker_settings_of_news(tmp_path)["rehearsal"]
        == RehearsalConfig(batches=200)
        == worker_settings_of_news(tmp_path, "worker.average_steps=0")["rehearsal"]
    )
    assert worker_settings_of_news(tmp_path, "worker.rehearsal={batches=7}")["rehearsal"].batches == 7
    for assignment in (
        "worker.corrections=on",
        "worker.staleness=1",
        "worker.deferral={share=0.5}",
        "controller.num_workers=2",
    ):
        assert "rehearsal" not in worker_settings_of_news(tmp_path, assignment), assignment
    assert "rehearsal" not in worker_settings_of_news(tmp_path, early_close_ms=60_000, window_ms=1_800_000)


def test_a_log_has_settings_of_the_ranker_unless_another_model_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "behaviors.parquet"
    file.touch()
    log: dict[str, Any] = {
        "dataset": "ebnerd",
        "options": ebnerd.Options(behaviors=(str(file),)),
        "engine": "local",
    }
    model = tmp_path / "own.toml"
    model.write_text("width = 8\n")
    assert program_settings(ReplayConfig(**log)).model == {
        "list_layers": 2,
        "linear": False,
        "scale_rates": False,
    }
    assert program_settings(ReplayConfig(**log, set=("model.list_layers=1", "model.width=8"))).model == {
        "list_layers": 1,
        "linear": False,
        "scale_rates": False,
        "width": 8,
    }
    assert program_settings(ReplayConfig(**log, model=(str(model),))).model == {}
    assert program_settings(ReplayConfig(**log, set=("model.kind=two_tower",))).model == {"kind": "two_tower"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width=32", "expected PROGRAM.KEY=VALUE"),
        ("model.width", "expected model.KEY=VALUE"),
        ("worker.batch_request=3", "did you mean 'batch_requests'"),
        ("worker.batch_requests=0", "key 'worker.batch_requests': expected 1.."),
        ("joiner.late_horizon=1s", "at least the longest window"),
        ("joiner.window=1h", "--window"),
        ("worker.seed=3", "--seed"),
        ("controller.commit_interval=1s", "--engine local has no such"),
        ("worker.exact=true", "--engine local has no such"),
    ],
)
def test_an_invalid_assignment_is_reported(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        program_settings(config(text))


def test_a_stack_takes_settings_of_more_programs() -> None:
    found = program_settings(config("controller.commit_interval=1s", "worker.exact=true", engine="stack"))
    assert found.others == {"controller": {"commit_interval_ms": 1000}} and found.worker["exact"] is True


def test_a_model_is_changed_key_by_key() -> None:
    assert with_model_settings(RankerConfig(prior=0.2), {"width": 32}) == RankerConfig(prior=0.2, width=32)
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        with_model_settings(RankerConfig(), {"widht": 32})
    with pytest.raises(ConfigError, match=r"expected 1\.\.4096, got 0"):
        with_model_settings(RankerConfig(), {"width": 0})


def test_only_a_stack_keeps_a_home(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected --engine stack,"):
        config(home=str(tmp_path))

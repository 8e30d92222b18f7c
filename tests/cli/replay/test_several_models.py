"""A replay with several models: each learns from the same pass over the log as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roostream.cli.main import cli
from roostream.errors import ConfigError
from tests.cli.replay.test_local_replay import replay, write_week_log
from tests.models.custom.test_loading import write_model
from tests.models.custom.test_model_checks import CODE

SMALL, LARGE = "width = 8\n", "width = 16\n"


@pytest.fixture(scope="module")
def news_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("news")
    write_week_log(folder, num_requests=200)
    (folder / "a.toml").write_text(SMALL)
    (folder / "b.toml").write_text(LARGE)
    return folder


@pytest.fixture(scope="module")
def joint_report(news_folder: Path) -> dict[str, Any]:
    """The report of a replay with two models."""
    return replay(news_folder, model=(str(news_folder / "a.toml"), str(news_folder / "b.toml")))


def test_each_model_learns_as_if_it_were_alone(news_folder: Path, joint_report: dict[str, Any]) -> None:
    a, b = str(news_folder / "a.toml"), str(news_folder / "b.toml")
    assert joint_report["accounted"] and [m["model"] for m in joint_report["models"]] == [a, b]
    for model, file in zip(joint_report["models"], (a, b), strict=True):
        alone = replay(news_folder, model=(file,))
        assert "models" not in alone
        for period in ("overall", "measured"):
            assert model["metrics"][period] == alone["metrics"][period]
        assert model["training"] == alone["training"]
        assert model["verdict"]["request_auc"] == alone["verdict"]["request_auc"]
        assert joint_report["features_digest"] == alone["features_digest"]
    assert joint_report["models"][0]["metrics"] != joint_report["models"][1]["metrics"]


def test_the_models_are_compared_request_by_request(news_folder: Path, joint_report: dict[str, Any]) -> None:
    a = str(news_folder / "a.toml")
    first, second = joint_report["models"]
    against = second["against_first"]
    for metric in ("request_auc", "ne"):
        compared = against[metric]["baselines"][a]
        expected = second["verdict"][metric]["model"] - first["verdict"][metric]["model"]
        assert compared["difference"] == pytest.approx(expected, abs=1e-9)
        assert compared["low"] < compared["difference"] < compared["high"]
    assert "against_first" not in first


def test_a_custom_model_that_fails_a_check_is_a_warning_of_the_report(news_folder: Path) -> None:
    dropout = "return torch.nn.functional.dropout(z_BT)"
    model = write_model(news_folder / "custom", CODE.replace("(4,", "(1,").replace("return z_BT", dropout))
    (warning,) = [text for text in replay(news_folder, model=(model,))["warnings"] if "check-model" in text]
    assert "model.toml fails `roostream check-model`: same seed, same bits" in warning
    assert "remove dropout" in warning


def error_of(news_folder: Path, *models: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        replay(news_folder, model=models, **settings)
    return str(caught.value)


def test_a_bad_model_file_ends_the_command_before_the_log_is_read(
    news_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = news_folder / "bad.toml"
    bad.write_text("width = 8\nwidht = 3\n")
    arguments = [
        "replay",
        "jsonl",
        "--log",
        str(news_folder / "a.toml"),
        "--schema",
        str(news_folder / "schema.toml"),
    ]
    arguments += ["--engine", "local", "--model", str(news_folder / "a.toml"), "--model", str(bad)]
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capfd.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in output
    assert "bad.toml" in output and "widht" in output and "a.toml" not in output.replace(str(bad), "")


def test_a_schema_without_features_is_refused_before_the_log_is_read(
    news_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare, no_log = news_folder / "bare.toml", str(news_folder / "a.toml")
    bare.write_text('[[label]]\nname = "click"\naction = "click"\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["replay", "jsonl", "--log", no_log, "--schema", str(bare), "--engine", "local"])
    output = capfd.readouterr().err
    assert ended.value.code == 2 and "at least one [[ro]] or [[nro]] feature" in output


def test_several_models_need_the_local_engine_and_different_files(news_folder: Path) -> None:
    a, b = str(news_folder / "a.toml"), str(news_folder / "b.toml")
    assert "--engine local" in error_of(news_folder, a, b, engine="stack")
    assert "different" in error_of(news_folder, a, a)
    assert "as-served" in error_of(news_folder, a, b, as_served=True)
    assert "no such file" in error_of(news_folder, a, str(news_folder / "absent.toml"))

"""Several models learn from one pass over a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roostream.cli.main import cli
from roostream.errors import ConfigError
from tests.cli.replay.test_local_replay import replay, week
from tests.models.custom.test_loading import write_model
from tests.models.custom.test_model_checks import CODE

SMALL, LARGE = "width = 8\n", "width = 16\n"


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("news")
    week(folder, num_requests=200)
    (folder / "a.toml").write_text(SMALL)
    (folder / "b.toml").write_text(LARGE)
    return folder


@pytest.fixture(scope="module")
def both(news: Path) -> dict[str, Any]:
    """The report of a replay with both models."""
    return replay(news, model=(str(news / "a.toml"), str(news / "b.toml")))


def test_each_model_learns_as_if_it_were_alone(news: Path, both: dict[str, Any]) -> None:
    a, b = str(news / "a.toml"), str(news / "b.toml")
    assert both["accounted"] and [m["model"] for m in both["models"]] == [a, b]
    for model, file in zip(both["models"], (a, b), strict=True):
        alone = replay(news, model=(file,))
        assert "models" not in alone
        for when in ("overall", "measured"):
            assert model["metrics"][when] == alone["metrics"][when]
        assert model["training"] == alone["training"]
        assert model["verdict"]["request_auc"] == alone["verdict"]["request_auc"]
        assert both["features_digest"] == alone["features_digest"]
    assert both["models"][0]["metrics"] != both["models"][1]["metrics"]


def test_the_models_are_compared_request_by_request(news: Path, both: dict[str, Any]) -> None:
    a = str(news / "a.toml")
    first, second = both["models"]
    against = second["against_first"]
    for metric in ("request_auc", "ne"):
        compared = against[metric]["baselines"][a]
        expected = second["verdict"][metric]["model"] - first["verdict"][metric]["model"]
        assert compared["difference"] == pytest.approx(expected, abs=1e-9)
        assert compared["low"] < compared["difference"] < compared["high"]
    assert "against_first" not in first


def test_a_custom_model_that_fails_a_check_is_a_warning_of_the_report(news: Path) -> None:
    dropout = "return torch.nn.functional.dropout(z_BT)"
    model = write_model(news / "custom", CODE.replace("(4,", "(1,").replace("return z_BT", dropout))
    (warning,) = [text for text in replay(news, model=(model,))["warnings"] if "check-model" in text]
    assert "model.toml fails `roostream check-model`: nothing is kept between calls" in warning


def refused(news: Path, *models: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        replay(news, model=models, **settings)
    return str(caught.value)


def test_a_bad_model_file_ends_the_command_before_the_log_is_read(
    news: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = news / "bad.toml"
    bad.write_text("width = 8\nwidht = 3\n")
    words = ["replay", "jsonl", "--log", str(news / "a.toml"), "--schema", str(news / "schema.toml")]
    words += ["--engine", "local", "--model", str(news / "a.toml"), "--model", str(bad)]
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    told = capfd.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in told
    assert "bad.toml" in told and "widht" in told and "a.toml" not in told.replace(str(bad), "")


def test_several_models_need_the_local_engine_and_different_files(news: Path) -> None:
    a, b = str(news / "a.toml"), str(news / "b.toml")
    assert "--engine local" in refused(news, a, b, engine="stack")
    assert "different" in refused(news, a, a)
    assert "as-served" in refused(news, a, b, as_served=True)
    assert "no such file" in refused(news, a, str(news / "absent.toml"))

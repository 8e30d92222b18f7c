"""`roostream check-model` prints one line per check and has exit code 2 if a check fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from roostream.cli.main import cli
from roostream.schema.registry import to_toml
from tests.models.custom.test_loading import write_model
from tests.models.custom.test_model_checks import CODE
from tests.models.model_cases import make_schema


@pytest.fixture
def schema(tmp_path: Path) -> str:
    (tmp_path / "schema.toml").write_text(to_toml(make_schema("everything")))
    return str(tmp_path / "schema.toml")


@pytest.mark.parametrize("file", ["model.toml", "shop.py", "shop.py:build"])
def test_a_valid_model_is_reported_with_its_cost_per_request(tmp_path: Path, schema: str, file: str) -> None:
    write_model(tmp_path, CODE)
    result = CliRunner().invoke(cli, ["check-model", str(tmp_path / file), "--schema", schema])
    assert result.exit_code == 0, result.output
    assert result.output.count("ok ") == 9 and "µs for a request of 20 candidates" in result.output


def test_a_broken_rule_is_reported_with_exit_code_2(tmp_path: Path, schema: str) -> None:
    path = write_model(tmp_path, CODE.replace("return z_BT", "return z_BT - z_BT.mean()"))
    result = CliRunner().invoke(cli, ["check-model", path, "--schema", schema])
    assert (
        result.exit_code == 2
        and "failed  alone as in a batch, to 1e-5 (G9): expected a request's logits" in result.output
    )
    assert "checks failed (docs/bring-your-own-model.md)" in result.stderr


def test_a_model_that_depends_on_the_order_of_a_set_is_reported(tmp_path: Path, schema: str) -> None:
    order = "self.order = [*map(int, {str(n) for n in range(30)})]"
    code = CODE.replace("# more", order).replace("return z_BT", "return z_BT + torch.tensor(self.order[:2])")
    result = CliRunner().invoke(cli, ["check-model", write_model(tmp_path, code), "--schema", schema])
    assert result.exit_code == 2
    assert (
        "failed  same seed, same bits, same names: expected the same bits in another process" in result.output
    )


def test_a_file_that_is_not_there_is_reported(tmp_path: Path, schema: str) -> None:
    result = CliRunner().invoke(cli, ["check-model", str(tmp_path / "absent.py"), "--schema", schema])
    assert "can't be read: expected a Python file, got No such file" in str(result.exception)

"""A user's module: found, told apart from others by its source, and refused in one sentence."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

import pytest
import torch

from roostream.errors import ConfigError
from roostream.models.build import (
    build_model,
    load_model_config,
    load_model_config_or_code,
    model_config_from_dict,
)
from roostream.models.config import CustomModelConfig
from roostream.models.custom.loading import OUR_NAMES, CustomModel
from roostream.models.inputs import build_inputs
from roostream.models.model import Model, Targets
from roostream.wire.lookup import build_lookup
from tests.contract.house import FOLDERS
from tests.models.model_cases import make_batch, make_rows, make_schema

CODE = """
import dataclasses
import torch
from roostream.models.config import CustomModelConfig
from roostream.models.model import Model
from roostream.schema.settings import setting

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(CustomModelConfig):
    rows: int = setting(3, "of its one matrix", ge=1)

class Constant(Model):
    def __init__(self, schema, config):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(config.rows, len(schema.tasks)))

    def forward(self, inputs):
        return self.bias.mean(dim=0).expand(len(inputs.request_index_B), -1)

    def loss(self, inputs, logits_BT, targets):
        return (logits_BT - targets.label_BT).square().mul(targets.weight_BT).sum()

def build(schema, config):
    return Constant(schema, config)
"""
SCHEMA = make_schema("everything")


def written(folder: Path, code: str, toml: str = "", name: str = "shop.py") -> str:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(code)
    (folder / "model.toml").write_text(f'kind = "{name}:build"\n{toml}')
    return str(folder / "model.toml")


def forward(model: Model) -> torch.Tensor:
    batch = make_batch(SCHEMA, [2, 3])
    lookup = build_lookup(batch)
    inputs = build_inputs(batch, lookup, make_rows(SCHEMA, lookup))
    logits_BT = model(inputs)
    model.loss(inputs, logits_BT, Targets(torch.ones(5, 2), torch.ones(5, 2)))
    return logits_BT


def test_a_file_has_its_own_configuration_and_is_named_by_its_digest(tmp_path: Path) -> None:
    config = load_model_config(written(tmp_path, CODE, "rows = 5"))
    assert isinstance(config, CustomModelConfig)
    assert dataclasses.asdict(config) == {
        "kind": "shop.py:build",
        "code": hashlib.sha256(CODE.encode()).hexdigest(),
        "rows": 5,
    }
    assert model_config_from_dict(dataclasses.asdict(config)) == config
    model = build_model(SCHEMA, config, 1)
    assert isinstance(model, CustomModel) and forward(model).shape == (5, 2)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == [("own.bias", (5, 2))]


@pytest.mark.parametrize("name", ["models.py", "trainer.py", "torch.py", "json.py"])
def test_a_file_may_be_called_like_anything_and_hides_nothing(tmp_path: Path, name: str) -> None:
    before = {n for n in sys.modules if not n.startswith("_roostream_own_")}
    build_model(SCHEMA, load_model_config(written(tmp_path, CODE + f"# {name}", name=name)), 0)
    assert {n for n in sys.modules if not n.startswith("_roostream_own_")} == before
    assert not list(tmp_path.rglob("*.pyc")), "what runs is what was hashed"


def test_two_versions_of_a_file_are_two_models(tmp_path: Path) -> None:
    first = load_model_config(written(tmp_path, CODE))
    second = load_model_config(
        written(tmp_path, CODE.replace("rows: int = setting(3", "rows: int = setting(4"))
    )
    sizes = [next(build_model(SCHEMA, c, 0).parameters()).shape[0] for c in (first, second)]
    assert sizes == [3, 4] and first != second


def test_a_package_s_module_is_known_by_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "shop_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "ranking.py").write_text(CODE + "\nfrom shop_package import parts\n")
    (package / "parts.py").write_text("")
    first = load_model_config_or_code("shop_package.ranking:build")
    assert first.kind == "shop_package.ranking:build" and forward(build_model(SCHEMA, first, 0)).shape == (
        5,
        2,
    )
    (package / "parts.py").write_text("x = 1")
    assert (
        dataclasses.asdict(load_model_config_or_code("shop_package.ranking:build"))["code"]
        != dataclasses.asdict(first)["code"]
    )


def test_other_code_than_what_was_trained_with_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, CODE)
    committed = {**dataclasses.asdict(load_model_config(path)), "code": "0" * 64}
    digest = hashlib.sha256(CODE.encode()).hexdigest()[:12]
    sentence = f"model 'shop.py:build': expected code of digest 000000000000, got {digest} .*; use the file that it was trained with"
    with pytest.raises(ConfigError, match=sentence):
        model_config_from_dict(committed)
    with pytest.raises(ConfigError, match=f"model.toml:1: {sentence}"):
        load_model_config(written(tmp_path, CODE, f'code = "{"0" * 64}"'))


def test_code_that_a_program_was_not_given_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model 'absent.py:build': expected its code \(digest 12ab\), got none; set `model`",
    ):
        model_config_from_dict({"kind": "absent.py:build", "code": "12ab"})


def test_the_names_that_are_taken_are_our_folders() -> None:
    assert set(FOLDERS) == OUR_NAMES


@pytest.mark.parametrize(
    ("code", "toml", "message"),
    [
        (
            "import nothing_of_that_name",
            "",
            r"can't be imported: .*shop.py:1: ModuleNotFoundError: No module named",
        ),
        ("\n\ndef (", "", r"can't be imported: .*shop.py:3: SyntaxError: "),
        ("x = 1", "", r"expected a function build\(schema, config\) in .*shop.py, got none; define it"),
        (
            "Config = 3\ndef build(schema, config): ...",
            "",
            r"expected Config as a frozen dataclass that extends",
        ),
        (CODE, "rowz = 3", r"model.toml:2: unknown key 'rowz' = 3; did you mean 'rows'\?"),
        (CODE, "rows = 0", r"model.toml:2: key 'rows': expected at least 1, got 0"),
    ],
)
def test_what_is_wrong_with_a_module_is_one_sentence(
    tmp_path: Path, code: str, toml: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        load_model_config(written(tmp_path, code, toml))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "absent.py:build",
            r"model\.toml:1: model '.*absent.py' can't be read: expected a Python file, got No such file",
        ),
        ("shop.py:", r"expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, got 'shop.py:'"),
        ("not-a-name.x:build", r"expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"),
        (
            "roostream.models.ranker:Ranker",
            r"expected a package of a name of its own, got 'roostream', which is taken; rename it",
        ),
        (
            "no_such_package.x:build",
            r"expected package 'no_such_package' in this environment, got none; install it",
        ),
    ],
)
def test_a_kind_that_leads_nowhere_is_told(tmp_path: Path, kind: str, message: str) -> None:
    (tmp_path / "model.toml").write_text(f'kind = "{kind}"\n')
    with pytest.raises(ConfigError, match=message):
        load_model_config(str(tmp_path / "model.toml"))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "return Constant(schema, config)",
            "return 3",
            r"expected a roostream.models.model.Model, got int \(.*shop.py\); return one",
        ),
        (
            "return Constant(schema, config)",
            "return config.no",
            r"failed in build: .*shop.py:24: AttributeError: ",
        ),
        (
            ".expand(len(inputs.request_index_B), -1)",
            "",
            r"shop.py:17: expected forward to give logits of shape \(5, 2\), got shape",
        ),
        (
            "return self.bias.mean",
            "return self.bais.mean",
            r"failed in forward: .*shop.py:18: AttributeError: ",
        ),
        (
            ".mul(targets.weight_BT).sum()",
            "",
            r"shop.py:20: expected loss to give a scalar of shape \(\), got shape \(5, 2\)",
        ),
        (
            "targets.label_BT).square",
            "targets.labels).square",
            r"failed in loss: .*shop.py:21: AttributeError: ",
        ),
    ],
)
def test_what_goes_wrong_in_a_model_has_its_file_and_line(
    tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    assert CODE.count(right) == 1
    config = load_model_config(written(tmp_path, CODE.replace(right, wrong)))
    with pytest.raises(ConfigError, match=message) as told:
        forward(build_model(SCHEMA, config, 0))
    assert "\n" not in str(told.value)


def test_that_memory_is_out_stays_what_it_is(tmp_path: Path) -> None:
    config = load_model_config(
        written(
            tmp_path,
            CODE.replace("return self.bias.mean", "raise MemoryError\n        return self.bias.mean"),
        )
    )
    with pytest.raises(MemoryError):
        forward(build_model(SCHEMA, config, 0))


def test_a_manifest_makes_nobody_import_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unasked_model.py").write_text("raise SystemExit('imported')")
    for code in ("", "0" * 64):
        with pytest.raises(ConfigError, match=r"unasked_model:build.*expected its code"):
            model_config_from_dict({"kind": "unasked_model:build", "code": code})
    assert "unasked_model" not in sys.modules

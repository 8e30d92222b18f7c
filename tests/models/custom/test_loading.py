"""Loading a user's model module: how it is found, identified by a digest of its source, and rejected."""

from __future__ import annotations

import dataclasses
import hashlib
import re
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
from roostream.models.custom.loading import OUR_NAMES, CustomModel, backward
from roostream.models.model import Model, Targets
from tests.contract.source_tree import FOLDERS
from tests.models.model_cases import inputs_of, make_batch, make_schema

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


def write_model(folder: Path, code: str, toml: str = "", name: str = "shop.py") -> str:
    """Write a model module and a model.toml that names it; return the path of the TOML."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(code)
    (folder / "model.toml").write_text(f'kind = "{name}:build"\n{toml}')
    return str(folder / "model.toml")


def forward(model: Model) -> torch.Tensor:
    batch = make_batch(SCHEMA, [2, 3])
    inputs = inputs_of(batch)
    logits_BT = model(inputs)
    model.loss(inputs, logits_BT, Targets(torch.ones(5, 2), torch.ones(5, 2)))
    return logits_BT


def test_a_file_has_its_own_settings_and_is_identified_by_its_digest(tmp_path: Path) -> None:
    config = load_model_config(write_model(tmp_path, CODE, "rows = 5"))
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


@pytest.mark.parametrize("name", ["trainer.py", "torch.py"])
def test_a_file_of_any_name_hides_no_module(tmp_path: Path, name: str) -> None:
    before = {n for n in sys.modules if not n.startswith("_roostream_own_")}
    build_model(SCHEMA, load_model_config(write_model(tmp_path, CODE + f"# {name}", name=name)), 0)
    assert {n for n in sys.modules if not n.startswith("_roostream_own_")} == before
    assert not list(tmp_path.rglob("*.pyc")), "cached byte code could differ from the source that was hashed"


def test_two_versions_of_a_file_are_two_models(tmp_path: Path) -> None:
    first = load_model_config(write_model(tmp_path, CODE))
    second = load_model_config(
        write_model(tmp_path, CODE.replace("rows: int = setting(3", "rows: int = setting(4"))
    )
    sizes = [next(build_model(SCHEMA, c, 0).parameters()).shape[0] for c in (first, second)]
    assert sizes == [3, 4] and first != second


def test_the_digest_of_a_package_covers_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_code_that_differs_from_the_code_of_training_is_rejected(tmp_path: Path) -> None:
    path = write_model(tmp_path, CODE)
    committed = {**dataclasses.asdict(load_model_config(path)), "code": "0" * 64}
    digest = hashlib.sha256(CODE.encode()).hexdigest()[:12]
    sentence = f"model 'shop.py:build': expected code of digest 000000000000, got {digest}"
    with pytest.raises(ConfigError, match=sentence):
        model_config_from_dict(committed)
    with pytest.raises(ConfigError, match=f"model.toml:1: {sentence}"):
        load_model_config(write_model(tmp_path, CODE, f'code = "{"0" * 64}"'))


def test_corrected_code_continues_commits_of_the_code_that_it_replaces(tmp_path: Path) -> None:
    """The old code is not loaded: its file was overwritten before this process started."""
    digest = hashlib.sha256(b"the old code").hexdigest()
    committed = {"kind": "shop.py:build", "code": digest, "rows": 3}
    corrected = f"{CODE}\n# corrected"
    load_model_config(write_model(tmp_path, corrected))
    replaces = f'replaces = ["{digest[:12]}"]'
    with pytest.raises(ConfigError, match=re.escape(replaces)):
        model_config_from_dict(committed)
    config = load_model_config(write_model(tmp_path, corrected, replaces))
    assert model_config_from_dict(committed) == config
    assert dataclasses.asdict(config)["code"] == hashlib.sha256(corrected.encode()).hexdigest()
    assert forward(build_model(SCHEMA, model_config_from_dict(committed), 0)).shape == (5, 2)
    with pytest.raises(ConfigError, match="expected code of digest"):
        model_config_from_dict({**committed, "code": "0" * 64})


@pytest.mark.parametrize("replaces", ["'0123456789ab'", "['']", "[1]", "['0123']", "['xyzxyzxyzxyz']"])
def test_replaced_code_is_named_by_digests(tmp_path: Path, replaces: str) -> None:
    with pytest.raises(ConfigError, match=r"model.toml:1: key 'replaces': expected a list of digests"):
        load_model_config(write_model(tmp_path, CODE, f"replaces = {replaces}"))


def test_reserved_names_are_our_packages() -> None:
    assert set(FOLDERS) == OUR_NAMES


@pytest.mark.parametrize(
    ("code", "toml", "message"),
    [
        ("import nothing_of_that_name", "", r"shop.py:1: ModuleNotFoundError"),
        ("\n\ndef (", "", r"shop.py:3: SyntaxError"),
        ("x = 1", "", r"expected a function build\(schema, config\)"),
        ("Config = 3\ndef build(schema, config): ...", "", "expected Config as a frozen dataclass"),
        (CODE, "rowz = 3", r"model.toml:2: unknown key 'rowz' = 3; did you mean 'rows'\?"),
        ("import sys\nsys.exit()", "", "shop.py:2: SystemExit"),
        (
            "from .layers import X",
            "",
            "shop.py:1: ImportError.*; a model of several files is an installed pack",
        ),
        (
            "import neighbor",
            "",
            "shop.py:1: ModuleNotFoundError.*; a model of several files is an installed p",
        ),
        (
            "import torch\ntorch.set_default_dtype(torch.float64)",
            "",
            "expected torch's default dtype to stay",
        ),
        ("import torch\ntorch.set_grad_enabled(False)", "", "expected torch's grad mode to stay True"),
        ("import torch\ntorch.set_num_threads(63)", "", "expected torch's number of threads to stay"),
        (
            "import torch\ntorch.set_float32_matmul_precision('medium')",
            "",
            "expected torch's precision of products to stay highest",
        ),
        (
            # Another test of this process may have set it.
            "import torch as t\nt.use_deterministic_algorithms(not t.are_deterministic_algorithms_enabled())",
            "",
            "expected torch's use of deterministic algorithms to stay",
        ),
        (
            "import torch\ntorch.autograd.set_detect_anomaly(True)",
            "",
            "expected torch's detection of anomalies to stay False",
        ),
        (
            CODE.replace("Config(", "ShopConfig(").replace("CustomShopConfig", "CustomModelConfig"),
            "rows = 3",
            r"model.toml:2: key 'rows': expected a class Config with this field in .*shop.py",
        ),
    ],
)
def test_an_invalid_module_is_rejected_in_one_sentence(
    tmp_path: Path, code: str, toml: str, message: str
) -> None:
    (tmp_path / "neighbor.py").write_text("")
    with pytest.raises(ConfigError, match=message) as error:
        load_model_config(write_model(tmp_path, code, toml))
    assert "\n" not in str(error.value)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "def __post_init__(self): raise ValueError('rows')",
            r"failed in Config: .*shop.py:11: ValueError: rows",
        ),
        ("path: object = torch.float32", "failed in Config: TypeError: Object of type dtype is not JSON"),
        ("limit: float = float('nan')", "failed in Config: ValueError: Out of range float values"),
        ("path: 'Absent' = 3", "failed in Config: NameError: name 'Absent' is not defined"),
    ],
)
def test_settings_that_fail_or_cannot_be_stored_are_rejected(
    tmp_path: Path, field: str, message: str
) -> None:
    rows = 'rows: int = setting(3, "of its one matrix", ge=1)'
    with pytest.raises(ConfigError, match=message):
        load_model_config(write_model(tmp_path, CODE.replace(rows, f"{rows}\n    {field}")))


def test_the_error_names_a_package_without_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shop_folder").mkdir()
    with pytest.raises(
        ConfigError, match=r"'shop_folder' .*, got a folder without __init__.py; add this file"
    ):
        load_model_config_or_code("shop_folder.ranking:build")


def test_a_python_file_in_place_of_a_toml_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, CODE)
    with pytest.raises(
        ConfigError, match=r"expected a TOML, got Python; write one .* kind = 'shop.py:build'"
    ):
        load_model_config(str(tmp_path / "shop.py"))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("torch.nn.LazyLinear(3)", r"parameter 'part.weight': expected a shape, got a lazy layer"),
        ("torch.nn.Linear(3, 3).double()", r"parameter 'part.weight': expected float32, got torch.float64"),
        (
            "torch.nn.Linear(3, 3, device='meta')",
            r"parameter 'part.weight': expected it on the CPU, got meta",
        ),
        ("torch.nn.Embedding(3, 3, sparse=True)", r"layer 'part': expected dense gradients, got sparse"),
        (
            "torchrec.EmbeddingBagCollection([])",
            r"layer 'part': expected rows of the shards, got TorchRec's Emb.*RemoteEmbeddingBagCollection",
        ),
        ("Stateful()", r"expected tensors to store, got dict in 'part._extra_state'"),
    ],
)
def test_parts_that_cannot_be_trained_or_stored_are_rejected_when_built(
    tmp_path: Path, part: str, message: str
) -> None:
    stateful = "class Stateful(torch.nn.Module):\n    def get_extra_state(self):\n        return {}\n\n"
    code = CODE.replace("class Constant", f"import torchrec\n\n{stateful}class Constant").replace(
        "super().__init__()", f"super().__init__()\n        self.part = {part}"
    )
    with pytest.raises(ConfigError, match=f"shop.py: {message}"):
        build_model(SCHEMA, load_model_config(write_model(tmp_path, code)), 0)


def test_a_broken_graph_of_a_loss_is_an_error_of_the_model(tmp_path: Path) -> None:
    model = build_model(SCHEMA, load_model_config(write_model(tmp_path, CODE)), 0)
    inputs = inputs_of(make_batch(SCHEMA, [2]), train=True)
    with pytest.raises(ConfigError, match=r"shop.py:20: expected a loss with gradients, got one without"):
        backward(model, torch.zeros(()), inputs)
    leaf = torch.ones(3, requires_grad=True)
    value = leaf.exp()
    loss = (value * value).sum()
    with torch.no_grad():
        value += 1
    with pytest.raises(
        ConfigError, match=r"'shop.py:build' failed in the backward pass: RuntimeError.*inplace"
    ):
        backward(model, loss, inputs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("absent.py:build", r"model\.toml:1: model '.*absent.py' can't be read"),
        ("shop.py", r"expected one of ranker, .* or FILE.py:FUNCTION, got 'shop.py'"),
        ("shop.py:", r"expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, got 'shop.py:'"),
        ("not-a-name.x:build", "expected FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION"),
        ("roostream.models.ranker:Ranker", "got 'roostream', which is taken"),
        ("no_such_package.x:build", "expected package 'no_such_package' in this environment"),
    ],
)
def test_an_invalid_kind_is_rejected(tmp_path: Path, kind: str, message: str) -> None:
    (tmp_path / "model.toml").write_text(f'kind = "{kind}"\n')
    with pytest.raises(ConfigError, match=message):
        load_model_config(str(tmp_path / "model.toml"))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("return Constant(schema, config)", "return 3", r"model.Model, got int \(.*shop.py\)"),
        (
            "return Constant(schema, config)",
            "torch.set_default_dtype(torch.float64); return Constant(schema, config)",
            r"shop.py: build: expected torch's default dtype to stay torch.float32",
        ),
        (
            "return Constant(schema, config)",
            "return torch.compile(Constant(schema, config))",
            r"got OptimizedModule \(.*shop.py\); compile modules inside of it",
        ),
        (
            "return Constant(schema, config)",
            "return config.no",
            r"failed in build: .*shop.py:24: AttributeError",
        ),
        (
            ".expand(len(inputs.request_index_B), -1)",
            "",
            r"shop.py:17: expected forward to give logits of shape",
        ),
        (".expand(len(inputs", ".double().expand(len(inputs", r"shop.py:17: expected logits of float32, got"),
        (
            "return self.bias.mean",
            "return self.bais.mean",
            r"failed in forward: .*shop.py:18: AttributeError",
        ),
        ("return self.bias.mean", "assert False; self.bias.mean", r"shop.py:18: AssertionError; correct"),
        (".mul(targets.weight_BT).sum()", "", r"shop.py:20: expected loss to give a scalar"),
        (
            "targets.label_BT).square",
            "targets.labels).square",
            r"failed in loss: .*shop.py:21: AttributeError",
        ),
    ],
)
def test_errors_of_a_model_name_file_and_line(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    assert CODE.count(right) == 1
    config = load_model_config(write_model(tmp_path, CODE.replace(right, wrong)))
    with pytest.raises(ConfigError, match=message) as error:
        forward(build_model(SCHEMA, config, 0))
    assert "\n" not in str(error.value) and "; " in str(error.value)


def test_a_memory_error_passes_through(tmp_path: Path) -> None:
    config = load_model_config(
        write_model(
            tmp_path,
            CODE.replace("return self.bias.mean", "raise MemoryError\n        return self.bias.mean"),
        )
    )
    with pytest.raises(MemoryError):
        forward(build_model(SCHEMA, config, 0))


def test_a_manifest_never_causes_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unasked_model.py").write_text("raise SystemExit('imported')")
    for code in ("", "0" * 64):
        with pytest.raises(ConfigError, match=r"unasked_model:build.*expected its code"):
            model_config_from_dict({"kind": "unasked_model:build", "code": code})
    assert "unasked_model" not in sys.modules

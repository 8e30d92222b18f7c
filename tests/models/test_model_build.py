"""Building a model of any kind from its configuration. Initial values depend on the seed and the parameter's
name only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from roostream.errors import ConfigError
from roostream.models.build import (
    ADDED_PARTS,
    KINDS,
    ModelKind,
    build_model,
    load_model_config,
    model_config_from_dict,
)
from roostream.models.config import ModelConfig, RankerConfig
from roostream.models.inputs import Inputs
from roostream.models.model import Model, Targets
from roostream.schema.schema import Schema
from tests.models.kind_cases import CONFIGS
from tests.models.model_cases import inputs_of, make_batch, make_schema


def bits(seed: int, config: RankerConfig | None = None, case: str = "everything") -> dict[str, bytes]:
    model = build_model(make_schema(case), config or RankerConfig(), seed)
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def test_initial_values_depend_on_the_seed_only() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = bits(3)
    assert torch.equal(torch.rand(3), expected), "building does not draw from the global state"
    assert bits(3) == first
    assert bits(4) != first


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_to_be_loaded_has_all_values_of_its_state(kind: str) -> None:
    schema, config = make_schema("everything"), CONFIGS[kind]
    initial = build_model(schema, config, 3)
    loaded = build_model(schema, config, 3, is_loaded=True)
    loaded.load_state_dict(initial.state_dict(), strict=True)
    for named in ("named_parameters", "named_buffers"):
        loaded_values, initial_values = dict(getattr(loaded, named)()), dict(getattr(initial, named)())
        assert loaded_values.keys() == initial_values.keys() and all(
            torch.equal(loaded_values[name], initial_values[name]) for name in initial_values
        )


def test_a_new_module_changes_no_other_parameter() -> None:
    without, with_ = bits(1, RankerConfig(list_layers=0)), bits(1, RankerConfig(list_layers=2))
    assert without.items() <= with_.items() and len(with_) > len(without)


def test_initial_values_are_pinned() -> None:
    # Before the first commit, trainer and serving of different releases must have the same weights.
    model = build_model(
        make_schema("one float"), RankerConfig(width=4, list_heads=1, request_layers=(2,)), seed=0
    )
    weight = dict(model.named_parameters())["dense.layers.0.weight"].detach().flatten()
    assert [round(x, 6) for x in weight[:4].tolist()] == [-0.755377, -0.128817, 1.124416, -0.505009]


def test_config_goes_through_a_manifest() -> None:
    config = RankerConfig(request_layers=(7, 3), cross_layers=0, prior=0.25)
    written = json.loads(json.dumps(dataclasses.asdict(config)))
    assert written["kind"] == "ranker"
    assert model_config_from_dict(written) == config
    del written["kind"]
    assert model_config_from_dict(written) == config, "an old manifest without a kind describes a ranker"
    for part in ADDED_PARTS:
        del written[part]
    without = dataclasses.replace(config, **dict.fromkeys(ADDED_PARTS, False))
    assert model_config_from_dict(written) == without, (
        "an old manifest without these keys has none of the parts"
    )


class Constant(Model):
    """A model kind with one parameter, as another module could add it."""

    def __init__(self, schema: Schema, config: ConstantConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.num_rows, len(schema.tasks)))

    def forward(self, inputs: Inputs) -> torch.Tensor:
        return self.bias.mean(dim=0).expand(len(inputs.request_index_B), -1)

    def loss(self, inputs: Inputs, logits_BT: torch.Tensor, targets: Targets) -> torch.Tensor:
        return (logits_BT - targets.label_BT).square().mul(targets.weight_BT).sum()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantConfig(ModelConfig):
    num_rows: int = 3


def test_a_new_kind_is_a_module_and_a_row_of_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "constant", ModelKind(ConstantConfig, Constant))
    path = tmp_path / "model.toml"
    path.write_text("kind = 'constant'\nnum_rows = 2\n")
    config = load_model_config(str(path))
    assert config == ConstantConfig(kind="constant", num_rows=2)
    assert model_config_from_dict(dataclasses.asdict(config)) == config
    schema = make_schema("everything")
    model, batch = build_model(schema, config, seed=1), make_batch(schema, [2, 3])
    inputs = inputs_of(batch, train=True)
    logits_BT = model(inputs)
    assert logits_BT.shape == (5, 2) and model.bias.abs().sum() > 0
    model.loss(inputs, logits_BT, Targets(torch.ones(5, 2), torch.ones(5, 2))).backward()
    assert model.bias.grad is not None


def test_config_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text("width = 32\nlist_heads = 2\ndeep_layers = [16, 8]\n")
    assert load_model_config(str(path)) == RankerConfig(width=32, list_heads=2, deep_layers=(16, 8))
    assert load_model_config("") == RankerConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind = 'rankr'", r"model.toml:1: key 'kind': .* did you mean 'ranker'\?"),
        ("kind = ['ranker']", r"key 'kind': expected one of .* got \['ranker'\]"),
        ("widht = 3", r"unknown key 'widht' = 3; did you mean 'width'\?"),
        ("width = 30", r"key 'list_heads': expected a divisor of width = 30, got 4"),
        ("kind = 'hstu'\nhstu_width = 7", r"key 'hstu_heads': expected a divisor of hstu_width = 7, got 2"),
        ("dhen_interactions = ['dot', 'dott']", "key 'dhen_interactions': expected one of cross, dot, mix"),
        ("dhen_interactions = ['dot', 'dot']", "key 'dhen_interactions': expected one or more .* each once"),
        ('width = "wide"', r"width"),
    ],
)
def test_a_wrong_setting_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model_config(str(path))

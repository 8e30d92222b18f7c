"""Initial values: a function of the seed and the parameter's name."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from models.build import build_model
from models.config import ModelConfig, load_model_config, model_config_from_dict
from roo.errors import ConfigError
from tests.models.model_cases import make_schema


def bits(seed: int, config: ModelConfig | None = None, case: str = "everything") -> dict[str, bytes]:
    model = build_model(make_schema(case), config or ModelConfig(), seed)
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def test_same_seed_same_bits_whatever_was_drawn_before() -> None:
    first = bits(3)
    torch.manual_seed(17)
    torch.rand(5)
    assert bits(3) == first
    assert bits(4) != first


def test_building_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    bits(0)
    assert torch.equal(torch.rand(3), expected)


def test_a_new_module_changes_no_other_parameter() -> None:
    without, with_ = bits(1, ModelConfig(list_layers=0)), bits(1, ModelConfig(list_layers=2))
    assert without.items() <= with_.items() and len(with_) > len(without)


def test_initial_values_are_pinned() -> None:
    # Trainer and serving of different releases must agree before the first commit.
    model = build_model(make_schema("one float"), ModelConfig(width=4, list_heads=1, request_layers=(2,)), seed=0)
    weight = dict(model.named_parameters())["dense.layers.0.weight"].detach().flatten()
    assert [round(x, 6) for x in weight[:4].tolist()] == [-0.755377, -0.128817, 1.124416, -0.505009]


def test_config_goes_through_a_manifest() -> None:
    config = ModelConfig(request_layers=(7, 3), cross_layers=0, prior=0.25)
    assert model_config_from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_config_from_toml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "model.toml"
    path.write_text("width = 32\nlist_heads = 2\ndeep_layers = [16, 8]\n")
    assert load_model_config(str(path)) == ModelConfig(width=32, list_heads=2, deep_layers=(16, 8))
    assert load_model_config("") == ModelConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("widht = 3", r"unknown key 'widht' = 3; did you mean 'width'\?"),
        ("width = 0", r"width: expected 1\.\.4096, got 0"),
        ("width = 30", r"list_heads: expected a divisor of width = 30, got 4"),
        ("list_layers = 99", r"list_layers: expected 0\.\.16, got 99"),
        ("deep_layers = [64, 0]", r"deep_layers: expected 1\.\.4096, got 0"),
        ("prior = 1.0", r"prior: expected a probability between 0 and 1, got 1\.0"),
        ('width = "wide"', r"width"),
    ],
)
def test_a_wrong_setting_is_told_in_a_sentence(tmp_path, text: str, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model_config(str(path))

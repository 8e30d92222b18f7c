"""Every rule has a model that breaks it and a sentence about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.models.build import load_model_config
from roostream.models.config import RankerConfig
from roostream.models.custom.model_checks import check_model, forward_time_us
from tests.models.custom.test_loading import written
from tests.models.model_cases import make_schema

CODE = """
import torch
from roostream.models.model import Model

class Linear(Model):
    def __init__(self, schema):
        super().__init__()
        self.width = len(schema.tasks)
        self.layer = torch.nn.Linear(4, self.width)
        # more

    def forward(self, inputs):
        x_BG = inputs.nro_float_BG[:, :4]
        z_BT = self.layer(x_BG)
        return z_BT

    def loss(self, inputs, logits_BT, targets):
        return (logits_BT - targets.label_BT).square().mul(targets.weight_BT).sum()

def build(schema, config):
    return Linear(schema)
"""
SCHEMA = make_schema("everything")


def broken(folder: Path, right: str = "", wrong: str = "") -> dict[str, str]:
    assert right in CODE
    config = load_model_config(written(folder, CODE.replace(right, wrong) if right else CODE))
    return {verdict.check: verdict.wrong for verdict in check_model(SCHEMA, config) if verdict.wrong}


def test_a_model_that_keeps_the_rules_passes(tmp_path: Path) -> None:
    assert broken(tmp_path) == {}


def test_our_own_kind_passes_and_takes_time() -> None:
    config = RankerConfig(request_layers=(8,), width=8, list_heads=2, deep_layers=(8,), task_layers=(4,))
    assert [verdict for verdict in check_model(SCHEMA, config) if verdict.wrong] == []
    assert forward_time_us(SCHEMA, config) > 0


@pytest.mark.parametrize(
    ("right", "wrong", "check", "message"),
    [
        (
            "return z_BT",
            "return z_BT - z_BT.mean()",
            "alone as in a batch, to 1e-5 (G9)",
            "nothing may be taken over all requests",
        ),
        (
            "return z_BT",
            "return z_BT + x_BG.sum()",
            "independent of other requests",
            "expected a request's logits to be its own",
        ),
        (
            "return z_BT",
            "return z_BT + self.training",
            "the same bits in serving (G9)",
            "looks at training or eval mode",
        ),
        (
            "return z_BT",
            "return torch.nn.functional.dropout(z_BT)",
            "nothing is kept between calls",
            "forward draws",
        ),
        (
            "return z_BT",
            "return z_BT.half()",
            "logits are finite float32 [B, T]",
            "expected logits of float32, got torch.float16",
        ),
        ("return z_BT", "return z_BT / 0", "logits are finite float32 [B, T]", "expected finite logits"),
        (
            "# more",
            "self.register_buffer('noise', torch.randn(3))",
            "same seed, same bits, same names",
            "expected the same bits of own.noise for the same seed",
        ),
        (
            "z_BT = self",
            "self.layer.bias.data += 1\n        z_BT = self",
            "nothing is kept between calls",
            "expected the same logits from the same batch twice",
        ),
        (
            "# more",
            "self.register_buffer('small', torch.zeros(3, dtype=torch.bfloat16))",
            "safe to store",
            "expected parameters and buffers that safetensors stores",
        ),
        (
            "return (logits_BT",
            "return (0 * logits_BT.sum()).sqrt() + (logits_BT",
            "loss and gradients are finite",
            "expected finite gradients, got others for own.layer.weight",
        ),
        (
            ".mul(targets.weight_BT)",
            "",
            "loss and gradients are finite",
            "expected a loss of 0 where all weights are 0",
        ),
        (
            "(logits_BT -",
            "(logits_BT.detach() -",
            "loss and gradients are finite",
            "expected a loss with gradients",
        ),
        (
            "- targets.label_BT",
            "/ (0 * targets.label_BT)",
            "loss and gradients are finite",
            "expected a finite loss",
        ),
        ("targets.label_BT", "targets.lable", "loss and gradients are finite", "shop.py:18: AttributeError"),
    ],
)
def test_a_broken_rule_is_told_in_a_sentence(
    tmp_path: Path, right: str, wrong: str, check: str, message: str
) -> None:
    told = broken(tmp_path, right, wrong)
    assert message in told[check] and "\n" not in told[check]

"""Every rule has a model that breaks it and a sentence about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.models.build import load_model_config
from roostream.models.custom.model_checks import check_model
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


def failed_checks(folder: Path, right: str = "", wrong: str = "") -> dict[str, str]:
    assert right in CODE
    config = load_model_config(written(folder, CODE.replace(right, wrong) if right else CODE))
    return {verdict.check: verdict.wrong for verdict in check_model(SCHEMA, config) if verdict.wrong}


def test_a_valid_model_passes(tmp_path: Path) -> None:
    assert failed_checks(tmp_path) == {}


BATCH, ALONE, SERVED = (
    "alone as in a batch, to 1e-5 (G9)",
    "independent of other requests",
    "the same bits in serving (G9)",
)
STATE, LOGITS, LEARNS = (
    "nothing is kept between calls",
    "logits are finite float32 [B, T]",
    "loss and gradients are finite",
)
SEED, STORE = "same seed, same bits, same names", "safe to store"
BFLOAT16 = "self.register_buffer('small', torch.zeros(3, dtype=torch.bfloat16))"


@pytest.mark.parametrize(
    ("right", "wrong", "check"),
    [
        ("return z_BT", "return z_BT - z_BT.mean()", BATCH),
        ("return z_BT", "return z_BT + x_BG.sum()", ALONE),
        ("return z_BT", "return z_BT + self.training", SERVED),
        ("return z_BT", "return torch.nn.functional.dropout(z_BT)", STATE),
        ("z_BT = self", "self.layer.bias.data += 1\n        z_BT = self", STATE),
        ("return z_BT", "return z_BT.half()", LOGITS),
        ("return z_BT", "return z_BT / 0", LOGITS),
        ("# more", "self.register_buffer('noise', torch.randn(3))", SEED),
        ("# more", BFLOAT16, STORE),
        ("return (logits_BT", "return (0 * logits_BT.sum()).sqrt() + (logits_BT", LEARNS),
        (".mul(targets.weight_BT)", "", LEARNS),
        ("(logits_BT -", "(logits_BT.detach() -", LEARNS),
        ("- targets.label_BT", "/ (0 * targets.label_BT)", LEARNS),
        ("targets.label_BT", "targets.lable", LEARNS),
    ],
)
def test_a_violated_rule_is_reported(tmp_path: Path, right: str, wrong: str, check: str) -> None:
    sentence = failed_checks(tmp_path, right, wrong)[check]
    assert sentence and "\n" not in sentence

"""`check_model` on custom models: for each check, a model that fails it is reported in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.models.build import load_model_config
from roostream.models.custom.model_checks import check_model
from tests.models.custom.test_loading import write_model
from tests.models.model_cases import make_schema

CODE = """
import torch
from roostream.models.model import Model

class Linear(Model):
    def __init__(self, schema):
        super().__init__()
        self.width, self.seen = len(schema.tasks), []
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
    """Check CODE with `right` replaced by `wrong`; return the error sentence of each failed check."""
    assert right in CODE
    config = load_model_config(write_model(folder, CODE.replace(right, wrong) if right else CODE))
    return {verdict.check: verdict.wrong for verdict in check_model(SCHEMA, config) if verdict.wrong}


def test_a_valid_model_passes(tmp_path: Path) -> None:
    assert failed_checks(tmp_path) == {}


TRANSFORMER = """self.layer = torch.nn.Linear(4, 8)
        block = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = torch.nn.TransformerEncoder(block, 2)
        self.norm, self.scale = torch.nn.RMSNorm(8), torch.nn.Parameter(torch.tensor(1.0))
        self.last = torch.nn.Linear(8, self.width)"""
LISTS = """z_BT = torch.cat([self.blocks(z_nD[None])[0] if len(z_nD) else z_nD
            for z_nD in torch.split(z_BT, inputs.num_candidates_R.tolist())])
        return self.last(self.norm(z_BT)) * self.scale"""


@pytest.mark.parametrize(
    "pairs",
    [
        # PyTorch's transformer over the candidates, a norm and a scalar parameter.
        {
            "self.layer = torch.nn.Linear(4, self.width)": TRANSFORMER,
            "return z_BT": LISTS,
            "    def forward": "    def adjust_initial_parameters(self):\n"
            "        self.scale.fill_(1.0)\n\n"
            "    def forward",
        },
        # A loss that is summed up from a tensor that requires gradients, and a constructor with a seed.
        {
            "return (logits_BT": "return torch.zeros((), requires_grad=True) + (logits_BT",
            "# more": "torch.manual_seed(1)\n        self.last = torch.nn.Linear(self.width, self.width)",
            "return z_BT": "return self.last(z_BT)",
        },
        # A loss without gradients if no candidate has a weight.
        {
            "        return (logits_BT": "        if not targets.weight_BT.any():\n"
            "            return torch.zeros(())\n"
            "        return (logits_BT"
        },
        # A frozen layer of random values.
        {
            "# more": "self.first = torch.nn.Linear(4, 4).requires_grad_(False)",
            "self.layer(x_BG)": "self.layer(self.first(x_BG))",
        },
        # A model without dense parameters: only embedding rows are trained.
        {
            "self.layer = torch.nn.Linear(4, self.width)": "",
            "z_BT = self.layer(x_BG)": "z_BT = (pool_features(inputs)['item'] * 9).sum(dim=1, keepdim=True)",
            "return z_BT": "return z_BT.expand(-1, self.width)",
            "import torch\n": "import torch\nfrom roostream.models.feature_encoders import pool_features\n",
        },
        # Single numbers as constant tensors and arrays.
        {
            "# more": "self.gain, self.shift = torch.tensor(2.0), torch.tensor(0.0).numpy()",
            "return z_BT": "return z_BT * self.gain",
        },
        # A model that names the columns of its weights.
        {
            "    def forward": "    def column_names(self):\n"
            "        return {'layer.weight': (None, ('a', 'b', 'c', 'd')), 'layer.bias': (None,)}\n\n"
            "    def forward"
        },
        # The logits are so large that float32 rounding exceeds the absolute tolerance of 1e-5.
        {"return z_BT": "return 1e6 * z_BT"},
    ],
)
def test_an_unusual_model_passes(tmp_path: Path, pairs: dict[str, str]) -> None:
    code = CODE
    for right, wrong in pairs.items():
        assert right in code
        code = code.replace(right, wrong)
    config = load_model_config(write_model(tmp_path, code))
    assert {verdict.check: verdict.wrong for verdict in check_model(SCHEMA, config) if verdict.wrong} == {}


BATCH = "alone as in a batch, to 1e-5 (G9)"
ALONE = "independent of other requests"
SERVED = "the same bits in serving (G9)"
STATE = "nothing is kept between calls"
LOGITS = "logits are finite float32 [B, T]"
LEARNS = "loss and gradients are finite"
LARGE = "as large as the schema's limits"
SEED, STORE = "same seed, same bits, same names", "safe to store"
NAMES = "    def column_names(self):\n        return {}\n\n    def forward"
WRONG_NAMES = (
    "[]",
    "{'layers.weight': ()}",
    "{'layer.weight': (None,)}",
    "{'layer.bias': (('a', 'a'),)}",
    "{'layer.bias': ((1, 2),)}",
    "self.absent",
)
LAYER_IN_A_LIST = """self.more = [torch.nn.Linear(4, self.width)]
        self.layer.register_forward_hook(lambda layer, x, z_BT: z_BT + self.more[0](x[0]))"""
LOSS = """    def loss(self, inputs, logits_BT, targets):
        return"""
AVERAGE_IN_LOSS = """    average = torch.ones(())

    def loss(self, inputs, logits_BT, targets):
        self.average.mul_(0.9).add_(0.1 * targets.label_BT.mean())
        return self.average *"""
HOOK = "self.layer.register_forward_hook(lambda layer, x, z_BT: z_BT"
COUNTER = "{}\n        self.layer.register_forward_hook(lambda *_: self.n.add_(1) and None)"
POOLED = "__import__('roostream.models.feature_encoders').models.feature_encoders.pool_features(inputs)"
ENTRIES = """
        history, rows_UD = inputs.sequences['history'], inputs.rows['d4-adagrad']
        entry_LD = torch.nn.functional.embedding(history.index_L, rows_UD, sparse=True)"""
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
        ("# more", LAYER_IN_A_LIST, SEED),  # neither stored nor trained
        (
            "# more",
            "scale = torch.rand(())\n        self.layer.register_forward_hook(lambda *x: x[2] * scale)",
            SEED,
        ),
        (LOSS, AVERAGE_IN_LOSS, STATE),
        ("# more", BFLOAT16, STORE),
        *(("    def forward", NAMES.format(names), STORE) for names in WRONG_NAMES),
        ("return (logits_BT", "return (0 * logits_BT.sum()).sqrt() + (logits_BT", LEARNS),
        (".mul(targets.weight_BT)", "", LEARNS),
        ("(logits_BT -", "(logits_BT.detach() -", LEARNS),
        ("- targets.label_BT", "/ (0 * targets.label_BT)", LEARNS),
        ("targets.label_BT", "targets.lable", LEARNS),
        # The loss is finite, but the gradient of sqrt at 0 is not.
        ("return (logits_BT", "return 0 * self.layer.bias.square().sum().sqrt() + (logits_BT", LEARNS),
        # A new user has an empty history, and max() of no entries raises.
        ("return z_BT", "return z_BT + inputs.sequences['history'].index_L.max()", SERVED),
        # Item ids are 64-bit hashes, not indices.
        ("return z_BT", "return z_BT + torch.zeros(99)[inputs.item_B][:, None]", LOGITS),
        ("return z_BT", "return z_BT + torch.zeros(500)[torch.arange(len(z_BT))][:, None]", LARGE),
        ("return z_BT", "return torch.sigmoid(z_BT)", LOGITS),
        ("return z_BT", "return z_BT / self.layer.bias.norm()", LOGITS),  # the initial bias is 0
        ("return z_BT", "return z_BT + torch.is_grad_enabled()", SERVED),
        ("x_BG = inputs", "inputs.nro_float_BG.mul_(2)\n        x_BG = inputs", STATE),
        # The result is the same at each call, but the batch has other items and labels afterwards.
        ("x_BG = inputs", "inputs.item_B.clamp_(max=3)\n        x_BG = inputs", STATE),
        ("return (logits_BT", "targets.label_BT.clamp_(0.1, 0.9)\n        return (logits_BT", STATE),
        ("return z_BT", "inputs.rows['d4-adagrad'] = torch.zeros(1)\n        return z_BT", STATE),
        ("return z_BT", "self.last_BT = z_BT\n        return z_BT", STATE),
        # State that changes no result yet, in a buffer that is not stored and in a tensor.
        ("# more", COUNTER.format("self.register_buffer('n', torch.zeros(1), persistent=False)"), STATE),
        ("# more", COUNTER.format("self.n = torch.zeros(1)"), STATE),
        ("z_BT = self", "self.seen.append(len(x_BG))\n        z_BT = self", STATE),
        ("z_BT = self", "self.late = torch.nn.Linear(4, self.width)\n        z_BT = self", LOGITS),
        (
            "return z_BT",
            "y_BT = z_BT.exp()\n        w_BT = y_BT * y_BT\n        y_BT += 1\n        return w_BT",
            LEARNS,
        ),
        (".sum()\n", ".sum() / targets.weight_BT.sum()\n", LEARNS),
        (".sum()\n", ".sum() / targets.weight_BT.sum().clamp(min=1)\n", LEARNS),  # ignores total_T
        (".sum()\n", ".mean()\n", LEARNS),
        # What the loss depends on would never be trained.
        ("self.layer(x_BG)", "torch.addmm(self.layer.bias, x_BG, self.layer.weight.detach().T)", LEARNS),
        ("return z_BT", "return z_BT.sign()", LEARNS),
        ("return z_BT", f"return z_BT + {POOLED}['item'].detach().sum(dim=1, keepdim=True)", LEARNS),
        ("# more", f"last = torch.zeros(self.width, requires_grad=True)\n        {HOOK} + last)", LEARNS),
        (
            "# more",
            f"self.last = [torch.nn.Parameter(torch.zeros(1))]\n        {HOOK} + self.last[0])",
            LEARNS,
        ),
        # The product of two vectors that start at 0 stays 0.
        (
            "# more",
            "self.a, self.b = (torch.nn.Parameter(torch.zeros(self.width)) for _ in range(2))\n"
            f"        {HOOK} + self.a * self.b)",
            LEARNS,
        ),
        # Values of a constructor do not count: this gain starts at 0.
        (
            "# more",
            f"self.gain = torch.nn.Parameter(torch.ones(self.width))\n        {HOOK} * self.gain)",
            SEED,
        ),
        ("# more", "torch.nn.init.eye_(self.layer.weight).requires_grad_(False)", SEED),
        # Each label trains the logits of the other.
        ("(logits_BT -", "(logits_BT.flip(1) -", LEARNS),
        ("return z_BT", f"{ENTRIES.strip()}\n        return z_BT + 0 * entry_LD.sum()", LEARNS),
        # Entries can be so old that their bucket is 122.
        (
            "return z_BT",
            "return z_BT + 0 * torch.zeros(64)[inputs.sequences['history'].bucket_L['time']].sum()",
            LARGE,
        ),
    ],
)
def test_a_violated_rule_is_reported(tmp_path: Path, right: str, wrong: str, check: str) -> None:
    sentence = failed_checks(tmp_path, right, wrong)[check]
    assert sentence and "\n" not in sentence

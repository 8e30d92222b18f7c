"""bfloat16 and torch.compile: how far they may change the results of training."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
import torch

from roostream.models.attention import QueriesKeysValues, attend, attend_to_each_other, padded_to_each_other
from roostream.models.candidate_groups import build_groups
from roostream.models.config import ModelConfig, TwoTowerConfig
from roostream.models.embedding_ops import gather_rows, pool_bags
from roostream.models.inputs import Inputs, build_inputs
from roostream.models.model import Targets
from roostream.wire.lookup import build_lookup
from tests.models.kind_cases import CONFIGS
from tests.models.model_cases import make_batch, make_rows, make_schema
from tests.models.model_checks import trained_model
from tests.trainer import samples
from tests.trainer.loops import assert_a_restored_loop_continues_bit_equal, build
from trainer.config import LoopConfig
from trainer.device import numerics
from trainer.device.numerics import compilable_modules, compile_rows, forward_logits, why_not_compilable

SCHEMA = make_schema("everything")
N24 = samples.records(list(range(1, 25)))
# Relative tolerances of bfloat16 against float32. bfloat16 has 8 significant bits, so each product is off by
# at most 2^-8 = 0.004. Gradients differ more, because rounding switches some ReLUs of a tiny model.
TOLERANCE, GRADIENT_TOLERANCE = 0.01, 0.15
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def inputs_of(
    seed: int, device: str = "cpu", counts: tuple[int, ...] = (3, 0, 20, 2)
) -> tuple[Inputs, Targets]:
    batch = make_batch(SCHEMA, list(counts), seed=seed)
    lookup = build_lookup(batch)
    targets = Targets(
        torch.from_numpy(batch.label_BT).to(device), torch.from_numpy(batch.weight_BT).to(device)
    )
    return build_inputs(batch, lookup, make_rows(SCHEMA, lookup), device, train=True), targets


def logits_and_gradients(
    config: ModelConfig, precision: str, device: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the logits and the gradients of all parameters and rows."""
    model = trained_model(SCHEMA, config).to(device)
    inputs, targets = inputs_of(5, device)
    logits_BT = forward_logits(model, inputs, LoopConfig(precision=precision, device=device))  # type: ignore[arg-type]
    model.loss(inputs, logits_BT, targets).backward()  # type: ignore[no-untyped-call]
    named = {**dict(model.named_parameters()), **inputs.rows}
    return logits_BT.detach(), {name: x.grad for name, x in named.items() if x.grad is not None}


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Compute the norm of the difference relative to the larger of both norms."""
    return float((a - b).norm() / torch.maximum(a.norm(), b.norm()).clamp_min(1e-6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_agrees_with_float32_and_keeps_float32_weights(name: str, device: str) -> None:
    full_BT, full = logits_and_gradients(CONFIGS[name], "float32", device)
    half_BT, half = logits_and_gradients(CONFIGS[name], "bfloat16", device)
    assert half_BT.dtype == torch.float32 and {g.dtype for g in half.values()} == {torch.float32}
    assert full.keys() == half.keys()
    assert relative_distance(full_BT, half_BT) < TOLERANCE
    assert isinstance(CONFIGS[name], TwoTowerConfig) or not torch.equal(full_BT, half_BT), (
        "bfloat16 must change the logits"
    )
    every_full, every_half = (torch.cat([g.flatten() for g in each.values()]) for each in (full, half))
    assert relative_distance(every_full, every_half) < GRADIENT_TOLERANCE


def test_bfloat16_rows_are_gathered_and_pooled_as_float32() -> None:
    rows_UD = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True)
    index_L, offset_S1 = torch.tensor([3, 1, 1]), torch.tensor([0, 2, 3])
    taken_LD, pooled_SD = gather_rows([(rows_UD, index_L)]), pool_bags(rows_UD, index_L, offset_S1, None)
    assert torch.equal(taken_LD, rows_UD.detach().float()[index_L]) and pooled_SD.dtype == torch.float32
    (taken_LD.sum() + pooled_SD.sum()).backward()  # type: ignore[no-untyped-call]
    assert rows_UD.grad is not None and rows_UD.grad.dtype == torch.bfloat16
    assert rows_UD.grad[:, 0].tolist() == [0, 3.5, 0, 1.5]


@pytest.mark.parametrize("autocast", [False, True])
def test_padded_attention_supports_bfloat16(autocast: bool) -> None:
    """Outputs and gradients agree with float32, for inputs that the CPU kernel would otherwise handle."""
    mask = torch.tensor([[True] * 4 + [False], [False] * 5])
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(1)
        qkv = QueriesKeysValues(*(torch.randn(2, 5, 12).to(dtype).requires_grad_() for _ in range(3)))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and dtype == torch.bfloat16):
            out = attend(qkv, mask, 3)
        gradients = torch.autograd.grad(out, qkv, torch.randn(2, 5, 12).to(dtype))
        assert {x.dtype for x in (out, *gradients)} == {dtype}
        results.append((out.detach(), *gradients))
    assert all(relative_distance(a, b.float()) < TOLERANCE for a, b in zip(*results, strict=True))


def test_softmax_of_bfloat16_is_of_float32_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax_dtypes: list[torch.dtype] = []
    softmax = torch.softmax
    monkeypatch.setattr(
        torch, "softmax", lambda x, dim: (softmax_dtypes.append(x.dtype), softmax(x, dim=dim))[1]
    )
    qkv_BD = torch.randn(5, 12, dtype=torch.bfloat16)
    groups = build_groups(np.array([2, 3]))
    assert torch.equal(attend_to_each_other(qkv_BD, groups, 2), padded_to_each_other(qkv_BD, groups, 2)), (
        "the CPU kernel does not support bfloat16, because numpy does not"
    )
    assert softmax_dtypes == [torch.float32, torch.float32]


def test_training_in_bfloat16_agrees_with_float32() -> None:
    full, half = build(N24).train_all(), build(N24, precision="bfloat16").train_all()
    assert half.pushes() == full.pushes() and half.offsets() == full.offsets()
    half_state, full_state = half.loop.snapshot().shared, full.loop.snapshot().shared
    assert {n: a.dtype for n, a in half_state.items()} == {n: a.dtype for n, a in full_state.items()}
    assert any(not np.array_equal(half_state[n], full_state[n]) for n in half_state)
    weights = {n: a for n, a in full_state.items() if n.startswith("model.")}
    assert all(np.allclose(half_state[n], a, rtol=0.01, atol=0.03) for n, a in weights.items())


def test_float32_continues_what_bfloat16_trained() -> None:
    half = build(N24, precision="bfloat16")
    for _ in range(3):
        half.loop.step()
    at, full = half.loop.snapshot(), build(N24)
    full.loop.restore(at)
    full.train_all()
    assert full.offsets() == half.train_all().offsets()


def test_g11_exact_mode_repeats_bfloat16_bit_for_bit() -> None:
    assert_a_restored_loop_continues_bit_equal(N24, 1, exact=True, precision="bfloat16")


def test_row_wise_modules_are_compiled() -> None:
    assert [type(module).__name__ for module in compilable_modules(trained_model(SCHEMA))] == [
        "Mlp",
        "CrossNet",
        "Mlp",
        "Mlp",
        "Heads",
    ]
    assert compilable_modules(torch.nn.Linear(2, 2)) == []


def test_without_a_compiler_training_continues_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        numerics, "why_not_compilable", lambda device_type: "nothing can be compiled here: no g++"
    )
    with caplog.at_level(logging.WARNING, "roostream.worker"):
        built = build(N24, compile=True)
    assert len(caplog.records) == 1 and "no g++" in caplog.text
    assert built.train_all().bits() == build(N24).train_all().bits()


def test_a_compiler_error_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\n  was found")

    monkeypatch.setattr(torch, "compile", fail)
    assert why_not_compilable.__wrapped__("cpu") == "nothing can be compiled here: no compiler was found"


HAS_COMPILER = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="this machine has no C++ compiler"),
]
COMPILED = [
    pytest.param("cpu", marks=HAS_COMPILER),
    pytest.param("cuda", marks=[*gpu, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]),
]


@pytest.mark.parametrize("device", COMPILED)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_modules_agree_for_any_number_of_rows(device: str, precision: str) -> None:
    config = LoopConfig(device=device, precision=precision, compile=True)  # type: ignore[arg-type]
    plain, compiled = (trained_model(SCHEMA).to(device) for _ in range(2))
    assert why_not_compilable(device) == ""
    compile_rows(compiled, device)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for seed, counts in enumerate([(3, 0, 2), (5, 1, 7, 2), (4, 9)]):
        results = []
        for model in (plain, compiled):
            inputs, targets = inputs_of(seed, device, counts)
            model.zero_grad()
            logits_BT = forward_logits(model, inputs, config)
            model.loss(inputs, logits_BT, targets).backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            results.append((logits_BT.detach(), torch.cat(gradients)))
        tolerance = 1e-5 if precision == "float32" else TOLERANCE
        assert relative_distance(results[0][0], results[1][0]) < tolerance
        assert relative_distance(results[0][1], results[1][1]) < (
            tolerance if precision == "float32" else GRADIENT_TOLERANCE
        )
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] > 0, "something must have been compiled"

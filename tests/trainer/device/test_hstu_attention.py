"""HSTU's Triton kernels equal the reference in outputs and gradients: in Triton's interpreter, and on a GPU
where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from roostream.models.sequence.hstu import HstuLayer
from tests.models.kind_cases import CONFIGS
from tests.models.model_cases import make_schema
from tests.models.model_checks import trained_model
from tests.trainer.device.kernel_checks import CASES, relative_errors
from trainer.device.hstu_attention import kernel_attention, use_triton_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.01}
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton has no wheel for this platform"
)


@needs_triton
@pytest.mark.timeout(600)
def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.trainer.device.kernel_checks"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    results = json.loads(run.stdout)
    assert len(results) == len(CASES) + 2
    for name, errors in results.items():
        tolerance = TOLERANCE[torch.bfloat16 if "bfloat16" in name else torch.float32]
        assert all(error < tolerance for error in errors.values()), (name, errors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("times", [True, False])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_reference_on_a_device(case: str, dtype: torch.dtype, times: bool) -> None:
    errors = relative_errors(case, dtype, "cuda", times=times)
    assert all(error < TOLERANCE[dtype] for error in errors.values()), errors


@needs_triton
def test_every_hstu_layer_uses_the_kernel() -> None:
    model = trained_model(make_schema("everything"), CONFIGS["hstu"])
    names = list(model.state_dict())
    use_triton_attention(model)
    layers = [module for module in model.modules() if isinstance(module, HstuLayer)]
    assert layers and all(layer.attention is kernel_attention for layer in layers)
    assert list(model.state_dict()) == names

"""How the dense part is computed: threads, determinism, precision, compilation.

Whatever is chosen, weights, optimizer state, rows, losses and metrics are float32. So a committed model may
be trained further with other choices, and is served in float32.
"""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor, nn

from roostream.models.build import build_model
from roostream.models.config import ModelConfig
from roostream.models.feature_encoders import LinearCompression
from roostream.models.inputs import Inputs
from roostream.models.interaction_layers import CrossNet, Dhen
from roostream.models.layers import Mlp
from roostream.models.model import Model
from roostream.models.ranker import Heads
from roostream.schema.schema import Schema
from trainer.config import LoopConfig
from trainer.device.hstu_attention import use_triton_attention

log = logging.getLogger("roostream.worker")

# A width, a batch of one, gradients or none: each is a graph of its own; torch gives up at 8
_MAX_GRAPHS = 256


def set_numerics(config: LoopConfig) -> None:
    """Set torch's threads and, with `exact`, deterministic algorithms for the whole process. Call before a
    device is used."""
    torch.set_num_threads(1 if config.exact else config.threads)
    if config.exact:
        # Without it cuBLAS refuses to repeat itself.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def build_training_model(schema: Schema, model_config: ModelConfig, config: LoopConfig) -> Model:
    """An untrained model on its device, with the configured attention and compilation.

    Raises:
        SchemaError, ConfigError: as `build_model`.
        SetupError: Triton is required but not installed.
    """
    model = build_model(schema, model_config, config.seed).to(config.device)
    if config.attention == "triton":
        use_triton_attention(model)
    if config.compile:
        compile_rows(model, config.device)
    return model


def forward_logits(model: nn.Module, inputs: Inputs, config: LoopConfig) -> Tensor:
    """[B, T], float32. With bfloat16, matrix products and what torch's autocast adds are computed in
    bfloat16."""
    if config.precision == "float32":
        logits_BT: Tensor = model(inputs)
        return logits_BT
    with torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16):
        logits_BT = model(inputs)
    return logits_BT.float()


def compile_rows(model: nn.Module, device: str) -> None:
    """Compile the model's row-wise modules in place, for any number of rows; names of weights do not change.

    They are compiled at their first call, some seconds each. If that is impossible, one warning says why and
    the model stays as it is.
    """
    modules = compilable_modules(model)
    no_module = "this kind of model has no module that can be compiled"
    reason = why_not_compilable(torch.device(device).type) if modules else no_module
    if reason:
        log.warning("compile: the model is trained without compilation: %s", reason)
        return
    from torch._dynamo import config as dynamo_config

    dynamo_config.recompile_limit = _MAX_GRAPHS
    dynamo_config.accumulated_recompile_limit = 4 * _MAX_GRAPHS
    for module in modules:
        module.compile(dynamic=True)


@functools.cache
def why_not_compilable(device_type: str) -> str:
    """Why torch.compile does not work for this device type, one line; "" if it works. Tries it once per
    process: some seconds."""
    try:
        from torch._inductor import config as inductor_config

        inductor_config.compile_threads = 1  # a worker has no processes of its own
        torch.compile(_probe, dynamic=True)(torch.zeros(3, device=device_type))
    except Exception as error:
        return f"nothing can be compiled here: {' '.join(str(error).split()):.200}"
    return ""


def _probe(x_N: Tensor) -> Tensor:
    return torch.relu(x_N * 2 + 1)


_KINDS = (Mlp, CrossNet, Dhen, Heads, LinearCompression)


def compilable_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with parameters that map rows to rows: dense, no loop over requests."""
    out: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, _KINDS):
            out += [child] if any(True for _ in child.parameters()) else []
        else:
            out += compilable_modules(child)
    return out

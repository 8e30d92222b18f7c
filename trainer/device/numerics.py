"""How the dense part is computed: threads, repetition, precision, compiled or not. What is computed is the model's.

Whatever is chosen, weights, the optimizer's state, rows, losses and metrics are float32: a committed model is the same kind of
thing, may be trained on with other choices, and is served in float32.

Modules from rows to rows: dense, of tensors alone, without a loop over requests. What a compiler can take whole.
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

_MAX_GRAPHS = (
    256  # a width, a batch of one, gradients or none: each is a graph of its own; torch gives up at 8
)


def set_numerics(config: LoopConfig) -> None:
    """Process-wide: torch's threads, and in exact mode what bit-equal repetition needs. Call once at start, before a device is
    used."""
    torch.set_num_threads(1 if config.exact else config.threads)
    if config.exact:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # without it cuBLAS refuses to repeat itself
        torch.use_deterministic_algorithms(True)


def build_training_model(schema: Schema, model_config: ModelConfig, config: LoopConfig) -> Model:
    """An untrained one, where and how it is to be computed.

    Raises:
        SchemaError, ConfigError: as `build_model`. SetupError: the kernels need Triton, which isn't there.
    """
    model = build_model(schema, model_config, config.seed).to(config.device)
    if config.attention == "triton":
        use_triton_attention(model)
    if config.compile:
        compile_rows(model, config.device)
    return model


def forward_logits(model: nn.Module, inputs: Inputs, config: LoopConfig) -> Tensor:
    """[B, T]. With bfloat16 the products of matrices are, and what torch's autocast adds to them; logits are float32."""
    if config.precision == "float32":
        logits_BT: Tensor = model(inputs)
        return logits_BT
    with torch.autocast(torch.device(config.device).type, dtype=torch.bfloat16):
        logits_BT = model(inputs)
    return logits_BT.float()


def compile_rows(model: nn.Module, device: str) -> None:
    """Its modules from rows to rows become compiled ones, in place, for any number of rows; names of weights stay. They are
    compiled when they are first called, some seconds each. Where nothing can be compiled the model stays as it is, and one
    warning says why."""
    modules = compilable_modules(model)
    why = (
        why_not_compilable(torch.device(device).type)
        if modules
        else "this kind of model has no module of ours from rows to rows"
    )
    if why:
        log.warning("compile: the model is trained as it is, since %s", why)
        return
    torch._dynamo.config.recompile_limit = _MAX_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = 4 * _MAX_GRAPHS
    for module in modules:
        module.compile(dynamic=True)


@functools.cache
def why_not_compilable(device_type: str) -> str:
    """Why nothing can be compiled for such a device, one line; '' where it can. Tries it: some seconds, once a process."""
    try:
        import torch._dynamo
        import torch._inductor.config

        torch._inductor.config.compile_threads = 1  # a worker has no processes of its own
        torch.compile(_probe, dynamic=True)(torch.zeros(3, device=device_type))
    except Exception as error:
        return f"nothing can be compiled here: {' '.join(str(error).split()):.200}"
    return ""


def _probe(x_N: Tensor) -> Tensor:
    return torch.relu(x_N * 2 + 1)


_KINDS = (Mlp, CrossNet, Dhen, Heads, LinearCompression)


def compilable_modules(model: nn.Module) -> list[nn.Module]:
    """Those of `model`, outermost ones alone. Without parameters there is nothing to compute."""
    out: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, _KINDS):
            out += [child] if any(True for _ in child.parameters()) else []
        else:
            out += compilable_modules(child)
    return out

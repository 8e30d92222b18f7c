"""The dense file: weights, optimizer state, dedupe ids and metric accumulators of one cut, as one safetensors.

Names: `model.<parameter>`, `optimizer.<parameter>.<slot>`, `optimizer.step`, `dedupe.id`, `dedupe.close_ms`, `metrics.<name>`.
Restoring gives the same bits that were taken (G11).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from roo.errors import CheckpointError
from trainer.adam import DenseAdam

log = logging.getLogger("roostream.dense")


def take(model: nn.Module, optimizer: DenseAdam) -> dict[str, np.ndarray]:
    """Copies of weights and optimizer state, on the host: later steps don't change them."""
    out = {f"model.{name}": _copy(value) for name, value in model.state_dict().items()}
    for name, slots in optimizer.slots.items():
        out |= {f"optimizer.{name}.{slot}": _copy(value) for slot, value in slots.items()}
    return out | {"optimizer.step": np.array(optimizer.num_steps, dtype=np.int64)}


def put(tensors: Mapping[str, np.ndarray], model: nn.Module, optimizer: DenseAdam, *, same_schema: bool) -> None:
    """Make `model` and `optimizer` what `take` saw.

    With another, readable schema a weight whose shape changed (a feature came or went) keeps its fresh initial value.

    Raises:
        CheckpointError: `same_schema` and a weight, or what the optimizer remembers of one, is missing or of another shape.
            Nothing was changed.
    """
    wanted = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, slots in optimizer.slots.items():
        wanted |= {f"optimizer.{name}.{slot}": value for slot, value in slots.items()}
    misfits = [n for n, value in wanted.items() if n not in tensors or tensors[n].shape != tuple(value.shape)]
    if misfits and same_schema:
        got = tensors[misfits[0]].shape if misfits[0] in tensors else "none"
        raise CheckpointError(f"expected {misfits[0]} of shape {tuple(wanted[misfits[0]].shape)}, got {got}")
    if misfits:
        log.warning(
            "the schema changed: %s begin from their initial values", ", ".join(n for n in misfits if n.startswith("model."))
        )
    with torch.no_grad():
        for name in wanted.keys() - set(misfits):
            wanted[name].copy_(torch.from_numpy(tensors[name].copy()))
    optimizer.num_steps = int(tensors.get("optimizer.step", 0))


def _copy(value: torch.Tensor) -> np.ndarray:
    return value.detach().cpu().numpy().copy()

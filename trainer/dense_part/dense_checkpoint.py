"""Weights and optimizer state of the dense part as tensors of a checkpoint (safetensors).

Names: `model.<parameter>`, the scoring weights; `trained.<parameter>`, the weights in training if they differ
(averaging); `optimizer.<parameter>.<slot>`, `optimizer.step`, `watermark.recent_ms`, `inputs.names`,
`inputs.columns`; state of selection. A restore is bit-exact (guarantee G11).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from roostream.errors import ConfigError, OtherVersionError
from roostream.models import named_columns
from roostream.models.build import ADDED_PARTS, build_model
from roostream.models.config import ModelConfig
from roostream.models.custom.loading import CustomModel
from roostream.models.model import Model
from roostream.models.named_columns import ColumnNames
from roostream.schema.schema import Feature, Schema
from trainer.dense_part.adam import SLOTS, DenseAdam

log = logging.getLogger("roostream.dense")

_TRAINED = "trained."
# A commit from before a part was added continues with it at zero, which changes no score.
_ADDED = tuple(f"{part}." for part in ADDED_PARTS)


def snapshot(model: nn.Module, optimizer: DenseAdam) -> dict[str, np.ndarray]:
    """Copies on the host of weights, their average if there is one, and optimizer state."""
    scores = optimizer.average.model if optimizer.average else model
    out = {f"model.{name}": _copy(value) for name, value in scores.state_dict().items()}
    if optimizer.average:
        out |= {f"{_TRAINED}{name}": _copy(value) for name, value in model.state_dict().items()}
    for name, slots in optimizer.slots.items():
        out |= {f"optimizer.{name}.{slot}": _copy(value) for slot, value in slots.items()}
    if names := _column_names(model):
        out[named_columns.COLUMN_NAMES] = named_columns.encode(names)
    return out | {"optimizer.step": np.array(optimizer.num_steps, dtype=np.int64)}


def weights_of_inputs(schema: Schema, config: ModelConfig, groups: Collection[str]) -> frozenset[str]:
    """The names of the weights with one column for each feature of these groups (of `input_names`): those
    that would have another shape with one feature more."""
    table = next(iter(schema.table_by_name), "")
    added: dict[str, list[Feature]] = {"ro": [], "nro": []}
    for group in groups:
        side, _, form = group.partition(" ")
        if form == "floats":
            added[side].append(Feature(name=f"{side}-one-more-float"))
        elif form == "lists" and table:
            added[side].append(Feature(name=f"{side}-one-more-list", kind="ids", table=table))
    wider = dataclasses.replace(schema, ro=(*schema.ro, *added["ro"]), nro=(*schema.nro, *added["nro"]))
    try:
        shapes = [
            {
                name: value.shape
                for name, value in build_model(s, config, 0, is_loaded=True).state_dict().items()
            }
            for s in (schema, wider)
        ]
    except ConfigError:  # a custom model of exactly these features
        return frozenset()
    return frozenset(name for name, shape in shapes[0].items() if shapes[1].get(name) != shape)


def restore(
    tensors: Mapping[str, np.ndarray],
    model: nn.Module,
    optimizer: DenseAdam,
    *,
    same_schema: bool,
    fresh: Collection[str] = (),
) -> None:
    """Set `model` and `optimizer` to a `snapshot`.

    An average that the snapshot lacks starts at the weights; one that is no longer configured is dropped.
    A snapshot from before a part was added to the model (`_ADDED`) starts it at zero; one from before a part
    got more columns starts these at zero.
    With another, compatible schema, a weight with named columns continues with those of the features that
    stayed (named_columns.py). Another weight whose shape changed keeps its initial value, and so do those in
    `fresh`, whose inputs have changed.

    Raises:
        OtherVersionError: `same_schema`, and a weight or its optimizer state is missing or has another shape,
        or a custom model lacks a weight of the commit. Nothing was changed.
    """
    weights_prefix = _TRAINED if any(name.startswith(_TRAINED) for name in tensors) else "model."
    wanted = [(f"{weights_prefix}{name}", value) for name, value in model.state_dict().items()]
    if optimizer.average:
        wanted += [(f"model.{name}", value) for name, value in optimizer.average.model.state_dict().items()]
    for name, slots in optimizer.slots.items():
        wanted += [(f"optimizer.{name}.{slot}", value) for slot, value in slots.items()]
    if not same_schema:
        carried = _carry_over(tensors, wanted, named_columns.decode(tensors), _column_names(model))
        tensors = {**tensors, **carried}
        fresh = {name for name in fresh if f"{weights_prefix}{name}" not in carried}
    parts = {name.rpartition(".")[0] for name in tensors}  # one with a tensor is not new
    added = {
        n: value
        for n, value in wanted
        if n not in tensors and _was_added(n) and n.rpartition(".")[0] not in parts
    }
    tensors = {**tensors, **{name: np.zeros(value.shape, np.float32) for name, value in added.items()}}
    if same_schema:
        tensors |= {n: _extended(tensors[n], value) for n, value in wanted if n in tensors and _was_added(n)}
    starts_anew = {f"{prefix}{name}" for name in fresh for prefix in (_TRAINED, "model.")}
    starts_anew |= {f"optimizer.{name}.{slot}" for name in fresh for slot in SLOTS}
    misfits = {
        n: value
        for n, value in wanted
        if n not in tensors or tensors[n].shape != tuple(value.shape) or n in starts_anew
    }
    is_custom = isinstance(model, CustomModel)
    removed = [n for n in tensors if is_custom and n.startswith(weights_prefix) and n not in dict(wanted)]
    if same_schema and (misfits or removed):
        first = next(iter((*misfits, *removed)))
        expected = f"of shape {tuple(misfits[first].shape)}" if first in misfits else "to be no weight"
        got = tensors[first].shape if first in tensors else "none"
        same = "the code" if is_custom else "the Roostream"
        raise OtherVersionError(
            f"expected {first} {expected}, got {got}: the commit is of a model with other weights; use "
            f"{same} that wrote this commit, or start over with `roostream reset`"
        )
    if misfits:
        names = [name for name in misfits if name.startswith(weights_prefix)]
        log.warning("the schema changed: %s start from their initial values", ", ".join(names))
    with torch.no_grad():
        for name, value in wanted:
            if name not in misfits:
                value.copy_(torch.from_numpy(tensors[name].copy()))
    optimizer.num_steps = int(tensors.get("optimizer.step", 0))


def _column_names(model: nn.Module) -> dict[str, ColumnNames]:
    return model.column_names() if isinstance(model, Model) else {}


def _carry_over(
    tensors: Mapping[str, np.ndarray],
    wanted: Sequence[tuple[str, torch.Tensor]],
    before: Mapping[str, ColumnNames],
    now: Mapping[str, ColumnNames],
) -> dict[str, np.ndarray]:
    """The tensors of `wanted` with named columns, with the values of the columns that stayed."""
    names = {
        full: (before[name], now[name])
        for name in before.keys() & now.keys()
        for full in (_TRAINED + name, f"model.{name}", *(f"optimizer.{name}.{slot}" for slot in SLOTS))
    }
    carried = {
        n: named_columns.carry_over(tensors[n], names[n][0], _copy(value), names[n][1])
        for n, value in wanted
        if n in names and n in tensors
    }
    return {n: value for n, value in carried.items() if value is not None}


def _was_added(name: str) -> bool:
    """Whether a tensor belongs to a part that commits of older versions lack (`_ADDED`), of a ranker or of
    the ranker in a cascade."""
    return name.partition(".")[2].removeprefix("ranker.").startswith(_ADDED)


def _extended(stored: np.ndarray, value: torch.Tensor) -> np.ndarray:
    """A tensor of an added part that had fewer columns, extended by zeros, which changes no score. Others are
    returned as they are."""
    shape = tuple(value.shape)
    if stored.ndim != len(shape) or stored.shape == shape or any(map(int.__gt__, stored.shape, shape)):
        return stored
    extended = np.zeros(shape, stored.dtype)
    extended[tuple(slice(0, size) for size in stored.shape)] = stored
    return extended


def _copy(value: torch.Tensor) -> np.ndarray:
    return value.detach().cpu().numpy().copy()

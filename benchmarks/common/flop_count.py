"""Counts the FLOPs and bytes of a training step; the counts do not depend on the machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from roostream.models import attention
from roostream.models.inputs import Inputs
from roostream.wire.batch import Batch
from roostream.wire.jagged import Jagged


def flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products of a step: two per multiply-add."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter, _ragged() as ours:
        step()
    return int(counter.get_total_flops()) + sum(ours)


@contextlib.contextmanager
def _ragged() -> Iterator[list[int]]:
    """FLOPs of each call of our attention kernels, which torch does not count."""
    counts: list[int] = []
    kernels = {name: vars(attention)[name] for name in ("attend_ragged", "attend_ragged_back")}

    def counted(products: int, run: Callable[..., None]) -> Callable[..., None]:
        def call(
            group: Any, begins: Any, starts: Any, one_QD: np.ndarray, other_QD: np.ndarray, *outputs: Any
        ) -> None:
            width = max(one_QD.shape[1], other_QD.shape[1])  # the other one also has a logarithm per head
            counts.append(products * 2 * width * int(np.dot(*(np.diff(s) for s in starts))))
            run(group, begins, starts, one_QD, other_QD, *outputs)

        return call

    try:
        for products, (name, run) in zip((2, 5), kernels.items(), strict=True):
            setattr(attention, name, counted(products, run))
        yield counts
    finally:
        for name, run in kernels.items():
            setattr(attention, name, run)


def bytes_of_batch(batch: Batch) -> int:
    """Bytes of the decoded arrays."""
    return sum(array.nbytes for array in _arrays(batch))


def bytes_of_inputs(inputs: Inputs) -> int:
    """Bytes of the tensors that go into a model, without rows."""
    return sum(x.nbytes for x in _tensors(dataclasses.replace(inputs, rows={})))


def bytes_of_rows(inputs: Inputs) -> int:
    """Bytes of the pulled rows."""
    return sum(rows_UD.nbytes for rows_UD in inputs.rows.values())


def _arrays(batch: Batch) -> Iterator[np.ndarray]:
    for value in vars(batch).values():
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, Jagged):
            yield from (value.lengths_KN, value.values, value.present_KN, *value.columns.values())
            yield from () if value.weights is None else (value.weights,)


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dataclasses, tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def _attention(query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, **named: Any) -> int:
    """FLOPs of [.., Q, C] · [.., N, C] and scores · [.., N, V]."""
    *batch, num_queries, width = query_shape
    return int(2 * np.prod(batch) * num_queries * key_shape[-2] * (width + value_shape[-1]))


def _attention_back(gradient_shape: Any, *inputs: Any, **named: Any) -> int:
    """Five products instead of two, because scores are computed again."""
    return _attention(*inputs) * 5 // 2


_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_ATTENTION = {
    getattr(torch.ops.aten, _FLASH): _attention,
    getattr(torch.ops.aten, f"{_FLASH}_backward"): _attention_back,
}

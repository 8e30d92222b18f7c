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
    """Of its matrix products, both ways, two of each multiplication with its addition; what torch counts."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter, _ragged() as ours:
        step()
    return int(counter.get_total_flops()) + sum(ours)


@contextlib.contextmanager
def _ragged() -> Iterator[list[int]]:
    """FLOPs of each call of our own kernels of attention, which torch doesn't see."""
    found: list[int] = []
    kernels = {name: vars(attention)[name] for name in ("attend_ragged", "attend_ragged_back")}

    def counted(products: int, run: Callable[..., None]) -> Callable[..., None]:
        def call(
            of: Any, begins: Any, starts: Any, one_QD: np.ndarray, other_QD: np.ndarray, *to: Any
        ) -> None:
            width = max(one_QD.shape[1], other_QD.shape[1])  # beside it lie logarithms, one a head
            found.append(products * 2 * width * int(np.dot(*(np.diff(s) for s in starts))))
            run(of, begins, starts, one_QD, other_QD, *to)

        return call

    try:
        for products, (name, run) in zip((2, 5), kernels.items(), strict=True):
            setattr(attention, name, counted(products, run))
        yield found
    finally:
        for name, run in kernels.items():
            setattr(attention, name, run)


def bytes_of_batch(batch: Batch) -> int:
    """What was decoded."""
    return sum(array.nbytes for array in _arrays(batch))


def bytes_of_inputs(inputs: Inputs) -> int:
    """The tensors that go into a model, but for rows."""
    return sum(x.nbytes for x in _tensors(dataclasses.replace(inputs, rows={})))


def bytes_of_rows(inputs: Inputs) -> int:
    """The rows that were pulled."""
    return sum(rows_UD.nbytes for rows_UD in inputs.rows.values())


def _arrays(batch: Batch) -> Iterator[np.ndarray]:
    for value in vars(batch).values():
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, Jagged):
            yield from (value.lengths_KN, value.values, value.present_KN, *value.columns.values())
            yield from () if value.weights is None else (value.weights,)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Of a dataclass, and of what it holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])


def _attention(
    query_shape: Any, key_shape: Any, value_shape: Any, *args: Any, out_shape: Any = None, **named: Any
) -> int:
    """[.., Q, C] with [.., N, C], and their scores with [.., N, V]."""
    *batch, num_queries, width = query_shape
    return int(2 * np.prod(batch) * num_queries * key_shape[-2] * (width + value_shape[-1]))


def _attention_back(
    gradient_shape: Any,
    query_shape: Any,
    key_shape: Any,
    value_shape: Any,
    *args: Any,
    out_shape: Any = None,
    **named: Any,
) -> int:
    """Five products for two: scores are made again."""
    return _attention(query_shape, key_shape, value_shape) * 5 // 2


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back,
}

"""One HSTU layer over a long history: all targets of a request share the history, or each target has its own
copy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.common.flop_bound import FLOP
from benchmarks.common.flop_count import flops
from benchmarks.harness.benchmark import Work
from roostream.models.layers import init_parameters
from roostream.models.sequence.hstu import Hstu
from roostream.models.sequence.jagged_sequences import build_jagged_sequences

_HEADS = 4


@contextlib.contextmanager
def layer(shared: bool, history: int, targets: int, width: int) -> Iterator[Work]:
    """Forward and backward of one request, without time bias; units are its targets."""
    torch.set_num_threads(1)
    module = Hstu(width, _HEADS, 1, history, times=False)
    init_parameters(module, seed=0)
    num_sequences, each = (1, targets) if shared else (targets, 1)
    counts = np.full(num_sequences, each, dtype=np.int32)
    sequences = build_jagged_sequences(np.full(num_sequences, history), None, counts, history)
    tokens_SD = torch.randn(num_sequences * history + targets, width)[sequences.source_S].requires_grad_()

    def step() -> None:
        module(tokens_SD, sequences)[sequences.token_B].sum().backward()

    yield Work(step, targets, functools.cache(lambda: {FLOP: flops(step) / targets / 1e3}))

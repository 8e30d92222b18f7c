"""Wired to nothing yet: a batch's list features as TorchRec's KeyedJaggedTensors, for TorchRec modules in a model of one's own.

Sharded modules would stand here, in trainer/, behind `rows.Rows`: models/ is what serving runs too, and may not import TorchRec.

Letters: R requests, B candidates, K features of a side, U unique rows of a stack, D width.

    request-only    stride R ─┐  two plain tensors, or
    per candidate   stride B ─┘  one with a stride a key

With raw ids TorchRec would need tables over all 64-bit ids. So the values can be positions in a stack's unique rows
instead: an EmbeddingBagCollection whose table holds the U pulled rows then gives what the parameter servers' rows give.
"""

from __future__ import annotations

import numpy as np
import torch
from torchrec import KeyedJaggedTensor

from roo.batch import Batch
from roo.jagged import Jagged
from roo.lookup import Lookup


def request_kjt(batch: Batch, lookup: Lookup | None = None, stack: str = "") -> KeyedJaggedTensor:
    """Request-only features, stride R; values are ids, or with `lookup` and `stack` the positions of that stack's features.

    Ids, lengths and weights are wrapped without a copy.
    """
    return _kjt(batch.ro_lists, *_positions(batch.ro_lists, lookup, stack))


def candidate_kjt(batch: Batch, lookup: Lookup | None = None, stack: str = "") -> KeyedJaggedTensor:
    """The same of the per-candidate features, stride B."""
    return _kjt(batch.nro_lists, *_positions(batch.nro_lists, lookup, stack))


def variable_stride_kjt(batch: Batch) -> KeyedJaggedTensor:
    """Both sides in one tensor of ids: request-only keys with stride R, then per-candidate keys with stride B."""
    sides = (batch.ro_lists, batch.nro_lists)
    weighted = any(side.weights is not None for side in sides)
    return KeyedJaggedTensor(
        keys=[key for side in sides for key in side.keys],
        values=torch.from_numpy(np.concatenate([side.values for side in sides])),
        lengths=torch.from_numpy(np.concatenate([side.lengths_KN.ravel() for side in sides])),
        weights=torch.from_numpy(np.concatenate([_weights(side) for side in sides])) if weighted else None,
        stride_per_key_per_rank=[[side.num_rows] for side in sides for _ in side.keys],
    )


def _positions(side: Jagged, lookup: Lookup | None, stack: str) -> tuple[tuple[str, ...], np.ndarray | None]:
    """The keys of this side that `stack` holds, and their positions; all keys and no positions without a lookup."""
    if lookup is None:
        return side.keys, None
    index = lookup.stacks[stack].index
    keys = tuple(key for key in side.keys if key in index)
    return keys, np.concatenate([index[key] for key in keys]) if keys else np.zeros(0, dtype=np.int64)


def _kjt(side: Jagged, keys: tuple[str, ...], positions: np.ndarray | None) -> KeyedJaggedTensor:
    rows = [side.index(key) for key in keys]
    weights = None
    if side.weights is not None:
        whole = keys == side.keys
        weights = side.weights if whole else np.concatenate([_weights_of(side, key) for key in keys] or [np.zeros(0, "f4")])
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(side.values if positions is None else positions),
        lengths=torch.from_numpy((side.lengths_KN if keys == side.keys else side.lengths_KN[rows]).ravel()),
        weights=None if weights is None else torch.from_numpy(weights),
        stride=side.num_rows,
    )


def _weights(side: Jagged) -> np.ndarray:
    return np.ones(len(side.values), dtype=np.float32) if side.weights is None else side.weights


def _weights_of(side: Jagged, key: str) -> np.ndarray:
    weights = side.weights_of(key)
    assert weights is not None, key
    return weights

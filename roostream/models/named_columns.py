"""Weights with a column for each feature, continued with other features.

A commit names these columns. A restore finds each one by its name: columns of features that stayed keep their
weights, those of removed features are dropped. A new column that is an input gets the weight 0, so it changes
no score until it is trained; other new entries get the initial value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from roostream.errors import CheckpointError

ColumnNames: TypeAlias = tuple[tuple[str, ...] | None, ...]
"""For each dimension of a parameter the names of its entries; None: they belong to no feature."""

COLUMN_NAMES = "inputs.columns"
"""Name of the tensor of a commit that holds these names for its parameters; older commits have none."""


def numbered(name: str, count: int) -> tuple[str, ...]:
    """The names of `count` columns that are one vector."""
    return tuple(f"{name} {i}" for i in range(count))


def with_prefix(prefix: str, names: Mapping[str, ColumnNames]) -> dict[str, ColumnNames]:
    """The parameters of a part, as the module that contains it names them."""
    return {f"{prefix}.{parameter}": columns for parameter, columns in names.items()}


def wrong_names(names: object, shapes: Mapping[str, Sequence[int]]) -> str:
    """What is wrong with these names of the columns of parameters of these shapes; "" if nothing is."""
    if not isinstance(names, dict):
        return f"expected a dict, got {type(names).__name__}"
    for parameter, by_dimension in names.items():
        if parameter not in shapes:
            return f"expected names of parameters, got {parameter!r}"
        shape = shapes[parameter]
        if not isinstance(by_dimension, tuple) or len(by_dimension) != len(shape):
            return (
                f"{parameter}: expected a tuple of {len(shape)}, one for each dimension, got {by_dimension!r}"
            )
        for size, columns in zip(shape, by_dimension, strict=True):
            is_named = isinstance(columns, tuple) and all(isinstance(column, str) for column in columns)
            if columns is not None and not (is_named and len(set(columns)) == len(columns) == size):
                return f"{parameter}: expected None or a tuple of {size} different texts, got {columns!r}"
    return ""


def encode(names: Mapping[str, ColumnNames]) -> np.ndarray:
    """As the tensor COLUMN_NAMES: JSON with each list of names once."""
    lists = {
        columns: None for by_dimension in names.values() for columns in by_dimension if columns is not None
    }
    place = {columns: at for at, columns in enumerate(lists)}
    parameters = {
        parameter: [None if columns is None else place[columns] for columns in by_dimension]
        for parameter, by_dimension in names.items()
    }
    return np.frombuffer(json.dumps({"lists": [*lists], "parameters": parameters}).encode(), np.uint8)


def decode(tensors: Mapping[str, np.ndarray]) -> dict[str, ColumnNames]:
    """What `encode` got; {} for a commit that names no columns. Raises CheckpointError: it cannot be read."""
    if COLUMN_NAMES not in tensors:
        return {}
    try:
        found = json.loads(tensors[COLUMN_NAMES].tobytes())
        lists = [tuple(map(str, columns)) for columns in found["lists"]]
        return {
            parameter: tuple(None if at is None else lists[at] for at in places)
            for parameter, places in found["parameters"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{COLUMN_NAMES}: expected names of columns as JSON: {error}") from None


def carry_over(
    stored: np.ndarray, before: ColumnNames, initial: np.ndarray, now: ColumnNames
) -> np.ndarray | None:
    """A parameter, or its optimizer state, of the shape of `initial`, with the values of `stored` where the
    names in `before` and `now` are equal. None: shapes and names do not belong together."""
    if not stored.ndim == initial.ndim == len(before) == len(now):
        return None
    kept = [_kept_places(*sides) for sides in zip(before, now, stored.shape, initial.shape, strict=True)]
    if any(places is None for places in kept):
        return None
    places = [pair for pair in kept if pair is not None]
    out = initial.copy()
    if out.ndim > 1 and now[-1] is not None:
        is_new = np.ones(out.shape[-1], np.bool_)
        is_new[places[-1][1]] = False
        out[..., is_new] = 0
    out[np.ix_(*(to for _, to in places))] = stored[np.ix_(*(of for of, _ in places))]
    return out


def _kept_places(
    before: Sequence[str] | None, now: Sequence[str] | None, size_before: int, size_now: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """The places of the entries of a dimension that are kept, before and now."""
    if before is None or now is None:
        is_equal = before is now and size_before == size_now
        return (np.arange(size_now), np.arange(size_now)) if is_equal else None
    if (len(before), len(now)) != (size_before, size_now):
        return None
    place = {name: at for at, name in enumerate(before)}
    pairs = [(place[name], at) for at, name in enumerate(now) if name in place]
    return _places(of for of, _ in pairs), _places(to for _, to in pairs)


def _places(places: Iterable[int]) -> np.ndarray:
    return np.fromiter(places, np.intp)

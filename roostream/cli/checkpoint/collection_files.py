"""Files of a TorchRec collection's rows: a state_dict as safetensors, and which id each row number is.

collection   `embedding_bags.TABLE.weight` (or `embeddings.TABLE.weight`), floats [N, D], of each table; behind any prefix
ids          `TABLE`, int64 [N]: the id of row n; a table that isn't there has ids 0 to N - 1
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from roostream.errors import CheckpointError, SchemaError, nearest
from roostream.runtime import tensor_file
from roostream.schema.schema import Schema

_WEIGHT = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")


class CollectionRows(NamedTuple):
    """Of a file."""

    rows: dict[str, np.ndarray]  # table → float32 [N, D]
    others: dict[str, np.ndarray]  # what else is in it, by its names


def weight_name(table: str) -> str:
    return f"embedding_bags.{table}.weight"


def read_collection(path: Path, schema: Schema) -> CollectionRows:
    """Rows of tables of `schema`.

    Raises:
        CheckpointError: no safetensors file with rows of a collection, or rows that aren't finite floats.
        SchemaError: a table that the schema hasn't, or rows of another width.
    """
    rows: dict[str, np.ndarray] = {}
    others: dict[str, np.ndarray] = {}
    for name, values in _tensors(path).items():
        if found := _WEIGHT.search(name):
            if found[1] in rows:
                raise CheckpointError(
                    f"{path}: expected rows of table {found[1]!r} once, got {name} too; keep one of them"
                )
            rows[found[1]] = _checked(f"{path}: {name}", found[1], values, schema)
        else:
            others[name] = values
    if not rows:
        raise CheckpointError(
            f"{path}: expected embedding_bags.TABLE.weight of a collection's state_dict, got {', '.join(others) or 'nothing'}"
        )
    return CollectionRows(rows, others)


def read_ids(path: Path | None) -> dict[str, np.ndarray]:
    """Table → int64 [N], each id once; {} without a file.

    Raises:
        CheckpointError: not such a file.
    """
    found = {} if path is None else _tensors(path)
    for table, id_N in found.items():
        if id_N.dtype != np.int64 or id_N.ndim != 1 or len(np.unique(id_N)) != len(id_N):
            raise CheckpointError(
                f"{path}: {table}: expected int64 [N], each id once, got {id_N.dtype} {list(id_N.shape)}"
                f"{' with ids that come again' if id_N.ndim == 1 else ''}"
            )
    return found


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises CheckpointError: the file is there, or can't be written."""
    try:
        with path.open("xb") as file:
            file.write(tensor_file.encode(tensors, {}))
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be written ({error.strerror}); name a file that isn't there"
        ) from None


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return tensor_file.decode(path.read_bytes())[0]
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read: expected a safetensors file, got {error.strerror}"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; save it in float32 by safetensors.torch.save_file") from None


def _checked(what: str, name: str, values: np.ndarray, schema: Schema) -> np.ndarray:
    table = schema.table_by_name.get(name)
    if table is None:
        raise SchemaError(
            f"{what}: expected a table of the schema, got {name!r}{nearest(name, schema.table_by_name)}"
        )
    if values.ndim != 2 or values.shape[1] != table.dim:
        raise SchemaError(
            f"{what}: expected [N, {table.dim}], as [tables.{name}] has dim = {table.dim}, got {list(values.shape)}; change one"
        )
    return finite(what, values)


def finite(what: str, values: np.ndarray) -> np.ndarray:
    """As float32. Raises CheckpointError: no floats, or some of them aren't finite in float32."""
    with np.errstate(over="ignore"):  # it is infinite then, and told
        found = np.ascontiguousarray(values, dtype=np.float32)
    if values.dtype.kind != "f" or not np.isfinite(found).all():
        raise CheckpointError(
            f"{what}: expected finite floats, got {values.dtype} or others; save them dequantized"
        )
    return found

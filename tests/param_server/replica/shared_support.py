"""Rows whose content says what it must be: row = a function of (id, version), so that a mixed one is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from param_server.index import Keys
from param_server.replica.shared_files import SharedFolder
from param_server.replica.shared_reader import SharedReader
from param_server.replica.shared_rows import SharedOwner
from roostream.runtime.clock import Clock, SystemClock
from tests.param_server.shard_support import ADAGRAD, ITEM, lookup_of, small_schema, table_id


def folder_at(path: Path, seed: int = 0) -> SharedFolder:
    return SharedFolder(path, small_schema(), seed)


def owner_at(path: Path, clock: Clock | None = None) -> SharedOwner:
    """Open, nothing published."""
    return SharedOwner(folder_at(path), small_schema(), 0, 64, clock or SystemClock()).open()


def reader_at(path: Path, clock: Clock | None = None) -> SharedReader:
    reader = SharedReader(folder_at(path), small_schema(), 0, clock or SystemClock())
    reader.look()
    return reader


def keys_of(*ids: int) -> Keys:
    return Keys(np.full(len(ids), table_id(ITEM), np.uint32), np.array(ids, np.int64))


def rows_of(ids: np.ndarray, version: int) -> np.ndarray:
    """float32 [U, 4]: (id, version, id + version, id - version)."""
    ids_U = ids.astype(np.float32)
    version_U = np.full_like(ids_U, version)
    return np.stack([ids_U, version_U, ids_U + version_U, ids_U - version_U], axis=1)


def put(owner: SharedOwner, ids: list[int], version: int) -> None:
    keys = keys_of(*ids)
    owner.stores[ADAGRAD].put(keys, rows_of(keys.id_U, version))


def read(reader: SharedReader, *ids: int) -> np.ndarray:
    return reader.gather(lookup_of({ITEM: ids}))[ADAGRAD]


def whole(rows_UD: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool [U]: rows that were written whole, and under this id."""
    return (
        (rows_UD[:, 0] == ids)
        & (rows_UD[:, 2] == rows_UD[:, 0] + rows_UD[:, 1])
        & (rows_UD[:, 3] == rows_UD[:, 0] - rows_UD[:, 1])
    )

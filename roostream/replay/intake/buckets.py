"""Rows of one request brought together, however far apart they lie: in two passes, in bounded memory.

Rows go by a hash of their request into buckets, files of Arrow batches in a temporary folder; then each bucket is read whole. A
bucket holds about BUCKET_BYTES, however large the input is, as long as no single request is larger.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from roostream.schema.ids import hash64

BUCKET_BYTES = 64 << 20
MAX_BUCKETS = 256  # files that are open at a time


def num_buckets(num_bytes: int) -> int:
    """For input of so many bytes in Arrow's form."""
    return max(1, min(MAX_BUCKETS, -(-num_bytes // BUCKET_BYTES)))


def request_ids(table: pa.Table | pa.RecordBatch, columns: Sequence[str]) -> np.ndarray:
    """Text [N] of each row's request: what its columns say, or where that is long or missing a hash of it; "" without any."""
    texts = [_texts(table.column(column)) for column in columns]
    joined_N = np.array(
        ["|".join(cells) if any(cells) else "" for cells in zip(*texts, strict=True)], dtype=object
    )
    long_N = np.array([len(text.encode()) > 64 for text in joined_N], dtype=np.bool_)
    joined_N[long_N] = [f"{hash64(text):016x}" for text in joined_N[long_N]]
    return joined_N


def into_buckets(
    batches: Iterable[pa.RecordBatch], columns: Sequence[str], folder: Path, number: int
) -> Iterator[pa.Table]:
    """Every row of `batches` (one schema) once, rows that are equal in `columns` in the same table and in their order.

    Raises:
        OSError: the folder can't be written to; what is there is the caller's to remove.
    """
    paths = [folder / f"{n}.arrow" for n in range(number)]
    with contextlib.ExitStack() as opened:
        writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
        for batch in batches:
            at_N = _bucket(batch, columns, number)
            for n in np.unique(at_N).tolist():
                if n not in writers:
                    writers[n] = opened.enter_context(pa.ipc.new_file(str(paths[n]), batch.schema))
                writers[n].write_batch(batch.take(pa.array(np.flatnonzero(at_N == n))))
    for path in paths:
        if path.exists():
            with pa.ipc.open_file(str(path)) as reader:
                yield reader.read_all()
            path.unlink()


def _bucket(batch: pa.RecordBatch, columns: Sequence[str], number: int) -> np.ndarray:
    """int64 [N]; the hash is of the first column's text alone where there are several: they agree in a request."""
    coded = pc.dictionary_encode(batch.column(columns[0]))
    hashes_U = np.array([hash64(text) % number for text in _texts(coded.dictionary)] + [0], dtype=np.int64)
    at_N: np.ndarray = hashes_U[pc.fill_null(coded.indices, len(hashes_U) - 1).to_numpy(zero_copy_only=False)]
    return at_N


def _texts(column: pa.Array | pa.ChunkedArray) -> list[str]:
    return ["" if cell is None else str(cell) for cell in column.to_pylist()]

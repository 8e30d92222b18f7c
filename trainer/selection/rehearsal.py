"""Rehearsal: after each new batch, one of the last batches is trained again (experience replay, Lin 1992,
within a stream).

A rehearsed batch is trained with the current weights and rows. It is counted in no metric, prediction or
offset.

    draw    after each trained batch: one of the kept batches, chosen by seed and number of steps
    keep    then the new batch is added; the oldest ones are dropped beyond `batches` or `max_bytes`

Kept batches are part of a commit, in the worker's own file, so a restored worker draws the same ones
(guarantee G11). Each is stored as the compressed tensor file of its columns, so the byte limit is exact and a
restore changes nothing.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from roostream.runtime import tensor_file
from roostream.schema.schema import Schema
from roostream.wire.batch import TEXT, Batch
from roostream.wire.jagged import Jagged
from trainer.chunks import ChunkPart, build_part
from trainer.selection.config import RehearsalConfig

_PREFIX = "rehearsal."
_FAST = 1
_ARRAYS = [field.name for field in dataclasses.fields(Batch) if field.type == "np.ndarray"]
_OF_LISTS = ("lengths_KN", "values", "present_KN", "weights")


class Rehearsal:
    """The kept batches of a single worker. Nothing is trained here."""

    def __init__(
        self, config: RehearsalConfig, schema: Schema, seed: int, *, deduplicated: bool = False
    ) -> None:
        self.config, self.schema, self.seed, self.deduplicated = config, schema, seed, deduplicated
        self._kept: deque[bytes] = deque()
        self.num_bytes = 0

    @property
    def num_batches(self) -> int:
        return len(self._kept)

    def draw(self, num_steps: int) -> ChunkPart | None:
        """The batch to train again after `num_steps` optimizer steps; None while nothing is kept."""
        if not self._kept:
            return None
        at = int(np.random.default_rng((self.seed, num_steps)).integers(len(self._kept)))
        return build_part(
            decode_batch(self._kept[at], self.schema), trains=True, deduplicated=self.deduplicated
        )

    def keep(self, batch: Batch) -> None:
        """Add a batch. A batch that is larger than `max_bytes` is ignored."""
        data = encode_batch(batch)
        if len(data) > self.config.max_bytes:
            return
        self._kept.append(data)
        self.num_bytes += len(data)
        while len(self._kept) > self.config.batches or self.num_bytes > self.config.max_bytes:
            self.num_bytes -= len(self._kept.popleft())

    def state(self) -> dict[str, np.ndarray]:
        """Copies, for the commit of a partition."""
        arrays: dict[str, np.ndarray] = {
            "schema": np.array([self.schema.fingerprint], np.uint64),
            "length": np.array([len(data) for data in self._kept], np.int64),
            "bytes": np.frombuffer(b"".join(self._kept), np.uint8),
        }
        return {f"{_PREFIX}{name}": value for name, value in arrays.items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load a `state` found among `tensors`; without one, or with one of another schema, nothing is
        kept."""
        self._kept.clear()
        kept = {
            name.removeprefix(_PREFIX): value for name, value in tensors.items() if name.startswith(_PREFIX)
        }
        if kept and int(kept["schema"][0]) == self.schema.fingerprint:
            data, ends = kept["bytes"].tobytes(), np.cumsum(kept["length"]).tolist()
            self._kept.extend(data[start:end] for start, end in zip([0, *ends], ends, strict=False))
        self.num_bytes = sum(map(len, self._kept))

    def report(self) -> dict[str, Any]:
        return {"rehearsal_batches": len(self._kept), "rehearsal_bytes": self.num_bytes}


def encode_batch(batch: Batch) -> bytes:
    """Columns of the batch without its schema, compressed to about a third; takes a twentieth of the time of
    a step."""
    tensors = {name: getattr(batch, name) for name in _ARRAYS}
    tensors["surface_R"] = np.ascontiguousarray(batch.surface_R).view(np.uint8)
    for side, lists in (("ro", batch.ro_lists), ("nro", batch.nro_lists)):
        tensors |= {
            f"{side}.{name}": value for name in _OF_LISTS if (value := getattr(lists, name)) is not None
        }
        tensors |= {f"{side}.column.{name}": value for name, value in lists.columns.items()}
    return zlib.compress(tensor_file.encode(tensors, {}), _FAST)


def decode_batch(data: bytes, schema: Schema) -> Batch:
    """Inverse of `encode_batch`, with the schema of the batch."""
    tensors, _ = tensor_file.decode(zlib.decompress(data))
    arrays = {name: tensors[name] for name in _ARRAYS}
    arrays["surface_R"] = tensors["surface_R"].view(TEXT)
    return Batch(
        schema=schema,
        ro_lists=_lists(tensors, schema, "ro"),
        nro_lists=_lists(tensors, schema, "nro"),
        **arrays,
    )


def _lists(tensors: Mapping[str, np.ndarray], schema: Schema, side: Any) -> Jagged:
    prefix = f"{side}.column."
    return Jagged(
        keys=tuple(feature.name for feature in schema.lists(side)),
        columns={
            name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
        },
        **{name: tensors[f"{side}.{name}"] for name in _OF_LISTS if f"{side}.{name}" in tensors},
    )

"""Training on impressions: each candidate becomes a request of its own, in batches of one size (ROO paper
§2.1.3).

    chunk of requests ──► scored as requests: predictions, metrics
           └──► expanded ──► waiting impressions ──► batches of `batch_impressions` ──► trained

Floats are transformed before the expansion, so ranks and shares are those of the whole list. Impressions that
wait for a full batch are part of a commit. So each impression is trained exactly once, and batches do not
depend on when commits are made.

Letters: R requests, B impressions, G floats after transforms.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from roostream.errors import ConfigError
from roostream.models.config import ModelConfig
from roostream.models.inputs import INPUT_NAMES, changed_inputs, input_names_tensor
from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.transform import apply_transforms
from trainer.chunks import ChunkPart, build_part
from trainer.selection.rehearsal import decode_batch, encode_batch

log = logging.getLogger("roostream.worker")

_PREFIX = "expansion."


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Impressions:
    """Requests of one candidate each, and their floats after transforms."""

    batch: Batch
    ro_float_BG: np.ndarray  # float32
    nro_float_BG: np.ndarray  # float32

    def part(self, start: int, end: int) -> ChunkPart:
        part = build_part(self.batch.requests_between(start, end), trains=True)
        return dataclasses.replace(
            part, floats=(self.ro_float_BG[start:end].copy(), self.nro_float_BG[start:end].copy())
        )


class Expansion:
    """The impressions of a single worker that wait for a full batch. Nothing is trained here."""

    def __init__(self, size: int, schema: Schema) -> None:
        """`size`: impressions of a batch, at least 1."""
        self.size, self.schema = size, schema
        self._waiting: _Impressions | None = None

    @property
    def num_waiting(self) -> int:
        """Fewer than `size`."""
        return 0 if self._waiting is None else self._waiting.batch.num_requests

    def add(self, batch: Batch) -> list[ChunkPart]:
        """The batches of `size` impressions that are now full, in the order of requests and candidates."""
        ro_float_RG, nro_float_BG = apply_transforms(batch)
        added = _Impressions(
            batch=batch.expand(), ro_float_BG=ro_float_RG[batch.request_index_B], nro_float_BG=nro_float_BG
        )
        whole = added if self._waiting is None else _concatenated(self._waiting, added)
        number = whole.batch.num_requests
        left = number - number % self.size
        self._waiting = None
        if left < number:
            rest = whole.part(left, number)
            assert rest.floats is not None
            self._waiting = _Impressions(
                batch=rest.batch, ro_float_BG=rest.floats[0], nro_float_BG=rest.floats[1]
            )
        return [whole.part(at, at + self.size) for at in range(0, left, self.size)]

    def take_waiting(self) -> ChunkPart | None:
        """The waiting impressions, as a batch below `size`; None: there are none. They wait no longer."""
        waiting, self._waiting = self._waiting, None
        return None if waiting is None else waiting.part(0, waiting.batch.num_requests)

    def state(self) -> dict[str, np.ndarray]:
        """For a commit; {} if nothing waits."""
        if self._waiting is None:
            return {}
        arrays: dict[str, np.ndarray] = {
            "schema": np.array([self.schema.fingerprint], np.uint64),
            "batch": np.frombuffer(encode_batch(self._waiting.batch), np.uint8),
            "ro_float": self._waiting.ro_float_BG,
            "nro_float": self._waiting.nro_float_BG,
            INPUT_NAMES: input_names_tensor(self.schema),
        }
        return {f"{_PREFIX}{name}": value for name, value in arrays.items()}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Load a `state` found among `tensors`; without one, nothing waits. Impressions of another schema, or
        with floats of other transforms, cannot be trained: a warning says so."""
        self._waiting = None
        if f"{_PREFIX}batch" not in tensors:
            return
        found = {name: tensors[f"{_PREFIX}{name}"] for name in ("schema", "batch", "ro_float", "nro_float")}
        named = f"{_PREFIX}{INPUT_NAMES}"
        changed = changed_inputs({INPUT_NAMES: tensors[named]}, self.schema) if named in tensors else None
        if changed or int(found["schema"][0]) != self.schema.fingerprint:
            warn_of_dropped(tensors, "the schema has changed")
            return
        self._waiting = _Impressions(
            batch=decode_batch(found["batch"].tobytes(), self.schema),
            ro_float_BG=found["ro_float"],
            nro_float_BG=found["nro_float"],
        )


def warn_of_dropped(tensors: Mapping[str, np.ndarray], reason: str) -> None:
    """Log that the impressions of a commit which wait for a batch are not trained; nothing if none wait."""
    if f"{_PREFIX}nro_float" in tensors:
        number = len(tensors[f"{_PREFIX}nro_float"])
        log.warning(
            "%d impressions of the commit that waited for a full batch are not trained: %s", number, reason
        )


def check_expandable(schema: Schema, model: ModelConfig) -> None:
    """Raises ConfigError: the model or a label compares the candidates of a request. Custom models are not
    checked."""
    layers = getattr(model, "list_layers", 0)
    if layers:
        raise ConfigError(
            f"expand = 'impressions': expected list_layers = 0 in the model, got {layers}: an impression has "
            "no list to attend to, but serving scores whole lists"
        )
    for label in schema.labels:
        if label.objective == "pairwise":
            raise ConfigError(
                f"expand = 'impressions': expected another objective of {label.name!r}, got 'pairwise', "
                "which compares the candidates of a request"
            )


def _concatenated(first: _Impressions, second: _Impressions) -> _Impressions:
    return _Impressions(
        batch=Batch.concat([first.batch, second.batch]),
        ro_float_BG=np.concatenate([first.ro_float_BG, second.ro_float_BG]),
        nro_float_BG=np.concatenate([first.nro_float_BG, second.nro_float_BG]),
    )

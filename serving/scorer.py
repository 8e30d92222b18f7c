"""One forward pass over a request's candidates, and the versions that it runs with.

A `Version` is everything that must not be mixed (G4): schema, dense weights, decoder. A request takes one at its start and
uses nothing else; following a new one is a single assignment. Rows come from the replica at the time of the request.

Letters: n candidates, T tasks.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Protocol

import numpy as np
import torch

from models.build import build_model
from models.config import ModelConfig
from models.inputs import build_inputs
from models.model import Model
from roo.decode import Decoder
from roo.errors import ConfigError, WireError
from roo.lookup import Lookup, build_lookup
from roo.schema import Schema
from serving.errors import RequestError

log = logging.getLogger("roostream.serving")

FIRST = "0-0"


class RowReader(Protocol):
    """Where rows are read: the row replica."""

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]; a row that isn't there has its initial value. Thread-safe."""


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """Immutable once built; its decoder is used by one thread at a time."""

    name: str  # "<incarnation>-<seq>"
    schema: Schema
    model: Model
    decoder: Decoder

    def score(self, rows: RowReader, ro: bytes, nro: bytes, item_ids: np.ndarray, time_ms: int) -> np.ndarray:
        """float32 logits [n, T]; the same bits as training gives for this request alone (G9).

        Raises:
            RequestError: 400 or 413: the blocks are not what the schema says; 500: not finite, or a user's own model failed.
        """
        try:
            batch = self.decoder.decode_request(ro, nro, item_ids, time_ms)
        except WireError as error:
            raise RequestError(413 if error.reason == "oversized" else 400, str(error), "$") from None
        lookup = build_lookup(batch)
        inputs = build_inputs(batch, lookup, rows.gather(lookup))
        try:
            with torch.inference_mode():
                logits = self.model(inputs).numpy()
        except ConfigError as error:  # a user's own code; where it lies isn't for strangers
            log.error("model version %s: %s", self.name, error)
            raise RequestError(500, f"the code of model version {self.name} failed; serving's log says where") from None
        if not np.isfinite(logits).all():
            raise RequestError(500, f"model version {self.name} gave a score that is not finite for this request")
        return logits


def first_version(schema: Schema, config: ModelConfig, seed: int) -> Version:
    """What is served before the first commit: initial weights, as the trainer begins with."""
    return build_version(FIRST, schema, config, seed, {})


def build_version(name: str, schema: Schema, config: ModelConfig, seed: int, weights: dict[str, torch.Tensor]) -> Version:
    """A version with these weights in place of the initial ones (none given = all initial).

    Raises:
        RuntimeError: names or shapes aren't those of the model.
    """
    model = build_model(schema, config, seed)
    if weights:
        model.load_state_dict(weights, strict=True)
    model.eval().requires_grad_(False)
    return Version(
        name, schema, model, Decoder(schema, lambda fingerprint: schema if fingerprint == schema.fingerprint else None)
    )


def probabilities(logits_nT: np.ndarray) -> np.ndarray:
    """Sigmoid, float32 [n, T]."""
    return torch.sigmoid(torch.from_numpy(logits_nT)).numpy()

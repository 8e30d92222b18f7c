"""One forward pass over the candidates of a request, or of several, and the versions that it runs with.

A `Version` is everything that must not be mixed (G4): schema and dense weights. A request takes one at its start and
uses nothing else; following a new one is a single assignment. Rows come from the replica at the time of the request.

Letters: n candidates, T tasks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from roostream.errors import ConfigError
from roostream.models.build import build_model
from roostream.models.config import ModelConfig
from roostream.models.fused.forward import Forward, forward_of, torch_forward
from roostream.models.model import Model
from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup, build_lookup
from serving.errors import RequestError
from serving.request_batch import RequestColumns, build_batch

log = logging.getLogger("roostream.serving")

FIRST = "0-0"
_MOST = np.float32(88)  # whose exponential is a float32


class RowReader(Protocol):
    """Where rows are read: the row replica."""

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]; a row that isn't there has its initial value. Thread-safe."""


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """Immutable once built; thread-safe, unless a user's own model isn't."""

    name: str  # "<incarnation>-<seq>"
    schema: Schema
    model: Model
    as_trained: bool = False  # each request alone through the modules that training runs: the same bits (G9)

    @functools.cached_property
    def forward(self) -> Forward:
        """Made when it is first asked for; the model's parameters are not changed after that."""
        return torch_forward(self.model) if self.as_trained else forward_of(self.model, self.schema)

    def score(self, rows: RowReader, request: RequestColumns) -> np.ndarray:
        """float32 logits [n, T]: those of training for this request alone, to 1e-5, or to the bit where `as_trained` (G9).

        Raises:
            RequestError: 500: not finite, or a user's own model failed.
        """
        (logits_nT,) = self.score_all(rows, [request])
        return self.finite(logits_nT)

    def score_all(self, rows: RowReader, requests: Sequence[RequestColumns]) -> list[np.ndarray]:
        """Of each request, in one pass; not all may be finite. Raises RequestError 500: a user's own model failed."""
        if self.as_trained and len(requests) > 1:
            return [logits_nT for request in requests for logits_nT in self.score_all(rows, [request])]
        batch = build_batch(self.schema, requests)
        lookup = build_lookup(batch)
        gathered = rows.gather(lookup)
        try:
            logits_BT = self.forward(batch, lookup, gathered)
        except ConfigError as error:  # a user's own code; where it lies isn't for strangers
            log.error("model version %s: %s", self.name, error)
            raise RequestError(
                500, f"the code of model version {self.name} failed; serving's log says where"
            ) from None
        return (
            np.split(logits_BT, np.cumsum(batch.num_candidates_R)[:-1]) if len(requests) > 1 else [logits_BT]
        )

    def finite(self, logits_nT: np.ndarray) -> np.ndarray:
        """The same. Raises RequestError 500 where there is anything else than numbers."""
        if not np.isfinite(logits_nT).all():
            raise RequestError(
                500, f"model version {self.name} gave a score that is not finite for this request"
            )
        return logits_nT


def first_version(schema: Schema, config: ModelConfig, seed: int, as_trained: bool = False) -> Version:
    """What is served before the first commit: initial weights, as the trainer begins with."""
    return build_version(FIRST, schema, config, seed, {}, as_trained)


def build_version(
    name: str,
    schema: Schema,
    config: ModelConfig,
    seed: int,
    weights: dict[str, torch.Tensor],
    as_trained: bool = False,
) -> Version:
    """A version with these weights in place of the initial ones (none given = all initial).

    Raises:
        RuntimeError: names or shapes aren't those of the model.
    """
    model = build_model(schema, config, seed, is_loaded=bool(weights))
    if weights:
        model.load_state_dict(weights, strict=True)
    model.eval().requires_grad_(False)
    return Version(name, schema, model, as_trained)


def probabilities(logits_nT: np.ndarray) -> np.ndarray:
    """Sigmoid, float32 [n, T]; of what lies below -88 that of -88."""
    scores_nT: np.ndarray = 1 / (1 + np.exp(np.minimum(-logits_nT, _MOST)))
    return scores_nT

"""`Version`: one model version, and the forward pass over the candidates of one or several requests.

A version holds what must not be mixed: schema and dense weights (guarantee G4). A request takes one version
at its start and uses nothing else, so following a new version is a single assignment. Embedding rows are read
at the time of the request.

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
from roostream.models.compiled.scorer import Forward, build_scorer, torch_forward
from roostream.models.config import ModelConfig
from roostream.models.model import Model
from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup, build_lookup
from serving.errors import NonFiniteScoreError, RequestError
from serving.request_batch import RequestColumns, build_batch

log = logging.getLogger("roostream.serving")

FIRST = "0-0"
_MOST = np.float32(88)  # exp(88) is still a finite float32


class RowReader(Protocol):
    """Source of embedding rows: the row replica."""

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Return stack → float32 [U, D]; a missing row has its initial value. Thread-safe."""


@dataclasses.dataclass(frozen=True, eq=False)
class Version:
    """Immutable once built. Thread-safe, unless a custom model is not."""

    name: str  # "<incarnation>-<seq>"
    schema: Schema
    model: Model
    # Score each request alone through training's modules: bit-equal to training (guarantee G9)
    as_trained: bool = False

    @functools.cached_property
    def forward(self) -> Forward:
        """The forward pass, built when first used; the model's parameters do not change after that."""
        return torch_forward(self.model) if self.as_trained else build_scorer(self.model, self.schema)

    def score(self, rows: RowReader, request: RequestColumns) -> np.ndarray:
        """Return float32 logits [n, T] of one request: within 1e-5 of training's, or bit-equal if
        `as_trained` (guarantee G9).

        Raises:
            RequestError: 500: a score is not finite, or a custom model failed.
        """
        (logits_nT,) = self.score_all(rows, [request])
        return self.finite(logits_nT)

    def score_all(self, rows: RowReader, requests: Sequence[RequestColumns]) -> list[np.ndarray]:
        """Return the logits of each request, computed in one pass; they may contain non-finite values.

        Raises:
            RequestError: 500: a custom model failed.
        """
        if self.as_trained and len(requests) > 1:
            return [logits_nT for request in requests for logits_nT in self.score_all(rows, [request])]
        batch = build_batch(self.schema, requests)
        lookup = build_lookup(batch)
        gathered = rows.gather(lookup)
        try:
            logits_BT = self.forward(batch, lookup, gathered)
        except ConfigError as error:  # the error has paths of custom code, which clients must not see
            log.error("model version %s: %s", self.name, error)
            raise RequestError(
                500, f"the code of model version {self.name} failed; serving's log says where"
            ) from None
        return (
            np.split(logits_BT, np.cumsum(batch.num_candidates_R)[:-1]) if len(requests) > 1 else [logits_BT]
        )

    def finite(self, logits_nT: np.ndarray) -> np.ndarray:
        """Return `logits_nT`. Raises RequestError 500 if a value is not finite."""
        if not np.isfinite(logits_nT).all():
            raise NonFiniteScoreError(
                500, f"model version {self.name} gave a score that is not finite for this request"
            )
        return logits_nT


def first_version(schema: Schema, config: ModelConfig, seed: int, as_trained: bool = False) -> Version:
    """The version before the first commit: the initial weights that the trainer starts with."""
    return build_version(FIRST, schema, config, seed, {}, as_trained)


def build_version(
    name: str,
    schema: Schema,
    config: ModelConfig,
    seed: int,
    weights: dict[str, torch.Tensor],
    as_trained: bool = False,
) -> Version:
    """Build a version with these weights; no weights = initial weights.

    Raises:
        RuntimeError: names or shapes of the weights do not fit the model.
    """
    model = build_model(schema, config, seed, is_loaded=bool(weights))
    if weights:
        model.load_state_dict(weights, strict=True)
    model.eval().requires_grad_(False)
    return Version(name, schema, model, as_trained)


def probabilities(logits_nT: np.ndarray) -> np.ndarray:
    """Sigmoid, float32 [n, T]; logits below -88 give the value of -88."""
    scores_nT: np.ndarray = 1 / (1 + np.exp(np.minimum(-logits_nT, _MOST)))
    return scores_nT

"""From a parsed request to its answer and the impression that records it.

1 complete: what the client left out is hydrated or computed (serving/fill.py)
2 encode: these bytes are scored, and these bytes are logged
3 score: one version for the whole request, rows from the replica
4 order: by the first task, a share of it explored
5 impression: features as scored, scores and places as served, propensities

`append`: a page that adds candidates to an open request. Its RO features are hydrated again to score it, but its impression
carries none: the request's are those of its first page, and that is what its candidates are trained with.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from roo import roo_pb2 as pb
from roo import wire
from roo.errors import RoostreamError
from roo.schema import Schema
from runtime.topics import IMPRESSIONS
from serving.errors import RequestError
from serving.explore import best_order, draw_of, explore
from serving.feature_log.format import LogRecord
from serving.fill import Filler
from serving.request import RankRequest
from serving.scorer import Rows, Version, Versions, probabilities

log = logging.getLogger("roostream.serving")


class Hydration(Protocol):
    """`features.hydration.Hydrator`."""

    def read(self, user_id: int, item_ids: np.ndarray, time_ms: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Online features by their names. RoostreamError while Redis is away."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """How answers are ordered."""

    task: int = 0  # index of the label that decides
    exploration: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Ranked:
    """An answer and its record; nothing has left yet."""

    answer: bytes  # JSON
    record: LogRecord
    degraded: bool


class RankService:
    """`rank` runs in one thread at a time: the decoder's and Redis' client's."""

    def __init__(
        self, schema: Schema, versions: Versions, rows: Rows, hydrator: Hydration | None = None, policy: Policy | None = None
    ) -> None:
        self.schema, self.versions, self.rows, self.hydrator = schema, versions, rows, hydrator
        self.policy = policy or Policy()
        self.filler = Filler(schema)
        self.rows_ready: Callable[[], bool] = lambda: True  # until the replica is bootstrapped, answers are marked degraded

    def rank(self, request: RankRequest, time_ms: int) -> Ranked:
        """Raises RequestError; nothing is logged then."""
        version = self.versions.named(request.model_version)
        self.filler.open(request)
        ro_online, nro_online, degraded = self._hydrate(request, time_ms)
        ro, nro = self.filler.encode(request, time_ms, ro_online, nro_online)
        scores_nT = probabilities(version.score(self.rows, ro, nro, request.item_ids, time_ms))
        order, propensities = self._order(request, scores_nT)
        impression = self._impression(request, time_ms, version, (ro, nro), scores_nT)
        positions = np.empty(len(order), dtype=np.int64)
        positions[order] = np.arange(request.first_position, request.first_position + len(order))
        impression.positions.extend(positions.tolist())
        impression.propensities.extend(propensities)
        value = wire.encode(wire.IMPRESSION, impression)
        if len(value) > self.schema.limits.max_record_bytes:
            raise RequestError(
                413, f"expected an impression of at most {self.schema.limits.max_record_bytes} bytes, got {len(value)}"
            )
        answer = self._answer(request, version, scores_nT, order, degraded)
        return Ranked(answer, LogRecord(IMPRESSIONS, -1, time_ms, request.key, value), degraded)

    def _hydrate(self, request: RankRequest, time_ms: int) -> tuple[Mapping[str, Any], Mapping[str, Any], bool]:
        """(RO, NRO, degraded); without Redis the features stay missing."""
        if self.hydrator is None or not self.filler.wants_hydration(request):
            return {}, {}, not self.rows_ready()
        try:
            return *self.hydrator.read(request.user_id, request.item_ids, time_ms), not self.rows_ready()
        except RoostreamError as error:
            log.debug("hydration failed: %s", error)
            return {}, {}, True

    def _order(self, request: RankRequest, scores_nT: np.ndarray) -> tuple[list[int], list[float]]:
        best = best_order(scores_nT[:, self.policy.task])
        if not self.policy.exploration:
            return best, []
        draw = draw_of(self.policy.seed, request.key, request.request_id, request.first_position)
        return explore(best, self.policy.exploration, draw)

    def _impression(
        self, request: RankRequest, time_ms: int, version: Version, blocks: tuple[bytes, bytes], scores_nT: np.ndarray
    ) -> pb.Impression:
        header = pb.Header(
            request_id=request.request_id,
            user_id=request.user_id,
            session_id=request.session_id,
            surface=request.surface,
            time_ms=time_ms,
            schema=self.schema.fingerprint,
            model_version=version.name,
        )
        return pb.Impression(
            header=header,
            ro=None if request.append else blocks[0],
            item_ids=request.item_ids.view(np.uint64).tolist(),
            nro=blocks[1],
            scores=scores_nT.ravel().tolist(),
        )

    def _answer(self, request: RankRequest, version: Version, scores_nT: np.ndarray, order: list[int], degraded: bool) -> bytes:
        tasks = self.schema.tasks
        return msgspec.json.encode(
            {
                "request_id": request.request_id,
                "model_version": version.name,
                "scores": [dict(zip(tasks, row, strict=True)) for row in scores_nT.tolist()],
                "order": order,
                "degraded": degraded,
            }
        )

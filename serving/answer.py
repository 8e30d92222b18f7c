"""The answer of `POST /v1/rank`: values, and their two forms on the wire.

Letters: n candidates in the request's order, T tasks.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from roo import roo_pb2 as pb


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAnswer:
    request_id: str
    model_version: str
    tasks: tuple[str, ...]
    scores_nT: np.ndarray  # float32 probabilities
    order: list[int]  # candidates' indices, first slot first
    degraded: bool  # Redis or the rows were away

    def json(self) -> bytes:
        """See `/docs`."""
        return msgspec.json.encode(
            {
                "request_id": self.request_id,
                "model_version": self.model_version,
                "scores": [dict(zip(self.tasks, row, strict=True)) for row in self.scores_nT.tolist()],
                "order": self.order,
                "degraded": self.degraded,
            }
        )

    def protobuf(self) -> bytes:
        """A `roo.RankAnswer`."""
        return pb.RankAnswer(
            request_id=self.request_id,
            model_version=self.model_version,
            tasks=self.tasks,
            scores=self.scores_nT.ravel().tolist(),
            order=self.order,
            degraded=self.degraded,
        ).SerializeToString(deterministic=True)

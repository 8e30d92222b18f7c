"""The answer of `POST /v1/rank`: values, and their two forms on the wire.

Letters: n candidates in the request's order, T tasks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roo import roo_pb2 as pb

_DIGITS = (6, 7, 8, 9)  # 9 are always enough for a float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAnswer:
    request_id: str
    model_version: str
    tasks: tuple[str, ...]
    scores_nT: np.ndarray  # float32 probabilities
    order: list[int]  # candidates' indices, first slot first
    degraded: bool  # Redis or the rows were away
    ranked: Sequence[int | str] | None = None  # ids as the client wrote them, first slot first; None = it didn't ask
    top: Sequence[int | str] | None = None  # those of the first slots, which are all that it asked for; None = it didn't

    def json(self) -> bytes:
        """See `/docs`. Scores are the shortest decimals that are those float32."""
        if self.top is not None:
            return msgspec.json.encode(self._top(self.top))
        answer: dict[str, Any] = {
            "request_id": self.request_id,
            "model_version": self.model_version,
            "scores": self._scores(self.scores_nT),
            "order": self.order,
            "degraded": self.degraded,
        }
        if self.ranked is not None:
            answer["ranked"] = self.ranked
        return msgspec.json.encode(answer)

    def _top(self, ids: Sequence[int | str]) -> dict[str, Any]:
        rows = self._scores(self.scores_nT[self.order[: len(ids)]])
        return {
            "request_id": self.request_id,
            "model_version": self.model_version,
            "top": [{"item_id": item_id, "scores": scores} for item_id, scores in zip(ids, rows, strict=True)],
            "degraded": self.degraded,
        }

    def _scores(self, scores_nT: np.ndarray) -> list[msgspec.Struct]:
        return list(itertools.starmap(_scores_type(self.tasks), shortest(scores_nT).tolist()))

    def protobuf(self) -> bytes:
        """A `roo.RankAnswer`; it has no ids. Of what was asked for by `top`, `order` has so many slots; `scores` has all."""
        return pb.RankAnswer(
            request_id=self.request_id,
            model_version=self.model_version,
            tasks=self.tasks,
            scores=self.scores_nT.ravel().tolist(),
            order=self.order if self.top is None else self.order[: len(self.top)],
            degraded=self.degraded,
        ).SerializeToString(deterministic=True)


@functools.lru_cache(maxsize=16)
def _scores_type(tasks: tuple[str, ...]) -> type[msgspec.Struct]:
    """A candidate's scores by their names: made and written faster than a dictionary is."""
    names = [f"t{i}" for i in range(len(tasks))]
    return msgspec.defstruct("Scores", [(name, float) for name in names], rename=dict(zip(names, tasks, strict=True)), gc=False)


def shortest(values: np.ndarray) -> np.ndarray:
    """float32 in 0..1 → the float64 of fewest decimal digits (6 at least) that rounds to the same float32; same shape.

    Written out, it has those digits and no more. Values below 1e-12 stay as they are.
    """
    wide = values.astype(np.float64)
    out, open_ = wide.copy(), wide >= 1e-12
    exponent = np.floor(np.log10(np.where(open_, wide, 1.0)))
    for digits in _DIGITS:
        scale = 10.0 ** (digits - 1 - exponent)  # a power of ten up to 1e20: exact, so the quotient is rounded once
        short = np.rint(wide * scale) / scale
        found = open_ & (short.astype(np.float32) == values)
        out[found] = short[found]
        open_ &= ~found
        if not open_.any():
            break
    return out

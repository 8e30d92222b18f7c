"""The answer of `POST /v1/rank` and its JSON and protobuf encodings.

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
from numba import njit

from roostream.wire.proto_fields import RANK_ANSWER, VARINT, encode_fields

_LEAST = 1e-12
_DEGRADED = bytes((RANK_ANSWER.degraded << 3 | VARINT, 1))
_POWERS = np.array([float(f"1e{k}") for k in range(23)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAnswer:
    request_id: str
    model_version: str
    tasks: tuple[str, ...]
    scores_nT: np.ndarray  # float32 probabilities
    order: list[int]  # candidate indices, first slot first
    degraded: bool  # online features or rows were unavailable
    ranked: Sequence[int | str] | None = None  # client item ids, first slot first; None = not requested
    top: Sequence[int | str] | None = None  # client item ids of the first slots, if only those were requested

    def json(self) -> bytes:
        """Encode as JSON, see `/docs`. Scores are the shortest decimals that round to the same float32."""
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
            "top": [
                {"item_id": item_id, "scores": scores} for item_id, scores in zip(ids, rows, strict=True)
            ],
            "degraded": self.degraded,
        }

    def _scores(self, scores_nT: np.ndarray) -> list[msgspec.Struct]:
        return list(itertools.starmap(_scores_type(self.tasks), shortest(scores_nT).tolist()))

    def protobuf(self) -> bytes:
        """Encode as `roo.RankAnswer`, which has no item ids. With `top`, `order` has only the first slots;
        `scores` has all candidates."""
        order = self.order if self.top is None else self.order[: len(self.top)]
        fields = (
            (RANK_ANSWER.request_id, self.request_id.encode() or None),
            (RANK_ANSWER.model_version, self.model_version.encode() or None),
            *((RANK_ANSWER.tasks, task.encode()) for task in self.tasks),
            (RANK_ANSWER.scores, self.scores_nT.astype("<f4").tobytes() or None),
            (RANK_ANSWER.order, np.array(order, dtype="<u4").tobytes() or None),
        )
        return encode_fields(fields) + (_DEGRADED if self.degraded else b"")


@functools.lru_cache(maxsize=16)
def _scores_type(tasks: tuple[str, ...]) -> type[msgspec.Struct]:
    """A struct with one field per task: faster to create and to encode than a dictionary."""
    names = [f"t{i}" for i in range(len(tasks))]
    return msgspec.defstruct(
        "Scores", [(name, float) for name in names], rename=dict(zip(names, tasks, strict=True)), gc=False
    )


def shortest(values: np.ndarray) -> np.ndarray:
    """Return, for float32 values in 0..1, the float64 with the fewest decimal digits (at least 6) that rounds
    to the same float32.

    Its decimal text has those digits and no more. Values below 1e-12 are unchanged.
    """
    out = np.empty(values.size, np.float64)
    shorten(np.ascontiguousarray(values, np.float32).reshape(-1), _POWERS, out)
    return out.reshape(values.shape)


@njit(cache=True)  # keeps the GIL, as the kernels of request_batch.py do
def shorten(value_N: np.ndarray, powers: np.ndarray, out_N: np.ndarray) -> None:
    """`powers`: of ten, from 0 on; they are exact up to 1e22, so the quotient is rounded once. 9 digits
    always suffice."""
    for n in range(len(value_N)):
        wide = np.float64(value_N[n])
        out_N[n] = wide
        if not wide >= _LEAST:
            continue
        exponent = int(np.floor(np.log10(wide)))
        for digits in range(6, 10):
            scale = powers[digits - 1 - exponent]
            short = np.rint(wide * scale) / scale
            if np.float32(short) == value_N[n]:
                out_N[n] = short
                break


def precompile() -> None:
    """Compile the kernel into numba's cache."""
    shortest(np.ones(1, np.float32))

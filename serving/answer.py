"""The scores of a rank's answer, and the answer's encodings as JSON and protobuf.

Letters: n candidates in the request's order, T tasks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec
import numpy as np
from numba import njit

from roostream.wire.proto_fields import RANK_ANSWER, VARINT, encode_fields
from serving.types import RankAnswer, ScoredItem, TopAnswer

_LEAST = 1e-12
_DEGRADED = bytes((RANK_ANSWER.degraded << 3 | VARINT, 1))
_POWERS = np.array([float(f"1e{k}") for k in range(23)])


class Scores(Sequence[msgspec.Struct]):
    """The scores of all candidates. An element has a field for each task; elements are created when they are
    read, because an answer in protobuf does not need them."""

    def __init__(self, tasks: tuple[str, ...], values_nT: np.ndarray) -> None:
        """`values_nT`: float32 probabilities."""
        self.tasks, self.values_nT = tasks, values_nT

    def __len__(self) -> int:
        return len(self.values_nT)

    def __iter__(self) -> Iterator[msgspec.Struct]:
        """Scores are the shortest decimals that round to the same float32."""
        return itertools.starmap(_scores_type(self.tasks), shortest(self.values_nT).tolist())

    @overload
    def __getitem__(self, at: int) -> msgspec.Struct: ...
    @overload
    def __getitem__(self, at: slice) -> list[msgspec.Struct]: ...
    def __getitem__(self, at: int | slice) -> msgspec.Struct | list[msgspec.Struct]:
        return list(self)[at]

    def in_order(self, order: Sequence[int]) -> Scores:
        """The scores of these candidates, in this order."""
        return Scores(self.tasks, self.values_nT[order])


ENCODER = msgspec.json.Encoder(enc_hook=list)  # `list` turns Scores into what JSON has


def top_answer(answer: RankAnswer[Any], item_ids: Sequence[int | str], num_slots: int) -> TopAnswer[Any]:
    """The answer with the first slots only. `item_ids` are those of the request."""
    assert isinstance(answer.scores, Scores)
    order = answer.order[:num_slots]
    top = [
        ScoredItem(item_ids[i], scores)
        for i, scores in zip(order, answer.scores.in_order(order), strict=True)
    ]
    common = set(TopAnswer.__struct_fields__) - {"top"}
    return TopAnswer(top=top, **{name: getattr(answer, name) for name in common})


def encode_protobuf(answer: RankAnswer[Any], num_slots: int = 0) -> bytes:
    """Encode as `roo.RankAnswer`, which has no item ids. With `num_slots`, `order` has only the first slots;
    `scores` always has all candidates."""
    scores = answer.scores
    assert isinstance(scores, Scores)
    order = answer.order[:num_slots] if num_slots else answer.order
    fields = (
        (RANK_ANSWER.request_id, answer.request_id.encode() or None),
        (RANK_ANSWER.model_version, answer.model_version.encode() or None),
        *((RANK_ANSWER.tasks, task.encode()) for task in scores.tasks),
        (RANK_ANSWER.scores, scores.values_nT.astype("<f4").tobytes() or None),
        (RANK_ANSWER.order, np.array(order, dtype="<u4").tobytes() or None),
    )
    return encode_fields(fields) + (_DEGRADED if answer.degraded else b"")


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
    """Round numbers to the shortest decimals that give the same float32. `powers`: of ten, from 0 on; they
    are exact up to 1e22, so the quotient is rounded once. 9 digits always suffice."""
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

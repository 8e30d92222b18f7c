"""Answers in JSON and protobuf, and the decimals of their scores."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from roostream.wire import roo_pb2 as pb
from serving.answer import ENCODER, Scores, encode_protobuf, shortest
from serving.types import RankAnswer


def test_scores_are_written_as_their_shortest_decimals() -> None:
    rng = np.random.default_rng(5)
    values = np.concatenate(
        [rng.random(20_000), 10.0 ** rng.uniform(-12, 0, 20_000), [0.0, 1.0, 0.1, 0.5, 1e-30, 5e-324, 1e-12]]
    ).astype(np.float32)
    decimals = shortest(values)
    assert (decimals.astype(np.float32) == values).all(), "the decimals convert back to the same float32"
    digits = [
        len(repr(float(w)).split("e")[0].replace(".", "").lstrip("0")) for w in decimals[values > 2e-12]
    ]
    assert max(digits) <= 9, "nine digits are enough for any float32"
    longer = [
        len(repr(w)) - len(str(v)) for w, v in zip(decimals[:20_000].tolist(), values[:20_000], strict=True)
    ]
    assert np.mean(longer) < 0.01 and max(longer) <= 1


@pytest.mark.parametrize("degraded", [False, True])
@pytest.mark.parametrize(
    ("n", "tasks", "top"), [(1, ("click",), 0), (200, ("click", "dwell"), 0), (3, ("click", "dwell"), 2)]
)
def test_an_answer_in_protobuf_equals_the_bytes_of_the_protobuf_library(
    n: int, tasks: tuple[str, ...], top: int, degraded: bool
) -> None:
    scores_nT = np.random.default_rng(n).random((n, len(tasks)), dtype=np.float32)
    order = list(range(n))[::-1]
    answer: RankAnswer[Any] = RankAnswer(
        request_id="é" * 32,
        model_version="1-2",
        scores=Scores(tasks, scores_nT),
        order=order,
        degraded=degraded,
    )
    message = pb.RankAnswer(
        request_id="é" * 32,
        model_version="1-2",
        tasks=tasks,
        scores=scores_nT.ravel().tolist(),
        order=order[:top] if top else order,
        degraded=degraded,
    )
    assert encode_protobuf(answer, top) == message.SerializeToString(deterministic=True)


def test_scores_of_a_json_answer_are_shortest_decimals() -> None:
    scores = np.array([[0.1, 0.25], [1 / 3, 1.0]], dtype=np.float32)
    answer: RankAnswer[Any] = RankAnswer(
        request_id="r",
        model_version="1-2",
        scores=Scores(("click", "dwell"), scores),
        order=[1, 0],
        degraded=False,
    )
    assert b'{"click":0.1,"dwell":0.25},{"click":0.33333334,"dwell":1.0}' in ENCODER.encode(answer)
    assert "ranked" not in json.loads(ENCODER.encode(answer))

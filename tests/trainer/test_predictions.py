"""Predictions and dead letters: their bytes, and that a flush means acknowledged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from roo import roo_pb2 as pb
from roo import wire
from roo.batch import Batch
from roo.decode import Decoder
from roo.errors import UnavailableError
from roo.ids import unsigned
from runtime.clock import FakeClock
from tests.trainer import samples
from trainer.batches import Rejected
from trainer.predictions import KafkaOutputs, dead_letter, predictions_of


def batch_of(*values: bytes) -> Batch:
    records = [r._replace(value=value) for r, value in zip(samples.records(list(range(1, 1 + len(values)))), values, strict=True)]
    return Decoder(samples.schema(), {}.get).decode(records)[0]


def message_of(batch: Batch, score_BT: np.ndarray, step: int, r: int) -> pb.Prediction:
    """The same, field by field."""
    of_B = batch.request_index_B == r
    served_NT = batch.served_score_BT[of_B]
    return pb.Prediction(
        sample_id=unsigned(int(batch.sample_id_R[r])),
        time_ms=int(batch.time_ms_R[r]),
        item_ids=batch.item_B.view(np.uint64)[of_B].tolist(),
        scores=score_BT[of_B].ravel().tolist(),
        labels=batch.label_BT[of_B].ravel().tolist(),
        served_scores=[] if np.isnan(served_NT).all() else served_NT.ravel().tolist(),
        step=step,
        partition=int(batch.partition_R[r]),
        offset=int(batch.offset_R[r]),
    )


@pytest.mark.parametrize("served", [False, True])
def test_a_prediction_s_bytes_are_those_of_its_message(served: bool) -> None:
    batch = batch_of(samples.sample(1), samples.sample(2, num_candidates=0), samples.sample(3, num_candidates=5))
    if served:
        served_BT = np.full_like(batch.served_score_BT, np.nan)
        served_BT[batch.request_index_B == 2] = 0.25
        batch = dataclasses.replace(batch, served_score_BT=served_BT)
    score_BT = np.random.default_rng(0).random((batch.num_candidates, 1), dtype=np.float32)
    made = list(predictions_of(batch, score_BT, 7))
    expected = [message_of(batch, score_BT, 7, r) for r in range(3)]
    assert [p.value for p in made] == [wire.encode(wire.PREDICTION, message) for message in expected]
    assert [(p.sample_id, p.time_ms) for p in made] == [(m.sample_id, m.time_ms) for m in expected]
    assert [len(m.served_scores) for m in expected] == ([0, 0, 5] if served else [0, 0, 0])


def test_a_dead_letter_keeps_as_much_of_the_record_as_fits() -> None:
    letter = dead_letter(Rejected(("samples", 3), 9, "undecodable", "why", b"12345"), 4)
    assert (letter.topic, letter.partition, letter.offset, letter.reason, letter.error) == ("samples", 3, 9, "undecodable", "why")
    assert letter.raw == b"1234" and letter.raw_bytes == 5


class Producer:
    """Takes records; `left` of them stay unacknowledged, one is refused with `refusal`."""

    def __init__(self, left: int = 0, refusal: Any = None) -> None:
        self.left, self.refusal = left, refusal
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def produce(self, topic: str, *, on_delivery: Callable[[Any, object], None], **record: Any) -> None:
        self.sent.append((topic, record))
        on_delivery(self.refusal, None)

    def poll(self, timeout_s: float = 0) -> int:
        return 0

    def flush(self, timeout_s: float) -> int:
        return self.left


class Refusal:
    def str(self) -> str:
        return "too large"


def test_both_go_to_their_topics() -> None:
    producer = Producer()
    outputs = KafkaOutputs(producer, "t.", FakeClock(5))  # type: ignore[arg-type]
    batch = batch_of(samples.sample(1))
    for prediction in predictions_of(batch, np.zeros((batch.num_candidates, 1), np.float32), 1):
        outputs.prediction(prediction)
    outputs.dead_letter(dead_letter(Rejected(("samples", 0), 9, "undecodable", "why", b""), 4))
    outputs.flush()
    assert [topic for topic, _ in producer.sent] == ["t.predictions", "t.dead_letters"]
    assert producer.sent[0][1]["key"] == (1).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("producer", "says"),
    [(Producer(left=2), "has not acknowledged 2"), (Producer(refusal=Refusal()), "refused a record: too large")],
)
def test_a_flush_that_is_not_whole_is_told(producer: Producer, says: str) -> None:
    outputs = KafkaOutputs(producer, "", FakeClock(5))  # type: ignore[arg-type]
    outputs.dead_letter(dead_letter(Rejected(("samples", 0), 9, "undecodable", "why", b""), 4))
    with pytest.raises(UnavailableError, match=says):
        outputs.flush()

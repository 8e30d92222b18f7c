"""Predictions and dead letters: their bytes, and that a flush means acknowledged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException

from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import unsigned
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from tests.trainer import samples
from trainer.chunks import Rejected
from trainer.predictions import KafkaOutputs, Prediction, dead_letter, encode_predictions
from trainer.selection.decision import SelectionWeights


def batch_of(*values: bytes) -> Batch:
    records = [
        r._replace(value=value)
        for r, value in zip(samples.records(list(range(1, 1 + len(values)))), values, strict=True)
    ]
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
def test_encoded_predictions_equal_the_protobuf_message(served: bool) -> None:
    batch = batch_of(
        samples.sample(1), samples.sample(2, num_candidates=0), samples.sample(3, num_candidates=5)
    )
    if served:
        served_BT = np.full_like(batch.served_score_BT, np.nan)
        served_BT[batch.request_index_B == 2] = 0.25
        batch = dataclasses.replace(batch, served_score_BT=served_BT)
    score_BT = np.random.default_rng(0).random((batch.num_candidates, 1), dtype=np.float32)
    made = list(encode_predictions(batch, score_BT, 7))
    expected = [message_of(batch, score_BT, 7, r) for r in range(3)]
    assert [p.value for p in made] == [wire.encode(wire.PREDICTION, message) for message in expected]
    assert [(p.sample_id, p.time_ms) for p in made] == [(m.sample_id, m.time_ms) for m in expected]
    assert [len(m.served_scores) for m in expected] == ([0, 0, 5] if served else [0, 0, 0])


def test_encoded_zeros_weights_and_subsets_equal_the_protobuf_message() -> None:
    """Protobuf leaves a 0 out."""
    batch = batch_of(*(samples.sample(n, num_candidates=n % 3) for n in range(1, 8)))
    zero = {
        "sample_id_R": [0, 2, -3, 4, 5, 6, 7],
        "time_ms_R": [1, 0, 3, -4, 5, 6, 7],
        "offset_R": [9, 8, 7, 0, 1 << 40, 5, 4],
    }
    partitions = np.array([0, 1, 300, 0, 2, 2, 1], np.int32)
    batch = dataclasses.replace(
        batch, partition_R=partitions, **{name: np.array(v, np.int64) for name, v in zero.items()}
    )
    score_BT = np.random.default_rng(1).random((batch.num_candidates, 1), dtype=np.float32)
    disposition_R = np.array([0, 1, 2, 3, 4, 0, 0], np.uint8)
    weights = (np.array(w, np.float32) for w in ([1, 0, 2.5, 1, 0, 4, 0], [1, 20, 1, 0, 3.3, 1, 0]))
    choice = SelectionWeights(disposition_R, *weights)
    for with_choice in (None, choice):
        expected = []
        for r in range(7):
            message = message_of(batch, score_BT, 1 << 33, r)
            message.disposition = int(disposition_R[r])  # type: ignore[assignment]
            for name, w_R in (
                ("train_weight", choice.train_weight_R),
                ("metric_weight", choice.metric_weight_R),
            ):
                if with_choice and w_R[r] not in (0, 1):
                    setattr(message, name, float(w_R[r]))
            expected.append(
                Prediction(
                    message.sample_id,
                    message.time_ms,
                    message.partition,
                    wire.encode(wire.PREDICTION, message),
                )
            )
        made = list(encode_predictions(batch, score_BT, 1 << 33, disposition_R, with_choice))
        assert made == expected
        some = np.array([1, 4, 6])
        assert list(encode_predictions(batch, score_BT, 1 << 33, disposition_R, with_choice, some)) == [
            expected[r] for r in (1, 4, 6)
        ]


def test_a_dead_letter_keeps_as_much_of_the_record_as_fits() -> None:
    letter = dead_letter(Rejected(("samples", 3), 9, "undecodable", "why", b"12345"), 4)
    assert (letter.topic, letter.partition, letter.offset) == ("samples", 3, 9)
    assert (letter.reason, letter.error) == ("undecodable", "why")
    assert letter.raw == b"1234" and letter.raw_bytes == 5


class Refusal:
    def __init__(self, text: str = "too large") -> None:
        self.text = text

    def str(self) -> str:
        return self.text


class Producer:
    """Takes records while there is `room`; `answer` says what became of each when it is polled or flushed."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.answer: Refusal | None = None
        self.acknowledges = True
        self.raises: Exception | None = None
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.waiting: list[Callable[[Any, object], None]] = []
        self.num_purged = self.num_polls = 0

    def produce(self, topic: str, *, on_delivery: Callable[[Any, object], None], **record: Any) -> None:
        if self.raises:
            raise self.raises
        if len(self.waiting) >= self.room:
            raise BufferError
        self.sent.append((topic, record))
        self.waiting.append(on_delivery)

    def poll(self, timeout_s: float = 0) -> int:
        self.num_polls += 1
        return 0

    def flush(self, timeout_s: float) -> int:
        self.deliver() if self.acknowledges else None
        return len(self.waiting)

    def deliver(self) -> None:
        told, self.waiting = self.waiting, []
        for on_delivery in told:
            on_delivery(self.answer, None)

    def purge(self) -> None:
        self.num_purged += 1
        self.answer = Refusal("purged")
        self.deliver()


class Opened:
    """Outputs over producers, the newest last."""

    def __init__(self, room: int = 1000, is_urgent: bool = False) -> None:
        self.producers: list[Producer] = []
        self.is_urgent = is_urgent
        self.it = KafkaOutputs(lambda: self.open(room), "t.", FakeClock(5), lambda: self.is_urgent)  # type: ignore[arg-type]

    def open(self, room: int) -> Producer:
        self.producers.append(Producer(room))
        return self.producers[-1]

    @property
    def producer(self) -> Producer:
        return self.producers[-1]

    def send(self, offset: int = 9) -> None:
        self.it.dead_letter(dead_letter(Rejected(("samples", 0), offset, "undecodable", "why", b""), 4))


def test_predictions_and_dead_letters_go_to_their_topics() -> None:
    outputs = Opened()
    batch = batch_of(samples.sample(1))
    for prediction in encode_predictions(batch, np.zeros((batch.num_candidates, 1), np.float32), 1):
        outputs.it.prediction(prediction)
    outputs.send()
    outputs.it.flush()
    assert [topic for topic, _ in outputs.producer.sent] == ["t.predictions", "t.dead_letters"]
    assert outputs.producer.sent[0][1]["key"] == (1).to_bytes(8, "little")
    assert outputs.producer.sent[0][1]["partition"] == batch.partition_R[0], "one auditor reads both"
    assert "partition" not in outputs.producer.sent[1][1]
    assert outputs.it.refused() == ""


def test_a_flood_of_dead_letters_logs_one_line_a_minute_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outputs = Opened()
    for offset in range(300):
        reason = "unknown_type" if offset == 200 else "undecodable"
        outputs.it.dead_letter(dead_letter(Rejected(("samples", 0), offset, reason, "why", b""), 4))
    assert caplog.messages == [
        "dead letter: samples-0 offset 0: undecodable (why)",
        "dead letter: samples-0 offset 200: unknown_type (why)",
    ]
    assert len(outputs.producer.sent) == 300


def test_an_unacknowledged_flush_fails_and_a_later_one_may_succeed() -> None:
    outputs = Opened()
    outputs.send()
    outputs.producer.acknowledges = False
    with pytest.raises(UnavailableError, match="has not acknowledged 1 predictions or dead letters for 10 s"):
        outputs.it.flush()
    assert outputs.it.refused() == ""
    outputs.producer.acknowledges = True
    outputs.it.flush()


def test_a_refusal_is_remembered_until_everyone_is_restored() -> None:
    outputs = Opened()
    outputs.send()
    outputs.producer.answer = Refusal()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="refused a prediction or dead letter: too large"):
            outputs.it.flush()
        outputs.producer.answer = None
    assert outputs.it.refused() == "Kafka refused a prediction or dead letter: too large"
    outputs.it.begin()
    assert outputs.it.refused() == ""
    outputs.send()
    outputs.it.flush()


def test_a_refusal_replaces_the_producer_and_its_late_reports_are_ignored() -> None:
    outputs = Opened()
    for offset in range(3):
        outputs.send(offset)
    first = outputs.producer
    first.answer, late = Refusal("fatal: out of order"), first.waiting.pop()
    first.deliver()
    outputs.it.begin()
    assert outputs.producer is not first and first.num_purged == 1
    late(Refusal("late"), None)
    assert outputs.it.refused() == ""
    outputs.send()
    outputs.it.flush()
    assert len(outputs.producer.sent) == 1
    outputs.it.begin()
    assert len(outputs.producers) == 2, "a producer that refused nothing is kept"


@pytest.mark.parametrize("method", ["poll", "flush"])
def test_a_producer_that_failed_is_replaced_at_the_restore(method: str) -> None:
    """librdkafka raises a fatal error wherever callbacks are called. The other kinds of errors go to them."""
    outputs = Opened()
    error = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "desynchronized", fatal=True)
    failing = outputs.producer

    def fail(timeout_s: float = 0) -> int:
        raise KafkaException(error)

    setattr(failing, method, fail)
    outputs.send()
    with pytest.raises(UnavailableError, match=r"out of order sequence number.*stopped uncleanly"):
        outputs.it.flush()
    assert outputs.it.refused()
    outputs.it.begin()
    outputs.send()
    outputs.it.flush()
    assert outputs.producer is not failing


def test_a_record_refused_by_the_client_counts_as_refused() -> None:
    outputs = Opened()
    outputs.producer.raises = KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    outputs.send()
    assert "MSG_SIZE_TOO_LARGE" in outputs.it.refused()


@pytest.mark.parametrize("why", ["restore", "is_urgent"])
def test_waiting_for_queue_space_ends_at_a_restore_or_shutdown(why: str) -> None:
    outputs = Opened(room=1)
    outputs.send()
    outputs.it.interrupt() if why == "restore" else setattr(outputs, "is_urgent", True)
    with pytest.raises(UnavailableError, match=r"topic t\.dead_letters: .*queue is full"):
        outputs.send()
    outputs.is_urgent = False
    outputs.it.begin()
    outputs.producer.deliver()
    outputs.send()
    assert len(outputs.producer.sent) == 2


def test_a_flush_gives_up_at_once_during_shutdown() -> None:
    outputs = Opened(is_urgent=True)
    outputs.send()
    outputs.producer.acknowledges = False
    asked: list[float] = []
    outputs.producer.flush = lambda timeout_s: asked.append(timeout_s) or 1  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(UnavailableError, match="has not acknowledged 1"):
        outputs.it.flush()
    assert len(asked) == 1 and asked[0] < 1

"""Predictions and dead letters: their encoding, and their delivery to Kafka. A flush succeeds only if Kafka
has acknowledged everything."""

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
    """The prediction of request r as a protobuf message, set field by field."""
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
    encoded = list(encode_predictions(batch, score_BT, 7))
    expected = [message_of(batch, score_BT, 7, r) for r in range(3)]
    assert [p.value for p in encoded] == [wire.encode(wire.PREDICTION, message) for message in expected]
    assert [(p.sample_id, p.time_ms) for p in encoded] == [(m.sample_id, m.time_ms) for m in expected]
    assert [len(m.served_scores) for m in expected] == ([0, 0, 5] if served else [0, 0, 0])


def test_a_label_that_a_sample_does_not_have_is_nan() -> None:
    batch = batch_of(samples.sample(1), samples.sample(2))
    weight_BT = np.where(batch.request_index_B == 0, 0, batch.weight_BT.T).T.astype(np.float32)
    batch = dataclasses.replace(batch, weight_BT=weight_BT)
    first, second = (
        wire.decode(p.value)[1].labels for p in encode_predictions(batch, np.ones_like(weight_BT), 1)
    )
    assert np.isnan(first).all() and len(first) == batch.num_candidates_R[0]
    assert list(second) == batch.label_BT[batch.request_index_B == 1].ravel().tolist()


def test_a_request_represents_as_many_in_metrics_as_its_sampling_weight_says() -> None:
    batch = batch_of(samples.sample(1), samples.sample(2), samples.sample(3, num_candidates=0))
    weight_R = np.array([1, 4, 1], np.float32)
    batch = dataclasses.replace(batch, weight_BT=batch.weight_BT * weight_R[batch.request_index_B][:, None])
    score_BT, one_R = np.ones_like(batch.weight_BT), np.ones(3, np.float32)
    choice = SelectionWeights(np.zeros(3, np.uint8), one_R, 2.5 * one_R)
    for with_choice, expected in ((None, [0, 4, 0]), (choice, [2.5, 10, 2.5])):
        found = [p.value for p in encode_predictions(batch, score_BT, 1, choice=with_choice)]
        assert [wire.decode(value)[1].metric_weight for value in found] == expected, "0 stands for 1"


def test_encoded_zeros_weights_and_subsets_equal_the_protobuf_message() -> None:
    """Protobuf omits a field whose value is 0."""
    batch = batch_of(*(samples.sample(n, num_candidates=n % 3) for n in range(1, 8)))
    values = {
        "sample_id_R": [0, 2, -3, 4, 5, 6, 7],
        "time_ms_R": [1, 0, 3, -4, 5, 6, 7],
        "offset_R": [9, 8, 7, 0, 1 << 40, 5, 4],
    }
    partitions = np.array([0, 1, 300, 0, 2, 2, 1], np.int32)
    batch = dataclasses.replace(
        batch, partition_R=partitions, **{name: np.array(v, np.int64) for name, v in values.items()}
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
        encoded = list(encode_predictions(batch, score_BT, 1 << 33, disposition_R, with_choice))
        assert encoded == expected
        subset = np.array([1, 4, 6])
        assert list(encode_predictions(batch, score_BT, 1 << 33, disposition_R, with_choice, subset)) == [
            expected[r] for r in (1, 4, 6)
        ]


def test_a_dead_letter_keeps_as_much_of_the_record_as_fits() -> None:
    letter = dead_letter(Rejected(("samples", 3), 9, "undecodable", "why", b"12345"), 4)
    assert (letter.topic, letter.partition, letter.offset) == ("samples", 3, 9)
    assert (letter.reason, letter.error) == ("undecodable", "why")
    assert letter.raw == b"1234" and letter.raw_bytes == 5


class DeliveryError:
    def __init__(self, text: str = "too large") -> None:
        self.text = text

    def str(self) -> str:
        return self.text


class Producer:
    """A fake Kafka producer with a queue of limited size. `delivery_error`: why it fails to deliver
    records."""

    def __init__(self, queue_size: int = 1000) -> None:
        self.queue_size = queue_size
        self.delivery_error: DeliveryError | None = None
        self.acknowledges = True
        self.raises: Exception | None = None
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.waiting: list[Callable[[Any, object], None]] = []
        self.num_purged = self.num_polls = 0

    def produce(self, topic: str, *, on_delivery: Callable[[Any, object], None], **record: Any) -> None:
        if self.raises:
            raise self.raises
        if len(self.waiting) >= self.queue_size:
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
        callbacks, self.waiting = self.waiting, []
        for on_delivery in callbacks:
            on_delivery(self.delivery_error, None)

    def purge(self) -> None:
        self.num_purged += 1
        self.delivery_error = DeliveryError("purged")
        self.deliver()


class OutputsHarness:
    """`KafkaOutputs` over fake producers. `producers` holds all that were opened, the newest last."""

    def __init__(self, queue_size: int = 1000, is_urgent: bool = False) -> None:
        self.producers: list[Producer] = []
        self.is_urgent = is_urgent
        self.kafka = KafkaOutputs(lambda: self.open(queue_size), "t.", FakeClock(5), lambda: self.is_urgent)  # type: ignore[arg-type]

    def open(self, queue_size: int) -> Producer:
        self.producers.append(Producer(queue_size))
        return self.producers[-1]

    @property
    def producer(self) -> Producer:
        return self.producers[-1]

    def send(self, offset: int = 9) -> None:
        self.kafka.dead_letter(dead_letter(Rejected(("samples", 0), offset, "undecodable", "why", b""), 4))


def test_predictions_and_dead_letters_go_to_their_topics() -> None:
    outputs = OutputsHarness()
    batch = batch_of(samples.sample(1))
    for prediction in encode_predictions(batch, np.zeros((batch.num_candidates, 1), np.float32), 1):
        outputs.kafka.prediction(prediction)
    outputs.send()
    outputs.kafka.flush()
    assert [topic for topic, _ in outputs.producer.sent] == ["t.predictions", "t.dead_letters"]
    assert outputs.producer.sent[0][1]["key"] == (1).to_bytes(8, "little")
    assert outputs.producer.sent[0][1]["partition"] == batch.partition_R[0], (
        "a prediction keeps its sample's partition, so that one auditor reads both"
    )
    assert "partition" not in outputs.producer.sent[1][1]
    assert outputs.kafka.refused() == ""


def test_a_flood_of_dead_letters_logs_one_line_a_minute_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outputs = OutputsHarness()
    for offset in range(300):
        reason = "unknown_type" if offset == 200 else "undecodable"
        outputs.kafka.dead_letter(dead_letter(Rejected(("samples", 0), offset, reason, "why", b""), 4))
    assert caplog.messages == [
        "dead letter: samples-0 offset 0: undecodable (why)",
        "dead letter: samples-0 offset 200: unknown_type (why)",
    ]
    assert len(outputs.producer.sent) == 300


def test_an_unacknowledged_flush_fails_and_a_later_one_may_succeed() -> None:
    outputs = OutputsHarness()
    outputs.send()
    outputs.producer.acknowledges = False
    with pytest.raises(UnavailableError, match="has not acknowledged 1 predictions or dead letters for 10 s"):
        outputs.kafka.flush()
    assert outputs.kafka.refused() == ""
    outputs.producer.acknowledges = True
    outputs.kafka.flush()


def test_a_refusal_is_remembered_until_everyone_is_restored() -> None:
    outputs = OutputsHarness()
    outputs.send()
    outputs.producer.delivery_error = DeliveryError()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="refused a prediction or dead letter: too large"):
            outputs.kafka.flush()
        outputs.producer.delivery_error = None
    assert outputs.kafka.refused() == "Kafka refused a prediction or dead letter: too large"
    outputs.kafka.begin()
    assert outputs.kafka.refused() == ""
    outputs.send()
    outputs.kafka.flush()


def test_a_refusal_replaces_the_producer_and_its_late_reports_are_ignored() -> None:
    outputs = OutputsHarness()
    for offset in range(3):
        outputs.send(offset)
    first = outputs.producer
    first.delivery_error, late_callback = DeliveryError("fatal: out of order"), first.waiting.pop()
    first.deliver()
    outputs.kafka.begin()
    assert outputs.producer is not first and first.num_purged == 1
    late_callback(DeliveryError("late"), None)
    assert outputs.kafka.refused() == ""
    outputs.send()
    outputs.kafka.flush()
    assert len(outputs.producer.sent) == 1
    outputs.kafka.begin()
    assert len(outputs.producers) == 2, "a producer without failures must be kept"


@pytest.mark.parametrize("method", ["poll", "flush"])
def test_a_producer_that_failed_is_replaced_at_the_restore(method: str) -> None:
    """librdkafka raises a fatal error from any call that runs callbacks. Other errors go to the callbacks."""
    outputs = OutputsHarness()
    error = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "desynchronized", fatal=True)
    failing = outputs.producer

    def fail(timeout_s: float = 0) -> int:
        raise KafkaException(error)

    setattr(failing, method, fail)
    outputs.send()
    with pytest.raises(UnavailableError, match=r"out of order sequence number.*stopped uncleanly"):
        outputs.kafka.flush()
    assert outputs.kafka.refused()
    outputs.kafka.begin()
    outputs.send()
    outputs.kafka.flush()
    assert outputs.producer is not failing


def test_a_record_refused_by_the_client_counts_as_refused() -> None:
    outputs = OutputsHarness()
    outputs.producer.raises = KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
    outputs.send()
    assert "MSG_SIZE_TOO_LARGE" in outputs.kafka.refused()


@pytest.mark.parametrize("why", ["restore", "is_urgent"])
def test_waiting_for_queue_space_ends_at_a_restore_or_shutdown(why: str) -> None:
    outputs = OutputsHarness(queue_size=1)
    outputs.send()
    outputs.kafka.interrupt() if why == "restore" else setattr(outputs, "is_urgent", True)
    with pytest.raises(UnavailableError, match=r"topic t\.dead_letters: .*queue is full"):
        outputs.send()
    outputs.is_urgent = False
    outputs.kafka.begin()
    outputs.producer.deliver()
    outputs.send()
    assert len(outputs.producer.sent) == 2


def test_a_flush_gives_up_at_once_during_shutdown() -> None:
    outputs = OutputsHarness(is_urgent=True)
    outputs.send()
    outputs.producer.acknowledges = False
    timeouts_s: list[float] = []
    outputs.producer.flush = lambda timeout_s: timeouts_s.append(timeout_s) or 1  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(UnavailableError, match="has not acknowledged 1"):
        outputs.kafka.flush()
    assert len(timeouts_s) == 1 and timeouts_s[0] < 1

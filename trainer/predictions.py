"""What a worker tells the world beside its updates: a prediction for each request, a dead letter for each bad record."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from confluent_kafka import KafkaError, Producer

from roo import roo_pb2 as pb
from roo import wire
from roo.batch import Batch
from roo.errors import UnavailableError
from roo.ids import unsigned
from runtime import kafka
from runtime.clock import Clock
from runtime.topics import DEAD_LETTERS, PREDICTIONS, name_of
from trainer.batches import Rejected

log = logging.getLogger("roostream.worker")


def predictions_of(batch: Batch, score_BT: np.ndarray, step: int) -> Iterator[pb.Prediction]:
    """One a request, in the order of the batch; `score_BT` are probabilities before the update."""
    ends_R = np.cumsum(batch.num_candidates_R, dtype=np.int64)
    starts_R = ends_R - batch.num_candidates_R
    item_B = batch.item_B.view(np.uint64)
    for r in range(batch.num_requests):
        of = slice(int(starts_R[r]), int(ends_R[r]))
        served_NT = batch.served_score_BT[of]
        yield pb.Prediction(
            sample_id=unsigned(int(batch.sample_id_R[r])),
            time_ms=int(batch.time_ms_R[r]),
            item_ids=item_B[of].tolist(),
            scores=score_BT[of].ravel().tolist(),
            labels=batch.label_BT[of].ravel().tolist(),
            served_scores=[] if np.isnan(served_NT).all() else served_NT.ravel().tolist(),
            step=step,
            partition=int(batch.partition_R[r]),
            offset=int(batch.offset_R[r]),
        )


def dead_letter(rejected: Rejected, max_raw_bytes: int) -> pb.DeadLetter:
    """Why a record was not trained on, with as much of it as fits."""
    topic, partition = rejected.partition
    return pb.DeadLetter(
        reason=rejected.reason,
        topic=topic,
        partition=partition,
        offset=rejected.offset,
        error=rejected.error,
        raw=rejected.raw[:max_raw_bytes],
        raw_bytes=len(rejected.raw),
    )


class Outputs(Protocol):
    """Where both go. The loop's thread alone calls it."""

    def prediction(self, prediction: pb.Prediction) -> None: ...

    def dead_letter(self, letter: pb.DeadLetter) -> None: ...

    def flush(self) -> None:
        """Until everything given is safe; before a cut, so that nothing below its offsets lacks its prediction.

        Raises:
            UnavailableError: it isn't; a later flush may work.
        """


class KafkaOutputs:
    """See `Outputs`. The two topics, through one idempotent producer."""

    def __init__(self, producer: Producer, prefix: str, clock: Clock) -> None:
        self.producer, self.prefix, self.clock = producer, prefix, clock
        self._lock = threading.Lock()
        self._refused = ""

    def prediction(self, prediction: pb.Prediction) -> None:
        self._send(PREDICTIONS, prediction.sample_id.to_bytes(8, "little"), wire.encode(wire.PREDICTION, prediction))

    def dead_letter(self, letter: pb.DeadLetter) -> None:
        log.warning(
            "%s-%d offset %d is dead: %s (%s)", letter.topic, letter.partition, letter.offset, letter.reason, letter.error
        )
        key = letter.offset.to_bytes(8, "little", signed=True)
        self._send(DEAD_LETTERS, key, wire.encode(wire.DEAD_LETTER, letter))

    def flush(self, timeout_s: float = 10.0) -> None:
        """Until Kafka has acknowledged everything.

        Raises:
            UnavailableError: it hasn't in time, or refused a record since the last flush; the rest stays queued.
        """
        left = self.producer.flush(timeout_s)
        with self._lock:
            refused, self._refused = self._refused, ""
        if refused:
            raise UnavailableError(f"Kafka refused a record: {refused}")
        if left:
            raise UnavailableError(f"Kafka has not acknowledged {left} predictions or dead letters for {timeout_s:g} s")

    def _send(self, topic: str, key: bytes, value: bytes) -> None:
        time_ms = self.clock.now_ms()
        kafka.send(
            self.producer, name_of(self.prefix, topic), key=key, value=value, timestamp_ms=time_ms, on_delivery=self._delivered
        )

    def _delivered(self, error: KafkaError | None, message: object) -> None:
        if error is not None:
            with self._lock:
                self._refused = error.str()

"""A worker's outputs besides its updates: a prediction for each request, and a dead letter for each bad
record."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Producer

from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import DEAD_LETTERS, PREDICTIONS, name_of
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.schema.ids import unsigned
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.proto_fields import encode_fields
from trainer.chunks import Rejected
from trainer.monitoring.progressive_metrics import sampling_weights
from trainer.selection.decision import SelectionWeights, UnscoredRequests

log = logging.getLogger("roostream.worker")

_FLUSH_S = 0.25  # a flush checks this often whether it should give up


class Prediction(NamedTuple):
    """Scores of one request from before its labels were used."""

    sample_id: int  # uint64
    time_ms: int  # of the request
    partition: int  # number of the partition that its sample is in
    value: bytes  # the encoded record: a `Prediction` message


def encode_predictions(
    batch: Batch,
    score_BT: np.ndarray,
    step: int,
    disposition_R: np.ndarray | None = None,
    choice: SelectionWeights | None = None,
    row_M: np.ndarray | None = None,
) -> Iterator[Prediction]:
    """One prediction per request, in the order of the batch, encoded straight from arrays without building
    messages.

    `score_BT`: probabilities before the update; [B, 0] for unscored requests. `disposition_R`: uint8, what
    happens to each request (selection/decision.py); None = trained. `choice`: their weights; None = 1.
    `row_M`: int64, only these requests. A label that the sample does not have (weight 0) is NaN."""
    tasks, label_bytes = 4 * score_BT.shape[1], 4 * batch.label_BT.shape[1]
    id_R, time_R = batch.sample_id_R.view(np.uint64).tolist(), batch.time_ms_R.tolist()
    partition_R = batch.partition_R.tolist()
    heads, tails = _heads(batch), _tails(batch, step, disposition_R, choice)
    ends_R = np.cumsum(batch.num_candidates_R, dtype=np.int64).tolist()
    starts_R = [0, *ends_R[:-1]]
    has_served_B = ~np.isnan(batch.served_score_BT).all(axis=1)
    num_served_R = np.bincount(batch.request_index_B, has_served_B, batch.num_requests).tolist()
    label_BT = np.where(batch.weight_BT > 0, batch.label_BT, np.float32(np.nan))
    item, label, served = (x.tobytes() for x in (batch.item_B, label_BT, batch.served_score_BT))
    score = score_BT.astype("<f4", copy=False).tobytes()
    for r in range(batch.num_requests) if row_M is None else row_M.tolist():
        start, end = starts_R[r], ends_R[r]
        record = [heads[r]]
        if end > start:
            record += (_field_header(_ITEM_IDS, 8 * (end - start)), item[8 * start : 8 * end])
            if tasks:
                record += (_field_header(_SCORES, tasks * (end - start)), score[tasks * start : tasks * end])
            first, last = label_bytes * start, label_bytes * end
            record += (_field_header(_LABELS, last - first), label[first:last])
            if num_served_R[r]:
                record += (_field_header(_SERVED_SCORES, last - first), served[first:last])
        record.append(tails[r])
        yield Prediction(id_R[r], time_R[r], partition_R[r], b"".join(record))


def encode_unscored(unscored: UnscoredRequests, step: int) -> Iterator[Prediction]:
    """As `encode_predictions`, without scores."""
    batch = unscored.batch
    return encode_predictions(
        batch, np.zeros((batch.num_candidates, 0), np.float32), step, unscored.reason_R, row_M=unscored.row_M
    )


_ITEM_IDS, _SCORES = pb.Prediction.ITEM_IDS_FIELD_NUMBER, pb.Prediction.SCORES_FIELD_NUMBER
_LABELS, _SERVED_SCORES = pb.Prediction.LABELS_FIELD_NUMBER, pb.Prediction.SERVED_SCORES_FIELD_NUMBER
_FIXED64 = 1  # protobuf's wire type
_HEAD = np.dtype([("of_id", "u1"), ("id", "<u8"), ("of_time", "u1"), ("time", "<i8")])
_OFFSET = np.dtype([("of", "u1"), ("offset", "<i8")])


@functools.lru_cache(1 << 12)
def _field_header(number: int, size: int) -> bytes:
    """Tag and length of a column with `size` bytes."""
    return encode_fields([(number, bytes(size))])[:-size]


def _heads(batch: Batch) -> list[bytes]:
    """Bytes before the columns of each record."""
    head_R = np.empty(batch.num_requests, _HEAD)
    head_R["of_id"] = pb.Prediction.SAMPLE_ID_FIELD_NUMBER << 3 | _FIXED64
    head_R["of_time"] = pb.Prediction.TIME_MS_FIELD_NUMBER << 3 | _FIXED64
    head_R["id"], head_R["time"] = batch.sample_id_R.view(np.uint64), batch.time_ms_R
    frame = wire.frame(wire.PREDICTION, b"")
    heads = [frame + head for head in _cut(head_R)]
    has_zero_R = (batch.sample_id_R == 0) | (batch.time_ms_R == 0)  # protobuf does not write zeros
    for r in np.flatnonzero(has_zero_R).tolist():
        head = pb.Prediction(sample_id=unsigned(int(batch.sample_id_R[r])), time_ms=int(batch.time_ms_R[r]))
        heads[r] = wire.encode(wire.PREDICTION, head)
    return heads


def _tails(
    batch: Batch, step: int, disposition_R: np.ndarray | None, choice: SelectionWeights | None
) -> list[bytes]:
    """Bytes after the columns. Apart from the offset, few are different."""
    offset_R = np.empty(batch.num_requests, _OFFSET)
    offset_R["of"], offset_R["offset"] = pb.Prediction.OFFSET_FIELD_NUMBER << 3 | _FIXED64, batch.offset_R
    front = {p: _bytes(step=step, partition=p) for p in np.unique(batch.partition_R).tolist()}
    columns = zip(batch.partition_R.tolist(), _cut(offset_R), batch.offset_R.tolist(), strict=True)
    tails = [front[p] + (at if offset else b"") for p, at, offset in columns]
    metric_weight_R = sampling_weights(batch)
    if choice is None and (metric_weight_R == 1).all() and (disposition_R is None or not disposition_R.any()):
        return tails
    train_weight_R = np.ones_like(metric_weight_R) if choice is None else choice.train_weight_R
    if choice is not None:
        metric_weight_R = metric_weight_R * choice.metric_weight_R
    if disposition_R is None:
        disposition_R = np.zeros(batch.num_requests, np.uint8)
    weights = (train_weight_R, metric_weight_R)
    values = list(
        zip(disposition_R.tolist(), *(np.where(w_R == 1, 0, w_R).tolist() for w_R in weights), strict=True)
    )
    names = ("disposition", "train_weight", "metric_weight")
    encoded = {value: _bytes(**dict(zip(names, value, strict=True))) for value in set(values)}
    return [tail + encoded[value] for tail, value in zip(tails, values, strict=True)]


def _cut(record_R: np.ndarray) -> Iterator[bytes]:
    data, size = record_R.tobytes(), record_R.itemsize
    return (data[at : at + size] for at in range(0, len(data), size))


def _bytes(**fields: Any) -> bytes:
    return pb.Prediction(**fields).SerializeToString(deterministic=True)


def dead_letter(rejected: Rejected, max_raw_bytes: int) -> pb.DeadLetter:
    """Why a record was not trained, with as much of the record as fits."""
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
    """Where predictions and dead letters go. Called by the loop's thread only."""

    def prediction(self, prediction: Prediction) -> None: ...

    def dead_letter(self, letter: pb.DeadLetter) -> None: ...


class DurableOutputs(Outputs, Protocol):
    """Outputs that can be flushed, so that every record below a committed offset has its prediction or dead
    letter."""

    def begin(self) -> None:
        """Everyone was restored: forget earlier outputs and refusals. The outputs will be sent again."""

    def refused(self) -> str:
        """Why an output since `begin` will never arrive; "" if none was refused. Flushing again does not
        help."""

    def flush(self) -> None:
        """Wait until all outputs are durable, before a cut. Raises UnavailableError: they are not. A later
        flush may work, unless an output was `refused`."""

    def interrupt(self) -> None:
        """Until `begin`, raise UnavailableError instead of waiting for queue space. Any thread."""


class KafkaOutputs:
    """`DurableOutputs` to the two Kafka topics through one idempotent producer. After a refusal it is
    replaced, because a producer whose order is broken accepts nothing more.

    A prediction goes to the partition with the number of its sample's, so that one auditor reads both."""

    def __init__(
        self,
        open_producer: Callable[[], Producer],
        prefix: str,
        clock: Clock,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_urgent`: the process is ending and cannot wait any longer."""
        self.open_producer, self.prefix, self.clock, self.is_urgent = open_producer, prefix, clock, is_urgent
        self._log_rate_limit = LogRateLimit(clock.monotonic_s)
        self._producer = open_producer()
        self._refusals: list[str] = []  # a new list at each `begin`, so that late reports are ignored
        self._interrupted = threading.Event()

    def begin(self) -> None:
        if self._refusals:
            self._producer.purge()
            self._producer = self.open_producer()
        self._refusals = []
        self._interrupted.clear()

    def refused(self) -> str:
        return f"Kafka refused a prediction or dead letter: {self._refusals[0]}" if self._refusals else ""

    def interrupt(self) -> None:
        self._interrupted.set()

    def prediction(self, prediction: Prediction) -> None:
        key = prediction.sample_id.to_bytes(8, "little")
        self._send(PREDICTIONS, key, prediction.value, prediction.partition)

    def dead_letter(self, letter: pb.DeadLetter) -> None:
        where = f"{letter.topic}-{letter.partition} offset {letter.offset}"
        self._log_rate_limit.warning(
            log, letter.reason, "dead letter: %s: %s (%s)", where, letter.reason, letter.error
        )
        key = letter.offset.to_bytes(8, "little", signed=True)
        self._send(DEAD_LETTERS, key, wire.encode(wire.DEAD_LETTER, letter))

    def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until Kafka has acknowledged everything. Raises UnavailableError: not in time, or Kafka
        refused a record; the rest stays queued."""
        try:
            for _ in range(round(timeout_s / _FLUSH_S)):
                left = clients.flush(self._producer, _FLUSH_S)
                if not left or self._refusals or self._gives_up():
                    break
        except clients.ProducerFailedError as error:
            self._refusals.append(str(error))
        if self._refusals:
            raise UnavailableError(self.refused())
        if left:
            raise UnavailableError(
                f"Kafka has not acknowledged {left} predictions or dead letters for {timeout_s:g} s"
            )

    def _send(self, topic: str, key: bytes, value: bytes, partition: int = -1) -> None:
        refusals = self._refusals

        def delivered(error: KafkaError | None, message: object) -> None:
            if error is not None and not refusals:
                refusals.append(error.str())

        try:
            clients.send(
                self._producer,
                name_of(self.prefix, topic),
                key=key,
                value=value,
                timestamp_ms=self.clock.now_ms(),
                partition=partition,
                on_delivery=delivered,
                give_up=self._gives_up,
            )
        except (KafkaException, clients.ProducerFailedError) as error:
            refusals.append(str(error.args[0]))

    def _gives_up(self) -> bool:
        return self._interrupted.is_set() or self.is_urgent()

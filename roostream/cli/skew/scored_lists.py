"""Read lists with their served scores: samples and impressions from a topic, from segments of a feature log,
or a saved batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from roostream.errors import ConfigError, RoostreamError, UnavailableError, reason_of
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import IMPRESSIONS, SAMPLES, all_partitions
from roostream.schema.ids import NO_KEY, sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from serving.feature_log.segment import LogSegment
from trainer import saved_batch

_POLL_S, _SILENCE_S = 0.5, 10.0


class LoggedList(NamedTuple):
    """A logged list with its features and served scores."""

    request_id: str
    version: str  # "<incarnation>-<seq>"; "" = nothing scored it
    time_ms: int
    fingerprint: int  # of its schema
    num_pages: int
    served: bool  # whether it has scores
    record: Record  # as a sample
    where: str


def of_records(records: Iterable[Record], where: str) -> Iterator[LoggedList]:
    """The lists among the records: samples and impressions. Other and unreadable records are ignored."""
    for record in records:
        try:
            kind = wire.kind_of(record.value)
            place = f"{where} {record.topic}-{record.partition} offset {record.offset}"
            if kind == wire.SAMPLE and record.topic == SAMPLES:
                yield _of(pb.Sample.FromString(record.value[2:]), record, place)
            elif kind == wire.IMPRESSION:
                message = pb.Impression.FromString(record.value[2:])
                num_tasks = len(message.scores) // max(len(message.item_ids), 1)
                sample = sample_of(record, message, num_tasks)
                yield _of(
                    sample, record._replace(topic=SAMPLES, value=wire.encode(wire.SAMPLE, sample)), place
                )
        except (RoostreamError, DecodeError):
            continue


def sample_of(record: Record, message: pb.Impression, num_tasks: int) -> pb.Sample:
    """The sample that the joiner would create from an impression without engagements."""
    num_rows = len(message.item_ids)
    sample = pb.Sample(
        header=message.header,
        sample_id=sample_id(record.key or NO_KEY, message.header.request_id),
        close_ms=record.timestamp_ms,
        item_ids=message.item_ids,
        parts=[pb.Part(nro=message.nro, num_rows=num_rows)] if num_rows else [],
        labels=[0.0] * (num_rows * num_tasks),
        scores=message.scores,
        positions=message.positions,
    )
    if message.HasField("ro"):
        sample.ro = message.ro
    return sample


def of_file(path: Path) -> list[LoggedList]:
    """The lists in a segment of serving's feature log, or in a batch saved by a worker.

    Raises:
        ConfigError: the file is neither.
    """
    try:
        data = path.read_bytes()
        segment = LogSegment.open(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected a segment of a feature log or a saved batch, got {reason_of(error)}; "
            "choose another file"
        ) from None
    if segment is None:
        return list(of_records(saved_batch.decode(data, str(path)).records, str(path)))
    try:
        found = (f.record for f in segment.scan(segment.start))
        logged = [
            Record(r.topic, r.partition, -1, r.timestamp_ms, r.key, r.value) for r in found if r is not None
        ]
    finally:
        segment.close()
    return list(of_records((r for r in logged if r.topic == IMPRESSIONS), str(path)))


def of_topic(bootstrap: str, prefix: str, num_partitions: int, max_lists: int) -> list[LoggedList]:
    """`newest` of the samples of a stack. Raises UnavailableError: Kafka does not answer."""
    options = ConsumerOptions(partitions=all_partitions((SAMPLES,), num_partitions), prefix=prefix)
    reader = KafkaConsumer.open(Broker(bootstrap), f"{prefix}inspect", options)
    try:
        return newest(reader, max_lists, bootstrap)
    finally:
        reader.close()


def newest(reader: RecordConsumer, max_lists: int, where: str) -> list[LoggedList]:
    """The newest lists, oldest first, among the newest `max_lists` records of each partition at the time of
    the call. Raises UnavailableError: Kafka stops answering before all of them are read."""
    ends = reader.end_offsets()
    reader.seek({partition: max(end - max_lists, 0) for partition, end in ends.items()})
    records: list[Record] = []
    silent_s = 0.0
    while not reader.at_end() and silent_s < _SILENCE_S:
        found = reader.poll(max_lists, _POLL_S)
        silent_s = 0.0 if found else silent_s + _POLL_S
        records += [r for r in found if r.offset < ends[r.topic, r.partition]]
    if not reader.at_end():
        raise UnavailableError(f"Kafka at {where} has not answered for {_SILENCE_S:.0f} s; run this again")
    return sorted(of_records(records, where), key=lambda logged: logged.time_ms)[-max_lists:]


def _of(sample: pb.Sample, record: Record, where: str) -> LoggedList:
    header = sample.header
    pages = len(sample.parts)
    served = len(sample.scores) > 0
    return LoggedList(
        header.request_id, header.model_version, header.time_ms, header.schema, pages, served, record, where
    )

"""Scored lists as they were logged: samples and impressions, from a topic, a feature log's segments, or a saved batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from roostream.errors import ConfigError, RoostreamError
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
    """A list with its features and the scores that it was served with."""

    request_id: str
    version: str  # "<incarnation>-<seq>"; "" = nothing scored it
    time_ms: int
    fingerprint: int  # of its schema
    num_pages: int
    served: bool  # scores are there
    record: Record  # as a sample
    where: str


def of_records(records: Iterable[Record], where: str) -> Iterator[LoggedList]:
    """Samples and impressions among them; everything else is passed over, and so is what can't be read."""
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
    """What the joiner would make of an impression alone, with nothing engaged."""
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
    """Of a segment of a serving process' feature log, or of a batch that a worker saved.

    Raises:
        ConfigError: it is neither.
    """
    try:
        data = path.read_bytes()
        segment = LogSegment.open(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected a segment of a feature log or a saved batch, got {error}; name a file"
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


def of_topic(bootstrap: str, prefix: str, num_partitions: int, most: int) -> list[LoggedList]:
    """As `newest`, of the samples of a stack. Raises UnavailableError: Kafka doesn't answer."""
    reading = ConsumerOptions(partitions=all_partitions((SAMPLES,), num_partitions), prefix=prefix)
    reader = KafkaConsumer.open(Broker(bootstrap), f"{prefix}inspect", reading)
    try:
        return newest(reader, most, bootstrap)
    finally:
        reader.close()


def newest(reader: RecordConsumer, most: int, where: str) -> list[LoggedList]:
    """The newest `most` lists of the newest records of each partition, oldest first; those that came while it read are left."""
    ends = reader.end_offsets()
    reader.seek({partition: max(end - most, 0) for partition, end in ends.items()})
    records: list[Record] = []
    silent_s = 0.0
    while not reader.at_end() and silent_s < _SILENCE_S:
        found = reader.poll(most, _POLL_S)
        silent_s = 0.0 if found else silent_s + _POLL_S
        records += [r for r in found if r.offset < ends[r.topic, r.partition]]
    return sorted(of_records(records, where), key=lambda logged: logged.time_ms)[-most:]


def _of(sample: pb.Sample, record: Record, where: str) -> LoggedList:
    header = sample.header
    pages = len(sample.parts)
    served = len(sample.scores) > 0
    return LoggedList(
        header.request_id, header.model_version, header.time_ms, header.schema, pages, served, record, where
    )

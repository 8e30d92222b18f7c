"""The Flink job; `joiner/submit.py` has Flink's client run `main` with `--settings FILE`.

    impressions ─► deserializer ─► event time ─┐
                                               ├─► drop heartbeats ─► by key ─► watermark ─► JoinFunction ─► samples, corrections,
    engagements ─► deserializer ─► event time ─┘                                                             dead_letters

Uids, the execution mode, the state's type and the maximal parallelism stay as they are: savepoints depend on them. The join's uid
carries the version of its state, so that Flink refuses a savepoint of another version before a record is read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pyflink.common import Configuration, Types, WatermarkStrategy
from pyflink.datastream import DataStream, KeyedStream, StreamExecutionEnvironment
from pyflink.datastream.connectors import DeliveryGuarantee
from pyflink.datastream.connectors.kafka import KafkaOffsetsInitializer, KafkaSink, KafkaSource
from pyflink.java_gateway import get_gateway

from joiner.config import JoinerConfig
from joiner.entries import VERSION
from joiner.envelope import OUTPUTS
from joiner.operator import JoinFunction
from roostream.runtime.flink_rest import JOB_NAME
from roostream.runtime.kafka.topics import EVENTS, name_of
from roostream.schema.limits import MAX_MESSAGE_BYTES
from roostream.schema.settings import from_dict

MAX_PARALLELISM = 128
UID = f"join-{VERSION}"
_ENVELOPE = Types.PRIMITIVE_ARRAY(Types.BYTE())
_ALIGN_EVERY_MS = 100


def build(config: JoinerConfig) -> StreamExecutionEnvironment:
    """The environment with the whole job in it."""
    env = _environment(config)
    impressions, engagements = (_read(env, config, topic) for topic in range(len(EVENTS)))
    events = _by_key(_events(impressions.union(engagements)))
    joined = events.process(JoinFunction(config), output_type=_ENVELOPE)
    joined.name("join").uid(UID).sink_to(_sink(config)).name("write").uid("write")
    return env


def _environment(config: JoinerConfig) -> StreamExecutionEnvironment:
    settings = Configuration()
    settings.set_string("python.execution-mode", "thread")
    settings.set_string("state.backend.type", "hashmap")
    settings.set_string("execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION")
    settings.set_string("execution.checkpointing.min-pause", f"{config.checkpoint_interval_ms // 2} ms")
    if config.restart_attempts:
        settings.set_string("restart-strategy.type", "fixed-delay")
        settings.set_string("restart-strategy.fixed-delay.attempts", str(config.restart_attempts))
        settings.set_string("restart-strategy.fixed-delay.delay", "1 s")
    env = StreamExecutionEnvironment.get_execution_environment(settings)
    env.set_parallelism(config.parallelism).set_max_parallelism(MAX_PARALLELISM)
    env.enable_checkpointing(config.checkpoint_interval_ms)
    env.set_buffer_timeout(10)
    env.get_config().set_auto_watermark_interval(50)
    return env


def _read(env: StreamExecutionEnvironment, config: JoinerConfig, topic: int) -> DataStream:
    """One topic. Event time is taken per partition (joiner/local_watermark.py says how), and the slowest one's counts."""
    name = name_of(config.prefix, EVENTS[topic])
    builder = (
        KafkaSource.builder()
        .set_bootstrap_servers(config.bootstrap)
        .set_topics(name)
        .set_group_id(f"{config.prefix}{JOB_NAME}")
        .set_client_id_prefix(f"{JOB_NAME}-{name}")
        .set_starting_offsets(KafkaOffsetsInitializer.earliest())
        .set_property("partition.discovery.interval.ms", "-1")
        .set_property("isolation.level", "read_committed")
        .set_property("fetch.max.wait.ms", "50")
    )
    for key, value in config.kafka_security.java().items():
        builder.set_property(key, value)
    builder._j_builder.setDeserializer(get_gateway().jvm.roostream.RecordDeserializer(topic))
    java = get_gateway().jvm
    strategy = java.roostream.EventTime(config.lateness_ms, config.drift_ms, config.producer_timeout_ms)
    most, every = (java.java.time.Duration.ofMillis(ms) for ms in (config.drift_ms, _ALIGN_EVERY_MS))
    strategy = strategy.withWatermarkAlignment(JOB_NAME, most, every)
    if config.idleness_ms and not config.replay:
        strategy = strategy.withIdleness(java.java.time.Duration.ofMillis(config.idleness_ms))
    return env.from_source(builder.build(), WatermarkStrategy(strategy), name).uid(f"read-{EVENTS[topic]}")


def _events(records: DataStream) -> DataStream:
    """Heartbeats have to leave the deserializer, so that they move the watermark; here they end."""
    return (
        DataStream(records._j_data_stream.filter(get_gateway().jvm.roostream.EventFilter()))
        .name("events")
        .uid("events")
    )


def _by_key(events: DataStream) -> KeyedStream:
    """By field 0, which the deserializer made of the record's key. `DataStream.key_by` would add a second Python operator."""
    java = get_gateway().jvm
    selector, key_type = java.KeyByKeySelector(), Types.ROW([Types.LONG()]).get_java_type_info()
    keyed = events._j_data_stream.keyBy(selector, key_type)
    kept = keyed.transform("watermark", keyed.getType(), java.roostream.WatermarkKeeper()).uid("watermark")
    utils = java.org.apache.flink.streaming.api.datastream.DataStreamUtils
    return KeyedStream(utils.reinterpretAsKeyedStream(kept, selector, key_type), _ENVELOPE, events)


def _sink(config: JoinerConfig) -> KafkaSink:
    builder = (
        KafkaSink.builder()
        .set_bootstrap_servers(config.bootstrap)
        .set_delivery_guarantee(DeliveryGuarantee[config.delivery.upper()])
        .set_property("linger.ms", "5")
        .set_property("compression.type", "zstd")
        .set_property("max.request.size", str(MAX_MESSAGE_BYTES))
    )
    if config.delivery == "exactly_once":
        builder.set_transactional_id_prefix(f"{config.prefix}{JOB_NAME}")
        builder.set_property("transaction.timeout.ms", str(config.transaction_timeout_ms))
    for key, value in config.kafka_security.java().items():
        builder.set_property(key, value)
    topics = ",".join(name_of(config.prefix, topic) for topic in OUTPUTS)
    builder._j_builder.setRecordSerializer(get_gateway().jvm.roostream.OutputSerializer(topics))
    return builder.build()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Submit the joiner's job to the cluster of Flink's configuration."
    )
    parser.add_argument("--settings", required=True, help="file with JoinerConfig as JSON")
    settings = json.loads(Path(parser.parse_args().settings).read_text(encoding="utf-8"))
    build(from_dict(JoinerConfig, settings)).execute(JOB_NAME)

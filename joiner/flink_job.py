"""The Flink job of the joiner, and its two entry points: Flink's client (`main`) and an application cluster
(`application_main`).

    impressions ─► deserializer ─► event time ─► drop heartbeats ─┐
                                                                  ├─► by key ─► watermark ─► join ─► outputs
    engagements ─► deserializer ─► event time ─► drop heartbeats ─┘

Savepoints depend on the uids, the execution mode, the state's type and the maximal parallelism, so these must
not change. The join's uid contains the version of its state: Flink refuses a savepoint of another version
before it reads a record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyflink.common import Configuration, Types, WatermarkStrategy
from pyflink.datastream import (
    DataStream,
    KeyedProcessFunction,
    KeyedStream,
    RuntimeContext,
    StreamExecutionEnvironment,
    TimerService,
)
from pyflink.datastream.connectors import DeliveryGuarantee
from pyflink.datastream.connectors.kafka import KafkaOffsetsInitializer, KafkaSink, KafkaSource
from pyflink.datastream.state import MapStateDescriptor
from pyflink.java_gateway import get_gateway
from pyflink.metrics import Counter

from joiner.config import JoinerConfig
from joiner.envelope import pack, unpack
from joiner.event_decoder import EventDecoder
from joiner.join import Join, StepResult
from joiner.keyed_join import KeyedJoin
from joiner.outputs import OUTPUTS, Output
from joiner.state import GONE, VERSION, Engagement, Impression
from roostream.errors import RoostreamError, UnavailableError
from roostream.runtime.flink_rest import JOB_NAME, RULES_KEY, FlinkRest, output_counter
from roostream.runtime.kafka.clients import wait_for_topics
from roostream.runtime.kafka.topics import EVENTS, name_of
from roostream.runtime.program import tune_garbage_collector
from roostream.runtime.store_identity import open_checkpoint_store
from roostream.schema.limits import MAX_MESSAGE_BYTES
from roostream.schema.registry import open_registry, register
from roostream.schema.schema_file import load_schema
from roostream.schema.settings import from_dict, load, setting_error

MAX_PARALLELISM = 128
UID = f"join-{VERSION}"
_ENVELOPE = Types.PRIMITIVE_ARRAY(Types.BYTE())
_ALIGN_EVERY_MS = 100
_UNALIGNED = "execution.checkpointing.unaligned.enabled"
_ANY_NUMBER = 2**31 - 1
# PyFlink has no public way to its Java objects: they are private attributes, marked SLF001 below.


class JoinFunction(KeyedProcessFunction):  # type: ignore[misc]
    """The operator around `Join`, in thread mode (inside the JVM). State is one map, name → bytes
    (`KeyedJoin`).

    Key: the record's 8 key bytes as an integer. Input and output: envelopes (joiner/envelope.py).
    """

    def __init__(self, config: JoinerConfig) -> None:
        self.config = config

    def open(self, runtime_context: RuntimeContext) -> None:
        tune_garbage_collector()
        schema = load_schema(self.config.schema)
        registry = open_registry(open_checkpoint_store(self.config.store), own=schema)
        self.decoder = EventDecoder(registry, schema.limits)
        # In thread mode only pickled bytes come back as bytes. The values are our own versioned encoding.
        descriptor = MapStateDescriptor("entries", Types.STRING(), Types.PICKLED_BYTE_ARRAY())
        join = Join(self.config.rules, registry, schema.limits)
        self.join = KeyedJoin(join, runtime_context.get_map_state(descriptor))
        self.metrics, self.counters = runtime_context.get_metrics_group(), dict[str, Counter]()
        from pemja import findClass  # exists only inside the JVM

        self.request_counts = findClass("roostream.RequestCounts")

    def process_element(self, value: bytes, ctx: KeyedProcessFunction.Context) -> Iterator[bytes]:
        record = unpack(value)
        event = self.decoder.decode(record)
        if isinstance(event, Output):
            self._count_output(event)  # a dead letter
            return iter((pack(event),))
        if not isinstance(event, (Impression, Engagement)):
            return iter(())
        assert record.key is not None
        timers = ctx.timer_service()
        step = self.join.apply(record.key, event, timers.current_watermark())
        return self._finish(step, timers)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[bytes]:
        timers = ctx.timer_service()
        key = (ctx.get_current_key() & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
        step = self.join.advance(key, timestamp, timers.current_watermark())
        return self._finish(step, timers)

    def _finish(self, step: StepResult, timers: TimerService) -> Iterator[bytes]:
        """Set the timers, count, return the outputs."""
        for due_ms in step.timers_ms:
            timers.register_event_time_timer(due_ms)
        for output in step.outputs:
            self._count_output(output)
        for before, after in step.phase_changes:
            if before != GONE:
                self.request_counts.add(before, -1)
            if after != GONE:
                self.request_counts.add(after, 1)
        return map(pack, step.outputs)

    def _count_output(self, output: Output) -> None:
        name = output_counter(output.topic, output.reason)
        counter = self.counters.get(name)
        if counter is None:
            counter = self.counters[name] = self.metrics.counter(name)
        counter.inc()


def build(config: JoinerConfig, topics: Mapping[str, str]) -> StreamExecutionEnvironment:
    """An execution environment that contains the complete job. `topics`: full name of each event topic → the
    broker's topic id."""
    env = _environment(config)
    impressions, engagements = (_source(env, config, topic) for topic in range(len(EVENTS)))
    events = _by_key(config, impressions.union(engagements), topics)
    joined = events.process(JoinFunction(config), output_type=_ENVELOPE)
    joined.name("join").uid(UID).sink_to(_sink(config)).name("write").uid("write")
    return env


def _environment(config: JoinerConfig) -> StreamExecutionEnvironment:
    """Raises ConfigError if the cluster enables unaligned checkpoints.

    After a restore `WatermarkKeeper` continues from the newest watermark of all subtasks. At aligned barriers
    these are equal. Unaligned ones store records in flight, which would then be behind the watermark.
    """
    cluster = get_gateway().jvm.org.apache.flink.configuration.GlobalConfiguration.loadConfiguration()
    if str(cluster.toMap().get(_UNALIGNED)).lower() == "true":
        reason = "after a restore the join would take records of unaligned checkpoints for late ones"
        raise setting_error(f"{_UNALIGNED} (configuration of Flink)", "false", True, reason)
    settings = Configuration()
    settings.set_string(_UNALIGNED, "false")
    settings.set_string("python.execution-mode", "thread")
    # `EventTimeKeeper` and `RequestCounts` share the thread of their neighbours in the chain.
    settings.set_string("pipeline.operator-chaining.enabled", "true")
    settings.set_string("state.backend.type", "rocksdb" if config.state_backend == "rocksdb" else "hashmap")
    if config.state_backend == "rocksdb":
        settings.set_string("execution.checkpointing.incremental", "true")
        settings.set_string("execution.checkpointing.local-backup.enabled", "true")
        settings.set_string("execution.state-recovery.from-local", "true")
    # A store that is full or away fails checkpoints, not the job; an alert watches the age of the newest one.
    settings.set_string("execution.checkpointing.tolerable-failed-checkpoints", str(_ANY_NUMBER))
    settings.set_string("execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION")
    settings.set_string("execution.checkpointing.min-pause", f"{config.checkpoint_interval_ms // 2} ms")
    if config.restart_attempts:
        settings.set_string("restart-strategy.type", "fixed-delay")
        settings.set_string("restart-strategy.fixed-delay.attempts", str(config.restart_attempts))
        settings.set_string("restart-strategy.fixed-delay.delay", "1 s")
    env = StreamExecutionEnvironment.get_execution_environment(settings)
    env.set_parallelism(config.parallelism).set_max_parallelism(MAX_PARALLELISM)
    env.enable_checkpointing(config.checkpoint_interval_ms)
    env.get_config().set_global_job_parameters({RULES_KEY: config.rules.text})
    env.set_buffer_timeout(10)
    env.get_config().set_auto_watermark_interval(50)
    return env


def _source(env: StreamExecutionEnvironment, config: JoinerConfig, topic: int) -> DataStream:
    """The events of one topic. Event time is tracked a partition at a time, by the rules of
    `joiner.local_engine.PartitionTime`.

    Heartbeats must leave the deserializer to advance the watermark. `EventTimeKeeper` drops them; it must be
    in the chain of its source, so each source has one.
    """
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
        # The records of a poll are on the heap at once, and a record may have a megabyte.
        .set_property("max.poll.records", "100")
    )
    for key, value in config.kafka_security.java().items():
        builder.set_property(key, value)
    java = get_gateway().jvm
    builder._j_builder.setDeserializer(java.roostream.RecordDeserializer(topic))  # noqa: SLF001
    strategy = java.roostream.EventTime(config.lateness_ms, config.max_drift_ms, config.producer_timeout_ms)
    max_drift, update_every = (
        java.java.time.Duration.ofMillis(ms) for ms in (config.max_drift_ms, _ALIGN_EVERY_MS)
    )
    strategy = strategy.withWatermarkAlignment(JOB_NAME, max_drift, update_every)
    # A source subtask without a partition would hold back the watermark of the whole job for ever.
    parallelism = min(config.parallelism, config.partitions)
    records = env.from_source(builder.build(), WatermarkStrategy(strategy), name)
    records.uid(f"read-{EVENTS[topic]}").set_parallelism(parallelism)
    stream = records._j_data_stream  # noqa: SLF001
    events = stream.transform("event-time", stream.getType(), java.roostream.EventTimeKeeper())
    return DataStream(events).uid(f"event-time-{EVENTS[topic]}").set_parallelism(parallelism)


def _by_key(config: JoinerConfig, events: DataStream, topics: Mapping[str, str]) -> KeyedStream:
    """Key by field 0, the record's key. `DataStream.key_by` would add a second Python operator."""
    java = get_gateway().jvm
    selector, key_type = java.KeyByKeySelector(), Types.ROW([Types.LONG()]).get_java_type_info()
    keyed = events._j_data_stream.keyBy(selector, key_type)  # noqa: SLF001
    keeper = java.roostream.WatermarkKeeper(config.rules.text, json.dumps(topics, sort_keys=True))
    kept = keyed.transform("watermark", keyed.getType(), keeper).uid("watermark")
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
    builder._j_builder.setRecordSerializer(get_gateway().jvm.roostream.OutputSerializer(topics))  # noqa: SLF001
    return builder.build()


def main() -> None:
    """Entry point for Flink's client, started by `joiner.flink_client.submit`."""
    parser = argparse.ArgumentParser(
        description="Submit the joiner's job to the cluster of Flink's configuration."
    )
    parser.add_argument("--settings", required=True, help="file with JoinerConfig as JSON")
    settings = json.loads(Path(parser.parse_args().settings).read_text(encoding="utf-8"))
    config = from_dict(JoinerConfig, settings)
    job = build(config, _event_topics(config))
    # The client and the job took seconds to start, in which another joiner may have submitted its job.
    if running := FlinkRest(config.flink).live_job():
        raise UnavailableError(
            f"another joiner has submitted job {running['jid']}; restart to watch that one"
        )
    job.execute(JOB_NAME)


def _event_topics(config: JoinerConfig) -> dict[str, str]:
    return wait_for_topics(config.broker, config.prefix, EVENTS, config.partitions)


def application_config(arguments: list[str]) -> JoinerConfig:
    """Settings of `application_main`. Raises ConfigError as `roostream.schema.settings.load`, or if a
    required key is empty."""
    parser = argparse.ArgumentParser(
        description="The joiner's job, in the cluster whose job manager runs this."
    )
    parser.add_argument("--config", required=True, help="TOML file of `roostream joiner`")
    config = load(JoinerConfig, parser.parse_args(arguments).config, program="joiner")
    config.require("bootstrap", "schema", "store")
    return config


def application_main() -> None:
    """Entry point inside a job manager (application mode): register the schema, wait for the topics, submit
    the job, and end.

    It must not wait for the job: a job manager that is stopped ends the waiting process first, takes that for
    a failure of the application, cancels the job, and deletes what it would be recovered from (Flink 2.3).

    Ends with one line and code 2 on an error, so that the cluster's log shows the reason.
    """
    try:
        config = application_config(sys.argv[1:])
        register(open_checkpoint_store(config.store), load_schema(config.schema))
        wait_for_topics(config.broker, config.prefix, OUTPUTS, config.partitions)
        job = build(config, _event_topics(config))
    except RoostreamError as error:
        print(f"error: joiner: {error}", file=sys.stderr)
        sys.exit(2)
    job.execute_async(JOB_NAME)

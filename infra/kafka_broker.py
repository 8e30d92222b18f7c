"""A Kafka broker of one node (KRaft) as a child process."""

from __future__ import annotations

import logging
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

from infra import ports
from infra.child import Program, StopRank
from infra.home import Home
from infra.jars import KAFKA_JARS, java_flags
from infra.options import StackOptions
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import TopicSettings

log = logging.getLogger("roostream.stack")

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "auto.create.topics.enable": "false",
    "num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.initial.rebalance.delay.ms": "0",
    "transaction.max.timeout.ms": "7200000",
    # A broker that was killed registers again only when its old session is over: 16.6 s with Kafka's defaults.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "message.max.bytes": str(8 << 20),
    "log.retention.check.interval.ms": "60000",
    "log.cleaner.dedupe.buffer.size": str(16 << 20),
    "metadata.log.max.record.bytes.between.snapshots": str(4 << 20),
    "metadata.max.retention.bytes": str(32 << 20),
    "metadata.log.segment.bytes": str(8 << 20),
}


def server_properties(data: Path, port: int, controller_port: int) -> str:
    """The broker's configuration. The quorum is named here and not kept in the data, so ports can change between starts."""
    settings = {
        **_SETTINGS,
        "controller.quorum.voters": f"1@{ports.HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{ports.HOST}:{port},CONTROLLER://{ports.HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{ports.HOST}:{port}",
        "log.dirs": str(data),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def program(
    home: Home, options: StackOptions, env: Mapping[str, str], java: Path, port: int, controller_port: int
) -> Program:
    """The broker; it is ready when it answers and our topics exist."""
    data, conf = home.root / "kafka", home.conf / "kafka.properties"
    bootstrap = f"{ports.HOST}:{port}"
    log4j = home.conf / "kafka-log4j2.properties"
    common = (f"-Dlog4j2.configurationFile={log4j}", "-cp", f"{KAFKA_JARS}/*")

    def prepare() -> None:
        conf.write_text(server_properties(data, port, controller_port), encoding="utf-8")
        log4j.write_text(log4j_properties("WARN"), encoding="utf-8")
        if not (data / "meta.properties").exists():
            _format((str(java), *java_flags(home.tmp, quick_start=True), *common), conf, env)

    def make_topics() -> None:
        clients.wait_for_broker(Broker(bootstrap), timeout_s=10)
        _make_topics(Broker(bootstrap), options)

    return Program(
        name="kafka",
        command=(
            str(java),
            "-Xms192m",
            "-Xmx512m",
            *java_flags(home.tmp, quick_start=not options.replay),
            *common,
            "kafka.Kafka",
            str(conf),
        ),
        log=home.log("kafka"),
        env=env,
        prepare=prepare,
        ready=lambda: ports.answers(bootstrap),
        on_ready=make_topics,
        stop_rank=StopRank.KAFKA,
        stop_timeout_s=15.0,
        place=home.root,
    )


def _format(java: tuple[str, ...], conf: Path, env: Mapping[str, str]) -> None:
    cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    command = (
        *java,
        "kafka.tools.StorageTool",
        "format",
        "--ignore-formatted",
        "-t",
        cluster,
        "-c",
        str(conf),
    )
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SetupError(
            f"Kafka's data folder can't be formatted: {said[-1] if said else f'exit code {done.returncode}'}"
        )


def log4j_properties(level: str, **loggers: str) -> str:
    """Log to standard output, which is the child's bounded log file; `loggers`: class → a level of its own."""
    own = "".join(
        f"logger.own{i}.name={name}\nlogger.own{i}.level={its.lower()}\n"
        for i, (name, its) in enumerate(loggers.items())
    )
    return own + (
        f"rootLogger.level={level.lower()}\n"
        "rootLogger.appenderRef.stdout.ref=STDOUT\n"
        "appender.stdout.type=Console\n"
        "appender.stdout.name=STDOUT\n"
        "appender.stdout.layout.type=PatternLayout\n"
        "appender.stdout.layout.pattern=%d{HH:mm:ss} %-5p %c{1} %m%n\n"
    )


def use_outside(options: StackOptions) -> None:
    """Create our topics on a broker of the user's own.

    Raises:
        UnavailableError: it does not answer, or refuses.
        ConfigError: topics of that prefix exist otherwise than the options say.
    """
    if not ports.answers(options.kafka, 2.0):
        raise UnavailableError(
            f"Kafka at {options.kafka} does not answer; start it, or leave the option out to have one started"
        )
    _make_topics(Broker(options.kafka), options)


def _make_topics(broker: Broker, options: StackOptions) -> None:
    settings = TopicSettings(
        replay=options.replay, retention_ms=options.retention_ms, retention_bytes=options.retention_bytes
    )
    topics = TopicAdmin(clients.admin(broker), options.prefix, options.partitions, settings)
    topics.create()
    topics.check()

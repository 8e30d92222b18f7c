"""A single-node Kafka broker (KRaft) as a child process, and the creation of the stack's topics."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path

from infra import ports as port_checks
from infra.child import Program, StopRank
from infra.home import Home
from infra.jars import KAFKA_JARS, find_java, java_flags, java_home, java_locale
from infra.options import StackOptions
from infra.ports import HOST, Ports
from infra.supervisor import Supervisor
from roostream.errors import SetupError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topics import TopicSettings

log = logging.getLogger("roostream.stack")

_FORMAT_S = 60.0
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
    # A killed broker can register again only after its old session expired: 16.6 s with Kafka's defaults.
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
    """The broker's configuration. The quorum is not stored in the data, so ports can change between
    starts."""
    settings = {
        **_SETTINGS,
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "listeners": f"PLAINTEXT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port}",
        "log.dirs": str(data),
    }
    return "".join(f"{key}={_escaped(value)}\n" for key, value in settings.items())


def _escaped(value: str) -> str:
    """Escape a value for a properties file, which Java reads as Latin-1: what is not ASCII becomes
    `\\uXXXX`."""
    units = value.encode("utf-16-be")
    codes = (units[i] << 8 | units[i + 1] for i in range(0, len(units), 2))
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


def broker_program(
    home: Home, options: StackOptions, env: Mapping[str, str], java: Path, port: int, controller_port: int
) -> Program:
    """The broker; it is ready when it accepts connections and the stack's topics exist."""
    data, conf = home.root / "kafka", home.conf / "kafka.properties"
    bootstrap = f"{HOST}:{port}"
    log4j = home.conf / "kafka-log4j2.properties"
    common = (f"-Dlog4j2.configurationFile={log4j}", "-cp", f"{KAFKA_JARS}/*")

    def prepare() -> None:
        conf.write_text(server_properties(data, port, controller_port), encoding="utf-8")
        log4j.write_text(log4j_properties("WARN"), encoding="utf-8")
        if not (data / "meta.properties").exists():
            _expect_no_earlier_kafka(home)
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
        ready=lambda: port_checks.is_listening(bootstrap),
        on_ready=make_topics,
        stop_rank=StopRank.KAFKA,
        stop_timeout_s=15.0,
        cwd=home.root,
    )


def _expect_no_earlier_kafka(home: Home) -> None:
    """Raise SetupError: the newest commit of the home has offsets, so its Kafka has data somewhere. A new
    Kafka would get what serving has not sent yet, and training could not continue from it."""
    newest = manifests.newest(FileStore(home.store))
    if newest is not None and newest.manifest.kafka:
        raise SetupError(
            f"expected the data of Kafka in {home.root / 'kafka'}, because {newest.name} has offsets of it, "
            "got none; mount its volume or put it back, move the model with `roostream checkpoint export` "
            "and `import`, or start over with `roostream reset`"
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
    try:
        done = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, check=False, timeout=_FORMAT_S
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"Kafka's data folder was not formatted within {_FORMAT_S:.0f} s; the machine is too busy"
        ) from None
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        reason = output[-1] if output else f"exit code {done.returncode}"
        raise SetupError(f"Kafka's data folder can't be formatted: {reason}")


def log4j_properties(level: str, **loggers: str) -> str:
    """Log to standard output, which goes to the child's log file. `loggers` maps classes to their own
    levels."""
    extra = "".join(
        f"logger.extra{i}.name={name}\nlogger.extra{i}.level={level_of_class.lower()}\n"
        for i, (name, level_of_class) in enumerate(loggers.items())
    )
    return extra + (
        f"rootLogger.level={level.lower()}\n"
        "rootLogger.appenderRef.stdout.ref=STDOUT\n"
        "appender.stdout.type=Console\n"
        "appender.stdout.name=STDOUT\n"
        "appender.stdout.layout.type=PatternLayout\n"
        "appender.stdout.layout.pattern=%d{HH:mm:ss} %-5p %c{1} %m%n\n"
    )


def use_external_broker(options: StackOptions) -> None:
    """Create the stack's topics on an external broker.

    Raises:
        UnavailableError: the broker does not answer, or refuses.
        ConfigError: topics with that prefix exist and differ from the options.
    """
    if not port_checks.is_listening(options.kafka, 2.0):
        raise UnavailableError(
            f"Kafka at {options.kafka} does not answer; "
            "start it, or leave the option out to let the stack start a broker"
        )
    broker = Broker(options.kafka)
    try:
        clients.wait_for_broker(broker, timeout_s=5)
    except UnavailableError as error:
        raise UnavailableError(f"{error}; a local stack uses a Kafka without TLS and login") from None
    _make_topics(broker, options)


def _make_topics(broker: Broker, options: StackOptions) -> None:
    settings = TopicSettings(
        replay=options.replay, retention_ms=options.retention_ms, retention_bytes=options.retention_bytes
    )
    topics = TopicAdmin(clients.admin(broker), options.prefix, options.partitions, settings)
    topics.create()
    topics.check()


_READY_S = 60.0
_NEVER_MS = 1 << 40
_KEEP_ALL = f"log.retention.check.interval.ms={_NEVER_MS}\nlog.initial.task.delay.ms={_NEVER_MS}\n"


@contextlib.contextmanager
def read_only_broker(home: Home, java: str = "") -> Iterator[str]:
    """Start only the broker of a stopped home, to read its topics; stopped at the end of the block. Yields
    its host:port.

    The broker creates no topics and deletes no records, however old.

    Raises:
        SetupError: a stack runs in this home, or the home has no broker.
        UnavailableError: the broker was not ready in time; with the end of its log.
    """
    if not (home.root / "kafka" / "meta.properties").exists():
        raise SetupError(
            f"{home.root} has no Kafka data; name the broker that it used with --kafka HOST:PORT"
        )
    java_path, ports = find_java(java), Ports()
    home.make()
    home.lock()
    try:
        home.end_leftovers()
        port = ports.draw()
        env = {**os.environ, **java_locale(os.environ), "JAVA_HOME": str(java_home(java_path))}
        broker = broker_program(home, StackOptions(), env, java_path, port, ports.draw())

        def prepare() -> None:
            broker.prepare()
            with (home.conf / "kafka.properties").open("a", encoding="utf-8") as file:
                file.write(_KEEP_ALL)

        with Supervisor() as supervisor:
            supervisor.start([dataclasses.replace(broker, prepare=prepare, on_ready=lambda: None)])
            supervisor.wait_ready([broker.name], _READY_S)
            yield f"{HOST}:{port}"
            supervisor.stop([broker.name])
    finally:
        ports.release()
        home.unlock()

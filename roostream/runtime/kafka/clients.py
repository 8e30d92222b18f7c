"""Creates Kafka clients. Only this module uses librdkafka's option names."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.address import parse_address
from roostream.runtime.backoff import Backoff
from roostream.runtime.file_watcher import FileWatcher
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import name_of, partitions_of
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.schema.limits import MAX_MESSAGE_BYTES

log = logging.getLogger("roostream.kafka")

# Codes of librdkafka itself have no public name.
AUTO_OFFSET_RESET = KafkaError._AUTO_OFFSET_RESET  # noqa: SLF001
PARTITION_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
UNKNOWN_PARTITION = KafkaError._UNKNOWN_PARTITION  # noqa: SLF001
TRANSPORT = KafkaError._TRANSPORT  # noqa: SLF001
_TIMED_OUT = KafkaError._TIMED_OUT  # noqa: SLF001
# A broker returns these for a moment after its start, while a partition is getting its leader.
_NO_LEADER_YET = (
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.OFFSET_NOT_AVAILABLE,
)
_FATAL = KafkaError._FATAL  # noqa: SLF001
_ALL_BROKERS_DOWN = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001
_NO_RESOURCES = KafkaError._CRIT_SYS_RESOURCE  # noqa: SLF001
_NO_CONNECTION = KafkaError._TRANSPORT, KafkaError._TIMED_OUT, _ALL_BROKERS_DOWN  # noqa: SLF001
_REFUSED = KafkaError._SSL, KafkaError._AUTHENTICATION  # noqa: SLF001
_RETRY_S = 0.1
_CREATING_S = 20.0  # a new stack starts Kafka and creates its topics while other programs start
_WRONG_OPTION = re.compile(r"(ssl\.[a-z.]+) failed: (?:error:\w+:)?(.*)")
_KEYS = {"ssl.ca.location": "ca", "ssl.certificate.location": "certificate", "ssl.key.location": "key"}
_EXAMINE_S = 2.0
_QUIET = {
    "log_level": 2,
    "log.connection.close": False,
    "reconnect.backoff.ms": 100,
    "reconnect.backoff.max.ms": 1000,
}


class ProducerFailedError(UnavailableError):
    """The producer has failed for good, and another one must be opened. Records that it has not reported as
    delivered may or may not be in their topics."""


@contextlib.contextmanager
def _fatal_errors() -> Iterator[None]:
    """Raise ProducerFailedError for librdkafka's fatal errors. An idempotent producer has one when its broker
    no longer has the records that it acknowledged last: numbers of records follow each other without gaps."""
    try:
        yield
    except KafkaException as error:
        reason = error.args[0]
        if not reason.fatal() and reason.code() != _FATAL:
            raise
        raise ProducerFailedError(
            f"Kafka accepts no more records of this producer ({KafkaError(reason.code()).str()}); the broker "
            "has probably stopped uncleanly and lost records"
        ) from None


_log_rate_limit = LogRateLimit()
_last_errors: dict[Broker, tuple[float, str]] = {}
"""Broker → when a connection to it failed last, in monotonic seconds, and why."""
_REPEATED_S = 30.0  # librdkafka reports an error again after this time, and suppresses it before


class _ErrorCallback:
    """Logs why a client's connections fail. librdkafka keeps trying after errors of a client; those of
    certificates and logins need a person."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._watch, self._has_old_files = FileWatcher(*broker.security.files), False

    def __call__(self, error: KafkaError) -> None:
        log.debug("kafka: %s", error)
        if error.code() == _ALL_BROKERS_DOWN:
            return
        bootstrap, text = self.broker.bootstrap, error.str()
        if error.code() in _REFUSED or "SSL routines" in text or "SSL handshake failed" in text:
            self._has_old_files = self._has_old_files or self._watch.changed()
            if "verify failed" in text:
                text = _tls_problem(self.broker) or text
            text += "; check kafka_security and the certificates"
            if self._has_old_files:
                text += "; their files have changed since this client began, so restart this program"
            _log_rate_limit.warning(log, bootstrap, "Kafka at %s: %s", bootstrap, text)
        _last_errors[self.broker] = time.monotonic(), text


_found_problems: dict[Broker, tuple[float, str]] = {}
"""Broker → when `_tls_problem` examined it last, in monotonic seconds, and what it found."""


def _tls_problem(broker: Broker) -> str:
    """What is wrong with TLS at the first address that answers; "" = nothing was found.

    librdkafka says neither why a certificate is not valid, nor that a listener expects TLS. An address is
    examined once in _REPEATED_S, with a handshake.
    """
    at_s, found = _found_problems.get(broker, (-_REPEATED_S, ""))
    if time.monotonic() - at_s >= _REPEATED_S:
        found = next(filter(None, (_examine(address, broker) for address in broker.bootstrap.split(","))), "")
        _found_problems[broker] = time.monotonic(), found
    return found


def _examine(address: str, broker: Broker) -> str:
    host, port = parse_address(address.strip())
    try:
        context = ssl.create_default_context(cafile=broker.security.ca or None)
        if not broker.security.uses_tls:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((host.strip("[]"), port), _EXAMINE_S) as connection,
            context.wrap_socket(connection, server_hostname=host.strip("[]")),
        ):
            if broker.security.uses_tls:
                return ""
            return f"{address} expects TLS; set protocol of kafka_security to SSL or SASL_SSL"
    except ssl.SSLCertVerificationError as error:
        return f"the certificate of {address} is not valid: {error.verify_message.rstrip('.')}"
    except OSError:  # ssl.SSLError is one
        return ""


def _reason(client: AdminClient, broker: Broker, error: KafkaException) -> str:
    """Why a call failed. Of a broken connection the call's own error says nothing; librdkafka gives the cause
    to the client's error callback alone."""
    client.poll(0)
    own = error.args[0] if error.args else None
    if own is None or own.code() in _NO_CONNECTION:
        at_s, cause = _last_errors.get(broker, (0.0, ""))
        if cause and time.monotonic() - at_s <= _REPEATED_S:
            return cause
        if own is not None and own.code() == TRANSPORT and not broker.security.uses_tls:
            return _tls_problem(broker) or str(own.str())
        return own.str() if own else str(error)
    return str(own.str())


def _common(broker: Broker) -> dict[str, Any]:
    broker.security.check_files()
    return {
        "bootstrap.servers": broker.bootstrap,
        "error_cb": _ErrorCallback(broker),
        **_QUIET,
        **broker.security.librdkafka(),
    }


_opened: set[Broker] = set()
"""Brokers for which a client could be made, so their settings are right."""


@contextlib.contextmanager
def _opening(broker: Broker) -> Iterator[None]:
    """Around the creation of a client. librdkafka checks its options then, such as whether a key fits its
    certificate.

    Raises:
        ConfigError: an option or a file is wrong.
        UnavailableError: no threads can be started now, or the files are being replaced.
    """
    try:
        with _settings_errors():
            yield
    except ConfigError as error:
        if broker in _opened:
            raise UnavailableError(str(error)) from None
        raise
    _opened.add(broker)


@contextlib.contextmanager
def _settings_errors() -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        text = error.args[0].str()
        if error.args[0].code() == _NO_RESOURCES:
            advice = "free some memory, or raise the limit of threads"
            raise UnavailableError(f"no Kafka client can be opened now ({text}); {advice}") from None
        if found := _WRONG_OPTION.search(text):
            key, reason = _KEYS.get(found[1], found[1]), found[2]
            if reason.endswith("PEM lib"):
                reason = "not a PEM file" + (", or encrypted without key_password" if key == "key" else "")
            raise ConfigError(f"kafka_security.{key}: {reason}; correct this setting or its file") from None
        raise ConfigError(f"kafka_security: {text}; correct these settings or files") from None


def producer(broker: Broker, **overrides: Any) -> Producer:
    """An idempotent producer that partitions by murmur2 of the key, like Java's. Pass `transactional_id` for
    transactions.

    Delivery errors go to the callback passed to `produce`; a full queue raises BufferError there. Use `send`,
    `poll` and `flush` of this module, which raise ProducerFailedError when another producer is needed.
    """
    settings = {
        "partitioner": "murmur2_random",
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 5,
        "compression.type": "zstd",
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "queue.buffering.max.kbytes": 262_144,
        "delivery.timeout.ms": 2_000_000_000,
    }
    with _opening(broker):
        return Producer(
            {**_common(broker), **settings, **{k.replace("_", "."): v for k, v in overrides.items()}}
        )


def consumer(
    broker: Broker,
    group: str,
    *,
    on_commit: Callable[[KafkaError | None, list[TopicPartition]], None] | None = None,
    **overrides: Any,
) -> Consumer:
    """A consumer without automatic commits that starts at the earliest offset and reads committed
    transactions only. `on_commit` gets the result of each asynchronous commit."""
    settings = {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "check.crcs": True,
        "fetch.wait.max.ms": 50,
        "fetch.error.backoff.ms": 100,
        "queued.max.messages.kbytes": 65_536,
        "max.partition.fetch.bytes": 8 << 20,
        "topic.metadata.refresh.interval.ms": 10_000,
        **({"on_commit": on_commit} if on_commit else {}),
    }
    with _opening(broker):
        return Consumer(
            {**_common(broker), **settings, **{k.replace("_", "."): v for k, v in overrides.items()}}
        )


def admin(broker: Broker) -> AdminClient:
    """Connects at the first call."""
    with _opening(broker):
        return AdminClient(_common(broker))


def results_of(futures: Mapping[Any, concurrent.futures.Future[Any]], timeout_s: float) -> dict[Any, Any]:
    """The results of an admin client's request. The client has its own time limit; this one ends the wait if
    the client does not keep it.

    Raises:
        KafkaException: the broker is away or refuses, or there is no answer after `timeout_s`.
    """
    if concurrent.futures.wait(futures.values(), timeout_s).not_done:
        raise KafkaException(KafkaError(_TIMED_OUT, f"no answer within {timeout_s:g} s"))
    for future in futures.values():
        if (error := future.exception()) is not None:
            # A new one: that of the future would refer to this frame and so to the future itself and to the
            # caller's client, whose threads and sockets would stay until a rare collection of cycles.
            raise type(error)(*error.args)
    return {key: future.result() for key, future in futures.items()}


def wait_for_broker(
    broker: Broker, stop: threading.Event | None = None, timeout_s: float | None = None
) -> str:
    """Block until the broker answers. Returns its cluster id.

    Raises:
        UnavailableError: `timeout_s` passed, or `stop` was set.
    """
    client = admin(broker)

    def cluster_id() -> str:
        try:
            return str(client.list_topics(timeout=2).cluster_id)
        except KafkaException as error:
            raise UnavailableError(_reason(client, broker, error)) from None

    return Backoff(what=f"Kafka at {broker}", timeout_s=timeout_s).until(
        cluster_id, (UnavailableError,), stop
    )


def wait_for_topics(
    broker: Broker,
    prefix: str,
    topics: Iterable[str],
    partitions: int,
    stop: threading.Event | None = None,
    timeout_s: float | None = None,
) -> dict[str, str]:
    """Block until the topics exist. Returns full name → the broker's topic id, which changes when a topic is
    created again.

    Raises:
        ConfigError: a topic has another number of partitions than the deployment's setting.
        UnavailableError: `stop` was set, or `timeout_s` passed.
    """
    client = admin(broker)
    expected = {name_of(prefix, topic): partitions_of(topic, partitions) for topic in topics}

    def describe() -> dict[str, Any]:
        try:
            described = client.describe_topics(TopicCollection(list(expected)), request_timeout=2)
            return results_of(described, timeout_s=10)
        except KafkaException as error:
            if error.args and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise UnavailableError(
                    "not all of them exist yet; if nothing creates them, run `roostream topics create`, or "
                    "correct `prefix`"
                ) from None
            raise UnavailableError(_reason(client, broker, error)) from None

    what = f"topics {', '.join(expected)} at {broker}"
    wait = Backoff(what=what, expected_s=_CREATING_S, timeout_s=timeout_s)
    found = wait.until(describe, (UnavailableError,), stop)
    for name, number in expected.items():
        if number != (got := len(found[name].partitions)):
            remedy = "set `partitions` to this number"
            if got > number:
                remedy = (
                    f"run `roostream topics grow --partitions {got}`, so that all topics have as many, and "
                    f"set `partitions` to {got}"
                )
            raise ConfigError(f"topic {name} at {broker}: expected {number} partitions, got {got}; {remedy}")
    return {name: str(topic.topic_id) for name, topic in found.items()}


def topic_ids(broker: Broker, prefix: str, topics: Iterable[str]) -> dict[str, str]:
    """Name without prefix → the broker's id of the topic now; a topic that is created again has another one.

    Raises:
        UnavailableError: the broker does not answer, a topic does not exist now, or no client can be made
        now, for example while its certificate is replaced.
    """
    full_names = {name_of(prefix, topic): topic for topic in topics}
    try:
        client = admin(broker)  # must outlive its request: an answer is lost with its client
    except ConfigError as error:
        raise UnavailableError(str(error)) from None
    try:
        described = client.describe_topics(TopicCollection(list(full_names)), request_timeout=2)
        return {full_names[name]: str(topic.topic_id) for name, topic in results_of(described, 4).items()}
    except KafkaException as error:
        raise UnavailableError(_reason(client, broker, error)) from None


def check_topics(
    broker: Broker, prefix: str, topics: Iterable[str], partitions: int, stop: threading.Event
) -> None:
    """`wait_for_topics` for a background thread. Raises ConfigError; returns when `stop` is set."""
    try:
        wait_for_topics(broker, prefix, topics, partitions, stop)
    except UnavailableError:
        if not stop.is_set():
            raise


def bounds(
    client: Consumer, places: Sequence[TopicPartition], timeout_s: float = 10.0
) -> list[tuple[int, int]]:
    """(oldest offset, last stable offset) of each partition, in order. Call from the consumer's own thread.

    Uses the offsets of the times "earliest" and "latest", which takes two requests a broker for any number of
    partitions. `get_watermark_offsets` would wait without limit for a broker that dies meanwhile (librdkafka
    issues 2588, 4878). A partition that is just getting its leader is retried within the time limit.

    Raises:
        KafkaException: the broker refused, is away, or did not answer in time.
    """
    end_s = time.monotonic() + timeout_s
    return list(
        zip(*(_offsets_at(client, places, at, end_s) for at in (OFFSET_BEGINNING, OFFSET_END)), strict=True)
    )


def _offsets_at(client: Consumer, places: Sequence[TopicPartition], when: int, end_s: float) -> list[int]:
    while True:
        left_s = end_s - time.monotonic()
        requested = [TopicPartition(place.topic, place.partition, when) for place in places]
        try:
            offsets = {
                (at.topic, at.partition): at
                for at in client.offsets_for_times(requested, timeout=max(left_s, 0.1))
            }
            at = [offsets[place.topic, place.partition] for place in places]
            refused = next((place.error for place in at if place.error is not None), None)
            if refused is None:
                return [int(place.offset) for place in at]
        except KafkaException as error:  # no partition has an answer
            refused = error.args[0]
        if refused.code() not in _NO_LEADER_YET or left_s <= 0:
            raise KafkaException(refused)
        time.sleep(_RETRY_S)
        with contextlib.suppress(KafkaException):
            # Refreshes the partition leaders that the client has cached.
            client.list_topics(timeout=max(end_s - time.monotonic(), 0.1))


def end_offsets(
    client: Consumer, topic: str, partitions: Iterable[int], timeout_s: float = 10.0
) -> dict[int, int]:
    """Partition → last stable offset. Call from the consumer's own thread.

    Raises:
        KafkaException: as `bounds`.
    """
    places = [TopicPartition(topic, p) for p in partitions]
    return {at.partition: end for at, (_, end) in zip(places, bounds(client, places, timeout_s), strict=True)}


def send(
    client: Producer,
    topic: str,
    *,
    key: bytes | None,
    value: bytes,
    timestamp_ms: int,
    partition: int = -1,
    on_delivery: Callable[[KafkaError | None, Any], None] | None = None,
    give_up: Callable[[], bool] = lambda: False,
) -> None:
    """Queue one record. Blocks while the queue is full, which bounds memory.

    Raises:
        UnavailableError: the queue is full and `give_up` returned true; the record is not queued.
        ProducerFailedError: open another producer; the record may be queued.
    """
    extra = {} if partition < 0 else {"partition": partition}
    while True:
        try:
            with _fatal_errors():
                client.produce(
                    topic,
                    value=value,
                    key=key,
                    timestamp=max(timestamp_ms, 0),
                    on_delivery=on_delivery,
                    **extra,
                )
                client.poll(0)
            return
        except BufferError:
            if give_up():
                raise UnavailableError(
                    f"topic {topic}: the producer's queue is full because Kafka accepts no records; "
                    "stopped waiting"
                ) from None
            poll(client, 0.05)


def poll(client: Producer, timeout_s: float) -> None:
    """Call the callbacks of records that were delivered or refused; wait up to `timeout_s` for one. Raises
    ProducerFailedError."""
    with _fatal_errors():
        client.poll(timeout_s)


def flush(client: Producer, timeout_s: float) -> int:
    """Wait until all queued records are delivered or refused. Returns how many are left after `timeout_s`.
    Raises ProducerFailedError."""
    with _fatal_errors():
        return int(client.flush(timeout_s))

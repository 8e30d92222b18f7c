"""`roostream audit`: read every topic once from its oldest record, and check that each event is accounted
for."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from infra.auditor.auditor import AUDITED, Auditor
from infra.auditor.config import horizon_for
from infra.auditor.sums import Sums, state_of
from infra.home import Home
from infra.kafka_broker import read_only_broker
from infra.options import settle_ms
from roostream.cli.options import Duration, home_option, json_option, read_table, refuse_given
from roostream.cli.output import print_report, progress_bar
from roostream.cli.status_table import book_rows
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.address import check_addresses
from roostream.runtime.backoff import Backoff
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker, KafkaSecurity
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS

_LEADERS_S = 20.0
_SILENT_S = 30.0
_STARTS_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topics:
    """The topics to audit, and how long an event may wait until it is joined. `replay`: the events have the
    times of a replayed log, which are not those at which they were written."""

    kafka: str
    prefix: str = ""
    partitions: int = DEFAULT_PARTITIONS
    settle_ms: int = 600_000
    replay: bool = False
    security: KafkaSecurity = dataclasses.field(default_factory=KafkaSecurity)
    start_timeout_s: float = _LEADERS_S  # time for a broker to become leader of its partitions

    @property
    def broker(self) -> Broker:
        return Broker(self.kafka, self.security)


def read_kafka_security(file: str) -> KafkaSecurity:
    """As `read_table`."""
    return read_table(file, "kafka_security", KafkaSecurity)


@click.command()
@home_option
@click.option(
    "--kafka", default="", metavar="HOST:PORT", help="a running broker; default: that of the stack in --home"
)
@click.option("--prefix", default="", help="with --kafka: prefix of the topic names")
@click.option(
    "--partitions",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    help="with --kafka: partitions of each topic",
)
@click.option(
    "--window",
    "window_ms",
    type=Duration(),
    default="10m",
    show_default=True,
    help="with --kafka: the join window",
)
@click.option(
    "--kafka-security",
    "security_file",
    default="",
    metavar="FILE",
    help="with --kafka: TOML of a program, from which [kafka_security] is read",
)
@click.option("--replay", is_flag=True, help="with --kafka: the topics were created with --replay")
@json_option
def audit(
    home: Path,
    kafka: str,
    prefix: str,
    partitions: int,
    window_ms: int,
    security_file: str,
    replay: bool,
    as_json: bool,
) -> None:
    """Read all topics once from their oldest record. Exit code 0 if every event is accounted for, else 1.

    If the stack is stopped, its broker is started for the audit and stopped afterwards.

    \b
    Example:
      roostream audit --home .roostream
      roostream audit --kafka kafka:9092 --prefix site. --partitions 16 --window 30m
    """
    if kafka:
        check_addresses("--kafka", *kafka.split(","))
    else:
        refuse_given(("prefix", "partitions", "window_ms", "security_file", "replay"), "--kafka")
    topics = Topics(
        kafka=kafka,
        prefix=prefix,
        partitions=partitions,
        settle_ms=settle_ms(window_ms),
        replay=replay,
        security=read_kafka_security(security_file),
    )
    sys.exit(run(home, topics if kafka else None, as_json))


def run(home: Path, topics: Topics | None, as_json: bool) -> int:
    """Audit `topics`, or with None those of the stack in `home`, whose broker is started if it is stopped.

    Returns 0, or 1 if an event is not accounted for.

    Raises:
        SetupError: there is no stack in `home`.
        UnavailableError: Kafka does not answer, or a topic cannot be read.
        ConfigError: a topic has another number of partitions.
    """
    with contextlib.nullcontext(topics) if topics is not None else _of_home(Home(home)) as found:
        sums = read_all(found)
    report = {"state": state_of(sums, True, 0), **dataclasses.asdict(sums)}
    print_report(as_json, report, book_rows(report), "Audit")
    return 0 if report["state"] == "yes" else 1


def read_all(topics: Topics) -> Sums:
    """Read all records that are present at the start, and return the sums.

    Raises:
        UnavailableError: as `run`.
        ConfigError: a topic has other partitions than `topics`, so the sums would be those of a part.
    """
    clients.wait_for_broker(topics.broker, timeout_s=topics.start_timeout_s)
    clients.wait_for_topics(
        topics.broker, topics.prefix, AUDITED, topics.partitions, timeout_s=topics.start_timeout_s
    )
    auditor = build_auditor(topics)
    with contextlib.closing(auditor), progress_bar("records") as update:
        backoff = Backoff(what=f"Kafka at {topics.kafka}", timeout_s=topics.start_timeout_s)
        answered_s, total = time.monotonic(), 0
        while not auditor.is_current():
            if backoff.until(lambda: auditor.poll(1.0), (UnavailableError,)) or auditor.behind() is not None:
                answered_s = time.monotonic()
            if time.monotonic() - answered_s > _SILENT_S:
                raise UnavailableError(
                    f"Kafka at {topics.kafka} has not answered for {_SILENT_S:.0f} s; start it, then run "
                    "this again"
                )
            left = auditor.behind()
            if left is not None:
                total = max(total, left)
                update(total - left, total)
        return auditor.sums()


def build_auditor(topics: Topics) -> Auditor:
    """The auditor of `topics`; it reads nothing yet."""
    return Auditor(
        topics.broker,
        topics.prefix,
        num_partitions=topics.partitions,
        settle_ms=topics.settle_ms,
        horizon_ms=horizon_for(topics.settle_ms, replay=topics.replay),
    )


def topics_of(stack: Mapping[str, Any]) -> Topics:
    """The topics of a stack; `stack` is its stack.json."""
    return Topics(
        kafka=str(stack["kafka"]),
        prefix=str(stack["prefix"]),
        partitions=int(stack.get("partitions", DEFAULT_PARTITIONS)),
        settle_ms=int(stack["settle_ms"]),
        replay=bool(stack.get("replay", False)),
    )


@contextlib.contextmanager
def _of_home(home: Home) -> Iterator[Topics]:
    stack = home.read_stack()
    if stack is None or "kafka" not in stack:
        raise SetupError(
            f"there is no stack in {home.root}; give a Kafka with --kafka HOST:PORT, or another --home"
        )
    if "kafka" not in stack["programs"]:
        yield topics_of(stack)
    elif home.is_locked():  # by another audit, perhaps; then stack.json has the address of an earlier stack
        yield topics_of(home.running_stack())
    else:
        with read_only_broker(home) as kafka:
            yield dataclasses.replace(topics_of(stack), kafka=kafka, start_timeout_s=_STARTS_S)

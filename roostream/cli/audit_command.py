"""`roostream audit`: every topic from its oldest record, once, and whether each event is accounted for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from infra.auditor.auditor import Auditor
from infra.auditor.config import HORIZON_MS
from infra.auditor.sums import Sums, state_of
from infra.home import Home
from infra.kafka_broker import read_only_broker
from roostream.cli import status_table as table
from roostream.errors import SetupError, UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS

_LEADERS_S = 20.0
_SAY_EVERY_S = 10.0
_SILENT_S = 30.0
_STARTS_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topics:
    """Which topics are added up, and how long an event may wait in them."""

    kafka: str
    prefix: str = ""
    partitions: int = DEFAULT_PARTITIONS
    settle_ms: int = 600_000
    starts_s: float = (
        _LEADERS_S  # how long a broker may need to lead its partitions, one after the other, behind its start
    )


def run(home: Path, topics: Topics | None, as_json: bool) -> int:
    """`topics` of a Kafka that runs; None: those of the stack in `home`, whose broker is started for it if it is stopped. 0, or
    1 if something is not accounted for, or not yet.

    Raises:
        SetupError: there is no such home, or nothing in it.
        UnavailableError: Kafka does not answer, or the topics can't be read.
    """
    with contextlib.nullcontext(topics) if topics is not None else _of_home(Home(home)) as found:
        sums = read_all(found)
    told = {"state": state_of(sums, True, 0), **dataclasses.asdict(sums)}
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        Console().print(table.render_rows(table.book_rows(told), "Audit"))
    return 0 if told["state"] == "yes" else 1


def read_all(topics: Topics) -> Sums:
    """The sums once every end that was there at the start has been passed. UnavailableError as `run`."""
    auditor = Auditor(
        Broker(topics.kafka),
        topics.prefix,
        num_partitions=topics.partitions,
        settle_ms=topics.settle_ms,
        horizon_ms=max(HORIZON_MS, 2 * topics.settle_ms),
    )
    try:
        asked = Backoff(what=f"Kafka at {topics.kafka}", timeout_s=topics.starts_s)
        heard_s = said_s = time.monotonic()
        while not auditor.is_current():
            if asked.until(lambda: auditor.poll(1.0), (UnavailableError,)) or auditor.behind() is not None:
                heard_s = time.monotonic()
            if time.monotonic() - heard_s > _SILENT_S:
                raise UnavailableError(
                    f"Kafka at {topics.kafka} has been silent for {_SILENT_S:.0f} s; start it, then run this again"
                )
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                click.echo(f"still reading: {auditor.behind() or 'unknown'} records to go", err=True)
        return auditor.sums()
    finally:
        auditor.close()


@contextlib.contextmanager
def _of_home(home: Home) -> Iterator[Topics]:
    stack = home.read_stack()
    if stack is None:
        raise SetupError(
            f"there is no stack in {home.root}; name a Kafka with --kafka HOST:PORT, or another --home"
        )
    found = Topics(
        kafka=str(stack["kafka"]),
        prefix=str(stack["prefix"]),
        partitions=int(stack.get("partitions", DEFAULT_PARTITIONS)),
        settle_ms=int(stack["settle_ms"]),
    )
    if home.is_locked() or "kafka" not in stack["programs"]:
        yield found
        return
    with read_only_broker(home) as kafka:
        yield dataclasses.replace(found, kafka=kafka, starts_s=_STARTS_S)

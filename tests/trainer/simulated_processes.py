"""Where the programs of a simulation run: their clock, what they read, and what of them is a moment."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roostream.runtime.clock import FakeClock
from roostream.runtime.controller_agent import ControllerAgent
from roostream.runtime.kafka.kafka_consumer import KafkaConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.schema.schema import Schema
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.actors import Actor
from tests.trainer.network import CONTROLLER
from trainer.control.controller import Controller
from trainer.control.types import Claim, CoordinatorConfig, Effect, Link
from trainer.deployment_identity import DeploymentIdentity


class EvenClock(FakeClock):
    """Every wait takes a tenth of a second: how long a retry waits is drawn where no seed reaches."""

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        return super().sleep(0.1, stop)


class TrickleReader(KafkaConsumer):
    """Three records a poll, without waiting, so that cuts find records that were fetched or polled and not
    yet trained."""

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        return super().poll(min(max_records, 3), 0.0, partition)


class WatchedController(Controller):
    """A controller whose effects are moments."""

    moment: Callable[[str, str, str], None]

    def perform(self, effect: Effect) -> None:
        what = {Claim: "claim", Link: "link"}.get(type(effect), "retire")
        self.moment(CONTROLLER, what, "before")
        super().perform(effect)
        self.moment(CONTROLLER, what, "after")


@dataclasses.dataclass(frozen=True)
class Site:
    """What a simulation begins with: its schema and Kafka, and what there is in its store and on its shards'
    disks."""

    schema: Schema = dataclasses.field(default_factory=samples.schema)
    kafka: Mapping[str, Any] = dataclasses.field(default_factory=lambda: dict(samples.KAFKA))
    objects: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    disks: Sequence[Any] = ()

    def registry(self, fingerprint: int) -> Schema | None:
        """Samples are those of `samples.schema()`, whatever the programs' schema is."""
        return {s.fingerprint: s for s in (samples.schema(), self.schema)}.get(fingerprint)

    def identity(self, facts: CoordinatorConfig) -> DeploymentIdentity:
        site = {"schema": self.schema, "registry": self.registry, "kafka": self.kafka}
        return samples.identity(**site, num_shards=facts.num_shards)


@dataclasses.dataclass
class Place:
    """A member's place: its process (None = dead), and its side of the controller."""

    process: Any = None
    session: int = 0
    member: ControllerAgent | None = None
    actor: Actor = dataclasses.field(default_factory=Actor)
    dead_rounds: int = 0
    begins_at: int = 0  # of a slow shard: the round in which it does what it was asked; 0 = when it comes

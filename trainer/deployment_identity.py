"""Checks that a manifest belongs to this deployment: its Kafka cluster and topics, its schema, its shards."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from roostream.errors import ConfigError, SchemaError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import CORRECTIONS, ROWS, SAMPLES
from roostream.runtime.manifest import Manifest
from roostream.runtime.store_identity import wait_for_store
from roostream.schema.registry import open_registry, register
from roostream.schema.schema import Registry, Schema, reading_plan
from trainer.config import ControllerConfig, WorkerConfig

_TOPICS = (SAMPLES, ROWS, CORRECTIONS)


def kafka_identity(
    broker: Broker, prefix: str, partitions: int, stop: threading.Event | None = None
) -> dict[str, Any]:
    """`{"cluster_id", "topics": {name: id}}` of the topics whose offsets are in manifests. Waits for broker
    and topics.

    Raises:
        ConfigError: the topics have another number of partitions than the settings.
        UnavailableError: `stop` was set meanwhile.
    """
    cluster_id = clients.wait_for_broker(broker, stop)
    topics = clients.wait_for_topics(broker, prefix, _TOPICS, partitions, stop)
    return {"cluster_id": cluster_id, "topics": topics}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentIdentity:
    """What a manifest must match before it is used."""

    schema: Schema
    registry: Registry
    kafka: Mapping[str, Any]  # of `kafka_identity`
    num_shards: int
    num_buckets: int
    num_partitions: int
    seed: int

    @classmethod
    def connect(
        cls,
        config: WorkerConfig | ControllerConfig,
        schema: Schema,
        store: CheckpointStore,
        num_shards: int,
        stop: threading.Event,
        health: Health,
    ) -> DeploymentIdentity:
        """Register the schema in `store` and read the ids of Kafka's topics. Waits for both. Raises as
        `kafka_identity`."""
        wait_for_store(lambda: register(store, schema), stop, health=health)
        return cls(
            schema=schema,
            registry=open_registry(store, own=schema),
            kafka=kafka_identity(config.broker, config.prefix, config.partitions, stop),
            num_shards=num_shards,
            num_buckets=config.buckets,
            num_partitions=config.partitions,
            seed=config.seed,
        )

    def check(self, manifest: Manifest) -> None:
        """Raises ConfigError, SchemaError: the manifest belongs to another deployment; an older manifest does
        not help."""
        check_kafka(manifest, self.kafka)
        check_schema(manifest, self.schema, self.registry)
        manifests.check_shape(
            manifest,
            num_shards=self.num_shards,
            num_buckets=self.num_buckets,
            num_partitions=self.num_partitions,
            seed=self.seed,
        )


def check_kafka(manifest: Manifest, kafka: Mapping[str, Any]) -> None:
    """Raises ConfigError: the offsets are of another cluster, or of topics that were recreated, and have no
    meaning here. A manifest of `roostream checkpoint import` names no cluster and has no offsets; the first
    commit names this cluster."""
    if not manifest.kafka:
        return
    expected = manifest.kafka.get("topics", {})  # old manifests do not name the topic of corrections
    actual = {name: kafka.get("topics", {}).get(name) for name in expected}
    if manifest.kafka.get("cluster_id") != kafka.get("cluster_id") or expected != actual:
        raise ConfigError(
            f"{manifest.name}: expected Kafka cluster {manifest.kafka.get('cluster_id')} with "
            f"{manifest.kafka.get('topics')}, got {kafka.get('cluster_id')} with {kafka.get('topics')}: "
            "the committed offsets have no meaning there; "
            "restore the old broker's data, move the model with `roostream checkpoint export` and `import`, "
            "or start over with `roostream reset`"
        )


def check_schema(manifest: Manifest, schema: Schema, registry: Registry) -> None:
    """A schema may add and remove features, and tables may become wider. What both schemas have must mean the
    same.

    Raises:
        SchemaError: a feature changed its kind, table, columns or side, a table became narrower, or the
            labels differ.
        ConfigError: the manifest's schema is not in the store.
    """
    if manifest.schema == f"{schema.fingerprint:016x}":
        return
    written = registry(int(manifest.schema, 16))
    if written is None:
        raise ConfigError(
            f"{manifest.name}: expected its schema {manifest.schema} in the store, got nothing; "
            "restore its file"
        )
    reading_plan(written, schema)
    for name, table in schema.table_by_name.items():
        committed = written.table_by_name.get(name)
        if committed is not None and committed.dim > table.dim:
            raise SchemaError(
                f"{manifest.name}: expected table {name!r} with dim {committed.dim} or more, as committed, "
                f"got {table.dim}: columns of its rows would be lost; give the narrower table another name"
            )
    if written.wire_shape()["labels"] != schema.wire_shape()["labels"]:
        names = [[label.name for label in s.labels] for s in (written, schema)]
        raise SchemaError(
            f"{manifest.name}: expected labels {names[0]} folded as committed, got {names[1]}; "
            "the weights predict the committed labels: keep them, or start over with `roostream reset`"
        )

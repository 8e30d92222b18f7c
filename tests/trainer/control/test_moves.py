"""A new fleet continues from an old one's checkpoint: with wider tables, with other update rules, on another
Kafka cluster, and with buckets moved between shards."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np
import pytest

from param_server.key_value_store import MemoryKeyValueStore
from roostream.cli.checkpoint.checkpoints import without_offsets
from roostream.cli.checkpoint.move_buckets import move
from roostream.errors import ConfigError, SchemaError
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from tests.trainer import samples
from tests.trainer.memory_store import MemoryStore
from tests.trainer.simulator import Deployment, Kill, Simulation

NUMBERS, MORE_NUMBERS = list(range(1, 25)), list(range(1, 41))
OTHER_KAFKA = {"cluster_id": "another", "topics": {"samples": "2"}}


def fleet(numbers: list[int], deployment: Deployment, **more: object) -> Simulation:
    return Simulation(
        samples.records(numbers),
        num_workers=2,
        real_shards=True,
        commit_interval_s=0.5,
        deployment=deployment,
        **more,
    )  # type: ignore[arg-type]


@functools.cache
def first() -> Simulation:
    """The fleet before the change, after its run. It is shared by tests, which must not modify it."""
    return fleet(NUMBERS, Deployment()).run()


def deployment_after(simulation: Simulation, **changes: object) -> Deployment:
    """Copy the store and the disks of a finished simulation, for the next fleet."""
    deployment = Deployment(objects=dict(simulation.store.objects), disks=copy.deepcopy(simulation.disks))
    return dataclasses.replace(deployment, **changes)  # type: ignore[arg-type]


def with_tables(**changes: dict[str, object]) -> Schema:
    schema = samples.schema()
    return dataclasses.replace(
        schema,
        tables=tuple(dataclasses.replace(table, **changes.get(table.name, {})) for table in schema.tables),  # type: ignore[arg-type]
    )


def rows_of(simulation: Simulation, table: str) -> dict[int, np.ndarray]:
    """Id → row of this table."""
    spec = simulation.deployment.schema.table_by_name[table]
    bits = {
        key: value
        for key, value in simulation.bits().items()
        if key.startswith(f"row ('{spec.stack}', {spec.id},")
    }
    return {
        int(key.rpartition(",")[2].rstrip(") ")): np.frombuffer(value, np.float32, spec.dim)
        for key, value in bits.items()
    }


def num_trained(simulation: Simulation) -> int:
    return sum(part.metrics["requests"] for part in simulation.last.workers.values())


RULES = {table.name: table.rule for table in samples.schema().tables}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (with_tables(user={"dim": 3}, item={"dim": 6}), "wider"),
        (with_tables(user={"rule": RULES["item"]}, item={"rule": RULES["user"]}), "other rules"),
        (with_tables(user={"dim": 4, "rule": RULES["item"]}), "into the stack of another table"),
    ],
)
def test_training_continues_with_the_trained_rows(schema: Schema, why: str) -> None:
    before = first()
    learned = {table: rows_of(before, table) for table in ("user", "item")}
    kills = [
        Kill(("shard 0", "write", "after"), "shard 1"),
        Kill(("shard 1", "commit", "before"), "worker 0"),
    ]
    simulation = fleet(MORE_NUMBERS, deployment_after(before, schema=schema), kills=kills).run()
    assert num_trained(simulation) == len(MORE_NUMBERS), why
    assert simulation.last.seq > before.last.seq and simulation.last.schema == f"{schema.fingerprint:016x}"
    now = rows_of(simulation, "user")
    assert now.keys() == set(MORE_NUMBERS) and learned["user"].keys() == set(NUMBERS)
    for number, row in learned["user"].items():  # a user has one sample, so its row is not trained again
        assert np.array_equal(now[number][: len(row)], row), number
    assert len(rows_of(simulation, "item")) == len(learned["item"]) == samples.NUM_ITEMS
    assert max(len(shard["segments"]) for shard in simulation.last.shards.values()) < 8


def test_a_narrower_table_stops_the_controller_without_changes() -> None:
    before = first()
    objects = dict(before.store.objects)
    with pytest.raises(SchemaError, match="'item'"):
        fleet(MORE_NUMBERS, deployment_after(before, schema=with_tables(item={"dim": 3}))).run()
    assert {name for name in before.store.objects if name.startswith("manifests")} == {
        n for n in objects if n.startswith("manifests")
    }


def imported_store(simulation: Simulation) -> dict[str, bytes]:
    """The store of a simulation, as `checkpoint import` leaves it."""
    last, kept = simulation.last, dict(simulation.store.objects)
    for name in [name for name in kept if name.startswith(f"{manifests.MANIFESTS}/")]:
        del kept[name]
    return kept | {last.name: without_offsets(last).encode()}


@pytest.mark.parametrize(
    "kills",
    [[Kill(("worker 0", "cut", "after"), "worker 1")], [Kill(("shard 0", "write", "after"), "shard 0")]],
)
def test_after_a_move_to_another_kafka_each_sample_is_trained_once(kills: list[Kill]) -> None:
    before = first()
    simulation = fleet(
        MORE_NUMBERS,
        deployment_after(before, kafka=OTHER_KAFKA, objects=imported_store(before)),
        kills=list(kills),
    ).run()
    assert num_trained(simulation) == len(MORE_NUMBERS) and rows_of(simulation, "user").keys() == set(
        MORE_NUMBERS
    )
    assert simulation.last.kafka == OTHER_KAFKA, "the first commit must name the new cluster"
    assert simulation.last.step > before.last.step and simulation.last.incarnation > before.last.incarnation
    now = rows_of(simulation, "user")
    assert all(np.array_equal(now[number], row) for number, row in rows_of(before, "user").items())


def test_another_kafka_is_refused_without_an_import() -> None:
    before = first()
    with pytest.raises(ConfigError, match="offsets"):
        fleet(MORE_NUMBERS, deployment_after(before, kafka=OTHER_KAFKA)).run()


ROTATED, THREE_SHARDS = (BucketMap((np.arange(64, dtype=np.int32) // 7 + 1) % n, n, 1) for n in (2, 3))


def with_moved_buckets(before: Simulation, owners: BucketMap) -> Deployment:
    """Copy the store and the disks of a finished simulation, and move its buckets to these owners."""
    store, blobs = MemoryStore(), copy.deepcopy(before.disks)
    blobs += [MemoryKeyValueStore() for _ in range(owners.num_owners - len(blobs))]
    store.objects |= before.store.objects
    register(store, samples.schema())
    move(store, owners, dict(enumerate(blobs)), 0)
    return Deployment(objects=store.objects, disks=blobs)


def run_one_worker(numbers: list[int], deployment: Deployment, **more: object) -> Simulation:
    return Simulation(
        samples.records(numbers),
        exact=True,
        real_shards=True,
        commit_interval_s=0.5,
        deployment=deployment,
        **more,
    ).run()  # type: ignore[arg-type]


@functools.cache
def run_without_move() -> tuple[Simulation, Simulation]:
    """A run before a move, and its continuation without one."""
    before = run_one_worker(NUMBERS, Deployment())
    return before, run_one_worker(MORE_NUMBERS, deployment_after(before))


@pytest.mark.parametrize("owners", [ROTATED, THREE_SHARDS], ids=["two shards", "three shards"])
@pytest.mark.parametrize(
    "kills",
    [
        [Kill(("shard 1", "write", "after"), "shard 0"), Kill(("controller", "link", "after"), "controller")],
        [Kill(("shard 0", "restore", "after"), "shard 1"), Kill(("worker 0", "cut", "after"), "worker 0")],
    ],
    ids=["while writing", "while restoring"],
)
def test_moved_buckets_do_not_change_training(owners: BucketMap, kills: list[Kill]) -> None:
    before, unmoved = run_without_move()
    moved = run_one_worker(
        MORE_NUMBERS, with_moved_buckets(before, owners), num_shards=owners.num_owners, kills=list(kills)
    )
    assert moved.last.owners == BucketMap(owners.owner_B, owners.num_owners, 1)
    assert unmoved.last.bucket_map is None
    assert moved.bits() == unmoved.bits() and len(moved.bits()) > len(MORE_NUMBERS)
    assert len(moved.killed) == len(kills)

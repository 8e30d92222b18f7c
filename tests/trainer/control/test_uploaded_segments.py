"""Commits whose segments are copied to the store, with kills at each part of an upload, lost disks and an
unavailable store. The final rows equal those of an undisturbed run bit for bit (guarantee G11 of
docs/architecture.md)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
from typing import Any

import pytest

from param_server.key_value_store import MemoryKeyValueStore
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import ObjectStore
from roostream.runtime.retention import StoreCleaner
from tests.runtime import s3_server
from tests.trainer import samples
from tests.trainer.network import CONTROLLER, FlakyBucketStore
from tests.trainer.schedules import (
    SHARDS,
    before_and_after,
    every_nth,
    random_kills,
    random_options_with_store_faults,
)
from tests.trainer.simulator import WORKER, Kill, Simulation

NUMBERS = list(range(1, 49))
UPLOAD = ("shard 0", "upload", "before")


@functools.cache
def undisturbed() -> dict[str, bytes]:
    """The final state of a run without faults and without uploads."""
    return Simulation(samples.records(NUMBERS), exact=True, real_shards=True).run().bits()


@functools.cache
def num_parts() -> int:
    """The number of parts that shard 0 uploads in an undisturbed run."""
    simulation = Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=True).run()
    assert simulation.bits() == undisturbed() and simulation.moments[UPLOAD] > 20
    return simulation.moments[UPLOAD]


def run(kills: list[Kill], **options: Any) -> Simulation:
    simulation = Simulation(
        samples.records(NUMBERS), exact=True, real_shards=True, uploads=True, kills=kills, **options
    )
    simulation.run_with_optional_kills()
    check(simulation)
    return simulation


def check(simulation: Simulation) -> None:
    """Check that every kept commit has its segment copies, that other copies are deleted, and that the newest
    commit can be restored from the copies alone."""
    assert simulation.bits() == undisturbed()
    store = simulation.store
    for number in manifests.numbers(store):
        manifest = manifests.load(store, manifests.manifest_name(number)).manifest
        for shard in manifest.shards.values():
            for segment in shard["segments"]:
                manifests.read_file(store, manifests.StoredFile(**segment["copy"]))
    StoreCleaner(store).clean()  # the store may have been unavailable during the last cleaning
    kept = [manifests.load(store, manifests.manifest_name(n)).manifest for n in manifests.numbers(store)]
    named = set[str]().union(*(manifest.segment_copies for manifest in kept))
    unnamed = set(store.list(manifests.SEGMENTS)) - named
    assert all(manifests.segment_copy_seq(name) >= kept[-1].seq for name in unnamed)
    simulation.disks[:] = [MemoryKeyValueStore() for _ in simulation.disks]
    for who in SHARDS:
        simulation.kill(who)
    for _ in range(24):
        simulation.round()
    assert simulation.run().bits() == undisturbed()


@pytest.mark.parametrize(
    ("part", "loses_disk"), every_nth(6, itertools.product(range(1, 40, 3), [False, True]))
)
def test_g11_a_shard_is_killed_at_a_part_of_its_upload(part: int, loses_disk: bool) -> None:
    simulation = run([Kill(UPLOAD, "shard 0", part, loses_disk)])
    assert simulation.killed[0] == "shard 0"


@pytest.mark.parametrize(
    ("part", "victim"), every_nth(3, itertools.product([2, 11, 23], [CONTROLLER, WORKER, "shard 1"]))
)
def test_g11_another_program_is_killed_during_an_upload(victim: str, part: int) -> None:
    run([Kill(UPLOAD, victim, part, loses_disk=True)])


@pytest.mark.parametrize(
    "moment",
    [
        *before_and_after("shard 0", "freeze", "write", "commit"),
        *before_and_after(CONTROLLER, "link"),
        ("shard 1", "restore", "before"),
    ],
    ids=" ".join,
)
def test_g11_both_disks_are_lost_at_a_moment_of_a_commit(moment: tuple[str, str, str]) -> None:
    occurrence = 1 if moment[1] == "restore" else 3
    run([Kill(moment, shard, occurrence, loses_disk=True) for shard in SHARDS])


def random_upload_options(seed: int) -> dict[str, Any]:
    """Options of `Simulation`: message faults, a fault schedule with store faults, and one to four kills. One
    kill is during an upload; half of the kills also lose the shard's disk."""
    draw = random.Random(f"upload {seed}")
    kills = [
        *(dataclasses.replace(k, loses_disk=draw.random() < 0.5) for k in random_kills(seed, 1)),
        Kill(UPLOAD, draw.choice([*SHARDS, CONTROLLER]), draw.randint(1, num_parts()), draw.random() < 0.5),
    ]
    return {**random_options_with_store_faults(seed, 1), "kills": kills}


@pytest.mark.parametrize("seed", every_nth(7, range(400, 420)))
def test_g11_any_kills_lost_disks_and_faults_of_the_store(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        simulation = run(**random_upload_options(seed))
    assert simulation.network.fault_counts
    assert "damaged" not in caplog.text


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 1150, 10))
def test_g11_any_kills_lost_disks_and_faults_over_a_real_s3_server(first: int) -> None:
    """`check` kills both shards at the end of each run, and restores them from the bucket alone."""
    num_kills = 0
    with s3_server.running():
        for seed in range(first, first + 10):
            bucket = ObjectStore(f"{s3_server.BUCKET}/{seed}")
            simulation = run(
                **random_upload_options(seed), open_store=functools.partial(FlakyBucketStore, bucket=bucket)
            )
            num_kills += len(simulation.killed) - len(SHARDS)
    assert num_kills >= 15  # 1 to 4 kills a run; some name moments that never occur


def test_a_store_that_takes_no_uploads_for_a_while_delays_commits_and_rolls_nothing_back() -> None:
    simulation = Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=True)
    for _ in range(10):
        simulation.store.fail_next("put_stream")
    simulation.run()
    assert simulation.controller is not None
    status = simulation.controller.status()
    assert status["aborts"] >= 4 and status["rollbacks"] == 0
    check(simulation)


def finished_run(*, uploads: bool) -> Simulation:
    return Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=uploads).run()


def restart_shards(simulation: Simulation, rounds: int = 40) -> None:
    for who in SHARDS:
        simulation.kill(who)
    for _ in range(rounds):
        simulation.round()


def test_shards_that_lose_all_disks_without_copies_wait_until_the_disks_are_back() -> None:
    simulation = finished_run(uploads=False)
    disks, objects = list(simulation.disks), dict(simulation.store.objects)
    simulation.disks[:] = [MemoryKeyValueStore() for _ in disks]
    restart_shards(simulation)
    assert not simulation.is_done() and simulation.controller is not None
    assert "mount its volume" in simulation.controller.status()["reason"]
    assert {name for name in objects if name.startswith("manifests/")} == set(
        simulation.store.list("manifests")
    )
    simulation.disks[:] = disks
    restart_shards(simulation)
    assert simulation.run().bits() == undisturbed()


def test_the_previous_commit_is_restored_if_a_disk_and_a_segment_copy_are_lost() -> None:
    simulation = finished_run(uploads=True)
    last = simulation.last
    simulation.store.delete(last.shards[0]["segments"][-1]["copy"]["name"])
    simulation.disks[0] = MemoryKeyValueStore()
    restart_shards(simulation)
    assert simulation.run().bits() == undisturbed()
    assert simulation.last.seq > last.seq, (
        "the samples of the damaged commit must be trained and committed again"
    )


def test_a_lost_segment_copy_does_not_matter_while_the_disk_is_intact() -> None:
    simulation = Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=True)
    while manifests.newest(simulation.store) is None:
        simulation.round()
    for name in simulation.last.segment_copies:
        simulation.store.delete(name)
    restart_shards(simulation)
    simulation.run()
    assert simulation.bits() == undisturbed()
    assert all(simulation.slots[who].process.shard.copies.fetched_bytes == 0 for who in SHARDS)
    assert simulation.controller is not None and not simulation.controller.coordinator.num_aborts

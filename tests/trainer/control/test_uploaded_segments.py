"""Commits whose segments are copied to the store: kills at each piece of an upload, disks that are lost, and
a store that is away. Rows end bit-equal to those of the undisturbed run."""

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
from tests.trainer.network import CONTROLLER, BucketStore
from tests.trainer.schedules import SHARDS, around, drawn_with_store_faults, every, kills_of
from tests.trainer.simulator import WORKER, Kill, Simulation

NUMBERS = list(range(1, 49))
UPLOAD = ("shard 0", "upload", "before")


@functools.cache
def undisturbed() -> dict[str, bytes]:
    """The disks have the only copy of the rows."""
    return Simulation(samples.records(NUMBERS), exact=True, real_shards=True).run().bits()


@functools.cache
def num_pieces() -> int:
    """How many pieces shard 0 uploads in an undisturbed run."""
    simulation = Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=True).run()
    assert simulation.bits() == undisturbed() and simulation.moments[UPLOAD] > 20
    return simulation.moments[UPLOAD]


def run(kills: list[Kill], **options: Any) -> Simulation:
    simulation = Simulation(
        samples.records(NUMBERS), exact=True, real_shards=True, uploads=True, kills=kills, **options
    )
    simulation.run_as_far_as_kills_go()
    check(simulation)
    return simulation


def check(simulation: Simulation) -> None:
    """Every kept commit has its copies, others are deleted, and the newest one can be restored from them
    alone."""
    assert simulation.bits() == undisturbed()
    store = simulation.store
    for number in manifests.numbers(store):
        manifest = manifests.load(store, manifests.manifest_name(number)).manifest
        for shard in manifest.shards.values():
            for segment in shard["segments"]:
                manifests.read_file(store, manifests.StoredFile(**segment["copy"]))
    StoreCleaner(store).clean()  # the store may have been away at the last one
    kept = [manifests.load(store, manifests.manifest_name(n)).manifest for n in manifests.numbers(store)]
    unnamed = set(store.list(manifests.SEGMENTS)) - set[str]().union(*(one.segment_copies for one in kept))
    assert all(manifests.segment_copy_seq(name) >= kept[-1].seq for name in unnamed)
    simulation.disks[:] = [MemoryKeyValueStore() for _ in simulation.disks]
    for who in SHARDS:
        simulation.kill(who)
    for _ in range(24):
        simulation.round()
    assert simulation.run().bits() == undisturbed()


@pytest.mark.parametrize(("piece", "loses_disk"), every(6, itertools.product(range(1, 40, 3), [False, True])))
def test_g11_a_shard_is_killed_at_a_piece_of_its_upload(piece: int, loses_disk: bool) -> None:
    simulation = run([Kill(UPLOAD, "shard 0", piece, loses_disk)])
    assert simulation.killed[0] == "shard 0"


@pytest.mark.parametrize(
    ("piece", "victim"), every(3, itertools.product([2, 11, 23], [CONTROLLER, WORKER, "shard 1"]))
)
def test_g11_another_program_is_killed_during_an_upload(victim: str, piece: int) -> None:
    run([Kill(UPLOAD, victim, piece, loses_disk=True)])


@pytest.mark.parametrize(
    "moment",
    [
        *around("shard 0", "freeze", "write", "commit"),
        *around(CONTROLLER, "link"),
        ("shard 1", "restore", "before"),
    ],
    ids=" ".join,
)
def test_g11_both_disks_are_lost_at_a_moment_of_a_commit(moment: tuple[str, str, str]) -> None:
    occurrence = 1 if moment[1] == "restore" else 3
    run([Kill(moment, shard, occurrence, loses_disk=True) for shard in SHARDS])


def drawn(seed: int) -> dict[str, Any]:
    """Options of a simulation: one to four kills, one of them during an upload, half of them with the shard's
    disk; disorder, and faults that last, also of the store."""
    draw = random.Random(f"upload {seed}")
    kills = [
        *(dataclasses.replace(k, loses_disk=draw.random() < 0.5) for k in kills_of(seed, 1)),
        Kill(UPLOAD, draw.choice([*SHARDS, CONTROLLER]), draw.randint(1, num_pieces()), draw.random() < 0.5),
    ]
    return {**drawn_with_store_faults(seed, 1), "kills": kills}


@pytest.mark.parametrize("seed", every(7, range(400, 420)))
def test_g11_any_kills_lost_disks_and_faults_of_the_store(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        simulation = run(**drawn(seed))
    assert simulation.network.struck
    assert "damaged" not in caplog.text


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 1150, 10))
def test_g11_any_kills_lost_disks_and_faults_over_a_real_s3_server(first: int) -> None:
    """At the end of each run, both shards are killed and restored from the bucket alone."""
    num_kills = 0
    with s3_server.running():
        for seed in range(first, first + 10):
            bucket = ObjectStore(f"{s3_server.BUCKET}/{seed}")
            simulation = run(**drawn(seed), open_store=functools.partial(BucketStore, bucket=bucket))
            num_kills += len(simulation.killed) - len(SHARDS)
    assert num_kills >= 15  # of 1 to 4 a run, some name moments that never come


def test_a_store_that_takes_no_uploads_for_a_while_delays_commits_and_rolls_nothing_back() -> None:
    simulation = Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=True)
    for _ in range(10):
        simulation.store.fail_next("put_stream")
    simulation.run()
    assert simulation.controller is not None
    status = simulation.controller.status()
    assert status["aborts"] >= 4 and status["rollbacks"] == 0
    check(simulation)


def trained(*, uploads: bool) -> Simulation:
    """Everything is trained and committed."""
    return Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=uploads).run()


def restart_shards(simulation: Simulation, rounds: int = 40) -> None:
    for who in SHARDS:
        simulation.kill(who)
    for _ in range(rounds):
        simulation.round()


def test_shards_that_lose_all_disks_without_copies_wait_until_the_disks_are_back() -> None:
    simulation = trained(uploads=False)
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


def test_the_commit_before_is_restored_if_a_disk_and_the_copy_that_it_needs_are_lost() -> None:
    simulation = trained(uploads=True)
    last = simulation.last
    simulation.store.delete(last.shards[0]["segments"][-1]["copy"]["name"])
    simulation.disks[0] = MemoryKeyValueStore()
    restart_shards(simulation)
    assert simulation.run().bits() == undisturbed()
    assert simulation.last.seq > last.seq, "what the damaged commit had is trained and committed again"


def test_training_continues_without_a_copy_whose_disk_is_in_order() -> None:
    simulation = Simulation(samples.records(NUMBERS), exact=True, real_shards=True, uploads=True)
    while manifests.newest(simulation.store) is None:
        simulation.round()
    for name in simulation.last.segment_copies:
        simulation.store.delete(name)
    restart_shards(simulation)
    simulation.run()
    assert simulation.bits() == undisturbed()
    assert all(simulation.places[who].process.shard.copies.fetched_bytes == 0 for who in SHARDS)
    assert simulation.controller is not None and not simulation.controller.coordinator.num_aborts

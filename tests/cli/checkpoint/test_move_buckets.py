"""Buckets of rows move between shards in one commit. The rows stay bit-equal, a kill at any moment leaves the
old or the new bucket map, and changes that are not yet published to replicas are not lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from infra.home import Home
from infra.options import demo, load_saved_options, save_options
from param_server.client import Client
from param_server.key_value_store import MemoryKeyValueStore, RocksDbStore
from param_server.publish import Publisher
from param_server.server import Shard
from roostream.cli.checkpoint.move_buckets import move
from roostream.cli.main import cli
from roostream.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    RoostreamError,
    SetupError,
    UnavailableError,
)
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import bucket_of
from roostream.schema.registry import register
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ITEM,
    NEVER_STOP,
    TOPIC,
    USER,
    Follower,
    gradients_of,
    link_manifest,
    lookup_of,
    make_shard,
    small_schema,
    state_of,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore

SWAPPED = BucketMap(1 - BucketMap.modulo(64, 2).owner_B, 2, 1)
ALTERNATING = BucketMap((np.arange(64, dtype=np.int32) // 7 + 1) % 2, 2, 1)
ONE, THREE = BucketMap.modulo(64, 1), BucketMap(np.arange(64, dtype=np.int32) // 22, 3, 1)


class Killed(BaseException):
    """The process was killed."""


class Fleet:
    """The shards of a deployment, restored from the newest commit of `store`, which can be trained and
    committed."""

    def __init__(self, store: Any, blobs: Mapping[int, Any], topic: InMemoryRows | None = None) -> None:
        self.store, self.topic, last = store, topic, manifests.newest(store)
        count = last.manifest.num_shards if last else len(blobs)
        about = {"num_shards": count, "publishing": topic is not None}
        self.shards: list[Shard] = [make_shard(blobs[i], store, index=i, **about) for i in range(count)]
        self.incarnation = manifests.claim_incarnation(store, 0)
        for shard in self.shards:
            shard.restore(self.incarnation, last.name if last else "")
        self.last = last
        self.client = Client(
            small_schema(), [transport_to(s) for s in self.shards], worker=0, clock=FakeClock()
        )
        self.client.set_incarnation(self.incarnation, 1, last.manifest.owners if last else None)
        self.publishers = [Publisher(shard, topic, FakeClock()) for shard in self.shards] if topic else []

    def push(self, value: float, ids: Iterable[int] = range(80)) -> None:
        lookup = lookup_of({ITEM: ids, USER: ids, TOPIC: ids})
        self.client.push(lookup, gradients_of(lookup, value), step=0, time_ms=0)

    def commit(self) -> Fleet:
        seq = manifests.next_seq(self.store)
        for shard in self.shards:
            shard.freeze(seq, 0)
        about = {"schema": f"{small_schema().fingerprint:016x}"}
        about |= {"bucket_map": self.last.manifest.bucket_map} if self.last else {}  # type: ignore[dict-item]
        link_manifest(self.store, seq, self.incarnation, [shard.write(seq) for shard in self.shards], **about)
        for shard in self.shards:
            shard.commit(seq)
        self.client.close()
        return self

    def rows(self) -> dict[Any, bytes]:
        return {key: bits for shard in self.shards for key, bits in state_of(shard).items()}


def make_trained_store(
    num_shards: int = 2,
) -> tuple[MemoryStore, dict[int, MemoryKeyValueStore], dict[Any, bytes]]:
    """Make four commits, the last of only some of the rows. Return the store, the shards' disks and the
    rows."""
    store, blobs = MemoryStore(), {i: MemoryKeyValueStore() for i in range(num_shards)}
    register(store, small_schema())
    fleet = Fleet(store, blobs)
    for step, ids in enumerate((range(80), range(40), range(20, 60), range(5))):
        fleet.push(step + 0.25, ids)
        fleet.commit()
        fleet = Fleet(store, blobs)
    fleet.client.close()
    return store, blobs, fleet.rows()


def add_empty_disks(blobs: Mapping[int, MemoryKeyValueStore], count: int) -> dict[int, MemoryKeyValueStore]:
    return {i: blobs.get(i) or MemoryKeyValueStore() for i in range(max(count, len(blobs)))}


@pytest.mark.parametrize(
    "after", [SWAPPED, ALTERNATING, ONE, THREE], ids=["swapped", "alternating", "to one", "to three"]
)
def test_moved_rows_are_bit_equal_at_their_new_owner(after: BucketMap) -> None:
    store, blobs, rows = make_trained_store()
    all_disks = add_empty_disks(blobs, after.num_owners)
    before = manifests.newest(store)
    new_manifest = move(store, after, all_disks, 7)
    assert (
        before
        and new_manifest.seq == before.manifest.seq + 1
        and new_manifest.previous == {"seq": before.manifest.seq, "checksum": before.checksum}
    )
    assert (new_manifest.owners.owner_B == after.owner_B).all()
    assert manifests.newest(store).manifest == new_manifest  # type: ignore[union-attr]
    fleet = Fleet(store, all_disks)
    assert fleet.rows() == rows and len(fleet.shards) == after.num_owners
    for index, shard in enumerate(fleet.shards):
        assert {int(after.owner_B[bucket_of(id_, table, 64)]) for _, table, id_ in state_of(shard)} == {index}


def test_training_between_moves_gives_the_same_rows_as_without_moves() -> None:
    store, blobs, _ = make_trained_store()
    unmoved_store, unmoved_blobs = copy.deepcopy(store), copy.deepcopy(blobs)
    for after in (ALTERNATING, THREE, ONE, BucketMap.modulo(64, 2)):
        all_disks = add_empty_disks(blobs, 3)
        move(store, after, all_disks, 0)
        for fleet in (Fleet(store, all_disks), Fleet(unmoved_store, unmoved_blobs)):
            fleet.push(after.num_owners + 0.5, range(10, 90))
            fleet.commit()
        blobs = all_disks
    assert Fleet(store, blobs).rows() == Fleet(unmoved_store, unmoved_blobs).rows()


def test_a_map_without_moved_segments_gives_other_rows() -> None:
    """Negative control: the comparison of rows in the tests above can fail."""
    store, blobs, rows = make_trained_store()
    newest = manifests.newest(store)
    assert newest
    without_segments = {
        "bucket_map": ALTERNATING,
        "shards": newest.manifest.shards,
        "schema": newest.manifest.schema,
    }
    link_manifest(
        store, newest.manifest.seq + 1, 9, [{"segments": [], "rows_end": {}}] * 2, **without_segments
    )
    assert Fleet(store, blobs).rows() != rows


class KilledAtChange:
    """A store or disk whose n-th change kills the process, before or (`after_change`) after the change takes
    effect. All objects that share `changes_left` count their changes together.
    """

    def __init__(self, inner: Any, changes_left: list[int], after_change: bool) -> None:
        self.inner, self.changes_left, self.after_change = inner, changes_left, after_change

    def _apply(self, change: Any) -> Any:
        self.changes_left[0] -= 1
        if self.changes_left[0] == 0:
            if self.after_change:
                change()
            raise Killed
        return change()

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        self._apply(lambda: self.inner.write(puts, deletes, sync=sync))

    def create(self, name: str, data: bytes) -> bool:
        return bool(self._apply(lambda: self.inner.create(name, data)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def killed_moves() -> Iterator[tuple[bool, MemoryStore, dict[int, MemoryKeyValueStore], dict[Any, bytes]]]:
    store, blobs, rows = make_trained_store()
    for after_change in (False, True):
        for nth in range(1, 100):
            killed_store, killed_blobs = copy.deepcopy(store), add_empty_disks(copy.deepcopy(blobs), 3)
            changes_left = [nth]
            try:
                killed_disks: Any = {
                    i: KilledAtChange(b, changes_left, after_change) for i, b in killed_blobs.items()
                }
                move(KilledAtChange(killed_store, changes_left, after_change), THREE, killed_disks, 0)  # type: ignore[misc]
            except Killed:
                is_moved = manifests.newest(killed_store).manifest.num_shards == 3  # type: ignore[union-attr]
                yield is_moved, killed_store, killed_blobs, rows
                continue
            break


def test_a_killed_move_leaves_the_old_or_the_new_map_and_can_be_repeated() -> None:
    outcomes = []
    for is_moved, store, blobs, rows in killed_moves():
        outcomes.append(is_moved)
        assert Fleet(store, blobs).rows() == rows, "files that the killed move left behind do no harm"
        move(store, THREE, blobs, 0)
        fleet = Fleet(store, blobs)
        assert fleet.rows() == rows and len(fleet.shards) == 3
        fleet.push(1.0)
        fleet.commit()
        named = {s.name for shard in fleet.shards for s in shard.committed.segments}
        stored = {key[2:].decode() for disk in blobs.values() for key in disk.keys(b"d/")}
        assert stored >= named
    assert len(outcomes) > 8 and outcomes.count(True) == 1, (
        "only a kill after the manifest was created leaves the new map"
    )


def test_unpublished_changes_survive_a_move() -> None:
    store, blobs = MemoryStore(), {i: MemoryKeyValueStore() for i in range(2)}
    register(store, small_schema())
    topic = InMemoryRows()
    fleet, follower = Fleet(store, blobs, topic), Follower(topic)
    follower.bootstrap(*fleet.shards)
    fleet.push(0.5)
    for publisher in fleet.publishers:
        publisher.turn(NEVER_STOP)
    fleet.push(1.5, range(30))  # these changes are committed but not published
    fleet.commit()
    move(store, ALTERNATING, blobs, 0)
    now = Fleet(store, blobs, topic)
    for publisher in now.publishers:
        publisher.turn(NEVER_STOP)
        publisher.turn(NEVER_STOP)
    follower.catch_up()
    assert not follower.replica.needs_bootstrap and follower.num_bootstraps == 1
    followed, pulled = follower.rows(ITEM, *range(80)), now.client.pull(lookup_of({ITEM: range(80)}))
    assert followed.tobytes() == next(iter(pulled.values())).tobytes()
    now.client.close()


def test_a_rollback_to_before_the_move_has_the_old_map_and_rows() -> None:
    store, blobs, rows = make_trained_store()
    before = manifests.newest(store)
    assert before
    move(store, ALTERNATING, blobs, 0)
    fleet = Fleet(store, blobs)
    fleet.push(4.0)
    fleet.commit()
    manifests.discard_after(store, before.manifest.seq)
    rolled_back = Fleet(store, blobs)
    assert rolled_back.rows() == rows and rolled_back.shards[0].owners == BucketMap.modulo(64, 2)


def test_applying_the_current_map_makes_no_commit() -> None:
    store, blobs, _ = make_trained_store()
    before = manifests.newest(store)
    assert before and move(store, BucketMap.modulo(64, 2), blobs, 0) == before.manifest


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (BucketMap.modulo(32, 2), "expected 64 buckets, got 32"),
        (BucketMap(np.zeros(64, np.int32), 2, 1), "for each of 2 shards, got none for shard 1"),
        (BucketMap(np.ones(64, np.int32), 2, 1), "got none for shard 0"),
        (
            BucketMap(BucketMap.modulo(64, 3).owner_B, 1 << 30, 1),
            "for each of 1073741824 shards, got none for shard 3",
        ),
    ],
)
def test_an_invalid_map_is_rejected_and_changes_nothing(after: BucketMap, says: str) -> None:
    store, blobs, _ = make_trained_store()
    objects, data = dict(store.objects), {i: dict(b.data) for i, b in blobs.items()}
    with pytest.raises(ConfigError, match=says):
        move(store, after, blobs, 0)
    assert store.objects == objects and {i: b.data for i, b in blobs.items()} == data
    with pytest.raises(CheckpointError, match="there are no rows to move yet"):
        move(MemoryStore(), ALTERNATING, blobs, 0)


def test_damaged_rows_are_not_moved_and_a_full_disk_leaves_the_last_commit() -> None:
    store, blobs, rows = make_trained_store()
    sound = copy.deepcopy(blobs)
    for key in blobs[0].keys(b"b/1-"):
        blobs[0].data[key] = blobs[0].data[key][:-1] + b"?"
    with pytest.raises(CheckpointError, match="damaged"):
        move(store, ALTERNATING, blobs, 0)
    sound[1].fail_at(2)
    with pytest.raises(UnavailableError, match="injected"):
        move(store, ALTERNATING, sound, 0)
    assert Fleet(store, sound).rows() == rows


def test_a_move_fences_running_programs() -> None:
    store, blobs, _ = make_trained_store()
    old_incarnation = manifests.newest_incarnation(store)
    move(store, ALTERNATING, blobs, 0)
    assert manifests.newest_incarnation(store) == old_incarnation + 1
    fleet = Fleet(store, blobs)
    with pytest.raises(FencedError, match="incarnation"):
        fleet.client.set_incarnation(old_incarnation, 1, None)
        fleet.push(1.0)
    fleet.client.close()


# Tests of the command `roostream placement`


def make_home(tmp_path: Path) -> tuple[Path, dict[Any, bytes]]:
    home = tmp_path / "home"
    store = FileStore(home / "store")
    register(store, small_schema())
    with_open_blobs(home, 2, lambda blobs: Fleet(store, blobs).push(1.0))
    rows: dict[Any, bytes] = {}

    def train(blobs: dict[int, RocksDbStore]) -> None:
        fleet = Fleet(store, blobs)
        fleet.push(1.0)
        rows.update(fleet.commit().rows())

    with_open_blobs(home, 2, train)
    save_options(home, demo())
    return home, rows


def with_open_blobs(home: Path, count: int, action: Any) -> None:
    blobs = {i: RocksDbStore(home / f"shard-{i}" / "segments") for i in range(count)}
    for i, disk in blobs.items():
        (home / f"shard-{i}").mkdir(parents=True, exist_ok=True)
        disk.open()
    try:
        action(blobs)
    finally:
        for disk in blobs.values():
            disk.close()


def run_command(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["placement", *map(str, arguments)])
    if isinstance(done.exception, RoostreamError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_a_home_of_two_shards_becomes_one_of_three_by_map_and_apply(tmp_path: Path) -> None:
    home, rows = make_home(tmp_path)
    assert "32 buckets" in run_command("map", "--home", home)
    file = tmp_path / "three.json"
    file.write_text(run_command("map", "--home", home, "--shards", 3, "--max-moved", 1, "--json"))
    store = FileStore(home / "store")
    before = manifests.newest(store)
    output = run_command("apply", file, "--home", home, "--dry-run")
    assert "nothing was changed" in output and "imbalance" in output and "→" in output
    assert before and manifests.newest(store) == before and not (home / "shard-2").exists()
    assert "has the map" in run_command("apply", file, "--home", home)
    options = load_saved_options(home)
    assert options and options.num_shards == 3
    with_open_blobs(home, 3, lambda blobs: rows.update(same=Fleet(store, blobs).rows() == rows))  # type: ignore[arg-type]
    assert rows.pop("same"), "rows are bit-equal"  # type: ignore[call-overload]
    after = manifests.newest(store)
    run_command("apply", file, "--home", home)
    assert manifests.newest(store) == after, "applying the same map again moves nothing"


def test_the_next_up_in_a_home_of_up_starts_the_new_number_of_shards(tmp_path: Path) -> None:
    home, _ = make_home(tmp_path)
    (home / "options.json").unlink()  # `up` saves none
    schema = tmp_path / "shop.toml"
    schema.write_text("")
    Home(home).write_stack({"schema": str(schema), "programs": {}})
    file = tmp_path / "three.json"
    file.write_text(run_command("map", "--home", home, "--shards", 3, "--max-moved", 1, "--json"))
    run_command("apply", file, "--home", home)
    assert load_saved_options(home) == demo(num_shards=3, schema=schema), "and nothing else changes"


def test_a_shard_that_runs_or_is_elsewhere_is_reported(tmp_path: Path) -> None:
    home, _ = make_home(tmp_path)
    file = tmp_path / "one.json"
    file.write_text(json.dumps(ONE.plain()))
    with Home(home).locked(), pytest.raises(SetupError, match="already runs"):
        run_command("apply", file, "--home", home)
    with pytest.raises(ConfigError, match="`placement map --json`"):
        run_command("apply", home / "options.json", "--home", home)
    with pytest.raises(ConfigError, match="got No such file"):
        run_command("apply", tmp_path / "none.json", "--home", home)
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    plan.write_text(json.dumps({"owners": 8, "pieces": [], "bytes_imbalance": 1.0}))
    with pytest.raises(ConfigError, match="`placement map --json`"):
        run_command("apply", plan, "--home", home)
    other.write_text(json.dumps(BucketMap.modulo(32, 4).plain()))
    with pytest.raises(ConfigError, match="expected 64 buckets, got 32; the number of buckets can't change"):
        run_command("apply", other, "--home", home)
    assert not (home / "shard-2").exists(), "a rejected map creates no files"
    with pytest.raises(SetupError, match="cannot be opened"):
        with_open_blobs(home, 1, lambda blobs: run_command("apply", file, "--home", home))
    (home / "shard-1").rename(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="expected the segments of shard 1"):
        run_command("apply", file, "--home", home)

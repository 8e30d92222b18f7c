"""`roostream placement apply` in a process that is killed at random moments. Either the old or the new map
holds, and every row is unchanged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from param_server.key_value_store import RocksDbStore
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import FileStore
from roostream.schema.registry import register
from tests.cli.checkpoint.test_move_buckets import Fleet
from tests.param_server.shard_support import small_schema

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
ROOSTREAM = [sys.executable, "-m", "roostream.cli.main"]
ROWS, KILLS = 30_000, 8


def rows_of_shards(home: Path, count: int, train: bool) -> dict[Any, bytes]:
    """All rows of the shards in `home`. With `train`, create the shards and commit some rows first."""
    store = FileStore(home / "store")
    register(store, small_schema())
    blobs = {}
    for index in range(count):
        (home / f"shard-{index}").mkdir(parents=True, exist_ok=True)
        blobs[index] = RocksDbStore(home / f"shard-{index}" / "segments").open()
    try:
        fleet = Fleet(store, blobs)
        if train:
            fleet.push(1.0, range(ROWS))
            fleet.commit()
        fleet.client.close()
        return fleet.rows()
    finally:
        for blob_store in blobs.values():
            blob_store.close()


def newest(home: Path) -> manifests.Manifest:
    found = manifests.newest(FileStore(home / "store"))
    assert found is not None
    return found.manifest


def apply_and_kill(home: Path, file: Path, after_s: float) -> bool:
    """Run the command and kill it `after_s` seconds after it claimed its incarnation. False if it had already
    ended."""
    before = manifests.newest_incarnation(FileStore(home / "store"))
    process = subprocess.Popen(
        [*ROOSTREAM, "placement", "apply", str(file), "--home", str(home)], stdout=subprocess.DEVNULL
    )
    while process.poll() is None and manifests.newest_incarnation(FileStore(home / "store")) == before:
        time.sleep(0.002)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def test_a_move_that_is_killed_leaves_one_of_two_maps_and_every_row(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "map.json"
    rows, rng = rows_of_shards(home, 2, train=True), random.Random(0)
    assert len(rows) == 3 * ROWS
    count, outcomes = 2, []
    for number in range(KILLS):
        target_shards = 3 if count == 2 else 2
        map_command = [
            *ROOSTREAM,
            "placement",
            "map",
            "--home",
            str(home),
            "--shards",
            str(target_shards),
            "--max-moved",
            "1",
            "--json",
        ]
        file.write_bytes(subprocess.run(map_command, check=True, stdout=subprocess.PIPE).stdout)
        seq = newest(home).seq
        was_killed = apply_and_kill(home, file, rng.uniform(0.0, 0.1 if number % 2 else 0.4))
        current = newest(home)
        assert (current.seq, current.num_shards) in ((seq, count), (seq + 1, target_shards))
        count = current.num_shards
        outcomes.append((was_killed, current.seq > seq))
        assert rows_of_shards(home, count, train=False) == rows
    assert (True, False) in outcomes, f"no kill came before the manifest: {outcomes}"
    subprocess.run(
        [*ROOSTREAM, "placement", "apply", str(file), "--home", str(home)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert rows_of_shards(home, newest(home).num_shards, train=False) == rows

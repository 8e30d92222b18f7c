"""`roostream placement apply` as a process that is killed at its worst: one of two maps holds, with every row
to the bit."""

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


def with_shards(home: Path, count: int, train: bool) -> dict[Any, bytes]:
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
        for its in blobs.values():
            its.close()


def newest(home: Path) -> manifests.Manifest:
    found = manifests.newest(FileStore(home / "store"))
    assert found is not None
    return found.manifest


def killed(home: Path, file: Path, after_s: float) -> bool:
    """Apply, killed so long after it has claimed its incarnation; False: it had ended."""
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
    rows, drawn = with_shards(home, 2, train=True), random.Random(0)
    assert len(rows) == 3 * ROWS
    count, outcomes = 2, []
    for number in range(KILLS):
        wanted = 3 if count == 2 else 2
        told = [
            *ROOSTREAM,
            "placement",
            "map",
            "--home",
            str(home),
            "--shards",
            str(wanted),
            "--max-moved",
            "1",
            "--json",
        ]
        file.write_bytes(subprocess.run(told, check=True, stdout=subprocess.PIPE).stdout)
        seq = newest(home).seq
        cut_off = killed(home, file, drawn.uniform(0.0, 0.1 if number % 2 else 0.4))
        now = newest(home)
        assert (now.seq, now.num_shards) in ((seq, count), (seq + 1, wanted))
        count = now.num_shards
        outcomes.append((cut_off, now.seq > seq))
        assert with_shards(home, count, train=False) == rows
    assert (True, False) in outcomes, f"no kill came before the manifest: {outcomes}"
    subprocess.run(
        [*ROOSTREAM, "placement", "apply", str(file), "--home", str(home)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert with_shards(home, newest(home).num_shards, train=False) == rows

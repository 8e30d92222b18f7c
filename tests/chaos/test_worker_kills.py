"""Kills of workers while files are trained, with rows at shards or in TorchRec's collections. The model
equals that of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from roostream.cli.train.offline import train_offline
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.program import Stop
from roostream.schema.registry import to_toml
from tests.cli.train.test_offline import config, last_manifest, make_wide_schema, rows_of, same_bits
from tests.trainer import samples
from tests.warehouse.sessions.test_sample_table import archive
from trainer.config import LoopConfig

NUM_SAMPLES, NUM_KILLS = 4000, 3
SLOW = LoopConfig(exact=True, batch_requests=4, first_batch_requests=4)


def workers_of(home: Path) -> list[int]:
    """The process ids of the workers."""
    mark = str(home / "conf" / "worker-")
    children = psutil.Process().children(recursive=True)
    return [c.pid for c in children if any(word.startswith(mark) for word in c.cmdline())]


def num_commits(home: Path) -> int:
    if not (home / "store" / "identity").exists():
        return 0
    found = manifests.newest(open_store(str(home / "store")))
    return found.manifest.seq if found else 0


def train_with_kills(folder: Path, home: str, kills: int = 0, **settings: Any) -> int:
    """Train, and kill a worker `kills` times, each time after a commit since the last kill. Returns the
    number of kills."""
    finished, draw, killed, commits = threading.Event(), random.Random(home), 0, 0

    def run() -> None:
        train_offline(config(folder, home, workers=2, **settings), SLOW, Stop())
        finished.set()

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and killed < kills:
        finished.wait(draw.uniform(0.1, 2.0))
        if num_commits(folder / home) > commits and (pids := workers_of(folder / home)):
            os.kill(draw.choice(pids), signal.SIGKILL)
            killed, commits = killed + 1, num_commits(folder / home)
    thread.join(400)
    assert finished.is_set(), "training ended with an error or did not end"
    return killed


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rows", ["shards", "torchrec"])
def test_g2_g11_killed_workers_train_the_same_model(tmp_path: Path, rows: str) -> None:
    if rows == "torchrec":
        pytest.importorskip("torchrec")
    (tmp_path / "schema.toml").write_text(to_toml(make_wide_schema()))
    archive(tmp_path / "warehouse", samples.records(list(range(1, NUM_SAMPLES + 1))))
    train_with_kills(tmp_path, "calm", rows=rows, num_shards=3)
    assert train_with_kills(tmp_path, "killed", NUM_KILLS, rows=rows, num_shards=3) >= 2
    assert last_manifest(tmp_path, "killed").num_shards == 3
    assert last_manifest(tmp_path, "killed").step == last_manifest(tmp_path, "calm").step
    assert same_bits(tmp_path, "calm", "killed")
    assert rows_of(tmp_path, "calm", make_wide_schema()) == rows_of(tmp_path, "killed", make_wide_schema())

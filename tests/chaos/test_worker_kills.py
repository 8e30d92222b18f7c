"""Workers that hold rows, and workers with shards, are killed while files are trained: the model is as if
nobody had been."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from roostream.cli.train.offline import train_offline
from roostream.runtime.program import Stop
from roostream.schema.registry import to_toml
from tests.cli.train.test_offline import config, last, rows_of, same_bits
from tests.trainer import samples
from tests.warehouse.sessions.test_sample_table import archive
from trainer.config import LoopConfig

NUM_SAMPLES, NUM_KILLS = 4000, 4
SLOW = LoopConfig(exact=True, batch_requests=4, first_batch_requests=4)


def workers_of(home: Path) -> list[int]:
    """Their processes."""
    mark = str(home / "conf" / "worker-")
    children = psutil.Process().children(recursive=True)
    return [c.pid for c in children if any(word.startswith(mark) for word in c.cmdline())]


def trained(place: Path, home: str, kills: int = 0, **more: Any) -> int:
    """How many were killed."""
    over, draw, killed = threading.Event(), random.Random(home), 0

    def run() -> None:
        train_offline(config(place, home, workers=2, **more), SLOW, Stop())
        over.set()

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and killed < kills:
        over.wait(draw.uniform(4.0, 9.0))
        if pids := workers_of(place / home):
            os.kill(draw.choice(pids), signal.SIGKILL)
            killed += 1
    thread.join(400)
    assert over.is_set(), "it ended with an error, or not at all"
    return killed


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_g2_g11_killed_workers_that_hold_rows_train_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(to_toml(samples.schema()))
    archive(tmp_path / "warehouse", samples.records(list(range(1, NUM_SAMPLES + 1))))
    trained(tmp_path, "calm", num_shards=2)
    began_s = time.monotonic()
    killed = trained(tmp_path, "killed", NUM_KILLS, rows="workers", num_shards=3)
    assert killed >= 2, f"it was over in {time.monotonic() - began_s:.0f} s"
    assert last(tmp_path, "killed").num_shards == 3
    assert last(tmp_path, "killed").step == last(tmp_path, "calm").step
    assert same_bits(tmp_path, "calm", "killed") and rows_of(tmp_path, "calm") == rows_of(tmp_path, "killed")

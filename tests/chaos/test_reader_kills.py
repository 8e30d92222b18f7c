"""Random kills of reader programs and of the trainer that they serve. Each sample is trained once, and in
exact mode the model equals, bit for bit, one trained without readers (guarantees G2 and G11,
docs/architecture.md)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.options import ROOT
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline import train_offline
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.manifest import Manifest
from roostream.runtime.program import Stop
from roostream.schema.registry import to_toml
from tests.trainer import samples
from tests.warehouse.sessions.test_sample_table import archive
from trainer.config import LoopConfig

NUM_SAMPLES, MIN_KILLS, MAX_S = 12_000, 24, 1200.0
SETTINGS = {"exact": "true", "batch_requests": "4", "first_batch_requests": "4"}


def readers_of(pid: int) -> list[int]:
    """The reader processes of the trainer. Its supervisor starts them from a thread, so every thread's
    children are listed."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir() if Path(f"/proc/{pid}").exists() else ():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def start(folder: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "roostream.cli.main",
        "train",
        "--warehouse",
        str(folder / "warehouse"),
        "--home",
        str(folder / "killed"),
    ]
    command += [
        "--schema",
        str(folder / "schema.toml"),
        "--partitions",
        "2",
        "--commit-interval",
        "300ms",
        "--readers",
        "2",
    ]
    for key, value in SETTINGS.items():
        command += ["--set", f"worker.{key}={value}"]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(ROOT)})


def newest(folder: Path, home: str) -> Manifest | None:
    found = manifests.newest(open_store(str(folder / home / "store")))
    return found.manifest if found else None


def dense_tensors(folder: Path, home: str) -> dict[str, bytes]:
    last = newest(folder, home)
    assert last is not None and last.input is None
    assert last.workers[0].metrics["requests"] == NUM_SAMPLES, "each sample must be trained once"
    tensors, _ = tensor_file.decode(manifests.read_file(open_store(str(folder / home / "store")), last.dense))
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_g2_g11_kills_of_readers_and_workers_change_no_bit(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    draw = random.Random(pytestconfig.getoption("--seed", default=0))
    (tmp_path / "schema.toml").write_text(to_toml(samples.schema()))
    archive(tmp_path / "warehouse", samples.records(list(range(1, NUM_SAMPLES + 1))))
    killed, last_step = {"reader": 0, "train": 0}, 0
    process, ends_s = start(tmp_path, tmp_path / "log"), time.monotonic() + MAX_S
    try:
        while process.poll() is None:
            assert time.monotonic() < ends_s, (tmp_path / "log").read_text()[-3000:]
            time.sleep(draw.uniform(0.05, 0.6))
            last = newest(tmp_path, "killed")
            num_killed = sum(killed.values())
            if (
                last is None or last.step == last_step or num_killed >= MIN_KILLS
            ):  # a program that is killed during its start would make no progress
                continue
            last_step, readers = last.step, readers_of(process.pid)
            if num_killed % 7 == 6:
                process.kill()
                process.wait()
                killed["train"] += 1
                process = start(tmp_path, tmp_path / "log")
            elif readers:
                os.kill(draw.choice(readers), signal.SIGKILL)
                killed["reader"] += 1
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert killed == {"reader": MIN_KILLS - MIN_KILLS // 7, "train": MIN_KILLS // 7}, (
        "training ended before all kills were made"
    )
    config = TrainConfig(
        warehouse=str(tmp_path / "warehouse"),
        home=str(tmp_path / "undisturbed"),
        schema=str(tmp_path / "schema.toml"),
        partitions=2,
    )
    train_offline(config, LoopConfig(exact=True, batch_requests=4, first_batch_requests=4), Stop())
    assert dense_tensors(tmp_path, "killed") == dense_tensors(tmp_path, "undisturbed")

"""Settings that can't be are refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError, SetupError
from roostream.schema.settings import load
from trainer.config import ControllerConfig, LoopConfig, WorkerConfig
from trainer.selection.config import RehearsalConfig

WORKER: dict[str, Any] = {
    "bootstrap": "k:1",
    "schema": "s.toml",
    "store": "store",
    "controller": "c:1",
    "shards": ("a:1",),
}
CONTROLLER: dict[str, Any] = {
    "listen": "127.0.0.1:0",
    "store": "store",
    "num_shards": 2,
    "bootstrap": "k:1",
    "schema": "s.toml",
}


def test_a_worker_is_configured_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(
        'bootstrap = "k:1"\nschema = "s"\nstore = "d"\ncontroller = "c:1"\nshards = ["a:1", "b:2"]\n'
        'max_batch_wait = "1s"\nexact = true\n'
    )
    config = load(WorkerConfig, path, program="worker", environ={"ROOSTREAM_WORKER_BATCH_REQUESTS": "8"})
    assert (config.shards, config.max_batch_wait_ms, config.exact, config.batch_requests) == (
        ("a:1", "b:2"),
        1000,
        True,
        8,
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_batch_requests": 0}, "key 'first_batch_requests': expected at least 1"),
        ({"batch_requests": 0}, "key 'batch_requests': expected 1.."),
        ({"learning_rate": -1.0}, "key 'learning_rate': expected 0..10"),
        ({"freeze_at_ms": -1}, "key 'freeze_at_ms': expected at least 0"),
        ({"device": "tpu"}, "key 'device': expected cpu, cuda or cuda:N, got 'tpu'"),
        ({"shards": ()}, "key 'shards': expected a value (host:port of shards"),
        ({"index": -1}, "key 'index': expected at least 0"),
        ({"read_ahead": 17}, "key 'read_ahead': expected 0..16, got 17"),
        (
            {"staleness": 1, "exact": True},
            "key 'staleness': expected 0 with exact = true, got 1; what is repeated would",
        ),
        ({"precision": "fp8"}, "key 'precision': expected one of"),
        (
            {"attention": "triton"},
            "key 'attention': expected reference with device = cpu, got 'triton'; its kernels are for CUDA",
        ),
        (
            {"attention": "triton", "device": "cuda", "exact": True},
            "key 'attention': expected reference with exact = true",
        ),
        (
            {"compile": True, "exact": True},
            "key 'compile': expected false with exact = true, got True; which compiled code runs",
        ),
        (
            {"staleness": 1, "rehearsal": RehearsalConfig(batches=1)},
            "key 'staleness': expected 0 with rehearsal, got 1; each batch",
        ),
        (
            {"staleness": 1, "read_ahead": 0},
            "key 'staleness': expected 0 with read_ahead = 0, got 1; no row is pulled ahead",
        ),
    ],
)
def test_a_worker_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**{**WORKER, **changes})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_shards": 0}, "key 'num_shards': expected at least 1"),
        (
            {"num_shards": 65},
            "key 'num_shards': expected at most buckets = 64, got 65; each shard holds at least one bucket",
        ),
        ({"listen": "0.0.0.0:7000"}, "key 'listen': expected a loopback address"),
        (
            {"bootstrap": ""},
            "key 'bootstrap': expected a value (Kafka, host:port; several with commas), got nothing; add it",
        ),
        ({"num_workers": 0}, "key 'num_workers': expected 1..64"),
        (
            {"num_workers": 5},
            "key 'num_workers': expected at most partitions = 4, got 5; each worker trains one partition",
        ),
        ({"initial_workers": 5}, "key 'initial_workers': expected at most partitions = 4, got 5"),
        ({"unit_records": 0}, "key 'unit_records': expected at least 1"),
        (
            {"export_offsets": ("0=5",)},
            "key 'export_offsets': expected none with initial_workers = 0, got '0=5'",
        ),
        (
            {"initial_workers": 1, "export_offsets": ("4=5",)},
            "expected PARTITION=OFFSET with partitions 0..3, got '4=5'",
        ),
        (
            {"initial_workers": 1, "export_offsets": ("0:5",)},
            "expected PARTITION=OFFSET with partitions 0..3, got '0:5'",
        ),
        ({"commit_interval_ms": 5}, "key 'commit_interval_ms': expected at least 100"),
    ],
)
def test_a_controller_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControllerConfig(**{**CONTROLLER, **changes})
    assert says in str(caught.value)


def test_an_export_point_is_chosen_by_partition() -> None:
    chosen = ControllerConfig(**{**CONTROLLER, "initial_workers": 2, "export_offsets": ("0=500", "3=0")})
    assert chosen.export == {0: 500, 3: 0} and ControllerConfig(**CONTROLLER).export == {}


def test_the_learning_rate_grows_with_the_root_of_the_batch_size() -> None:
    config = LoopConfig(
        first_batch_requests=8, batch_requests=32, batch_growth_requests=256, learning_rate=0.1
    )
    taken, steps = 0, 0
    while (size := config.batch_after(taken)) < 32:
        assert config.rate_after(steps) == pytest.approx(0.1 * math.sqrt(size / 32), rel=0.07), (steps, size)
        taken, steps = taken + size, steps + 1
    assert steps > 300
    assert config.rate_after(2 * steps) == config.rate_after(1 << 40) == 0.1, "full batches"


def test_rehearsed_batches_do_not_advance_the_learning_rate() -> None:
    config, rehearses = LoopConfig(), LoopConfig(rehearsal=RehearsalConfig(batches=1))
    assert all(rehearses.rate_after(2 * steps + 1) == config.rate_after(steps) for steps in (0, 1, 500, 4000))


@pytest.mark.parametrize("size", [1, 64])
def test_a_constant_batch_size_has_a_constant_learning_rate(size: int) -> None:
    config = LoopConfig(batch_requests=size, first_batch_requests=64, learning_rate=0.1)
    assert [config.rate_after(steps) for steps in (0, 1, 1 << 40)] == [0.1] * 3


def test_a_missing_device_is_named() -> None:
    import torch

    LoopConfig().check_device()
    if torch.cuda.is_available():
        LoopConfig(device="cuda").check_device()
    else:
        with pytest.raises(SetupError, match="expected a CUDA device for 'cuda'"):
            LoopConfig(device="cuda").check_device()

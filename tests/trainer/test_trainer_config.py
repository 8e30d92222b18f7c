"""Configuration of worker and controller: settings that contradict each other are refused, and the error
names the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError, SetupError
from roostream.schema.settings import load
from trainer.config import ControllerConfig, LoopConfig, WorkerConfig, missing_device
from trainer.selection.config import DeferralConfig, RehearsalConfig, SelectionConfig

COMMON: dict[str, Any] = {"bootstrap": "k:1", "schema": "s.toml", "store": "store"}
WORKER = {**COMMON, "controller": "c:1", "shards": ("a:1",)}
CONTROLLER = {**COMMON, "listen": "127.0.0.1:0", "num_shards": 2}


REHEARSAL, DEFERRAL = RehearsalConfig(batches=1), DeferralConfig(share=0.5)
NEGATIVES = SelectionConfig(policy="negatives")


def test_a_worker_is_configured_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_text(
        'bootstrap = "k:1"\nschema = "s"\nstore = "d"\ncontroller = "c:1"\nshards = ["a:1", "b:2"]\n'
        'max_batch_wait = "1s"\nexact = true\n'
    )
    config = load(WorkerConfig, path, program="worker", environ={"ROOSTREAM_WORKER_BATCH_REQUESTS": "8"})
    assert config.shards == ("a:1", "b:2") and config.max_batch_wait_ms == 1000
    assert config.exact and config.batch_requests == 8


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"device": "tpu"}, "device"),
        ({"shards": ()}, "shards"),
        ({"staleness": 1, "exact": True}, "staleness"),
        ({"precision": "fp8"}, "precision"),
        ({"attention": "triton"}, "attention"),
        ({"attention": "triton", "device": "cuda", "exact": True}, "attention"),
        ({"compile": True, "exact": True}, "compile"),
        ({"staleness": 1, "rehearsal": REHEARSAL}, "staleness"),
        ({"staleness": 1, "expand": "impressions"}, "staleness"),
        ({"staleness": 1, "read_ahead": 0}, "staleness"),
        ({"staleness": 1, "initial_rows": "torchrec"}, "initial_rows"),
        ({"initial_placement": "planner"}, "initial_placement"),
        ({"corrections": "on", "exact": True}, "corrections"),
        ({"loss": "dfm"}, "label_delay_ms"),
        ({"loss": "hinge"}, "loss"),
        ({"rendezvous_address": "0.0.0.0:0"}, "rendezvous_address"),
        ({"rendezvous_address": "0.0.0.0:0", "insecure": True}, "rendezvous_address"),
        ({"rendezvous_address": "[::]:7100", "insecure": True}, "rendezvous_address"),
        ({"expand": "impressions", "rehearsal": REHEARSAL}, "rehearsal.batches"),
        ({"expand": "impressions", "selection": NEGATIVES}, "selection.policy"),
        ({"expand": "impressions", "deferral": DEFERRAL}, "deferral.share"),
        ({"expand": "impressions", "corrections": "on"}, "corrections"),
        ({"expand": "impressions", "deduplicate": True}, "deduplicate"),
        ({"rehearsal": REHEARSAL, "corrections": "on"}, "corrections"),
        ({"rehearsal": REHEARSAL, "selection": NEGATIVES}, "selection.policy"),
        ({"rehearsal": REHEARSAL, "deferral": DEFERRAL}, "deferral.share"),
        ({"selection": SelectionConfig(policy="random", refill=True), "exact": True}, "selection.refill"),
    ],
)
def test_a_worker_refuses_invalid_settings(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**{**WORKER, **changes})
    assert f"key '{key}'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_shards": 65}, "num_shards"),
        ({"listen": "0.0.0.0:7000"}, "listen"),
        ({"bootstrap": ""}, "bootstrap"),
        ({"num_workers": 5}, "num_workers"),
        ({"initial_workers": 5}, "initial_workers"),
        ({"export_offsets": ("0=5",)}, "export_offsets"),
        ({"initial_workers": 1, "export_offsets": ("4=5",)}, "export_offsets"),
        ({"initial_workers": 1, "export_offsets": ("0:5",)}, "export_offsets"),
    ],
)
def test_a_controller_refuses_invalid_settings(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ControllerConfig(**{**CONTROLLER, **changes})
    assert f"key '{key}'" in str(caught.value)


def test_export_offsets_are_given_by_partition() -> None:
    config = ControllerConfig(**{**CONTROLLER, "initial_workers": 2, "export_offsets": ("0=500", "3=0")})
    assert config.export == {0: 500, 3: 0} and ControllerConfig(**CONTROLLER).export == {}


def test_the_learning_rate_grows_with_the_square_root_of_the_batch_size() -> None:
    config = LoopConfig(
        first_batch_requests=8, batch_requests=32, batch_growth_requests=256, learning_rate=0.1
    )
    trained, steps = 0, 0
    while (size := config.batch_after(trained)) < 32:
        assert config.rate_after(steps) == pytest.approx(0.1 * math.sqrt(size / 32), rel=0.07), (steps, size)
        trained, steps = trained + size, steps + 1
    assert steps > 300
    assert config.rate_after(2 * steps) == config.rate_after(1 << 40) == 0.1, (
        "full batches have the full learning rate"
    )


def test_rehearsed_batches_do_not_advance_the_learning_rate() -> None:
    config, rehearses = LoopConfig(), LoopConfig(rehearsal=RehearsalConfig(batches=1))
    assert all(rehearses.rate_after(2 * steps + 1) == config.rate_after(steps) for steps in (0, 1, 500, 4000))


@pytest.mark.parametrize(
    ("device", "num_cuda", "problem"),
    [
        ("cpu", 0, ""),
        ("cuda", 1, ""),
        ("cuda:1", 2, ""),
        ("cuda", 0, "expected a CUDA device for 'cuda' on this machine, got none"),
        ("cuda:2", 2, "expected a CUDA device for 'cuda:2' on this machine, got 2, from cuda:0 on"),
    ],
)
def test_a_device_that_the_machine_lacks_is_named(device: str, num_cuda: int, problem: str) -> None:
    found = missing_device(device, num_cuda)
    assert problem in found and bool(found) == bool(problem)


def test_a_missing_device_is_named() -> None:
    import torch

    LoopConfig().check_device()
    if torch.cuda.is_available():
        LoopConfig(device="cuda").check_device()
    else:
        with pytest.raises(SetupError, match="expected a CUDA device for 'cuda'"):
            LoopConfig(device="cuda").check_device()

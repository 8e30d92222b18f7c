"""Sums between processes: torch's groups, on this machine's loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from roostream.errors import UnavailableError
from tests.contract.source_tree import ROOT
from trainer.process_group import SINGLE_WORKER, GroupSpec, SingleWorkerGroup, TorchRendezvous

ANY = "127.0.0.1:0"


@pytest.fixture
def places() -> Iterator[list[TorchRendezvous]]:
    both = [TorchRendezvous(ANY, device="cpu", timeout_s=20.0) for _ in range(2)]
    yield both
    for place in both:
        place.close()


@pytest.fixture
def hasty() -> Iterator[TorchRendezvous]:
    """One that waits for nobody long."""
    place = TorchRendezvous(ANY, device="cpu", timeout_s=0.3)
    yield place
    place.close()


def test_a_single_worker_is_its_own_sum(hasty: TorchRendezvous) -> None:
    bucket = torch.ones(3, dtype=torch.float64)
    reduction = SINGLE_WORKER.join(GroupSpec(1, 0, 1, ""))
    reduction.sum(bucket)
    reduction.interrupt()
    reduction.leave()
    assert bucket.tolist() == [1.0, 1.0, 1.0] and isinstance(reduction, SingleWorkerGroup)
    with pytest.raises(UnavailableError, match="expected to train alone, got 2 workers"):
        SINGLE_WORKER.join(GroupSpec(1, 0, 2, "127.0.0.1:7000"))
    assert isinstance(hasty.join(GroupSpec(1, 0, 1, "")), SingleWorkerGroup)


def test_a_port_in_use_is_an_error(hasty: TorchRendezvous) -> None:
    with pytest.raises(UnavailableError, match="listen"):
        TorchRendezvous(hasty.address, device="cpu", timeout_s=1.0)


def test_all_workers_get_the_same_sum_in_every_incarnation(places: list[TorchRendezvous]) -> None:
    for incarnation in (3, 4):
        reductions = [
            place.join(GroupSpec(incarnation, i, 2, places[0].address)) for i, place in enumerate(places)
        ]
        buckets = [torch.tensor([1.5 * (i + 1), 1 / 3, 2.0**52], dtype=torch.float64) for i in range(2)]
        threads = [
            threading.Thread(target=r.sum, args=(b,)) for r, b in zip(reductions, buckets, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert torch.equal(*buckets) and buckets[0].tolist() == [4.5, 2 / 3, 2.0**53]
        for reduction in reductions:
            reduction.leave()


@pytest.mark.parametrize("met", [False, True])
def test_an_interrupt_ends_a_wait_for_other_workers(met: bool, places: list[TorchRendezvous]) -> None:
    reductions = [place.join(GroupSpec(1, i, 2, places[0].address)) for i, place in enumerate(places)]
    if met:
        other = threading.Thread(target=reductions[1].sum, args=(torch.ones(1, dtype=torch.float64),))
        other.start()
        reductions[0].sum(torch.ones(1, dtype=torch.float64))
        other.join(20)
    threading.Timer(0.2, reductions[0].interrupt).start()
    with pytest.raises(UnavailableError, match="interrupted while waiting for"):
        reductions[0].sum(torch.ones(1, dtype=torch.float64))
    assert (
        any(thread.name == "reduction-close" for thread in threading.enumerate()) == met
    )  # which waits for gloo's own limit
    with pytest.raises(UnavailableError, match="has left"):
        reductions[0].sum(torch.ones(1, dtype=torch.float64))


def test_waiting_for_missing_workers_has_a_time_limit(hasty: TorchRendezvous) -> None:
    with pytest.raises(UnavailableError, match=r"2 workers at 127.0.0.1:\d+ did not come for 0.3 s"):
        hasty.join(GroupSpec(1, 0, 2, hasty.address)).sum(torch.ones(1, dtype=torch.float64))
    with pytest.raises(UnavailableError, match=r"worker 0 at .* did not come"):
        hasty.join(GroupSpec(1, 1, 2, "127.0.0.1:1")).sum(torch.ones(1, dtype=torch.float64))


OTHER = """
import sys, time, torch
from trainer.process_group import GroupSpec, TorchRendezvous
reduction = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=60.0).join(GroupSpec(7, 1, 2, sys.argv[1]))
bucket = torch.full((1000,), 2.0, dtype=torch.float64)
reduction.sum(bucket)
print(float(bucket.sum()), "torch._dynamo" in sys.modules, flush=True)
time.sleep(60)
"""


def test_g3_a_killed_process_ends_the_wait_of_the_others(places: list[TorchRendezvous]) -> None:
    """Two processes; the time limit of the sum is 20 s, and what ends it is the connection."""
    reduction = places[0].join(GroupSpec(7, 0, 2, places[0].address))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, places[0].address], stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        bucket = torch.ones(1000, dtype=torch.float64)
        deadline_s = time.monotonic() + 60
        while True:  # the other one has yet to import torch
            try:
                reduction.sum(bucket)
                break
            except UnavailableError:
                assert time.monotonic() < deadline_s
                reduction = places[0].join(GroupSpec(7, 0, 2, places[0].address))
        assert other.stdout is not None and other.stdout.readline().split() == ["3000.0", "False"]
        assert bucket.sum() == 3000
        other.send_signal(signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"can't be summed with: .*closed by peer|reset by peer"):
            reduction.sum(torch.ones(1000, dtype=torch.float64))

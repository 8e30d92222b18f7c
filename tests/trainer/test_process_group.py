"""Gradient sums with torch's process groups over the loopback interface."""

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
def rendezvous_pair() -> Iterator[list[TorchRendezvous]]:
    both = [TorchRendezvous(ANY, device="cpu", timeout_s=20.0) for _ in range(2)]
    yield both
    for rendezvous in both:
        rendezvous.close()


@pytest.fixture
def impatient() -> Iterator[TorchRendezvous]:
    """A rendezvous whose waits end after 0.3 s."""
    rendezvous = TorchRendezvous(ANY, device="cpu", timeout_s=0.3)
    yield rendezvous
    rendezvous.close()


def test_a_single_worker_is_its_own_sum(impatient: TorchRendezvous) -> None:
    bucket = torch.ones(3, dtype=torch.float64)
    group = SINGLE_WORKER.join(GroupSpec(1, 0, 1, ""))
    group.sum(bucket)
    group.interrupt()
    group.leave()
    assert bucket.tolist() == [1.0, 1.0, 1.0] and isinstance(group, SingleWorkerGroup)
    with pytest.raises(UnavailableError, match="expected to train alone, got 2 workers"):
        SINGLE_WORKER.join(GroupSpec(1, 0, 2, "127.0.0.1:7000"))
    assert isinstance(impatient.join(GroupSpec(1, 0, 1, "")), SingleWorkerGroup)


def test_addresses_of_ipv6_have_brackets() -> None:
    first, second = (TorchRendezvous("[::1]:0", device="cpu", timeout_s=20.0) for _ in range(2))
    assert first.address.startswith("[::1]:")
    groups = [r.join(GroupSpec(1, i, 2, first.address)) for i, r in enumerate((first, second))]
    buckets = [torch.ones(1, dtype=torch.float64) for _ in groups]
    threads = [threading.Thread(target=g.sum, args=(b,)) for g, b in zip(groups, buckets, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [bucket.tolist() for bucket in buckets] == [[2.0], [2.0]]
    for group, rendezvous in zip(groups, (first, second), strict=True):
        group.leave()
        rendezvous.close()


def test_a_port_in_use_is_an_error(impatient: TorchRendezvous) -> None:
    with pytest.raises(UnavailableError, match="listen"):
        TorchRendezvous(impatient.address, device="cpu", timeout_s=1.0)


def test_all_workers_get_the_same_sum_in_every_incarnation(rendezvous_pair: list[TorchRendezvous]) -> None:
    for incarnation in (3, 4):
        groups = [
            rendezvous.join(GroupSpec(incarnation, i, 2, rendezvous_pair[0].address))
            for i, rendezvous in enumerate(rendezvous_pair)
        ]
        buckets = [torch.tensor([1.5 * (i + 1), 1 / 3, 2.0**52], dtype=torch.float64) for i in range(2)]
        threads = [threading.Thread(target=r.sum, args=(b,)) for r, b in zip(groups, buckets, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert torch.equal(*buckets) and buckets[0].tolist() == [4.5, 2 / 3, 2.0**53]
        for group in groups:
            group.leave()


@pytest.mark.parametrize("is_connected", [False, True])
def test_an_interrupt_ends_a_wait_for_other_workers(
    is_connected: bool, rendezvous_pair: list[TorchRendezvous]
) -> None:
    groups = [
        rendezvous.join(GroupSpec(1, i, 2, rendezvous_pair[0].address))
        for i, rendezvous in enumerate(rendezvous_pair)
    ]
    if is_connected:
        other = threading.Thread(target=groups[1].sum, args=(torch.ones(1, dtype=torch.float64),))
        other.start()
        groups[0].sum(torch.ones(1, dtype=torch.float64))
        other.join(20)
    threading.Timer(0.2, groups[0].interrupt).start()
    with pytest.raises(UnavailableError, match="interrupted while waiting for"):
        groups[0].sum(torch.ones(1, dtype=torch.float64))
    # gloo cannot be interrupted: a thread waits for gloo's own time limit.
    assert any(thread.name == "reduction-close" for thread in threading.enumerate()) == is_connected
    with pytest.raises(UnavailableError, match="has left"):
        groups[0].sum(torch.ones(1, dtype=torch.float64))


def test_waiting_for_missing_workers_has_a_time_limit(impatient: TorchRendezvous) -> None:
    with pytest.raises(UnavailableError, match=r"2 workers at 127.0.0.1:\d+ did not come for 0.3 s"):
        impatient.join(GroupSpec(1, 0, 2, impatient.address)).sum(torch.ones(1, dtype=torch.float64))
    with pytest.raises(UnavailableError, match=r"worker 0 at .* did not come"):
        impatient.join(GroupSpec(1, 1, 2, "127.0.0.1:1")).sum(torch.ones(1, dtype=torch.float64))


OTHER_WORKER = """
import sys, time, torch
from trainer.process_group import GroupSpec, TorchRendezvous
group = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=60.0).join(GroupSpec(7, 1, 2, sys.argv[1]))
bucket = torch.full((1000,), 2.0, dtype=torch.float64)
group.sum(bucket)
print(float(bucket.sum()), "torch._dynamo" in sys.modules, flush=True)
time.sleep(60)
"""


def test_g3_a_killed_process_ends_the_wait_of_the_others(rendezvous_pair: list[TorchRendezvous]) -> None:
    """The wait must end when the connection closes, long before the time limit of the sum, 20 s."""
    group = rendezvous_pair[0].join(GroupSpec(7, 0, 2, rendezvous_pair[0].address))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER_WORKER, rendezvous_pair[0].address],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        bucket = torch.ones(1000, dtype=torch.float64)
        deadline_s = time.monotonic() + 60
        while True:  # until the other process has imported torch
            try:
                group.sum(bucket)
                break
            except UnavailableError:
                assert time.monotonic() < deadline_s
                group = rendezvous_pair[0].join(GroupSpec(7, 0, 2, rendezvous_pair[0].address))
        assert other.stdout is not None and other.stdout.readline().split() == ["3000.0", "False"]
        assert bucket.sum() == 3000
        other.send_signal(signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"can't be summed with: .*closed by peer|reset by peer"):
            group.sum(torch.ones(1000, dtype=torch.float64))

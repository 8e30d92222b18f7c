"""Workers that hold rows sum by one meeting and swap by another, in the same incarnation."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from param_server.row_exchange import RowExchange
from roostream.errors import UnavailableError
from tests.param_server.shard_support import ITEM, begun, lookup_of, state_of
from tests.param_server.test_row_exchange import at_shards, batch
from trainer.process_group import DualRendezvous, GroupSpec, SingleWorkerGroup, TorchRendezvous

WORKERS, STEPS = 2, 3


def test_row_exchange_runs_beside_sums_and_leaving_ends_both() -> None:
    places = [TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=20) for _ in range(WORKERS)]
    shards = [begun(index=i, num_shards=WORKERS) for i in range(WORKERS)]
    rows = [RowExchange(shard, SingleWorkerGroup()) for shard in shards]
    teams = [DualRendezvous(place, its) for place, its in zip(places, rows, strict=True)]
    sums: list[list[float]] = [[], []]

    def one(worker: int) -> None:
        reduction = teams[worker].join(GroupSpec(1, worker, WORKERS, places[0].address))
        rows[worker].set_incarnation(1, WORKERS)
        rows[worker].pull(lookup_of({}))
        with ThreadPoolExecutor(1) as lane:
            for step in range(STEPS):
                lookup, gradients = batch(worker, step)
                push = lane.submit(
                    rows[worker].push, lookup, gradients, step=step, time_ms=100 * step + worker
                )
                bucket_N = torch.tensor([worker + 10.0 * step], dtype=torch.float64)
                reduction.sum(bucket_N)
                sums[worker] += bucket_N.tolist()
                push.result(20)
        if worker:
            reduction.leave()
        with pytest.raises(UnavailableError):
            rows[worker].pull(lookup_of({}))
        with pytest.raises(UnavailableError):
            reduction.sum(torch.zeros(1, dtype=torch.float64))

    try:
        assert [team.address for team in teams] == [place.address for place in places]
        with ThreadPoolExecutor(WORKERS) as pool:
            for done in [pool.submit(one, worker) for worker in range(WORKERS)]:
                done.result(60)
    finally:
        for place in places:
            place.close()
    assert sums == [[1.0 + 20.0 * step for step in range(STEPS)]] * WORKERS
    assert {key: bits for shard in shards for key, bits in state_of(shard).items()} == at_shards(
        WORKERS, STEPS
    )


def test_an_interrupt_ends_a_waiting_row_exchange() -> None:
    place = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=20)
    rows = RowExchange(begun(index=0, num_shards=2), SingleWorkerGroup())
    reduction = DualRendezvous(place, rows).join(GroupSpec(1, 0, 2, place.address))
    rows.set_incarnation(1, 2)
    threading.Timer(0.2, reduction.interrupt).start()
    with pytest.raises(UnavailableError, match="interrupted"):
        rows.pull(lookup_of({ITEM: range(4)}))
    place.close()

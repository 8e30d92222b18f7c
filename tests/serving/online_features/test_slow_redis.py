"""A slow Redis: bounds on what it may cost requests. Time is simulated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from roostream.errors import CheckpointError, RoostreamError, UnavailableError
from roostream.online.counters import Counters, Keys, StateReader
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from serving.errors import RequestError
from serving.http.admission import AdmissionGate
from serving.online_features.hydration import SLOW_READS, HydrationRequest, Hydrator
from serving.online_features.store import UpdaterStates

T0 = 1_700_000_000_000
ADDRESS = "redis://127.0.0.1:1/0"


class SlowStore:
    """A fake feature store in memory. Each read takes `read_s` of the fake clock. States of `broken` users
    have an unknown format.
    """

    def __init__(self, clock: FakeClock, read_s: float, broken: frozenset[int] = frozenset()) -> None:
        self.clock, self.read_s, self.broken, self.num_reads = clock, read_s, broken, 0
        self.counters = Counters(Schema())
        self.counters.apply_impression(7, [5], T0)

    def read(self, keys: Sequence[Keys]) -> list[UpdaterStates]:
        self.num_reads += 1
        self.clock.advance(self.read_s)
        return [
            [
                [b"\x09"] * sum(map(len, k.values()))
                if int(k["user"][0]) in self.broken
                else self.counters.dump(k)
            ]
            for k in keys
        ]


def make_hydrator(store: SlowStore) -> Hydrator:
    return Hydrator(ADDRESS, "", Schema(), clock=store.clock, store=store)


def make_request(user: int = 7) -> HydrationRequest:
    return HydrationRequest(user, [5, 6], T0 + 1000)


def test_all_requests_of_a_pass_are_read_in_one_round_trip() -> None:
    store = SlowStore(FakeClock(), 0.001)
    batched = make_hydrator(store).read_all([make_request(7), make_request(8), make_request(7)])
    assert store.num_reads == 1
    for user, hydrated in zip((7, 8, 7), batched, strict=True):
        assert not isinstance(hydrated, RoostreamError)
        alone = make_hydrator(store).read(*make_request(user))
        assert hydrated[0] == alone[0]
        assert {k: v.tobytes() for k, v in hydrated[1].items()} == {
            k: v.tobytes() for k, v in alone[1].items()
        }


def test_a_damaged_state_costs_only_the_requests_that_read_it() -> None:
    first, second = make_hydrator(SlowStore(FakeClock(), 0.001, frozenset({7}))).read_all(
        [make_request(7), make_request(8)]
    )
    assert isinstance(first, CheckpointError) and not isinstance(second, RoostreamError)


def test_consecutive_slow_reads_suspend_redis_reads_for_half_a_second() -> None:
    clock = FakeClock()
    store = SlowStore(clock, 0.04)
    hydrator = make_hydrator(store)
    for _ in range(SLOW_READS):
        hydrator.read(*make_request())
    with pytest.raises(UnavailableError, match="took 40 ms for a read"):
        hydrator.read(*make_request())
    clock.advance(0.51)
    hydrator.read(*make_request())
    with pytest.raises(UnavailableError):
        hydrator.read(*make_request())
    assert store.num_reads == SLOW_READS + 1, "while Redis is slow, there is one read every half second"
    store.read_s = 0.001
    clock.advance(0.51)
    for _ in range(10):
        hydrator.read(*make_request())


def test_single_slow_reads_do_not_suspend_redis_reads() -> None:
    store = SlowStore(FakeClock(), 0.04)
    hydrator = make_hydrator(store)
    for n in range(20):
        store.read_s = 0.04 if n % SLOW_READS else 0.001
        hydrator.read(*make_request())
    assert store.num_reads == 20


@pytest.mark.parametrize("read_s", [0.001, 0.019, 0.04])
def test_a_slow_redis_refuses_less_than_one_in_twenty_ranks(read_s: float) -> None:
    """60 requests/s for 30 s with a deadline of 100 ms; scoring a request takes 3 ms in addition to the
    read."""
    clock, max_in_pass, deadline_s = FakeClock(), 16, 0.1
    store = SlowStore(clock, read_s)
    hydrator, gate = make_hydrator(store), AdmissionGate(256, clock.monotonic_s)
    begin_s = clock.monotonic_s()
    arrivals = [begin_s + n / 60 for n in range(1800)]
    waiting: list[float] = []
    refused = late = degraded = 0
    while arrivals or waiting:
        while arrivals and arrivals[0] <= clock.monotonic_s():
            arrival_s = arrivals.pop(0)
            try:
                gate.enter(deadline_s)
                waiting.append(arrival_s)
            except RequestError:
                refused += 1
        if not waiting:
            clock.advance(arrivals[0] - clock.monotonic_s())
            continue
        batch, waiting = waiting[:max_in_pass], waiting[max_in_pass:]
        hydrated = hydrator.read_all([make_request()] * len(batch))
        clock.advance(0.003 * len(batch))
        gate.scored(len(batch), batch[0])
        degraded += sum(isinstance(values, UnavailableError) for values in hydrated)
        for arrival_s in batch:
            gate.leave()
            late += clock.monotonic_s() - arrival_s > deadline_s
    assert refused + late < 0.05 * 1800
    assert (degraded > 0.7 * 1800) == (read_s > 0.02)


def test_a_state_that_is_not_finite_reads_as_missing() -> None:
    counters = Counters(Schema())
    counters.apply_impression(7, [5, 6], T0)
    reader = StateReader(Schema())
    keys = reader.keys(7, [5, 6], T0 + 1000)
    states = counters.dump(keys.stored)
    width = (len(states[0] or b"") - 3) // 12
    row = np.full(width, np.inf).tobytes()
    damaged = (states[0] or b"")[: 3 + 4 * width] + row
    ro, nro = reader.read(keys, [[damaged, *states[1:]]])
    for column in nro.values():
        assert not np.isinf(column).any()
    assert np.isnan(nro["views_1h"][0]) and nro["views_1h"][1] > 0.9
    assert all(np.isfinite(v) for v in ro.values() if isinstance(v, float))

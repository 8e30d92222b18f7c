"""Admission control under overload, in simulated time: one server, deterministic arrivals, any load.

Guarantee G7 (docs/architecture.md, Guarantees): overload is refused with a clear status.
"""

from __future__ import annotations

import heapq

import pytest

from serving.config import ServingConfig
from serving.errors import RequestError
from serving.http.admission import AdmissionGate


class SimulatedServer:
    """A simulated server with a queue. Each request takes `service_s` and has a deadline."""

    def __init__(self, service_s: float, deadline_s: float, max_in_flight: int = 1000) -> None:
        self.now_s, self.service_s, self.deadline_s = 0.0, service_s, deadline_s
        self.gate = AdmissionGate(max_in_flight, lambda: self.now_s)
        self.in_time = self.late = self.refused = 0
        self._free_s = 0.0
        self._ends: list[tuple[float, float]] = []  # (time of completion, time of arrival)
        self._open: dict[float, object] = {}

    def arrive(self, at_s: float) -> None:
        self._advance(at_s)
        try:
            admitted = self.gate.admit(self.deadline_s)
            admitted.__enter__()
        except RequestError as error:
            assert error.status == 429 and error.retry_after_s == 1
            self.refused += 1
            return
        self._free_s = max(self._free_s, at_s) + self.service_s
        heapq.heappush(self._ends, (self._free_s, at_s))
        self._open[at_s] = admitted

    def _advance(self, to_s: float) -> None:
        while self._ends and self._ends[0][0] <= to_s:
            self.now_s, arrival_s = heapq.heappop(self._ends)
            self.gate.scored(1, arrival_s)
            self._open.pop(arrival_s).__exit__(None, None, None)  # type: ignore[attr-defined]
            if self.now_s - arrival_s <= self.deadline_s:
                self.in_time += 1
            else:
                self.late += 1
        self.now_s = to_s

    def run(self, rate: float, seconds: float) -> None:
        for _ in range(int(rate * seconds)):
            self.arrive(self.now_s + 1 / rate)


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("service_s", [0.003, 0.05, 0.3])
def test_g7_goodput_does_not_fall_under_overload(load: float, service_s: float) -> None:
    server = SimulatedServer(service_s, deadline_s=1.0)
    seconds = 200 * service_s + 10
    server.run(load / service_s, seconds)
    possible = min(load, 1.0) * seconds / service_s
    assert server.in_time >= 0.9 * possible, "goodput is at least 90 % of the server's capacity"
    first = load + 1  # arrive before the first request is done, when its time is not known yet
    assert server.late <= 0.01 * server.in_time + first, "admitted requests meet their deadline"
    assert load > 1 or server.refused == 0


def test_a_slow_moment_does_not_stop_admission_for_good() -> None:
    server = SimulatedServer(5.0, deadline_s=1.0)
    server.run(0.25, 60)
    slow, refused = server.gate.service_s, server.refused
    assert slow > 4 and server.late
    server.service_s = 0.01
    server.run(10, 30)
    assert server.gate.service_s < 0.1 and server.refused - refused < 100
    refused = server.refused
    server.run(10, 10)
    assert server.refused == refused


def test_the_number_of_admitted_requests_is_bounded() -> None:
    gate = AdmissionGate(2)
    with gate.admit(1.0), gate.admit(1.0), pytest.raises(RequestError, match="2 requests"):
        gate.check(1.0)
    assert gate.in_flight == 0


def test_a_failed_request_does_not_change_the_time_estimate() -> None:
    gate = AdmissionGate(2)
    with pytest.raises(ZeroDivisionError), gate.admit(1.0):
        raise ZeroDivisionError
    gate.scored(0, 0.0)
    assert gate.service_s == 0.0 and gate.in_flight == 0


@pytest.mark.parametrize("stall_s", [0.05, 0.1, 0.2])
def test_a_stall_causes_no_refusals(stall_s: float) -> None:
    """At 880 requests a second (half the capacity), all requests that arrived during a stall are read at
    once."""
    now_s = [0.0]
    gate = AdmissionGate(ServingConfig.max_in_flight, lambda: now_s[0])
    for _ in range(1000):
        now_s[0] += 0.00057
        gate.scored(1, now_s[0] - 0.00057)
    gate.enter(1.0)
    now_s[0] += stall_s
    gate.scored(1, now_s[0] - stall_s)
    gate.leave()
    for _ in range(int(880 * stall_s)):
        gate.enter(1.0)
    assert gate.expected_s() < 0.5, "one slow pass does not raise the estimate for the next passes"


def test_a_slower_ranker_is_detected_within_two_seconds_of_work() -> None:
    now_s = [0.0]
    gate = AdmissionGate(1000, lambda: now_s[0])
    for took_s, passes in ((0.001, 1000), (0.1, 20)):
        for _ in range(passes):
            now_s[0] += took_s
            gate.scored(1, now_s[0] - took_s)
    assert gate.service_s > 0.05


def test_a_long_queue_must_leave_half_of_the_deadline() -> None:
    gate = AdmissionGate(1000, lambda: 0.0)
    gate.service_s = 0.1
    gate.in_flight = 7
    gate.check(1.0)
    gate.in_flight, gate.service_s = 8, 0.06
    with pytest.raises(RequestError, match="deadline"):
        gate.check(1.0)
    gate.check(1.1)


@pytest.mark.parametrize("num_requests", [1, 4, 64])
def test_the_service_time_is_that_of_a_pass_divided_by_its_requests(num_requests: int) -> None:
    now_s = [0.0]
    gate = AdmissionGate(1000, lambda: now_s[0])
    gate.service_s = 5.0
    for _ in range(4000 // num_requests):
        begun_s, now_s[0] = now_s[0], now_s[0] + 0.01 * num_requests
        gate.scored(num_requests, begun_s)
    assert gate.service_s == pytest.approx(0.01, rel=1e-3)


def test_a_pass_is_timed_from_the_end_of_the_previous_one() -> None:
    now_s = [1.0]
    gate = AdmissionGate(1000, lambda: now_s[0])
    gate.scored(1, 0.0)
    now_s[0] = 1.2
    gate.scored(2, 0.5)
    assert gate.service_s == pytest.approx((9 * 1.0 + 0.2) / (9 + 2))

"""The idle gate lets background work run only while no request is being processed."""

from __future__ import annotations

import threading

import pytest

from roostream.runtime.clock import FakeClock, SystemClock
from serving.http.admission import AdmissionGate
from serving.versions.idle_gate import IdleGate


def test_without_requests_there_is_no_wait() -> None:
    clock = FakeClock()
    assert IdleGate(clock).wait(9.0) and clock.monotonic_s() == 0


def test_the_gate_waits_for_the_last_request() -> None:
    clock = FakeClock()
    idle_gate = IdleGate(clock)
    idle_gate.in_flight = lambda: int(clock.monotonic_s() < 0.5)
    assert idle_gate.wait(9.0) and 0.5 <= clock.monotonic_s() < 0.6


def test_the_gate_waits_at_most_its_timeout() -> None:
    clock = FakeClock()
    idle_gate = IdleGate(clock)
    idle_gate.in_flight = lambda: 1
    assert not idle_gate.wait(2.0) and 2.0 <= clock.monotonic_s() < 2.1


def test_a_stop_ends_the_wait() -> None:
    clock, stop = FakeClock(), threading.Event()
    idle_gate = IdleGate(clock)
    idle_gate.in_flight = lambda: 1
    stop.set()
    assert not idle_gate.wait(60.0, stop) and clock.monotonic_s() < 0.1


def test_a_waiter_is_woken_by_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.versions.idle_gate._LOOK_S", 60.0)
    idle_gate, gate, checked = IdleGate(SystemClock()), AdmissionGate(9), threading.Event()

    def in_flight() -> int:
        checked.set()
        return gate.in_flight

    idle_gate.in_flight, gate.on_idle = in_flight, idle_gate.notify_idle
    gate.enter(1.0)
    gate.enter(1.0)
    waiting = threading.Thread(target=idle_gate.wait, args=(60.0,), daemon=True)
    waiting.start()
    assert checked.wait(30)
    gate.leave()
    waiting.join(0.1)
    assert waiting.is_alive(), "one request is still in flight"
    gate.leave()
    waiting.join(30)
    assert not waiting.is_alive()

"""The buffer of recent requests is bounded in bytes, and keeps slow requests longer than others."""

from __future__ import annotations

import numpy as np

from serving.versions.recent_requests import MAX_SLOW, SLOW_FOR_MS, RecentRequests, ScoredRequest


def make_request(number: int, *, took_s: float = 0.001, size: int = 1000, time_ms: int = 0) -> ScoredRequest:
    return ScoredRequest(
        request_id=f"r-{number}",
        key=b"user",
        model_version="1-1",
        ro=b"",
        nro=bytes(size),
        item_ids=np.arange(2),
        time_ms=time_ms,
        scores_nT=np.zeros((2, 1), np.float32),
        took_s=took_s,
    )


def ids(requests: list[ScoredRequest]) -> list[str]:
    return [r.request_id for r in requests]


def test_the_newest_requests_are_kept_within_the_byte_limit() -> None:
    recent = RecentRequests(max_bytes=5 * make_request(0).num_bytes)
    for number in range(20):
        recent.add(make_request(number))
    assert ids(recent.newest(99)) == ["r-19", "r-18", "r-17", "r-16", "r-15"] and ids(recent.newest(2)) == [
        "r-19",
        "r-18",
    ]
    assert recent.num_bytes == recent.max_bytes


def test_a_request_larger_than_the_limit_is_not_kept() -> None:
    recent = RecentRequests(max_bytes=100)
    recent.add(make_request(1))
    assert recent.newest(1) == [] and recent.num_bytes == 0


def test_the_slowest_requests_are_kept_longer() -> None:
    recent = RecentRequests(max_bytes=40 * make_request(0).num_bytes)
    for number in range(100):
        recent.add(make_request(number, took_s=number % 50))
    slow = recent.slowest()
    assert "r-49" in ids(slow) and "r-49" not in ids(recent.newest(99)), (
        "the slowest request is kept although newer ones replaced it among the newest"
    )
    assert (
        len(slow) == MAX_SLOW and [r.took_s for r in slow[:4]] == [49, 49, 48, 48] and slow[-1].took_s == 34
    )


def test_slow_requests_share_the_byte_limit() -> None:
    recent = RecentRequests(max_bytes=3 * make_request(0).num_bytes)
    for number in range(10):
        recent.add(make_request(number, took_s=number))
    assert ids(recent.slowest()) == ["r-9", "r-8", "r-7"]


def test_a_slow_request_is_forgotten_after_a_while() -> None:
    recent = RecentRequests()
    recent.add(make_request(1, took_s=9.0))
    recent.add(make_request(2, took_s=0.1, time_ms=SLOW_FOR_MS + 1))
    assert ids(recent.slowest()) == ["r-2"]


def test_the_warm_up_sample_has_slow_and_new_requests_once() -> None:
    recent = RecentRequests()
    for number in range(10):
        recent.add(make_request(number, took_s=10 - number))
    assert ids(recent.warm_up_sample(4)) == ["r-0", "r-1", "r-9", "r-8"]
    assert (
        sorted(ids(recent.warm_up_sample(20))) == sorted(f"r-{n}" for n in range(10))
        and recent.warm_up_sample(0) == []
    )


def test_requests_of_the_warm_up_are_not_slow_but_are_sampled() -> None:
    recent = RecentRequests()
    recent.add(make_request(1))
    recent.end_warm_up()
    assert recent.slowest() == [] and ids(recent.warm_up_sample(4)) == ["r-1"]


def test_requests_from_before_the_start_are_not_traffic() -> None:
    recent = RecentRequests(max_bytes=4 * make_request(0).num_bytes)
    for number in range(3):
        recent.add(make_request(number))
    recent.end_warm_up()
    assert recent.newest_traffic(9) == [] and len(recent.newest(9)) == 3
    for number in range(3, 5):
        recent.add(make_request(number))
    assert ids(recent.newest_traffic(9)) == ["r-4", "r-3"] and ids(recent.newest_traffic(1)) == ["r-4"]
    for number in range(5, 12):
        recent.add(make_request(number))
    assert ids(recent.newest_traffic(9)) == ["r-11", "r-10", "r-9", "r-8"]


def test_a_recent_request_is_found_by_its_id() -> None:
    recent = RecentRequests(max_bytes=2 * make_request(0).num_bytes)
    for number in (1, 2, 3):
        recent.add(make_request(number))
    recent.add(make_request(3, time_ms=7))
    found = recent.find("r-3")
    assert found is not None and found.time_ms == 7 and recent.find("r-1") is None

"""Shadow scoring: another version scores requests after their answers. Its scores are only compared, and
requests never wait for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from roostream.models.build import build_model
from roostream.runtime.clock import FakeClock
from roostream.wire.lookup import Lookup
from serving.rank_json import JsonParser
from serving.scorer import build_version
from serving.versions.idle_gate import IdleGate
from serving.versions.routing import TrafficSplit
from serving.versions.shadow_scoring import MAX_WAITING, ShadowScoring, differences
from tests.serving.serving_cases import BODY, MODEL, NOW_MS, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows


class ShadowFixture:
    def __init__(self, serving: InProcessServing) -> None:
        self.serving, self.idle_gate, self.registry = serving, IdleGate(FakeClock()), CollectorRegistry()
        self.shadow = ShadowScoring(serving.service.versions, serving.service.rows, 0, self.idle_gate)
        self.registry.register(self.shadow)
        serving.service.on_scored = self.shadow.offer
        serving.service.versions.put(shadow=TrafficSplit("previous", 1.0))
        self.install("1-0", 1.0)

    def install(self, name: str, scale: float) -> None:
        state = build_model(SCHEMA, MODEL, 0).state_dict()
        self.serving.service.versions.install(
            build_version(name, SCHEMA, MODEL, 0, {n: t * scale for n, t in state.items()})
        )

    def rank(self, number: int = 1) -> None:
        request = JsonParser(SCHEMA).parse(json.dumps({**BODY, "request_id": f"r-{number}"}).encode())
        self.serving.service.rank(request, NOW_MS)

    def value(self, name: str) -> float:
        found = self.registry.get_sample_value(f"roostream_serving_shadow_{name}")
        assert found is not None
        return found


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[ShadowFixture]:
    torch.set_num_threads(1)
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    yield ShadowFixture(serving)
    serving.close()


def test_a_shadow_reports_differences_of_scores(fixture: ShadowFixture) -> None:
    fixture.install("1-1", 1.0)
    fixture.rank()
    fixture.shadow.turn(max_s=0.001)
    assert (
        fixture.shadow.num_scored,
        fixture.value("difference_sum"),
        fixture.value("top_overlap_sum"),
    ) == (1, 0.0, 1.0)
    assert fixture.value("rank_distance_count") == 1 and fixture.value("rank_distance_sum") == 0.0
    fixture.install("1-2", 3.0)
    fixture.rank()
    fixture.shadow.turn(max_s=0.001)
    assert fixture.shadow.num_scored == 2 and fixture.value("difference_sum") > 1e-4


def test_shadow_scores_are_neither_logged_nor_answered(fixture: ShadowFixture) -> None:
    fixture.install("1-1", 2.0)
    request = JsonParser(SCHEMA).parse(json.dumps(BODY).encode())
    ranked = fixture.serving.service.rank(request, NOW_MS)
    fixture.shadow.turn(max_s=0.001)
    assert ranked.answer.model_version == "1-1" and fixture.serving.records() == []


def test_without_a_shadow_nothing_is_queued(fixture: ShadowFixture) -> None:
    fixture.rank()
    fixture.shadow.turn(max_s=0.001)
    assert (fixture.shadow.num_scored, fixture.shadow.num_dropped) == (0, 0)


def test_a_full_shadow_queue_drops_and_counts(fixture: ShadowFixture) -> None:
    fixture.install("1-1", 2.0)
    for number in range(MAX_WAITING + 3):
        fixture.rank(number)
    assert fixture.shadow.num_dropped == 3


def test_without_idle_time_shadow_requests_are_dropped(fixture: ShadowFixture) -> None:
    fixture.install("1-1", 2.0)
    fixture.idle_gate.in_flight = lambda: 1
    fixture.rank()
    fixture.shadow.turn(max_s=0.001)
    assert (fixture.shadow.num_scored, fixture.shadow.num_dropped) == (0, 1)


def test_a_failing_shadow_is_counted(fixture: ShadowFixture) -> None:
    fixture.install("1-1", float("inf"))
    fixture.install("1-2", 1.0)
    fixture.rank()
    fixture.shadow.turn(max_s=0.001)
    assert (fixture.shadow.num_scored, fixture.shadow.num_failed) == (0, 1)


def test_a_shadow_without_memory_is_counted_and_the_next_request_is_compared(fixture: ShadowFixture) -> None:
    class RowsWithoutMemory(FakeRows):
        def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
            raise MemoryError("no room for a batch")

    fixture.install("1-1", 2.0)
    fixture.rank(1)
    fixture.rank(2)
    rows, fixture.shadow.rows = fixture.shadow.rows, RowsWithoutMemory(SCHEMA)
    fixture.shadow.turn(max_s=0.001)
    fixture.shadow.rows = rows
    fixture.shadow.turn(max_s=0.001)
    assert (fixture.shadow.num_scored, fixture.shadow.num_failed) == (1, 1)


# Tests of the comparison of two versions' scores.


def column(*scores: float) -> np.ndarray:
    return np.array(scores, dtype=np.float32)[:, None]


def test_equal_scores_have_no_difference() -> None:
    assert differences(column(0.1, 0.5, 0.5), column(0.1, 0.5, 0.5), 0) == (0.0, 1.0, 1.0)


def test_a_reversed_list_has_correlation_minus_one() -> None:
    found = differences(column(0.1, 0.2, 0.3), column(0.3, 0.2, 0.1), 0)
    assert found.rank_correlation == -1.0 and found.top_overlap == 1.0
    assert found.mean_abs == pytest.approx(0.4 / 3, abs=1e-6)


def test_overlap_is_of_the_first_ten_slots() -> None:
    one = np.linspace(1, 0, 20, dtype=np.float32)
    moved = np.roll(one, 5)  # the last five items become the first five
    assert differences(one[:, None], moved[:, None], 0).top_overlap == 0.5


def test_order_uses_the_ordering_task_and_differences_all_tasks() -> None:
    one = np.array([[0.1, 0.9], [0.2, 0.8]], np.float32)
    other = np.array([[0.9, 0.9], [0.1, 0.8]], np.float32)
    assert (
        differences(one, other, 1).rank_correlation == 1.0
        and differences(one, other, 0).rank_correlation == -1.0
    )
    assert differences(one, other, 1).mean_abs == pytest.approx(0.9 / 4)


def test_a_single_candidate_has_one_rank() -> None:
    assert differences(column(0.2), column(0.7), 0)[1:] == (1.0, 1.0)

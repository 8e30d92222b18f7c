"""Warm-up of a new version: it scores recent requests first, and is not served if that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roostream.models.build import build_model
from roostream.models.compiled.scorer import Rows
from roostream.runtime.clock import FakeClock
from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup
from serving.errors import VersionRefusedError
from serving.rank_json import JsonParser
from serving.scorer import Version, build_version
from serving.versions.idle_gate import IdleGate
from serving.versions.recent_requests import RecentRequests
from serving.versions.version_follower import WarmUp
from tests.serving.serving_cases import BODY, MODEL, NOW_MS, SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows


class WarmUpFixture:
    """An in-process serving with recent requests, and a warm-up that scores them."""

    def __init__(self, serving: InProcessServing, max_requests: int = 4) -> None:
        self.serving, self.recent, self.idle_gate = serving, RecentRequests(), IdleGate(FakeClock())
        serving.service.on_scored = self.recent.add
        self.rows = CountingRows(SCHEMA)
        self.warm_up = WarmUp(
            self.recent,
            self.rows,
            lambda: serving.service.versions.served.version,
            self.idle_gate,
            max_requests,
        )

    def rank(self, **changes: Any) -> None:
        self.serving.service.rank(JsonParser(SCHEMA).parse(json.dumps({**BODY, **changes}).encode()), NOW_MS)


class CountingRows(FakeRows):
    num_gathers, fill = 0, 1.0

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        self.num_gathers += 1
        return {stack: rows * np.float32(self.fill) for stack, rows in super().gather(lookup).items()}


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[WarmUpFixture]:
    torch.set_num_threads(1)
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    yield WarmUpFixture(serving)
    serving.close()


def test_a_refusal_shows_no_control_characters_of_a_request_id(fixture: WarmUpFixture) -> None:
    fixture.rank(request_id="r\n2026 ERROR forged\x1b[2J")
    with pytest.raises(VersionRefusedError) as refused:
        fixture.warm_up(overflowing_version())
    assert "forged" in str(refused.value) and str(refused.value).isprintable()


def valid_version() -> Version:
    return build_version("1-2", SCHEMA, MODEL, 1, {})


def overflowing_version() -> Version:
    """Return a version whose weights are finite, but whose scores are not."""
    state = build_model(SCHEMA, MODEL, 0).state_dict()
    return build_version(
        "1-2", SCHEMA, MODEL, 0, {name: torch.full_like(t, 3e38) for name, t in state.items()}
    )


def test_a_warm_up_scores_recent_requests_without_side_effects(fixture: WarmUpFixture) -> None:
    for number in range(6):
        fixture.rank(request_id=f"r-{number}")
    fixture.warm_up(valid_version())
    assert (
        fixture.rows.num_gathers == 4
        and fixture.serving.records() == []
        and len(fixture.recent.newest(99)) == 6
    )


def test_a_version_with_non_finite_scores_is_refused(fixture: WarmUpFixture) -> None:
    fixture.rank()
    with pytest.raises(
        VersionRefusedError, match=r"1-2: expected a score for request 'r-1': .*not finite"
    ) as error:
        fixture.warm_up(overflowing_version())
    assert error.value.reason == "warm_up"


def test_extreme_requests_of_one_user_do_not_refuse_a_version(
    fixture: WarmUpFixture, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.warm_up.max_requests = 32
    for number in range(9):
        fixture.rank(request_id=f"r-{number}", user_id=100 + number)
    for number in range(3):
        fixture.rank(request_id=f"extreme-{number}", user_id=17)
    for request in fixture.recent.newest(3):
        request.item_ids[0] = EXTREME
    fixture.warm_up(VersionFailingOn(EXTREME).version)
    assert caplog.text.count("request 'extreme-") == 1 and "is served" in caplog.text
    for request in fixture.recent.newest(99)[3:5]:
        request.item_ids[0] = EXTREME
    with pytest.raises(VersionRefusedError, match="not finite"):
        fixture.warm_up(VersionFailingOn(EXTREME).version)


EXTREME = 12345


class VersionFailingOn:
    """A version whose scores are not finite for requests whose first item is `item`."""

    def __init__(self, item: int) -> None:
        self.version = valid_version()
        score_all = self.version.score_all

        def scored(rows: Any, requests: Any) -> list[np.ndarray]:
            found = score_all(rows, requests)
            return [
                np.full_like(logits, np.nan) if request.item_ids[0] == item else logits
                for request, logits in zip(requests, found, strict=True)
            ]

        vars(self.version)["score_all"] = scored


def test_a_version_whose_code_raises_is_refused(fixture: WarmUpFixture) -> None:
    fixture.rank()
    version = valid_version()

    def fail(batch: Batch, lookup: Lookup, rows: Rows) -> np.ndarray:
        raise ZeroDivisionError("by zero")

    vars(version)["forward"] = fail
    with pytest.raises(VersionRefusedError, match="ZeroDivisionError: by zero"):
        fixture.warm_up(version)


def test_a_request_that_no_version_can_score_does_not_refuse_the_new_one(fixture: WarmUpFixture) -> None:
    fixture.rank()
    fixture.rows.fill = float("inf")
    fixture.warm_up(valid_version())
    assert fixture.rows.num_gathers == 2, "the served version also tried to score the request"


def test_without_recent_requests_there_is_no_warm_up(fixture: WarmUpFixture) -> None:
    fixture.warm_up(overflowing_version())
    assert fixture.rows.num_gathers == 0


def test_a_warm_up_waits_briefly_for_an_idle_moment(fixture: WarmUpFixture) -> None:
    fixture.rank()
    in_flight_counts = iter([1, 1, 1, 0])
    fixture.idle_gate.in_flight = lambda: next(in_flight_counts)
    fixture.warm_up(valid_version())
    assert next(in_flight_counts, None) is None, "the warm-up waited until no request was in flight"
    fixture.idle_gate.in_flight = lambda: 1
    fixture.warm_up(valid_version())
    assert fixture.rows.num_gathers == 2

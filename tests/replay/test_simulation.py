"""Simulated users against a fake serving, which is an httpx transport without sockets."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from roostream.errors import ConfigError, SetupError, UnavailableError
from roostream.replay.config import SimulateConfig
from roostream.replay.http_client import HttpClient
from roostream.replay.main import SimulatorMetrics, simulate_users
from roostream.replay.simulation import ExpectedClickRates, Simulation
from roostream.replay.world import ExpectedClicks
from roostream.runtime.clock import SystemClock
from roostream.runtime.health import Health
from roostream.runtime.program import Stop


class FakeServing:
    """A fake serving that ranks candidates in their given order, or in `order`.

    `fail` maps numbers of calls to the status of their answer; 0 refuses the connection.
    """

    def __init__(self, fail: dict[int, int] | None = None, order: list[int] | None = None) -> None:
        self.fail, self.order = fail or {}, order
        self.ranks: list[dict[str, Any]] = []
        self.engagements: list[dict[str, Any]] = []
        self.calls = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        status = self.fail.get(self.calls, 200)
        if status == 0:
            raise httpx.ConnectError("refused", request=request)
        if status != 200:
            return httpx.Response(status, headers={"retry-after": "0"}, json={"error": "no"})
        body = json.loads(request.content)
        if request.url.path == "/v1/engagements":
            self.engagements.append(body)
            return httpx.Response(200, json={})
        self.ranks.append(body)
        n = len(body["candidates"]["item_id"])
        return httpx.Response(200, json={"order": self.order or list(range(n)), "scores": []})


def simulate(serving: FakeServing, report: str = "", **settings: Any) -> tuple[Simulation, HttpClient]:
    config = SimulateConfig(
        **{"rate": 200.0, "seconds": 0.6, "users": 50, "items": 60, "report": report, **settings}
    )

    async def run() -> tuple[Simulation, HttpClient]:
        client = HttpClient(config.serving, transport=httpx.MockTransport(serving))
        simulation = Simulation(config, client, SystemClock(), delay_scale=0.01)
        await simulation.run(threading.Event())
        await client.close()
        return simulation, client

    return asyncio.run(run())


def test_every_click_belongs_to_a_request_that_showed_the_item() -> None:
    serving = FakeServing()
    simulation, _ = simulate(serving)
    shown: dict[str, set[int]] = {}
    for body in serving.ranks:
        shown.setdefault(body["request_id"], set()).update(body["candidates"]["item_id"])
    assert simulation.num_requests == len(shown) > 3
    assert simulation.num_clicks > 0 and simulation.num_cut_off == 0
    for e in serving.engagements:
        assert e["item_id"] in shown[e["request_id"]]
        assert e["action"] in ("click", "read")


def test_pages_append_new_candidates_after_the_shown_ones() -> None:
    serving = FakeServing()
    simulate(serving)
    first: dict[str, dict[str, Any]] = {}
    pages = 0
    for body in serving.ranks:
        opened = first.setdefault(body["request_id"], body)
        if opened is body:
            assert body["ro"]["user"] == [body["user_id"]] and "append" not in body
        else:
            pages += 1
            assert body["append"] and body["first_position"] == len(opened["candidates"]["item_id"])
            assert not set(body["candidates"]["item_id"]) & set(opened["candidates"]["item_id"])
    assert pages > 0


def test_clients_repeat_some_engagements_with_the_same_event_id() -> None:
    serving = FakeServing()
    simulate(serving, rate=500.0, seconds=1.0)
    repeats = [n for n in Counter(e["event_id"] for e in serving.engagements).values() if n > 1]
    assert 0 < len(repeats) < 0.1 * len(serving.engagements)


def test_requests_are_retried_while_serving_is_unavailable() -> None:
    serving = FakeServing(fail={2: 0, 3: 503, 4: 429})
    _, client = simulate(serving)
    assert client.outcomes["retried"] == 3
    assert client.outcomes["gave_up"] == 0 == client.outcomes["refused"]


def test_a_rejected_request_is_counted_and_not_retried() -> None:
    simulation, client = simulate(FakeServing(fail={1: 400}))
    assert client.outcomes["refused"] == 1 and client.outcomes["retried"] == 0
    assert simulation.num_requests > 0


@pytest.mark.parametrize(
    ("status", "text"), [(400, '{"error": "$.ro.x: unknown"}'), (200, "<html>"), (200, "[]"), (302, "{}")]
)
def test_the_program_fails_when_serving_refuses_every_request_or_is_another_server(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str
) -> None:
    refusing = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    monkeypatch.setattr("roostream.replay.main.HttpClient", partial(HttpClient, transport=refusing))
    config = SimulateConfig(rate=200.0, seconds=0.2, users=50, items=60)
    with pytest.raises(SetupError, match=rf"refused all \d+ requests.*{status}: {re.escape(text)}"):
        asyncio.run(simulate_users(config, Health(60), Stop()))


@pytest.mark.parametrize(("status", "reason"), [(0, "ConnectError refused"), (503, "status 503")])
def test_the_program_fails_when_serving_answers_no_request(
    monkeypatch: pytest.MonkeyPatch, status: int, reason: str
) -> None:
    away = FakeServing(fail=dict.fromkeys(range(1, 1000), status))
    monkeypatch.setattr(
        "roostream.replay.main.HttpClient", partial(HttpClient, transport=httpx.MockTransport(away))
    )
    stop = Stop()
    threading.Timer(0.3, stop.set).start()  # without it, pending requests are retried for 10 s
    config = SimulateConfig(serving="http://shop:8080", rate=200.0, users=50, items=60)
    with pytest.raises(UnavailableError, match=f"http://shop:8080 answered no request: {reason};"):
        asyncio.run(simulate_users(config, Health(60), stop))


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://[::1"])
def test_an_address_that_is_no_url_is_a_wrong_setting(url: str) -> None:
    with pytest.raises(ConfigError, match="key 'serving'"):
        asyncio.run(simulate_users(SimulateConfig(serving=url), Health(60), Stop()))


def test_requests_carry_the_key_of_the_key_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    serving, seen = FakeServing(), set[str]()

    def answer(request: httpx.Request) -> httpx.Response:
        seen.add(request.headers.get("authorization", ""))
        return serving(request)

    monkeypatch.setattr(
        "roostream.replay.main.HttpClient", partial(HttpClient, transport=httpx.MockTransport(answer))
    )
    config = SimulateConfig(rate=200.0, seconds=0.2, users=50, items=60, key_file=str(tmp_path / "key"))
    for content, expected in ((None, "No such file"), ("", "one key"), ("one two", "one key")):
        if content is not None:
            (tmp_path / "key").write_text(content)
        with pytest.raises(ConfigError, match=f"key 'key_file'.*{expected}"):
            asyncio.run(simulate_users(config, Health(60), Stop()))
    (tmp_path / "key").write_text("roo_1_2\n")
    asyncio.run(simulate_users(config, Health(60), Stop()))
    assert seen == {"Bearer roo_1_2"}


def test_an_answer_that_is_not_a_permutation_shows_no_items() -> None:
    simulation, _ = simulate(FakeServing(order=[0, 0]))
    assert simulation.num_requests == 0 == simulation.click_rates.total.shown


def test_report_and_metrics_have_click_rates(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    simulation, _ = simulate(FakeServing(), report=str(report))
    report_json = json.loads(report.read_text())
    assert set(report_json["click_rate"]) == {"served", "random", "best"}
    assert 0 < report_json["click_rate"]["random"] < report_json["click_rate"]["best"]
    assert report_json["counts"]["requests"] == simulation.num_requests
    shown = {m.name: m for m in SimulatorMetrics(simulation).collect()}
    counts = ("requests", "http", "candidates", "engagements", "clicks", "dropped")
    assert set(shown) == {
        "roostream_simulator_click_rate",
        *(f"roostream_simulator_{name}" for name in counts),
    }
    assert {m.type for name, m in shown.items() if not name.endswith("rate")} == {"counter"}


def test_a_long_pause_between_visits_ends_with_the_simulation() -> None:
    async def run(config: SimulateConfig, stop: threading.Event) -> int:
        client = HttpClient(config.serving, transport=httpx.MockTransport(FakeServing()))
        simulation = Simulation(config, client, SystemClock())
        await asyncio.wait_for(simulation.run(stop), 5)
        return simulation.num_requests

    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    assert asyncio.run(run(SimulateConfig(rate=0.01), stop)) == 0
    assert asyncio.run(run(SimulateConfig(rate=0.01, seconds=0.3), threading.Event())) == 0


def test_visits_beyond_the_maximum_in_flight_are_dropped() -> None:
    simulation, _ = simulate(FakeServing(fail=dict.fromkeys(range(1, 5), 503)), max_in_flight=2, seconds=0.3)
    assert simulation.num_dropped > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, "key 'rate': expected"),
        ({"serving": "localhost:80"}, "key 'serving': expected http://host:port"),
        ({"items": 5, "candidates": 9}, "raise items"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimulateConfig(**settings)


def test_rates_are_expected_clicks_per_shown_candidate() -> None:
    click_rates = ExpectedClickRates()
    click_rates.add(ExpectedClicks(1.0, 0.5, 2.0, 10), 0.0)
    click_rates.add(ExpectedClicks(2.0, 0.5, 2.0, 10), 61.0)
    assert click_rates.total.rates() == {"served": 0.15, "random": 0.05, "best": 0.2}
    assert [m["minute"] for m in click_rates.by_minute()] == [0, 1]
    assert click_rates.by_minute()[1]["served"] == pytest.approx(0.2)


def test_recent_rates_cover_the_newest_requests_only() -> None:
    click_rates = ExpectedClickRates(window=2)
    for served in (9.0, 1.0, 3.0):
        click_rates.add(ExpectedClicks(served, 1.0, 9.0, 10), 0.0)
    assert click_rates.recent.rates()["served"] == pytest.approx(0.2)
    assert click_rates.total.rates()["served"] == pytest.approx(13 / 30)

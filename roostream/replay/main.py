"""The program `roostream simulate`: the simulation with its metrics and its health probe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from roostream.errors import SetupError, UnavailableError, reason_of
from roostream.replay.config import SimulateConfig
from roostream.replay.http_client import HttpClient
from roostream.replay.report_files import check_report
from roostream.replay.simulation import Simulation
from roostream.runtime import metrics_server, program
from roostream.runtime.clock import SystemClock
from roostream.runtime.health import Health
from roostream.schema.settings import setting_error

log = logging.getLogger("roostream.simulator")
_ALIVE_INTERVAL_S = 1.0


def simulate(config: SimulateConfig, stop: program.Stop) -> None:
    """Run until stopped, or for `seconds`."""
    check_report(config.report)
    health = Health(config.stalled_after_ms / 1000)
    log.info("metrics on port %d", metrics_server.serve(config, health))
    asyncio.run(simulate_users(config, health, stop))


async def simulate_users(config: SimulateConfig, health: Health, stop: program.Stop) -> None:
    """Run the simulation with its metrics exported; closes its connections in any case.

    Raises:
        ConfigError: `key_file` has no key.
        SetupError: serving refused every request.
        UnavailableError: serving answered no request.
    """
    key = read_key(config.key_file) if config.key_file else ""
    client = HttpClient(config.serving, key=key, max_in_flight=config.max_in_flight)
    simulation = Simulation(config, client, SystemClock())
    collector = SimulatorMetrics(simulation)
    REGISTRY.register(collector)
    alive = asyncio.create_task(_report_alive(health))
    try:
        await simulation.run(stop)
    finally:
        alive.cancel()
        REGISTRY.unregister(collector)
        await client.close()
    if client.outcomes["ok"]:
        return
    if client.last_refusal:
        raise SetupError(
            f"serving refused all {client.outcomes['refused']} requests; the last answer was "
            f"{client.last_refusal}; simulated users need serving with the schema of the demo"
        )
    if client.last_failure:
        raise UnavailableError(
            f"serving at {config.serving} answered no request: {client.last_failure}; "
            "check that it runs, and its address"
        )


def read_key(file: str) -> str:
    """The API key in a file. Raises ConfigError, which does not repeat the content."""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise setting_error("key_file", "a file with an API key", file, reason_of(error)) from None
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise setting_error("key_file", "a file with one key, as `roostream keys new` prints it", file)
    return key


async def _report_alive(health: Health) -> None:
    while True:
        health.turned()
        await asyncio.sleep(_ALIVE_INTERVAL_S)


class SimulatorMetrics(Collector):
    """Metrics of a simulation, read from its own counts when they are scraped."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def collect(self) -> Iterator[Metric]:
        s, rates = self.simulation, self.simulation.click_rates
        click_rate = GaugeMetricFamily(
            "roostream_simulator_click_rate",
            "expected clicks per shown candidate under the hidden model",
            labels=("order", "window"),
        )
        for window, sums in (("total", rates.total), ("recent", rates.recent)):
            for order, rate in sums.rates().items():
                click_rate.add_metric((order, window), rate)
        yield click_rate
        calls = CounterMetricFamily("roostream_simulator_http_total", "calls of serving", labels=("outcome",))
        for outcome, count in s.client.outcomes.items():
            calls.add_metric((outcome,), count)
        yield calls
        yield CounterMetricFamily(
            "roostream_simulator_requests_total", "simulated requests", value=s.num_requests
        )
        yield CounterMetricFamily(
            "roostream_simulator_candidates_total",
            "candidates of simulated requests",
            value=rates.total.shown,
        )
        yield CounterMetricFamily(
            "roostream_simulator_engagements_total", "simulated engagements", value=s.num_engagements
        )
        yield CounterMetricFamily("roostream_simulator_clicks_total", "simulated clicks", value=s.num_clicks)
        yield CounterMetricFamily(
            "roostream_simulator_dropped_total",
            "requests dropped because too many waited",
            value=s.num_dropped,
        )

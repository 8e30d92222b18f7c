"""`roostream simulate`: the program around the simulation."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime import metrics, program
from runtime.clock import SystemClock
from runtime.health import Health
from traffic.client import Client
from traffic.config import SimulateConfig
from traffic.report import check_report
from traffic.simulate import Simulation

log = logging.getLogger("roostream.traffic")

_TURN_S = 1.0


def run_simulate(config: SimulateConfig) -> int:
    """Until stopped, or for `seconds`; the exit code."""

    def body(stop: program.Stop) -> None:
        check_report(config.report)
        health = Health(config.stalled_after_ms / 1000)
        log.info("metrics on port %d", metrics.serve(config, health))
        asyncio.run(_simulate(config, health, stop))

    return program.run("simulate", body)


async def _simulate(config: SimulateConfig, health: Health, stop: program.Stop) -> None:
    """The simulation with its metrics on show; its connections are closed however it ends."""
    client = Client(config.serving, max_in_flight=config.max_in_flight)
    simulation = Simulation(config, client, SystemClock())
    collector = SimulationMetrics(simulation)
    REGISTRY.register(collector)
    turning = asyncio.create_task(_turn(health))
    try:
        await simulation.run(stop)
    finally:
        turning.cancel()
        REGISTRY.unregister(collector)
        await client.close()


async def _turn(health: Health) -> None:
    while True:
        health.turned()
        await asyncio.sleep(_TURN_S)


class SimulationMetrics(Collector):
    """`roostream_traffic_…` from a simulation's own counts, read when scraped."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def collect(self) -> list[Metric]:
        """Every count, read anew."""
        s = self.simulation
        rate = GaugeMetricFamily(
            "roostream_traffic_click_rate",
            "expected clicks a shown candidate under the hidden model",
            labels=["order", "window"],
        )
        for window, sums in (("total", s.tally.total), ("recent", s.tally.recent)):
            for order, value in sums.rates().items():
                rate.add_metric([order, window], value)
        http = CounterMetricFamily("roostream_traffic_http", "calls of serving by outcome", labels=["outcome"])
        for outcome, count in s.client.outcomes.items():
            http.add_metric([outcome], count)
        counts = {
            "requests": s.num_requests,
            "candidates": s.tally.total.shown,
            "engagements": s.num_engagements,
            "clicks": s.num_clicks,
            "dropped": s.num_dropped,
        }
        totals = [
            CounterMetricFamily(f"roostream_traffic_{name}", f"simulated {name}", value=value) for name, value in counts.items()
        ]
        return [rate, http, *totals]

"""`roostream simulate`: the program around the simulation."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from roostream.replay.config import SimulateConfig
from roostream.replay.http_client import HttpClient
from roostream.replay.report_files import check_report
from roostream.replay.simulation import Simulation
from roostream.runtime import metrics_server, program
from roostream.runtime.clock import SystemClock
from roostream.runtime.health import Health
from roostream.runtime.metrics_collector import MetricsCollector

log = logging.getLogger("roostream.simulator")
_COUNTS = ("http", "requests", "candidates", "engagements", "clicks", "dropped")
_HELPS = {
    "click_rate": "expected clicks a shown candidate under the hidden model",
    "http": "calls of serving by outcome",
    **{name: f"simulated {name}" for name in _COUNTS[1:]},
}

_TURN_S = 1.0


def run_simulate(config: SimulateConfig) -> int:
    """Until stopped, or for `seconds`; the exit code."""

    def body(stop: program.Stop) -> None:
        check_report(config.report)
        health = Health(config.stalled_after_ms / 1000)
        log.info("metrics on port %d", metrics_server.serve(config, health))
        asyncio.run(_simulate(config, health, stop))

    return program.run("simulate", body, config.log_format)


async def _simulate(config: SimulateConfig, health: Health, stop: program.Stop) -> None:
    """The simulation with its metrics on show; its connections are closed however it ends."""
    client = HttpClient(config.serving, max_in_flight=config.max_in_flight)
    simulation = Simulation(config, client, SystemClock())
    exported = simulator_metrics(simulation)
    exported.register()
    turning = asyncio.create_task(_turn(health))
    try:
        await simulation.run(stop)
    finally:
        turning.cancel()
        exported.unregister()
        await client.close()


async def _turn(health: Health) -> None:
    while True:
        health.turned()
        await asyncio.sleep(_TURN_S)


def simulator_metrics(simulation: Simulation) -> MetricsCollector:
    """`roostream_simulator_…` from a simulation's own counts."""

    def read() -> dict[str, Any]:
        tally = simulation.tally
        windows = {"total": tally.total, "recent": tally.recent}
        rates = {
            (order, window): rate for window, sums in windows.items() for order, rate in sums.rates().items()
        }
        return {
            "click_rate": rates,
            "http": simulation.client.outcomes,
            "requests": simulation.num_requests,
            "candidates": tally.total.shown,
            "engagements": simulation.num_engagements,
            "clicks": simulation.num_clicks,
            "dropped": simulation.num_dropped,
        }

    labels: dict[str, str | tuple[str, ...]] = {"click_rate": ("order", "window"), "http": "outcome"}
    return MetricsCollector("simulator", read, labels, helps=_HELPS, counters=_COUNTS)

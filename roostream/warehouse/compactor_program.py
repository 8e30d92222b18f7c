"""`roostream compactor`: runs the compactor at intervals."""

from __future__ import annotations

import dataclasses

from roostream.errors import UnavailableError
from roostream.runtime import metrics_server, program
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import SystemClock
from roostream.runtime.health import Health
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.program import Stop
from roostream.warehouse.compact import CompactCounts, Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.warehouse import Warehouse

_COUNTERS = tuple(field.name for field in dataclasses.fields(CompactCounts))


def run_compactor(config: CompactorConfig) -> int:
    """Run until SIGTERM or SIGINT; return the exit code of `roostream.runtime.program.run`."""
    return program.run("compactor", lambda stop: compact(config, stop), config.log_format)


def compact(config: CompactorConfig, stop: Stop) -> None:
    """Run until `stop`. An unfinished step is not committed, and the next compactor does it again."""
    health = Health(config.stalled_after_ms / 1000)
    metrics_server.serve(config, health)
    warehouse = Warehouse(config.warehouse)
    compactor = Compactor(warehouse, config, SystemClock())
    exports = MetricsCollector("compactor", lambda: metrics_of(compactor), {}, counters=_COUNTERS)
    exports.register()
    waits = Backoff(what=f"the warehouse at {config.warehouse}")
    try:
        with health.waiting("warehouse"):
            waits.until(warehouse.create, (UnavailableError,), stop)
        while not stop.is_set():
            try:
                compactor.run_once(stop, health.turned)
                waits.reached()
                health.turned()
            except UnavailableError as error:
                health.turned(str(error))
                waits.wait(error, stop)
            stop.wait(config.interval_ms / 1000)
    finally:
        exports.unregister()


def metrics_of(compactor: Compactor) -> dict[str, object]:
    """Metric values by name."""
    return {**dataclasses.asdict(compactor.counts), "due": compactor.num_due}

"""`roostream compactor`: runs the compactor at intervals."""

from __future__ import annotations

import logging

from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime import metrics_server, program
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import SystemClock
from roostream.runtime.health import Health
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.program import Stop
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.warehouse import Warehouse

log = logging.getLogger("roostream.compactor")
_COUNTERS = ("seals", "files_replaced", "rows", "repeated", "retired", "cut", "deleted", "refused", "damaged")


def run_compactor(config: CompactorConfig) -> int:
    """Run until SIGTERM or SIGINT; return the exit code of `roostream.runtime.program.run`."""
    return program.run("compactor", lambda stop: compact(config, stop), config.log_format)


class Rounds:
    """Runs the compactor again and again. A damaged file stops its own day only."""

    def __init__(self, compactor: Compactor, health: Health, stop: Stop) -> None:
        self.compactor, self.health, self.stop = compactor, health, stop
        self.num_due = self.num_damaged = 0

    def run_once(self) -> None:
        """Run once.

        Raises:
            UnavailableError: the warehouse is away; finished steps stay done.
        """
        due = self.compactor.due()
        for n, seal in enumerate(due):
            if self.stop.is_set():
                return
            self.num_due = len(due) - n
            try:
                self.compactor.seal(seal)
            except CheckpointError as error:
                self.num_damaged += 1
                log.error("%s partition %d is not sealed: %s", seal.day, seal.partition, error)
            self.health.turned()
        self.num_due = 0
        self.compactor.retire()
        self.compactor.vacuum()

    def metrics(self) -> dict[str, object]:
        """Metric values by name."""
        numbers = {name: getattr(self.compactor.counts, name) for name in _COUNTERS if name != "damaged"}
        return {**numbers, "damaged": self.num_damaged, "due": self.num_due}


def compact(config: CompactorConfig, stop: Stop) -> None:
    """Run until `stop`. An unfinished step is not committed, and the next compactor does it again."""
    health = Health(config.stalled_after_ms / 1000)
    log.info(
        "metrics at %s://%s:%d/metrics",
        config.scheme,
        config.metrics_host,
        metrics_server.serve(config, health),
    )
    warehouse = Warehouse(config.warehouse)
    rounds = Rounds(Compactor(warehouse, config, SystemClock()), health, stop)
    exports = MetricsCollector("compactor", rounds.metrics, {}, counters=_COUNTERS)
    exports.register()
    waits = Backoff(what=f"the warehouse at {config.warehouse}")
    try:
        with health.waiting("warehouse"):
            waits.until(warehouse.create, (UnavailableError,), stop)
        while not stop.is_set():
            try:
                rounds.run_once()
                waits.reached()
                health.turned()
            except UnavailableError as error:
                health.turned(str(error))
                waits.wait(error, stop)
            stop.wait(config.interval_ms / 1000)
    finally:
        exports.unregister()

"""`roostream auditor`: the sums of a deployment's topics, kept current beside it and told as metrics.

1 wait for the topics, and go on from the sums of the run before
2 read for a second at a time; tell the sums that this gives
3 save sums and positions, now and then and at the end: one file, so that no record is counted twice or not at all
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from infra.auditor import audit_file, sums
from infra.auditor.auditor import AUDITED, Auditor
from infra.auditor.config import AuditorConfig
from roostream.errors import UnavailableError
from roostream.runtime import metrics_server, program
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.program import Stop

log = logging.getLogger("roostream.auditor")
_POLL_S = 1.0
_SHOW_EVERY_S = 1.0
_LAST_POLL_S = 2.0


def run(config: AuditorConfig) -> int:
    """Until SIGTERM or SIGINT; the exit code of `roostream.runtime.program.run`."""
    return program.run("auditor", lambda stop: auditor_body(config, stop), config.log_format)


class Books:
    """An auditor and its file. One thread; `shown` is whole at any moment."""

    def __init__(self, config: AuditorConfig, auditor: Auditor, topics: dict[str, str]) -> None:
        self.config, self.auditor, self.topics = config, auditor, topics
        self.home = Path(config.home)
        self.shown: dict[str, Any] = {}
        self._saved_s = time.monotonic()
        self._shown_s = 0.0
        self._told = False

    def open(self) -> None:
        """Step 1. UnavailableError: Kafka is away; call again."""
        FileStore(self.home).sweep()
        reader = self.auditor.open_reader()
        try:
            self.auditor.open_with(reader, audit_file.read(self.home, self.topics))
        except UnavailableError:
            reader.close()
            raise

    def turn(self, budget_s: float) -> None:
        """Steps 2 and 3."""
        self.auditor.poll(budget_s)
        if time.monotonic() - self._shown_s >= _SHOW_EVERY_S:
            self.show()
        if time.monotonic() - self._saved_s >= self.config.save_interval_ms / 1000:
            self.save()

    def show(self) -> None:
        """Tell the sums as they are now."""
        self._shown_s = time.monotonic()
        self.shown = sums.gauges(self.auditor.sums(), self.auditor.is_current(), self.auditor.behind())
        if not self._told and self.auditor.is_current():
            self._told = True
            log.info("everything that was there at the start has been added up")

    def save(self) -> None:
        """Sums that can't be saved are read anew by the next run."""
        self._saved_s = time.monotonic()
        if self.auditor.begins_anew:
            return
        try:
            audit_file.write(self.home, self.auditor.saved(self.topics))
        except (OSError, UnavailableError) as error:
            log.warning("the sums can't be saved in %s (%s); tried again", self.home, error)

    def close(self) -> None:
        """Read what is left, for a moment, and save."""
        self.auditor.poll(_LAST_POLL_S)
        self.show()
        self.save()


def auditor_body(config: AuditorConfig, stop: Stop) -> None:
    """`roostream auditor`, until `stop`.

    Raises:
        RoostreamError: a topic has other partitions than the settings say.
    """
    health = Health(config.stalled_after_ms / 1000)
    log.info(
        "metrics at %s://%s:%d/metrics",
        config.scheme,
        config.metrics_host,
        metrics_server.serve(config, health),
    )
    auditor = Auditor(
        config.broker,
        config.prefix,
        num_partitions=config.partitions,
        settle_ms=config.settle_ms,
        horizon_ms=config.horizon_ms,
        max_waiting=config.max_waiting,
    )
    with health.waiting("Kafka"):
        topics = clients.wait_for_topics(config.broker, config.prefix, AUDITED, config.partitions, stop)
    books = Books(config, auditor, topics)
    exports = MetricsCollector("auditor", lambda: books.shown, sums.LABELS)
    exports.register()
    try:
        with health.waiting("Kafka"):
            Backoff(what=f"Kafka at {config.broker}").until(books.open, (UnavailableError,), stop)
        while not stop.is_set():
            try:
                books.turn(_POLL_S)
            except UnavailableError as error:
                log.warning("%s; tried again", error)
                stop.wait(_POLL_S)
            health.turned()
        books.close()
    finally:
        exports.unregister()
        auditor.close()

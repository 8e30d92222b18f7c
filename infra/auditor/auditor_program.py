"""`roostream auditor`: audits a deployment's topics continuously and exports the sums as metrics.

1 wait for the topics, and continue from the sums of the previous run
2 read for a second at a time, and export the sums
3 save sums and offsets in one file, at intervals and at the end, so that every record counts exactly once
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from infra.auditor import audit_file, sums
from infra.auditor.accounts import Share
from infra.auditor.auditor import AUDITED, Auditor
from infra.auditor.config import AuditorConfig
from infra.auditor.model_quality import ModelQuality
from roostream.errors import UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.topics import EVENTS
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.metrics_collector import exported
from roostream.runtime.program import Stop
from roostream.schema.schema_file import load_schema
from trainer.monitoring.verdict import METRIC_SPECS

log = logging.getLogger("roostream.auditor")
_POLL_S = 1.0
_EXPORT_EVERY_S = 1.0
_LAST_POLL_S = 2.0


class AuditorLoop:
    """The auditor with its metrics and its file. Single-threaded, except `metrics`."""

    def __init__(
        self,
        config: AuditorConfig,
        auditor: Auditor,
        topics: dict[str, str],
        quality: ModelQuality | None = None,
    ) -> None:
        """`quality` gets the records of `auditor`; None = its metrics are not exported."""
        self.config, self.auditor, self.topics, self.quality = config, auditor, topics, quality
        self.home = Path(config.home)
        self.metrics: dict[str, Any] = {}
        self.log_rate_limit = LogRateLimit()
        self._saved_s = time.monotonic()
        self._exported_s = 0.0
        self._logged_current = self._logged_misplaced = False

    def open(self) -> None:
        """Step 1. Raises UnavailableError: Kafka is away; call again."""
        FileStore(self.home).sweep()
        reader = self.auditor.open_consumer()
        try:
            self.auditor.open_with(reader, audit_file.read(self.home, self.topics, self.auditor.share))
        except UnavailableError:
            reader.close()
            raise

    def turn(self, budget_s: float) -> None:
        """Steps 2 and 3."""
        try:
            self.auditor.poll(budget_s)
        finally:  # also if nothing can be read: the state is not that of before
            if time.monotonic() - self._exported_s >= _EXPORT_EVERY_S:
                self.export()
        if time.monotonic() - self._saved_s >= self.config.save_interval_ms / 1000:
            self.save()

    def export(self) -> None:
        """Update the exported sums."""
        self._exported_s = time.monotonic()
        auditor = self.auditor
        accounts = sums.metrics_of(auditor.sums(), auditor.is_current(), auditor.behind(), *auditor.share)
        self.metrics = {**accounts, **(self.quality.metrics() if self.quality else {})}
        if not self._logged_misplaced and any(auditor.sums().misplaced.get(topic) for topic in EVENTS):
            self._logged_misplaced = True
            log.error(
                "expected events in the partitions of their keys (Kafka's murmur2 partitioner), found "
                "others; correct their producer, or run one auditor (num_auditors = 1): several can't count "
                "these"
            )
        if not self._logged_current and self.auditor.is_current():
            self._logged_current = True
            log.info("all records that existed at the start have been counted")

    def save(self) -> None:
        """If saving fails, it is retried; without the file the next run reads the topics again."""
        self._saved_s = time.monotonic()
        if self.auditor.must_restart:
            return
        try:
            audit_file.write(self.home, self.auditor.saved(self.topics))
        except (OSError, UnavailableError) as error:
            self.log_rate_limit.warning(
                log, "save", "can't save the sums in %s (%s); retrying", self.home, error
            )
        else:
            if self.log_rate_limit.over("save"):
                log.info("the sums are saved again")

    def close(self) -> None:
        """Read the last records for a moment, and save."""
        self.auditor.poll(_LAST_POLL_S)
        self.export()
        self.save()


def run_until_stopped(config: AuditorConfig, stop: Stop) -> None:
    """Run until `stop` is set.

    Raises:
        RoostreamError: a topic has another number of partitions than the settings, or the schema is invalid.
    """
    health = Health(config.stalled_after_ms / 1000)
    metrics_server.serve(config, health)
    compares = config.compare_model and config.schema and config.index == 0
    quality = ModelQuality(load_schema(Path(config.schema)), config.compare_share) if compares else None
    auditor = Auditor(
        config.broker,
        config.prefix,
        num_partitions=config.partitions,
        settle_ms=config.settle_ms,
        horizon_ms=config.horizon_ms,
        max_waiting=config.max_waiting,
        share=Share(config.index, config.num_auditors),
        on_record=quality.add if quality else None,
    )
    with health.waiting("Kafka"):
        topics = clients.wait_for_topics(config.broker, config.prefix, AUDITED, config.partitions, stop)
    loop = AuditorLoop(config, auditor, topics, quality)
    exporting = exported(lambda: loop.metrics, {**sums.METRICS, **METRIC_SPECS})
    with contextlib.closing(auditor), exporting:
        with health.waiting("Kafka"):
            Backoff(what=f"Kafka at {config.broker}").until(loop.open, (UnavailableError,), stop)
        while not stop.is_set():
            missing = ""
            try:
                loop.turn(_POLL_S)
                loop.log_rate_limit.over("turn")
            except UnavailableError as error:
                missing = str(error)
                loop.log_rate_limit.warning(log, "turn", "%s; retrying", error)
                stop.wait(_POLL_S)
            health.turned(missing)
        loop.close()

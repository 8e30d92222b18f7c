"""`roostream compactor`: runs the warehouse's compactor at intervals. It merges the files of each day into
sorted ones (seals the day), and deletes files whose retention is over."""

from __future__ import annotations

from roostream.errors import UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import SystemClock
from roostream.runtime.health import Health
from roostream.runtime.metrics_collector import MetricSpec, by_name, exported
from roostream.runtime.program import Stop
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.warehouse import Warehouse

METRICS = {
    "roostream_compactor_seals_total": MetricSpec("days of partitions sealed"),
    "roostream_compactor_files_replaced_total": MetricSpec("files replaced by sealing"),
    "roostream_compactor_rows_total": MetricSpec("rows written by sealing"),
    "roostream_compactor_repeated_total": MetricSpec("duplicate rows removed"),
    "roostream_compactor_retired_total": MetricSpec("files retired"),
    "roostream_compactor_cut_total": MetricSpec("files of days that were retired in part"),
    "roostream_compactor_deleted_total": MetricSpec("files deleted"),
    "roostream_compactor_refused_total": MetricSpec(
        "commits refused because another program had committed first"
    ),
    "roostream_compactor_damaged_total": MetricSpec(
        "days of partitions not sealed because a file is damaged"
    ),
    "roostream_compactor_due": MetricSpec("days of partitions that are due to be sealed"),
}


def compact(config: CompactorConfig, stop: Stop) -> None:
    """Run until `stop`. An unfinished step is not committed, and the next compactor does it again."""
    health = Health(config.stalled_after_ms / 1000)
    metrics_server.serve(config, health)
    compactor = Compactor(Warehouse(config.warehouse), config, SystemClock())
    backoff = Backoff(what=f"the warehouse at {config.warehouse}")
    with exported(lambda: metrics_of(compactor), METRICS):
        while not stop.is_set():
            try:
                compactor.run_once(stop, health.turned)
                backoff.reached()
                health.turned()
            except UnavailableError as error:
                health.turned(str(error))
                backoff.wait(error, stop)
                continue  # without the interval, because this pass was not completed
            stop.wait(config.interval_ms / 1000)


def metrics_of(compactor: Compactor) -> dict[str, object]:
    """Full metric name → value."""
    values = {**vars(compactor.counts), "due": compactor.num_due}
    return by_name(METRICS, "roostream_compactor_", values)

"""The page of `roostream report table`: bytes by column, coverage by day, list lengths and duplicates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roostream.cli.replay.report_page import page, table
from roostream.cli.replay.report_table import number
from roostream.errors import SetupError, needs_extra
from roostream.replay.report_files import write_atomically
from roostream.warehouse.column_popularity import hit_rates, recent_session_features
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.scan import TableScan
from roostream.warehouse.statistics import FeatureDays, alerts
from roostream.wire.batch import Batch
from roostream.wire.dedup import sort_by_time, user_numbers
from roostream.wire.duplicate_statistics import DuplicateStatistics


def table_report(
    scan: TableScan, batches: Iterable[tuple[DataFile, Batch]], batch_requests: int
) -> dict[str, Any]:
    """The data of the page with stable keys, from one pass over `batches`."""
    days, duplicates = FeatureDays(scan.schema()), DuplicateStatistics(batch_requests)
    for file, batch in batches:
        days.add(file.day, batch)
        timely = sort_by_time(batch)
        duplicates.add(timely, user_numbers(timely), timely.num_candidates_R)
    statistics = days.report()
    return {
        "version": scan.version,
        "files": len(scan.files),
        "bytes": sum(file.bytes for file in scan.files),
        "requests": scan.num_requests,
        "candidates": sum(file.candidates for file in scan.files),
        "columns": {name: entry._asdict() for name, entry in scan.bytes_by_column().items()},
        "days": statistics,
        "alerts": alerts(statistics),
        "asked": hit_rates(recent_session_features(scan.store)),
        "duplicates": duplicates.report(),
    }


def write_table_page(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `index.html` and `report.json` into `folder`, which is created.

    Raises:
        SetupError: matplotlib is not installed, or the folder cannot be created.
        ConfigError: a file cannot be written.
    """
    with needs_extra("the page of a table", "replay", SetupError):
        from roostream.cli.replay.report_figures import figures_of_table
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"{folder}: the folder cannot be created ({error.strerror}); choose another"
        ) from None
    write_atomically(folder / "report.json", json.dumps(report, indent=2))
    write_atomically(folder / "index.html", page_of_table(report, figures_of_table(report)))


def page_of_table(report: Mapping[str, Any], figures: Mapping[str, str]) -> str:
    """The HTML of the page; `figures`: heading → SVG."""
    impressions = max(report["candidates"], 1)
    facts = [
        ("version", str(report["version"])),
        ("files", f"{report['files']:,}"),
        ("requests", f"{report['requests']:,} with {report['candidates']:,} candidates"),
        ("bytes", f"{report['bytes']:,}: {report['bytes'] / impressions:.1f} a candidate"),
    ]
    columns = [
        (name, f"{entry['stored']:,}", f"{entry['values']:,}", f"{entry['stored'] / impressions:.2f}")
        for name, entry in report["columns"].items()
    ]
    sections = {
        "The table": table((), facts),
        **figures,
        "Duplicates": table(("feature", "exact", "partial", "d"), _duplicate_rows(report["duplicates"])),
        "Bytes by column": table(("column", "stored", "before compression", "stored per candidate"), columns),
    }
    warnings = [*report["alerts"], *report["duplicates"]["advice"]]
    return page(f"Samples of {report['warehouse']}", warnings, sections)


def _duplicate_rows(duplicates: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    entry = duplicates["arrangements"].get("clustered", {"features": {}, "groups": {}})
    for name, figures in {**entry["groups"], **entry["features"]}.items():
        yield name, number(figures["exact"]), number(figures["partial"]), number(figures["same"])

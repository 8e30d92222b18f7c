"""A log and its settings as one stream of records: which reader, which features, which end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from roo.counter_seed import seed
from roo.schema import Schema
from roo.wire import Record
from traffic.config import ReplayConfig
from traffic.datasets import load_dataset
from traffic.edge import Edge
from traffic.replay import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """`records` once, in the order of one producer; `skipped` is whole when it has ended."""

    records: Iterator[Record]
    num_requests: int  # 0 = not known beforehand
    skipped: Callable[[], tuple[int, str]]  # events left out, and why the first was


def open_log(config: ReplayConfig, schema: Schema) -> Log:
    """Checks the files' form, counts what lies before the log, and gives the stream.

    Raises:
        ConfigError, SchemaError: a file or the schema can't be used; names file and column. While the stream is read,
            LogError for a bad line and WireError for features that don't fit the schema.
    """
    source = load_dataset(config.dataset).open(config.options, schema, config.window_ms)
    edge = Edge(schema, label_delay_ms=config.label_delay_ms, freeze_at_ms=config.freeze_counters_at_ms)
    if source.clicks_before is not None:
        seed(edge.counters, *source.clicks_before)
    stream = records(source.events, edge, settle_ms=settle_ms(config), refuse=source.refuse)
    return Log(records=stream, num_requests=source.num_requests, skipped=source.skipped)


def settle_ms(config: ReplayConfig) -> int:
    """From the last event to the end marker: beyond it nothing is open, waiting or remembered (late horizon + bound)."""
    return 10 * config.window_ms + config.lateness_ms + 1000

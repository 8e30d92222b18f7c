"""A log and its settings as one stream of records: which reader, which features, which end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from roo.counter_seed import seed
from roo.errors import ConfigError
from roo.schema import Schema
from roo.wire import Record
from traffic.config import ReplayConfig
from traffic.datasets import load_dataset
from traffic.edge import Edge
from traffic.replay import records
from traffic.survey import Survey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Log:
    """`records` once, in the order of one producer; `skipped` is whole when it has ended."""

    records: Iterator[Record]
    num_requests: int  # 0 = not known beforehand
    skipped: Callable[[], tuple[int, str]]  # events left out, and why the first was
    survey: Survey  # of what has been read


def open_log(config: ReplayConfig, schema: Schema) -> Log:
    """Checks the files' form, counts what lies before the log, and gives the stream.

    Raises:
        ConfigError, SchemaError: a file or the schema can't be used, or nothing is in it; names file and column. While the
            stream is read, LogError for a bad line and WireError for features that don't fit the schema.
    """
    source = load_dataset(config.dataset).open(config.options, schema, config.window_ms)
    survey = Survey(schema)
    edge = Edge(schema, label_delay_ms=config.label_delay_ms, freeze_at_ms=config.freeze_counters_at_ms, survey=survey)
    if source.clicks_before is not None:
        seed(edge.counters, *source.clicks_before)
    stream = records(source.events, edge, settle_ms=settle_ms(config), refuse=source.refuse)
    return Log(records=_not_empty(stream, survey), num_requests=source.num_requests, skipped=source.skipped, survey=survey)


def _not_empty(stream: Iterator[Record], survey: Survey) -> Iterator[Record]:
    """The stream, once its first record is there: what is wrong at the beginning, and a log of nothing, is told before anything
    is started for it."""
    first = next(stream, None)

    def impressions() -> Iterator[Record]:
        if first is not None:
            yield first
        yield from stream
        if not survey.num_impressions:
            raise ConfigError("the log has no impression that can be used, so nothing can be learned from it; check its files")

    return impressions() if first is not None else iter(list(impressions()))


def settle_ms(config: ReplayConfig) -> int:
    """From the last event to the end marker: beyond it nothing is open, waiting or remembered (late horizon + bound)."""
    return 10 * config.window_ms + config.lateness_ms + 1000

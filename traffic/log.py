"""A log and its settings as one stream of records: which reader, which features, which end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from roo.errors import WireError
from roo.schema import Schema
from roo.wire import Record
from traffic.config import ReplayConfig
from traffic.edge import Edge
from traffic.events import Event
from traffic.replay import records


@dataclasses.dataclass(kw_only=True)
class Log:
    """`records` once, in the order of one producer; the rest is known when it has ended."""

    records: Iterator[Record]
    num_requests: int = 0  # 0 = not known beforehand
    skipped: Callable[[], tuple[int, str]] = lambda: (0, "")  # lines left out, and why the first was


def open_log(config: ReplayConfig, schema: Schema) -> Log:
    """Checks the files' form, reads what lies before the log (histories), and gives the stream.

    Raises:
        ConfigError, SchemaError: a file or the schema can't be used; names file and column. While the stream is read,
            LogError for a bad line and WireError for features that don't fit the schema.
    """
    edge = Edge(schema, label_delay_ms=config.label_delay_ms, freeze_at_ms=config.freeze_counters_at_ms)
    return _ebnerd(config, schema, edge) if config.dataset == "ebnerd" else _jsonl(config, schema, edge)


def settle_ms(config: ReplayConfig) -> int:
    """From the last event to the end marker: beyond it nothing is open, waiting or remembered (late horizon + bound)."""
    return 10 * config.window_ms + config.lateness_ms + 1000


def _ebnerd(config: ReplayConfig, schema: Schema, edge: Edge) -> Log:
    from traffic import ebnerd
    from traffic.seed import seed

    events = ebnerd.events(config.behaviors, schema, config.window_ms)
    seed(edge.counters, *ebnerd.histories(config.history))
    return Log(records=_records(config, events, edge), num_requests=ebnerd.num_requests(config.behaviors))


def _jsonl(config: ReplayConfig, schema: Schema, edge: Edge) -> Log:
    from traffic.jsonl import JsonlLog

    log = JsonlLog(config.log, schema, skip_bad=config.skip_bad)
    return Log(records=_records(config, log.events(), edge, log.refuse), skipped=lambda: (log.num_skipped, log.first_skipped))


def _records(
    config: ReplayConfig,
    events: Iterable[Event],
    edge: Edge,
    refuse: Callable[[Event, WireError], None] | None = None,
) -> Iterator[Record]:
    return records(events, edge, settle_ms=settle_ms(config), refuse=refuse)
